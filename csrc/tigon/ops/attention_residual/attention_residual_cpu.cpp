#include <algorithm>
#include <cmath>
#include "tigon/base/op.h"

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/ops/attention_residual/attention_residual.h"

namespace tigon::cpu {
namespace {

// Holds the sums of v^2, of key * v and of dy * v for one value of a row.
struct AttentionSums {
  double square, key, dy;
};
// Holds the factors of one value.
struct AttentionFactors {
  float alpha, slope, pull;
};
// Describes the values of one row to the kernels.
struct AttentionRow {
  const void *values, *dy;
  int64_t pitch, dpitch;  // elements from value to value
  int64_t count, cols;
  const float* key;
  AttentionSums* sums;
  const AttentionFactors* of;
  void *y, *dvalues;
  float* u;
};
struct AttentionKernels {
  void (*sums)(const AttentionRow&);
  void (*forward)(const AttentionRow&);
  void (*backward)(const AttentionRow&);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/attention_residual/attention_residual_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

namespace double_math {
using std::fma;
using std::sqrt;
double constant(double, double c) { return c; }
#include "tigon/ops/attention_residual/attention_residual_math.inc"
}  // namespace double_math

using Score = double_math::AttentionScore<double>;

// Computes the factors of a row from its sums, in double: there are few operations, and every result has
// their errors.
void find_factors(const AttentionRow& a, float eps, Score* scores, AttentionFactors* factors) {
  double top = -INFINITY, total = 0.0, upstream = 0.0;
  for (int64_t n = 0; n < a.count; ++n) {
    scores[n] = double_math::attention_score(a.sums[n].square / double(a.cols), a.sums[n].key, double(eps));
    top = scores[n].score > top ? scores[n].score : top;
  }
  auto weight = [&](int64_t n) { return std::exp(scores[n].score - top); };
  for (int64_t n = 0; n < a.count; ++n) {
    total += weight(n);
    if (a.dy) upstream += weight(n) * a.sums[n].dy;
  }
  for (int64_t n = 0; n < a.count; ++n) {
    const double alpha = weight(n) / total;
    factors[n].alpha = float(alpha);
    if (!a.dy) continue;
    const auto slope =
        double_math::attention_slope(scores[n], alpha, a.sums[n].dy, upstream / total, 1.0 / double(a.cols));
    factors[n].slope = float(slope.slope), factors[n].pull = float(slope.pull);
  }
}

// Returns query * norm_weight.
float* make_key(Context& ctx, const Vector& query, const Vector& norm_weight) {
  float* key = ctx.scratch_of<float>(query.size);
  dispatch_float("attention_residual", "query", query.dtype, [&](auto t) {
    using W = typename decltype(t)::type;
    for (int64_t c = 0; c < query.size; ++c)
      key[c] = to_float(query.as<W>()[c]) * to_float(norm_weight.as<W>()[c]);
  });
  return key;
}

// Calls fn(task, row, values) with the factors of each row, those of a chunk in order.
template <class Args, class Fn>
void each_row(Context& ctx, const Args& a, const Matrix& dy, const RowChunks& chunks, const Fn& fn) {
  const int64_t rows = chunks.rows, tasks = chunks.count;
  const float* key = make_key(ctx, a.query, a.norm_weight);
  AttentionSums* all_sums = ctx.scratch_of<AttentionSums>(tasks * a.count);
  Score* all_scores = ctx.scratch_of<Score>(tasks * a.count);
  AttentionFactors* all_factors = ctx.scratch_of<AttentionFactors>(tasks * a.count);
  const AttentionKernels& kernels = TIGON_SELECT(attention_residual_table)[a.values.dtype];
  parallel(ctx, tasks, [&](int64_t task) {
    AttentionFactors* factors = all_factors + task * a.count;
    for (int64_t r = chunks.begin(task); r < chunks.end(task); ++r) {
      AttentionRow row{.values = element_at(a.values, r, 0),
                       .dy = element_at(dy, r, 0),
                       .pitch = rows * a.values.stride,
                       .count = a.count,
                       .cols = a.values.cols,
                       .key = key,
                       .sums = all_sums + task * a.count,
                       .of = factors};
      kernels.sums(row);
      find_factors(row, a.eps, all_scores + task * a.count, factors);
      fn(task, r, row, kernels);
    }
  });
}

// Computes out = factor * u.
void scale_sums(const float* u, const Vector& factor, const Vector& out) {
  if (!out) return;
  dispatch_float("attention_residual", "query", out.dtype, [&](auto t) {
    using W = typename decltype(t)::type;
    for (int64_t c = 0; c < out.size; ++c) out.as<W>()[c] = from_float<W>(to_float(factor.as<W>()[c]) * u[c]);
  });
}

}  // namespace

void attention_residual_fwd(Context& ctx, const AttentionResidualFwd& a) {
  each_row(ctx, a, {}, RowChunks(a.y.rows, 16, INT64_MAX),
           [&](int64_t, int64_t r, AttentionRow& row, const AttentionKernels& kernels) {
             row.y = element_at(a.y, r, 0);
             kernels.forward(row);
           });
}

void attention_residual_bwd(Context& ctx, const AttentionResidualBwd& a) {
  const int64_t rows = a.dy.rows, cols = a.dy.cols;
  const RowChunks chunks(rows);
  float* partials = ctx.scratch_of<float>(chunks.count * cols);
  std::fill(partials, partials + chunks.count * cols, 0.0f);
  each_row(ctx, a, a.dy, chunks,
           [&](int64_t task, int64_t r, AttentionRow& row, const AttentionKernels& kernels) {
             row.dvalues = element_at(a.dvalues, r, 0);
             row.dpitch = rows * a.dvalues.stride;
             row.u = partials + task * cols;
             kernels.backward(row);
           });
  if (!a.dquery && !a.dnorm_weight) return;
  const Vector u{ctx.scratch_of<float>(cols), DType::f32, cols};
  sum_partials(ctx, partials, chunks.count, cols, u);
  scale_sums(u.as<float>(), a.norm_weight, a.dquery);
  scale_sums(u.as<float>(), a.query, a.dnorm_weight);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(attention_residual, AttentionResidual)
}
