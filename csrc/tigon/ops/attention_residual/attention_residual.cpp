#include "tigon/ops/attention_residual/attention_residual.h"

#include <utility>

#include "tigon/base/dispatch.h"
#include "tigon/base/require.h"

namespace tigon {
namespace {

constexpr int64_t kMostValues = 1024;

// What both directions ask; returns the rows of one value.
template <class Args>
int64_t check(const char* op, const Args& a) {
  require_rows(op, "values", a.values);
  require_eps(op, a.eps);
  TIGON_CHECK(op, a.count >= 1 && a.count <= kMostValues, "values must be 1 to ", kMostValues, ", got ",
              a.count);
  TIGON_CHECK(op, a.values.rows % a.count == 0, "values must have a multiple of ", a.count, " rows, got ",
              a.values.rows);
  for (auto [name, v] : {std::pair{"query", &a.query}, {"norm_weight", &a.norm_weight}}) {
    TIGON_CHECK(op, bool(*v), name, " must be [", a.values.cols, "], got none");
    require_parameter(op, name, *v, a.values);
  }
  require_dtype(op, "norm_weight", a.norm_weight.dtype, a.query.dtype);
  return a.values.rows / a.count;
}

}  // namespace

void attention_residual_fwd(Context& ctx, const AttentionResidualFwd& a) {
  const char* op = "attention_residual";
  int64_t rows = check(op, a);
  require_matrix(op, "y", a.y, rows, a.values.cols, a.values.dtype);
  if (rows == 0) return;
  on_device(
      op, ctx, [&] { cpu::attention_residual_fwd(ctx, a); },
      TIGON_ON_CUDA(cuda::attention_residual_fwd(ctx, a)));
}

void attention_residual_bwd(Context& ctx, const AttentionResidualBwd& a) {
  const char* op = "attention_residual_bwd";
  int64_t rows = check(op, a);
  require_matrix(op, "dy", a.dy, rows, a.values.cols, a.values.dtype);
  require_result(op, "dvalues", a.dvalues, a.values);
  if (a.dquery) require_vector(op, "dquery", a.dquery, a.values.cols, a.query.dtype);
  if (a.dnorm_weight) require_vector(op, "dnorm_weight", a.dnorm_weight, a.values.cols, a.norm_weight.dtype);
  on_device(
      op, ctx, [&] { cpu::attention_residual_bwd(ctx, a); },
      TIGON_ON_CUDA(cuda::attention_residual_bwd(ctx, a)));
}

}  // namespace tigon
