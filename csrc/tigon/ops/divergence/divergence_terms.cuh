// Instantiates the formulas of the divergences for one fp32 value per thread.
#pragma once

#include "tigon/base/cuda/math.cuh"
#include "tigon/ops/divergence/distillation.h"

namespace tigon::cuda {
namespace {

// Calls fn.operator()<kind>().
template <class Fn>
void with_kind(DivergenceKind kind, const Fn& fn) {
  switch (kind) {
    case DivergenceKind::forward_kl: return fn.template operator()<DivergenceKind::forward_kl>();
    case DivergenceKind::reverse_kl: return fn.template operator()<DivergenceKind::reverse_kl>();
    case DivergenceKind::jsd: return fn.template operator()<DivergenceKind::jsd>();
    case DivergenceKind::tvd: return fn.template operator()<DivergenceKind::tvd>();
  }
}

// The formulas come twice: `fast` with approximate instructions for 16-bit rows, and `precise` with functions
// exact to an ulp for 32-bit rows.
namespace fast {
// Takes x <= 1, without lg2.approx's mean error of about 0.9 * 2^-24, which a sum over many classes would
// show. Just below 1 it is the series of log2(1 - y) to the sixth power; at 1 it is exactly 0.
TIGON_FN float log2(float x) {
  const float y = 1.0f - x;
  float series = fma(y, -kLog2e / 6.0f, -kLog2e / 5.0f);
  series = fma(series, y, -kLog2e / 4.0f);
  series = fma(series, y, -kLog2e / 3.0f);
  series = fma(series, y, -kLog2e / 2.0f);
  series = fma(series, y, -kLog2e);
  return y < 0.0625f ? series * y : log2_approx(x) - 5.4e-8f;
}
// Returns log2((1 + r) / 2) for r from 0 to 1, if arithmetic bounds the kernel. Half a rounding step less in
// the sum leaves a fifth of that mean error. r = 1 still rounds to exactly 1.
TIGON_FN float log2_mean_with_one(float r) { return log2_approx(fma(0.5f, r, 0.5f - 0x1p-25f)); }
#include "tigon/ops/divergence/divergence_math.inc"
}  // namespace fast
namespace precise {
TIGON_FN float exp2_neg(float t) { return exp2_precise(t, 1.0f, 0.0f); }
TIGON_FN float log2(float x) { return ::log2f(x); }
#include "tigon/ops/divergence/divergence_math.inc"
}  // namespace precise

// Bounds the logarithms of excluded classes.
constexpr float kMaxLog = 1e30f;

template <DivergenceKind K, class T>
__device__ __forceinline__ void terms_of(float q, float p, float d, float beta, float& term, float& g) {
  float r = 0.0f;
  if constexpr (K == DivergenceKind::jsd) d = fminf(fmaxf(d, -kMaxLog), kMaxLog);
  if constexpr (sizeof(T) == 4) {
    if constexpr (K == DivergenceKind::jsd) r = precise::exp2_neg(-fabsf(d));
    precise::divergence_terms<K>(q, p, d, r, beta, term, g);
  } else {
    if constexpr (K == DivergenceKind::jsd) r = exp2_approx(-fabsf(d));
    fast::divergence_terms<K>(q, p, d, r, beta, term, g);
  }
}

}  // namespace
}  // namespace tigon::cuda
