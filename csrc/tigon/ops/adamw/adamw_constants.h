// Holds what all elements of a tensor share, for host and device.
#pragma once

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
  float decay = 0.0f;  // -lr * weight_decay if decoupled, else 0
  float l2 = 0.0f;     // weight_decay if not decoupled, else 0
  float sign = 1.0f;   // sign of the gradient
  float scale = 0.0f;  // 1 / sqrt(1 - beta2^t)
  float rate = 0.0f;   // -lr / (1 - beta1^t)
  uint32_t step = 0;   // t
};

// Computes x^n by squaring. It uses multiplications only, so that host and device agree.
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

// Returns the factor of a gradient, from the scalars that are present (not null).
TIGON_EVERYWHERE float factor_of(float sign, const float* clip, const float* grad_scale) {
  float factor = clip != nullptr ? sign * *clip : sign;
  return grad_scale != nullptr ? factor / *grad_scale : factor;
}

// CTAs and tasks take chunks of a tensor, so that only sizes decide who does what.
inline constexpr int64_t kChunk = 16384;

}  // namespace tigon::adamw_detail
