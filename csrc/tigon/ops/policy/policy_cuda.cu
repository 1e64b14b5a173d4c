// Each answer has a CTA, or each part of one if its tokens are independent. It computes sums over the answer
// if they are wanted, the slope through its ratio, and the results of each token. Each of these reads
// operands once; repeated reads come from a cache.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/ops/policy/policy.h"

namespace tigon::cuda {
namespace {

// The formulas are in double: there are few tokens compared with the logits, and a ratio may be far from 1.
TIGON_FN double constant(double, float c) { return c; }
TIGON_FN double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
TIGON_FN double abs(double x) { return ::fabs(x); }
TIGON_FN double exp(double x) { return ::exp(x); }
TIGON_FN double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }
TIGON_FN double select(bool m, double a, double b) { return m ? a : b; }
TIGON_FN bool lt(double a, double b) { return a < b; }
TIGON_FN bool gt(double a, double b) { return a > b; }

#include "tigon/ops/policy/policy_rows.inc"

#include "tigon/ops/policy/policy_math.inc"

constexpr int kThreads = 512;
constexpr int64_t kTokensPerBlock = 4 * kThreads;

// Calls fn(row, place, results) for the tokens [begin, end) that count and have a place, and other(row,
// place, counts) for the rest.
template <PolicyKind K, class Fn, class Other>
__device__ __forceinline__ void each_token(const PolicyRows& p, const PolicyAnswer& a, int64_t answer,
                                           int64_t begin, int64_t end, const Fn& fn, const Other& other) {
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads) {
    const int64_t row = answer * p.tokens + t, place = policy_place(p, row);
    if (!policy_counts(p, row)) {
      other(row, place, false);
    } else if (place >= 0 && place < p.log_prob.size) {
      const PolicyOperands x = policy_load(p, answer, row, place);
      fn(row, place,
         policy_token<K, double>(p.numbers, a, p.formula.level == PolicyLevel::token, bool(p.ref),
                                 bool(p.entropy),
                                 {x.log_prob, x.advantage, x.importance, x.old, x.ref, x.entropy}));
    } else {
      other(row, place, true);
    }
  }
}

template <PolicyKind K>
__global__ __launch_bounds__(kThreads) void policy_kernel(const __grid_constant__ PolicyRows p, int64_t span,
                                                          int64_t parts) {
  __shared__ double slots[kThreads / 32 * 3];
  const int64_t answer = p.first + blockIdx.x / parts, begin = blockIdx.x % parts * span,
                end = min(p.tokens, begin + span);
  PolicySums sums = {};
  if (p.formula.coupled() || p.formula.by_answer) {
    for (int64_t t = threadIdx.x; t < p.tokens; t += kThreads)
      policy_add(p, answer, answer * p.tokens + t, sums);
    double x[3] = {sums.tokens, sums.log_ratio, sums.log_weight};
    sum_block<kThreads>(x, slots);
    sums = {x[0], x[1], x[2]};
  }
  const PolicyAnswer common = policy_answer(p, sums);
  const bool by_token = p.formula.level == PolicyLevel::token;
  double answer_slope = 0.0;
  if (!by_token) {
    double slope[1] = {0.0};
    each_token<K>(
        p, common, answer, begin, end,
        [&](int64_t, int64_t, const PolicyOut<double>& y) { slope[0] += y.ratio_slope; },
        [](int64_t, int64_t, bool) {});
    sum_block<kThreads>(slope, slots);
    answer_slope = slope[0] * policy_share(p, sums);
  }
  each_token<K>(
      p, common, answer, begin, end,
      [&](int64_t row, int64_t place, const PolicyOut<double>& y) {
        policy_store(p, common, row, place, float(y.loss), float(y.kl), float(y.clipped),
                     float(y.direct + (by_token ? y.ratio_slope : answer_slope)));
      },
      [&](int64_t row, int64_t place, bool counts) {
        counts ? policy_store_absent(p, row, place) : policy_store_ignored(p, row, place);
      });
}

}  // namespace

void policy(Context& ctx, const Policy& a) {
  void (*const kernels[])(PolicyRows, int64_t, int64_t) = {
      policy_kernel<PolicyKind::clip>, policy_kernel<PolicyKind::cispo>, policy_kernel<PolicyKind::sapo>,
      policy_kernel<PolicyKind::vespo>};
  const int64_t span = a.formula.coupled() ? a.tokens : kTokensPerBlock, parts = ceil_div(a.tokens, span);
  launch("policy", ctx, kernels[int(a.formula.kind)], {.blocks = a.count * parts, .threads = kThreads},
         PolicyRows(a), span, parts);
}

}  // namespace tigon::cuda
