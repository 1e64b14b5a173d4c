#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::modulated_rms_norm_torch {
namespace {

constexpr const char* kOp = "modulated_rms_norm";

Tensor normalise(Tensor& x, OptionalTensor& weight, Tensor& scale, OptionalTensor& shift, double eps,
                 double offset, int64_t rounding, const Vector& rstd) {
  if (weight) check_same_device(kOp, "weight", *weight, x);
  check_same_device(kOp, "scale", scale, x);
  if (shift) check_same_device(kOp, "shift", *shift, x);
  Matrix rows = rows_of(kOp, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  modulated_rms_norm_fwd(*ctx, {.x = rows,
                                .weight = vector_of(kOp, "weight", weight),
                                .scale = rows_of(kOp, "scale", scale),
                                .shift = shift ? rows_of(kOp, "shift", *shift) : Matrix{},
                                .y = rows_of(kOp, "y", y),
                                .rstd = rstd,
                                .eps = float(eps),
                                .offset = float(offset),
                                .rounding = Rounding(rounding)});
  return y;
}

std::tuple<Tensor, Tensor> forward(Tensor x, OptionalTensor weight, Tensor scale, OptionalTensor shift,
                                   double eps, double offset, int64_t rounding) {
  Tensor rstd = make(x, {rows_of(kOp, "x", x).rows}, DType::f32);
  return {normalise(x, weight, scale, shift, eps, offset, rounding, vector_of(kOp, "rstd", rstd)), rstd};
}

Tensor infer(Tensor x, OptionalTensor weight, Tensor scale, OptionalTensor shift, double eps, double offset,
             int64_t rounding) {
  return normalise(x, weight, scale, shift, eps, offset, rounding, {});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, OptionalTensor weight, Tensor scale,
                                                    Tensor rstd, double offset, int64_t rounding,
                                                    bool need_dx, bool need_dweight, bool need_dscale,
                                                    bool need_dshift) {
  check_same_device(kOp, "dy", dy, x);
  Matrix rows = rows_of(kOp, "x", x), modulation = rows_of(kOp, "scale", scale);
  Vector w = vector_of(kOp, "weight", weight);
  Tensor dx = need_dx ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dw = need_dweight ? make(x, {rows.cols}, w.dtype) : nothing(x, rows.dtype);
  Tensor dscale = need_dscale ? make_like(scale, modulation.dtype) : nothing(x, modulation.dtype);
  Tensor dshift = need_dshift ? make_like(scale, modulation.dtype) : nothing(x, modulation.dtype);
  auto ctx = make_context(x);
  modulated_rms_norm_bwd(*ctx, {.dy = rows_of(kOp, "dy", dy),
                                .x = rows,
                                .weight = w,
                                .scale = modulation,
                                .rstd = vector_of(kOp, "rstd", rstd),
                                .dx = need_dx ? rows_of(kOp, "dx", dx) : Matrix{},
                                .dweight = need_dweight ? vector_of(kOp, "dweight", dw) : Vector{},
                                .dscale = need_dscale ? rows_of(kOp, "dscale", dscale) : Matrix{},
                                .dshift = need_dshift ? rows_of(kOp, "dshift", dshift) : Matrix{},
                                .offset = float(offset),
                                .rounding = Rounding(rounding)});
  return {dx, dw, dscale, dshift};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string in =
      "(Tensor x, Tensor? weight, Tensor scale, Tensor? shift, float eps, float offset, int rounding)";
  define_forward(m, "modulated_rms_norm", in + " -> (Tensor y, Tensor rstd)");
  define(m, "modulated_rms_norm_infer" + in + " -> Tensor");
  define(
      m,
      "modulated_rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor scale, Tensor rstd, float offset,"
      " int rounding, bool need_dx, bool need_dweight, bool need_dscale, bool need_dshift)"
      " -> (Tensor dx, Tensor dweight, Tensor dscale, Tensor dshift)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "modulated_rms_norm", TORCH_BOX(&forward));
  m.impl("modulated_rms_norm_infer", TORCH_BOX(&infer));
  m.impl("modulated_rms_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::modulated_rms_norm_torch
