#include "tigon/ops/poly_norm/poly_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::poly_norm_torch {
namespace {

constexpr const char* kOp = "poly_norm";

Tensor compose(Tensor& x, Tensor& weight, Tensor& bias, double eps, const Vector& rstd) {
  check_same_device(kOp, "weight", weight, x);
  check_same_device(kOp, "bias", bias, x);
  Matrix rows = rows_of(kOp, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  poly_norm_fwd(*ctx, {.x = rows,
                       .weight = vector_of(kOp, "weight", weight),
                       .bias = vector_of(kOp, "bias", bias),
                       .y = rows_of(kOp, "y", y),
                       .rstd = rstd,
                       .eps = float(eps)});
  return y;
}

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor weight, Tensor bias, double eps) {
  Tensor rstd = make(x, {rows_of(kOp, "x", x).rows * 3}, DType::f32);
  return {compose(x, weight, bias, eps, vector_of(kOp, "rstd", rstd)), rstd};
}

Tensor infer(Tensor x, Tensor weight, Tensor bias, double eps) { return compose(x, weight, bias, eps, {}); }

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool need_dx,
                                            bool need_dweight, bool need_dbias) {
  check_same_device(kOp, "dy", dy, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  Tensor dx = need_dx ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dw = make(x, {need_dweight ? 3 : 0}, w.dtype), db = make(x, {need_dbias ? 1 : 0}, w.dtype);
  auto ctx = make_context(x);
  poly_norm_bwd(*ctx, {.dy = rows_of(kOp, "dy", dy),
                       .x = rows,
                       .weight = w,
                       .rstd = vector_of(kOp, "rstd", rstd),
                       .dx = need_dx ? rows_of(kOp, "dx", dx) : Matrix{},
                       .dweight = need_dweight ? vector_of(kOp, "dweight", dw) : Vector{},
                       .dbias = need_dbias ? vector_of(kOp, "dbias", db) : Vector{}});
  return {dx, dw, db};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "poly_norm",
                 "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor rstd)");
  define(m, "poly_norm_infer(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor");
  define(m,
         "poly_norm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool need_dx, bool need_dweight,"
         " bool need_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "poly_norm", TORCH_BOX(&forward));
  m.impl("poly_norm_infer", TORCH_BOX(&infer));
  m.impl("poly_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::poly_norm_torch
