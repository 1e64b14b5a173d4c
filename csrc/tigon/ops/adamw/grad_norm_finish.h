// Computes the last step of grad_norm, for host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "tigon/ops/adamw/grad_norm.h"

namespace tigon::adamw_detail {

inline constexpr int64_t kNormChunk = 65536;

#if defined(__CUDACC__)
__host__ __device__
#endif
    inline void finish_norm(double sum, const float* grad_scale, float max_norm, double* total, float* norm,
                            float* factor) {
  *total = sum;
  const double scaled = grad_scale != nullptr ? sqrt(sum) / double(*grad_scale) : sqrt(sum);
  const double quotient = double(max_norm) / (scaled + 1e-6);
  *norm = float(scaled);
  *factor = quotient > 1.0 ? 1.0f : float(quotient);
}

}  // namespace tigon::adamw_detail
