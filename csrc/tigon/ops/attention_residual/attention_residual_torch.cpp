#include "tigon/ops/attention_residual/attention_residual.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::attention_residual_torch {
namespace {

constexpr const char* kOp = "attention_residual";

void check_devices(const Tensor& query, const Tensor& norm_weight, const Tensor& values) {
  check_same_device(kOp, "query", query, values);
  check_same_device(kOp, "norm_weight", norm_weight, values);
  TIGON_CHECK(kOp, values.dim() >= 2, "values must have at least two dimensions, got ", values.dim());
}

Tensor forward(Tensor values, Tensor query, Tensor norm_weight, double eps) {
  check_devices(query, norm_weight, values);
  int64_t count = values.size(0), dims = values.dim() - 1;
  Matrix rows = rows_of(kOp, "values", values);
  Tensor y = empty(values, values.sizes().data() + 1, dims, rows.dtype);
  auto ctx = make_context(values);
  attention_residual_fwd(*ctx, {.values = rows,
                                .count = count,
                                .query = vector_of(kOp, "query", query),
                                .norm_weight = vector_of(kOp, "norm_weight", norm_weight),
                                .y = rows_of(kOp, "y", y),
                                .eps = float(eps)});
  return y;
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy, Tensor values, Tensor query, Tensor norm_weight,
                                            double eps, bool need_dvalues, bool need_dquery,
                                            bool need_dnorm_weight) {
  check_devices(query, norm_weight, values);
  check_same_device(kOp, "dy", dy, values);
  int64_t count = values.size(0);
  Matrix rows = rows_of(kOp, "values", values);
  Vector q = vector_of(kOp, "query", query), w = vector_of(kOp, "norm_weight", norm_weight);
  Tensor dvalues = need_dvalues ? make_like(values, rows.dtype) : nothing(values, rows.dtype);
  Tensor dquery = need_dquery ? make(values, {rows.cols}, q.dtype) : nothing(values, q.dtype);
  Tensor dweight = need_dnorm_weight ? make(values, {rows.cols}, w.dtype) : nothing(values, w.dtype);
  auto ctx = make_context(values);
  attention_residual_bwd(
      *ctx, {.dy = rows_of(kOp, "dy", dy),
             .values = rows,
             .count = count,
             .query = q,
             .norm_weight = w,
             .dvalues = need_dvalues ? rows_of(kOp, "dvalues", dvalues) : Matrix{},
             .dquery = need_dquery ? vector_of(kOp, "dquery", dquery) : Vector{},
             .dnorm_weight = need_dnorm_weight ? vector_of(kOp, "dnorm_weight", dweight) : Vector{},
             .eps = float(eps)});
  return {dvalues, dquery, dweight};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "attention_residual",
                 "(Tensor values, Tensor query, Tensor norm_weight, float eps) -> Tensor");
  define(m,
         "attention_residual_bwd(Tensor dy, Tensor values, Tensor query, Tensor norm_weight, float eps,"
         " bool need_dvalues, bool need_dquery, bool need_dnorm_weight)"
         " -> (Tensor dvalues, Tensor dquery, Tensor dnorm_weight)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "attention_residual", TORCH_BOX(&forward));
  m.impl("attention_residual_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::attention_residual_torch
