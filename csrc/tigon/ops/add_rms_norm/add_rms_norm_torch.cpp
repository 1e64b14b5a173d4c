#include "tigon/ops/add_rms_norm/add_rms_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::add_rms_norm_torch {
namespace {

constexpr const char* kOp = "add_rms_norm";

// x + residual goes to `h`.
Tensor normalise(Tensor& x, Tensor& residual, Tensor& h, OptionalTensor& weight, double eps, double offset,
                 int64_t rounding, const Vector& rstd) {
  check_same_device(kOp, "residual", residual, x);
  if (weight) check_same_device(kOp, "weight", *weight, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  auto mode = Rounding(rounding);
  Tensor y = make_like(x, rms_norm_result(rows.dtype, w ? w.dtype : rows.dtype, mode));
  auto ctx = make_context(x);
  add_rms_norm_fwd(*ctx, {.x = rows,
                          .residual = rows_of(kOp, "residual", residual),
                          .weight = w,
                          .y = rows_of(kOp, "y", y),
                          .h = rows_of(kOp, "h", h),
                          .rstd = rstd,
                          .eps = float(eps),
                          .offset = float(offset),
                          .rounding = mode});
  return y;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, Tensor residual, OptionalTensor weight, double eps,
                                           double offset, int64_t rounding) {
  Tensor h = make_like(x, dtype_of(kOp, "x", x));
  Tensor rstd = make(x, {rows_of(kOp, "x", x).rows}, DType::f32);
  Tensor y = normalise(x, residual, h, weight, eps, offset, rounding, vector_of(kOp, "rstd", rstd));
  return {y, h, rstd};
}

std::tuple<Tensor, Tensor> infer(Tensor x, Tensor residual, OptionalTensor weight, double eps, double offset,
                                 int64_t rounding) {
  Tensor h = make_like(x, dtype_of(kOp, "x", x));
  return {normalise(x, residual, h, weight, eps, offset, rounding, {}), h};
}

std::tuple<Tensor, Tensor> forward_in_place(Tensor x, Tensor residual, OptionalTensor weight, double eps,
                                            double offset, int64_t rounding) {
  Tensor rows = residual;
  (void)rows_of(kOp, "residual", rows);
  TIGON_CHECK(kOp, rows.data_ptr() == residual.data_ptr(),
              "residual must have dense rows to be written in place, got a layout that needs a copy");
  Tensor rstd = make(x, {rows_of(kOp, "x", x).rows}, DType::f32);
  Tensor sum = residual;
  return {normalise(x, residual, sum, weight, eps, offset, rounding, vector_of(kOp, "rstd", rstd)), rstd};
}

std::tuple<Tensor, Tensor> backward(Tensor dy, OptionalTensor dh, Tensor h, OptionalTensor weight,
                                    Tensor rstd, double offset, int64_t rounding, bool need_dx,
                                    bool need_dweight) {
  check_same_device(kOp, "dy", dy, h);
  if (dh) check_same_device(kOp, "dh", *dh, h);
  Matrix rows = rows_of(kOp, "h", h);
  Vector w = vector_of(kOp, "weight", weight);
  Tensor dx = need_dx ? make_like(h, rows.dtype) : nothing(h, rows.dtype);
  Tensor dw = need_dweight ? make(h, {rows.cols}, w.dtype) : nothing(h, rows.dtype);
  auto ctx = make_context(h);
  add_rms_norm_bwd(*ctx, {.dy = rows_of(kOp, "dy", dy),
                          .dh = dh ? rows_of(kOp, "dh", *dh) : Matrix{},
                          .h = rows,
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
  const std::string options = "Tensor? weight, float eps, float offset, int rounding)";
  define_forward(m, "add_rms_norm",
                 "(Tensor x, Tensor residual, " + options + " -> (Tensor y, Tensor h, Tensor rstd)");
  define(m, "add_rms_norm_infer(Tensor x, Tensor residual, " + options + " -> (Tensor y, Tensor h)");
  define(m,
         "add_rms_norm_in_place(Tensor x, Tensor(a!) residual, " + options + " -> (Tensor y, Tensor rstd)");
  define(m,
         "add_rms_norm_bwd(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float offset,"
         " int rounding, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "add_rms_norm", TORCH_BOX(&forward));
  m.impl("add_rms_norm_infer", TORCH_BOX(&infer));
  m.impl("add_rms_norm_in_place", TORCH_BOX(&forward_in_place));
  m.impl("add_rms_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::add_rms_norm_torch
