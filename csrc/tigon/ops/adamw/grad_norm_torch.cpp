#include <vector>

#include "tigon/ops/adamw/grad_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "grad_norm";

std::tuple<Tensor, Tensor, Tensor> norm(std::vector<Tensor> grads, double max_norm,
                                        OptionalTensor grad_scale) {
  TIGON_CHECK(kOp, !grads.empty(), "grads must have at least one tensor, got none");
  const Tensor like = grads[0];
  std::vector<Vector> vectors;
  vectors.reserve(grads.size());
  for (Tensor& g : grads) {
    check_same_device(kOp, "grads", g, like);
    if (!g.is_contiguous()) g = to_contiguous(kOp, "grads", g);
    vectors.push_back(
        {.data = data_of(kOp, "grads", g), .dtype = dtype_of(kOp, "grads", g), .size = g.numel()});
  }
  Vector scale;
  if (grad_scale.has_value()) {
    check_same_device(kOp, "grad_scale", *grad_scale, like);
    scale = scalar_of(kOp, "grad_scale", *grad_scale);
  }
  Tensor total = make(like, {}, DType::f64), value = make(like, {}, DType::f32),
         factor = make(like, {}, DType::f32);
  auto ctx = make_context(like);
  grad_norm(*ctx, {.grads = vectors,
                   .grad_scale = scale,
                   .max_norm = float(max_norm),
                   .total = scalar_of(kOp, "total", total),
                   .norm = scalar_of(kOp, "norm", value),
                   .factor = scalar_of(kOp, "factor", factor)});
  return {total, value, factor};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define(m, "grad_norm(Tensor[] grads, float max_norm, Tensor? grad_scale) -> (Tensor, Tensor, Tensor)");
}
TIGON_TORCH_KERNELS(m) { m.impl("grad_norm", &boxed<&norm>); }

}  // namespace tigon::torch_shim
