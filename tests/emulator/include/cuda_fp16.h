// __half and __half2.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half h) { return float(std::bit_cast<_Float16>(h.bits)); }
inline __half __float2half_rn(float x) { return {std::bit_cast<uint16_t>(_Float16(x))}; }
inline __half __float2half_rd(float x) {
  const __half h = __float2half_rn(x);
  if (!(__half2float(h) > x)) return h;
  return {uint16_t(h.bits & 0x8000 ? h.bits + 1 : h.bits == 0 ? 0x8001 : h.bits - 1)};
}
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __half2half2(__half h) { return {h, h}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline float __high2float(__half2 h) { return __half2float(h.y); }
inline __half2 emulated(__half2 a, __half2 b, float (*fn)(float, float)) {
  return __floats2half2_rn(fn(__half2float(a.x), __half2float(b.x)),
                           fn(__half2float(a.y), __half2float(b.y)));
}
inline __half2 __hmax2(__half2 a, __half2 b) { return emulated(a, b, fmaxf); }
inline __half2 __hmin2(__half2 a, __half2 b) { return emulated(a, b, fminf); }
inline __half2 __hadd2_rn(__half2 a, __half2 b) {
  return emulated(a, b, [](float x, float y) { return x + y; });
}
inline __half2 __hmul2_rn(__half2 a, __half2 b) {
  return emulated(a, b, [](float x, float y) { return x * y; });
}
inline __half2 __hneg2(__half2 a) { return {{uint16_t(a.x.bits ^ 0x8000)}, {uint16_t(a.y.bits ^ 0x8000)}}; }
inline bool __hble2(__half2 a, __half2 b) {
  return __half2float(a.x) <= __half2float(b.x) && __half2float(a.y) <= __half2float(b.y);
}
