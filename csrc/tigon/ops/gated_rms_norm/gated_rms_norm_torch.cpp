#include "tigon/ops/gated_rms_norm/gated_rms_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::gated_rms_norm_torch {
namespace {

constexpr const char* kOp = "gated_rms_norm";

GatedRmsNorm options(const Matrix& x, int64_t group, bool norm_first, int64_t act, double offset,
                     int64_t rounding) {
  return {.group = group == 0 ? x.cols : group,
          .norm_first = norm_first,
          .act = GateAct(act),
          .offset = float(offset),
          .rounding = Rounding(rounding)};
}

Tensor normalise(Tensor& x, Tensor& gate, OptionalTensor& weight, double eps, int64_t group, bool norm_first,
                 int64_t act, double offset, int64_t rounding, const Vector& rstd) {
  check_same_device(kOp, "gate", gate, x);
  if (weight) check_same_device(kOp, "weight", *weight, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  GatedRmsNorm how = options(rows, group, norm_first, act, offset, rounding);
  Tensor y = make_like(x, gated_rms_norm_result(rows.dtype, w ? w.dtype : rows.dtype, how));
  auto ctx = make_context(x);
  gated_rms_norm_fwd(*ctx, {.x = rows,
                            .gate = rows_of(kOp, "gate", gate),
                            .weight = w,
                            .y = rows_of(kOp, "y", y),
                            .rstd = rstd,
                            .eps = float(eps),
                            .how = how});
  return y;
}

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor gate, OptionalTensor weight, double eps, int64_t group,
                                   bool norm_first, int64_t act, double offset, int64_t rounding) {
  const Matrix rows = rows_of(kOp, "x", x);
  const int64_t of_row = group == 0 ? 1 : group > 0 ? rows.cols / group : 0;
  Tensor rstd = make(x, {rows.rows * of_row}, DType::f32);
  return {
      normalise(x, gate, weight, eps, group, norm_first, act, offset, rounding, vector_of(kOp, "rstd", rstd)),
      rstd};
}

Tensor infer(Tensor x, Tensor gate, OptionalTensor weight, double eps, int64_t group, bool norm_first,
             int64_t act, double offset, int64_t rounding) {
  return normalise(x, gate, weight, eps, group, norm_first, act, offset, rounding, {});
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, Tensor gate, OptionalTensor weight,
                                            Tensor rstd, int64_t group, bool norm_first, int64_t act,
                                            double offset, int64_t rounding, bool need_dx, bool need_dgate,
                                            bool need_dweight) {
  check_same_device(kOp, "dy", dy, x);
  check_same_device(kOp, "gate", gate, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  Tensor dx = need_dx ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dgate = need_dgate ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dw = need_dweight ? make(x, {rows.cols}, w.dtype) : nothing(x, rows.dtype);
  auto ctx = make_context(x);
  gated_rms_norm_bwd(*ctx, {.dy = rows_of(kOp, "dy", dy),
                            .x = rows,
                            .gate = rows_of(kOp, "gate", gate),
                            .weight = w,
                            .rstd = vector_of(kOp, "rstd", rstd),
                            .dx = need_dx ? rows_of(kOp, "dx", dx) : Matrix{},
                            .dgate = need_dgate ? rows_of(kOp, "dgate", dgate) : Matrix{},
                            .dweight = need_dweight ? vector_of(kOp, "dweight", dw) : Vector{},
                            .how = options(rows, group, norm_first, act, offset, rounding)});
  return {dx, dgate, dw};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string options = "int group, bool norm_first, int act, float offset, int rounding";
  const std::string inputs = "(Tensor x, Tensor gate, Tensor? weight, float eps, " + options + ")";
  define_forward(m, "gated_rms_norm", inputs + " -> (Tensor y, Tensor rstd)");
  define(m, "gated_rms_norm_infer" + inputs + " -> Tensor");
  define(
      m,
      "gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, " + options +
          ", bool need_dx, bool need_dgate, bool need_dweight) -> (Tensor dx, Tensor dgate, Tensor dweight)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "gated_rms_norm", TORCH_BOX(&forward));
  m.impl("gated_rms_norm_infer", TORCH_BOX(&infer));
  m.impl("gated_rms_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::gated_rms_norm_torch
