#include <vector>

#include "tigon/ops/adamw/grad_norm.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::grad_norm_torch {
namespace {

constexpr const char* kOp = "grad_norm";

std::tuple<Tensor, Tensor, Tensor> norm(TensorList grads, double max_norm, OptionalTensor grad_scale) {
  TIGON_CHECK(kOp, grads.size() > 0, "grads must have at least one tensor, got none");
  const Tensor like = grads.tensor(0);
  const DeviceId device(like.get());
  std::vector<Tensor> copies;
  std::vector<Vector> vectors(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    AtenTensorHandle g = grads[i];
    if (!device.has(g)) check_same_device(kOp, "grads", grads.tensor(i), like);
    const Shape shape(g);
    if (!shape.is_contiguous()) {
      copies.push_back(to_contiguous(kOp, "grads", grads.tensor(i)));
      g = copies.back().get();
    }
    vectors[i] = elements_of(kOp, "grads", g, shape.numel);
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

}  // namespace tigon::torch_shim::grad_norm_torch
