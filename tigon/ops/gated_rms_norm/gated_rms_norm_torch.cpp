#include "tigon/ops/gated_rms_norm/gated_rms_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
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

std::tuple<Tensor, Tensor> forward(Tensor x, Tensor gate, OptionalTensor weight, double eps, int64_t group,
                                   bool norm_first, int64_t act, double offset, int64_t rounding) {
  check_same_device(kOp, "gate", gate, x);
  if (weight) check_same_device(kOp, "weight", *weight, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  GatedRmsNorm how = options(rows, group, norm_first, act, offset, rounding);
  Tensor y = make_like(x, gated_rms_norm_result(rows.dtype, w ? w.dtype : rows.dtype, how));
  Tensor rstd = make(x, {how.group > 0 ? rows.rows * (rows.cols / how.group) : 0}, DType::f32);
  auto ctx = make_context(x);
  gated_rms_norm_fwd(*ctx, {.x = rows,
                            .gate = rows_of(kOp, "gate", gate),
                            .weight = w,
                            .y = rows_of(kOp, "y", y),
                            .rstd = vector_of(kOp, "rstd", rstd),
                            .eps = float(eps),
                            .how = how});
  return {y, rstd};
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

// gated_rms_norm is gated_rms_norm_fwd under a second name: Python attaches autograd to it, and eager calls stay free of that
// layer.
TIGON_TORCH_SCHEMAS(m) {
  m.def(
      "gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, float eps, int group, bool norm_first, int act, "
      "float offset, int rounding) -> (Tensor y, Tensor rstd)");
  m.def(
      "gated_rms_norm_fwd(Tensor x, Tensor gate, Tensor? weight, float eps, int group, bool norm_first, int "
      "act, "
      "float offset, int rounding) -> (Tensor y, Tensor rstd)");
  m.def(
      "gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, int group, bool "
      "norm_first, int act, float offset, int rounding, bool need_dx, bool need_dgate, bool need_dweight) -> "
      "(Tensor dx, Tensor dgate, Tensor dweight)");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("gated_rms_norm", TORCH_BOX(&forward));
  m.impl("gated_rms_norm_fwd", TORCH_BOX(&forward));
  m.impl("gated_rms_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim
