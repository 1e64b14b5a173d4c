// __nv_bfloat16 and __nv_bfloat162.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 h) { return std::bit_cast<float>(uint32_t(h.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7fff};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16_rd(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7fff};
  return {uint16_t((u >> 16) + (u >> 31 && (u & 0xffff) ? 1 : 0))};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 h) { return {h, h}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {__bfloat162float(h.x), __bfloat162float(h.y)}; }
inline __nv_bfloat162 emulated(__nv_bfloat162 a, __nv_bfloat162 b, float (*fn)(float, float)) {
  return __floats2bfloat162_rn(fn(__bfloat162float(a.x), __bfloat162float(b.x)),
                               fn(__bfloat162float(a.y), __bfloat162float(b.y)));
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) { return emulated(a, b, fmaxf); }
inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) { return emulated(a, b, fminf); }
inline __nv_bfloat162 __hmul2_rn(__nv_bfloat162 a, __nv_bfloat162 b) {
  return emulated(a, b, [](float x, float y) { return x * y; });
}
inline __nv_bfloat162 __hneg2(__nv_bfloat162 a) {
  return {{uint16_t(a.x.bits ^ 0x8000)}, {uint16_t(a.y.bits ^ 0x8000)}};
}
inline bool __hble2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __bfloat162float(a.x) <= __bfloat162float(b.x) && __bfloat162float(a.y) <= __bfloat162float(b.y);
}
