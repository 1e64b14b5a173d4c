#include "tigon/ops/layer_norm/layer_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "layer_norm";

Tensor normalise(Tensor& x, OptionalTensor& weight, OptionalTensor& bias, double eps, const Vector& mean,
                 const Vector& rstd) {
  if (weight) check_same_device(kOp, "weight", *weight, x);
  if (bias) check_same_device(kOp, "bias", *bias, x);
  Matrix rows = rows_of(kOp, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  layer_norm_fwd(*ctx, {.x = rows,
                        .weight = vector_of(kOp, "weight", weight),
                        .bias = vector_of(kOp, "bias", bias),
                        .y = rows_of(kOp, "y", y),
                        .mean = mean,
                        .rstd = rstd,
                        .eps = float(eps)});
  return y;
}

std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, OptionalTensor weight, OptionalTensor bias, double eps) {
  const int64_t rows = rows_of(kOp, "x", x).rows;
  Tensor mean = make(x, {rows}, DType::f32), rstd = make(x, {rows}, DType::f32);
  return {normalise(x, weight, bias, eps, vector_of(kOp, "mean", mean), vector_of(kOp, "rstd", rstd)), mean,
          rstd};
}

Tensor infer(Tensor x, OptionalTensor weight, OptionalTensor bias, double eps) {
  return normalise(x, weight, bias, eps, {}, {});
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor dy, Tensor x, OptionalTensor weight, OptionalTensor bias,
                                            Tensor mean, Tensor rstd, bool need_dx, bool need_dweight,
                                            bool need_dbias) {
  check_same_device(kOp, "dy", dy, x);
  Matrix rows = rows_of(kOp, "x", x);
  Vector w = vector_of(kOp, "weight", weight);
  Tensor dx = need_dx ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dw = need_dweight ? make(x, {rows.cols}, w.dtype) : nothing(x, rows.dtype);
  Tensor db =
      need_dbias && bias ? make(x, {rows.cols}, dtype_of(kOp, "bias", *bias)) : nothing(x, rows.dtype);
  auto ctx = make_context(x);
  layer_norm_bwd(*ctx, {.dy = rows_of(kOp, "dy", dy),
                        .x = rows,
                        .weight = w,
                        .mean = vector_of(kOp, "mean", mean),
                        .rstd = vector_of(kOp, "rstd", rstd),
                        .dx = need_dx ? rows_of(kOp, "dx", dx) : Matrix{},
                        .dweight = need_dweight ? vector_of(kOp, "dweight", dw) : Vector{},
                        .dbias = need_dbias ? vector_of(kOp, "dbias", db) : Vector{}});
  return {dx, dw, db};
}

}  // namespace

// The forward by three names: layer_norm_fwd; layer_norm, to which Python attaches autograd, so that eager calls stay free of that layer;
// layer_norm_infer, for where no gradient will be asked for: without what a backward needs.
TIGON_TORCH_SCHEMAS(m) {
  m.def(
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor "
      "rstd)");
  m.def(
      "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor "
      "rstd)");
  m.def("layer_norm_infer(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  m.def(
      "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool "
      "need_dx, bool need_dweight, bool need_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("layer_norm", TORCH_BOX(&forward));
  m.impl("layer_norm_fwd", TORCH_BOX(&forward));
  m.impl("layer_norm_infer", TORCH_BOX(&infer));
  m.impl("layer_norm_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim
