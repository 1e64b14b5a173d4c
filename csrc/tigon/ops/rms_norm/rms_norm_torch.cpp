#include "tigon/ops/rms_norm/rms_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::rms_norm_torch {
namespace {

constexpr const char* kOp = "rms_norm";

Tensor normalise(Tensor& x, OptionalTensor& weight, double eps, double offset, int64_t rounding,
                 const Vector& rstd) {
  if (weight) check_same_device(kOp, "weight", *weight, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  auto mode = Rounding(rounding);
  Tensor y = make_like(x, rms_norm_result(rows.dtype, w ? w.dtype : rows.dtype, mode));
  auto ctx = make_context(x);
  rms_norm_fwd(*ctx, {.x = rows,
                      .weight = w,
                      .y = rows_of(kOp, "y", y),
                      .rstd = rstd,
                      .eps = float(eps),
                      .offset = float(offset),
                      .rounding = mode});
  return y;
}

std::tuple<Tensor, Tensor> forward(Tensor x, OptionalTensor weight, double eps, double offset,
                                   int64_t rounding) {
  Tensor rstd = make(x, {rows_of(kOp, "x", x).rows}, DType::f32);
  return {normalise(x, weight, eps, offset, rounding, vector_of(kOp, "rstd", rstd)), rstd};
}

Tensor infer(Tensor x, OptionalTensor weight, double eps, double offset, int64_t rounding) {
  return normalise(x, weight, eps, offset, rounding, {});
}

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor x, OptionalTensor weight, Tensor rstd, double offset,
                                    int64_t rounding, bool need_dx, bool need_dweight) {
  check_same_device(kOp, "dy", dy, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  Tensor dx = need_dx ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dw = need_dweight ? make(x, {rows.cols}, w.dtype) : nothing(x, rows.dtype);
  auto ctx = make_context(x);
  rms_norm_bwd(*ctx, {.dy = rows_of(kOp, "dy", dy),
                      .x = rows,
                      .weight = w,
                      .rstd = vector_of(kOp, "rstd", rstd),
                      .dx = need_dx ? rows_of(kOp, "dx", dx) : Matrix{},
                      .dweight = need_dweight ? vector_of(kOp, "dweight", dw) : Vector{},
                      .offset = float(offset),
                      .rounding = Rounding(rounding)});
  return {dx, dw};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "rms_norm",
                 "(Tensor x, Tensor? weight, float eps, float offset, int rounding)"
                 " -> (Tensor y, Tensor rstd)");
  define(m, "rms_norm_infer(Tensor x, Tensor? weight, float eps, float offset, int rounding) -> Tensor");
  define(m,
         "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, int rounding,"
         " bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "rms_norm", TORCH_BOX(&forward));
  m.impl("rms_norm_infer", TORCH_BOX(&infer));
  m.impl("rms_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::rms_norm_torch
