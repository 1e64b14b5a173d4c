// What all elements of a tensor share, and the integer arithmetic of roundings, for host and device.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "tigon/ops/adamw/adamw.h"

#if defined(__CUDACC__)
#define TIGON_EVERYWHERE __host__ __device__ __forceinline__
#else
#define TIGON_EVERYWHERE [[gnu::always_inline]] inline
#endif

namespace tigon::adamw_detail {

struct Constants {
  float weight1 = 0.0f;  // 1 - beta1
  float weight2 = 0.0f;  // 1 - beta2
  float eps = 0.0f;
  float decay = 0.0f;  // -lr * weight_decay where decoupled, else 0
  float l2 = 0.0f;     // weight_decay where not, else 0
  float sign = 1.0f;   // of the gradient
  float scale = 0.0f;  // 1 / sqrt(1 - beta2^t)
  float rate = 0.0f;   // -lr / (1 - beta1^t)
  uint32_t step = 0;   // t
};

// x^n by squaring: products alone, so that host and device agree.
TIGON_EVERYWHERE double power(double x, uint32_t n) {
  double y = 1.0;
  for (; n != 0; n >>= 1) {
#if defined(__CUDA_ARCH__)
    if (n & 1) y = __dmul_rn(y, x);
    x = __dmul_rn(x, x);
#else
    if (n & 1) y *= x;
    x *= x;
#endif
  }
  return y;
}

TIGON_EVERYWHERE Constants constants_of(const AdamwGroup& g, double lr, uint32_t step) {
  Constants c;
  c.weight1 = float(1.0 - g.beta1);
  c.weight2 = float(1.0 - g.beta2);
  c.eps = float(g.eps);
  c.decay = g.decoupled ? float(-lr * g.weight_decay) : 0.0f;
  c.l2 = g.decoupled ? 0.0f : float(g.weight_decay);
  c.sign = g.maximize ? -1.0f : 1.0f;
  c.scale = float(1.0 / sqrt(1.0 - power(g.beta2, step)));
  c.rate = float(-lr / (1.0 - power(g.beta1, step)));
  c.step = step;
  return c;
}

// Factor of a gradient from the scalars that are there (null: absent).
TIGON_EVERYWHERE float factor_of(float sign, const float* clip, const float* grad_scale) {
  float factor = clip != nullptr ? sign * *clip : sign;
  return grad_scale != nullptr ? factor / *grad_scale : factor;
}

// Philox4x32-10: 128 bits of a counter and a key.
struct Random {
  uint32_t word[4];
};
TIGON_EVERYWHERE Random philox(uint64_t counter_low, uint64_t counter_high, uint64_t seed) {
  uint32_t x0 = uint32_t(counter_low), x1 = uint32_t(counter_low >> 32), x2 = uint32_t(counter_high),
           x3 = uint32_t(counter_high >> 32), k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * x0, b = uint64_t(0xCD9E8D57u) * x2;
    const uint32_t y0 = uint32_t(b >> 32) ^ x1 ^ k0, y2 = uint32_t(a >> 32) ^ x3 ^ k1;
    x1 = uint32_t(b), x3 = uint32_t(a), x0 = y0, x2 = y2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{x0, x1, x2, x3}};
}
// The bits of elements [8 block, 8 block + 8) of the stream: 16 each, even elements in the lower halves of words.
TIGON_EVERYWHERE Random random_block(uint64_t block, uint32_t step, uint64_t seed) {
  return philox(block, step, seed);
}
TIGON_EVERYWHERE uint32_t random_of(const Random& r, int i) { return r.word[i / 2] >> (16 * (i % 2)) & 0xffffu; }

// An fp32 value in 16 bits, up with the probability of what is cut off; `random` has 16 bits. Infinity and NaN stay.
TIGON_EVERYWHERE uint16_t stochastic_bf16(uint32_t x, uint32_t random) {
  if ((x & 0x7f800000u) == 0x7f800000u) return uint16_t(x >> 16 | ((x & 0x7fffffu) != 0 ? 0x40u : 0u));
  return uint16_t((x + random) >> 16);
}
TIGON_EVERYWHERE uint16_t stochastic_f16(uint32_t x, uint32_t random) {
  const uint32_t sign = x >> 16 & 0x8000u, a = x & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (a >= 0x47800000u) return uint16_t(sign | 0x7c00u);
  if (a >= 0x38800000u) return uint16_t(sign | (a - 0x38000000u + (random >> 3)) >> 13);
  // Multiples of 2^-24, 1 / 2^16 of one at the least.
  const int shift = 126 - int(a >> 23);
  if (shift > 40) return uint16_t(sign);
  const uint64_t mantissa = (a & 0x7fffffu) | 0x800000u;
  const uint64_t noise = shift >= 16 ? uint64_t(random) << (shift - 16) : random >> (16 - shift);
  return uint16_t(sign | uint32_t((mantissa + noise) >> shift));
}

// A master as bf16, to nearest with ties away from 0, and what restores it. NaN becomes one that splits.
TIGON_EVERYWHERE uint32_t splittable(uint32_t x) { return (x & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : x; }
TIGON_EVERYWHERE uint16_t upper_half(uint32_t splittable) { return uint16_t((splittable + 0x8000u) >> 16); }
TIGON_EVERYWHERE uint32_t joined(uint16_t upper, uint16_t low) {
  return ((uint32_t(upper) << 16) - ((low & 0x8000u) << 1)) | low;
}

// Chunks of a tensor: CTAs and tasks, so that sizes alone say who does what.
inline constexpr int64_t kChunk = 16384;

}  // namespace tigon::adamw_detail
