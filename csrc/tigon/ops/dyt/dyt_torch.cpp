#include "tigon/ops/dyt/dyt.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::dyt_torch {
namespace {

constexpr const char* kOp = "dyt";

Tensor forward(Tensor x, Tensor alpha, OptionalTensor weight, OptionalTensor bias) {
  check_same_device(kOp, "alpha", alpha, x);
  if (weight) check_same_device(kOp, "weight", *weight, x);
  if (bias) check_same_device(kOp, "bias", *bias, x);
  Matrix rows = rows_of(kOp, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  dyt_fwd(*ctx, {.x = rows,
                 .alpha = scalar_of(kOp, "alpha", alpha),
                 .weight = vector_of(kOp, "weight", weight),
                 .bias = vector_of(kOp, "bias", bias),
                 .y = rows_of(kOp, "y", y)});
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, Tensor alpha, OptionalTensor weight,
                                                    bool need_dx, bool need_dalpha, bool need_dweight,
                                                    bool need_dbias) {
  check_same_device(kOp, "dy", dy, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector scale = scalar_of(kOp, "alpha", alpha);
  Tensor dx = need_dx ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dalpha = need_dalpha ? make_like(alpha, scale.dtype) : nothing(x, scale.dtype);
  Tensor dw = make(x, {need_dweight ? rows.cols : 0}, scale.dtype);
  Tensor db = make(x, {need_dbias ? rows.cols : 0}, scale.dtype);
  auto ctx = make_context(x);
  dyt_bwd(*ctx, {.dy = rows_of(kOp, "dy", dy),
                 .x = rows,
                 .alpha = scale,
                 .weight = vector_of(kOp, "weight", weight),
                 .dx = need_dx ? rows_of(kOp, "dx", dx) : Matrix{},
                 .dalpha = need_dalpha ? scalar_of(kOp, "dalpha", dalpha) : Vector{},
                 .dweight = need_dweight ? vector_of(kOp, "dweight", dw) : Vector{},
                 .dbias = need_dbias ? vector_of(kOp, "dbias", db) : Vector{}});
  return {dx, dalpha, dw, db};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "dyt", "(Tensor x, Tensor alpha, Tensor? weight, Tensor? bias) -> Tensor");
  define(m,
         "dyt_bwd(Tensor dy, Tensor x, Tensor alpha, Tensor? weight, bool need_dx, bool need_dalpha,"
         " bool need_dweight, bool need_dbias) -> (Tensor dx, Tensor dalpha, Tensor dweight, Tensor dbias)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "dyt", TORCH_BOX(&forward));
  m.impl("dyt_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::dyt_torch
