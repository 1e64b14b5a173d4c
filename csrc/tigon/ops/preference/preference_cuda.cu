// Each group (a pair, or a single answer) has a CTA: the sums of its tokens, the formula by one thread, and
// the gradient of every token. It reads log_prob and target twice and writes the gradient once; the second
// read comes from a cache.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/ops/preference/preference.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/preference/preference_math.inc"

constexpr int kThreads = 512;

template <int kSides>
__global__ __launch_bounds__(kThreads) void preference_kernel(const __grid_constant__ Preference p) {
  __shared__ double slots[kThreads / 32 * 7];
  __shared__ PreferenceSlopes slopes;
  const int64_t pair = p.first + blockIdx.x;
  PreferenceSums own = {};
#pragma unroll
  for (int side = 0; side < kSides; ++side)
    for (int64_t t = threadIdx.x; t < p.tokens; t += kThreads) preference_add(p, pair, side, t, own);
  double x[7] = {own.log_prob[0], own.log_prob[1], own.ref[0], own.ref[1],
                 own.tokens[0],   own.tokens[1],   own.nll};
  sum_block<kThreads>(x, slots);
  if (threadIdx.x == 0) slopes = preference_finish(p, pair, {{x[0], x[1]}, {x[2], x[3]}, {x[4], x[5]}, x[6]});
  if (!p.dlog_prob) return;
  __syncthreads();
#pragma unroll
  for (int side = 0; side < kSides; ++side)
    for (int64_t t = threadIdx.x; t < p.tokens; t += kThreads) preference_write(p, pair, side, t, slopes);
}

}  // namespace

void preference(Context& ctx, const Preference& a) {
  auto kernel = a.formula.kind == PreferenceKind::kto ? preference_kernel<1> : preference_kernel<2>;
  launch("preference", ctx, kernel, {.blocks = a.count, .threads = kThreads}, a);
}

}  // namespace tigon::cuda
