#include <vector>

#include "tigon/ops/adamw/scale.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::scale_torch {
namespace {

constexpr const char* kOp = "scale";

std::tuple<> scale_list(TensorList tensors, Tensor factor) {
  if (tensors.size() == 0) return {};
  const Tensor like = tensors.tensor(0);
  const DeviceId device(like.get());
  std::vector<Vector> vectors(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    AtenTensorHandle x = tensors[i];
    if (!device.has(x)) check_same_device(kOp, "tensors", tensors.tensor(i), like);
    const Shape shape(x);
    TIGON_CHECK(kOp, shape.is_dense(), "tensors must fill their memory without gaps or overlaps, got one of ",
                shape.numel, " elements that does not");
    vectors[i] = elements_of(kOp, "tensors", x, shape.numel);
  }
  check_same_device(kOp, "factor", factor, like);
  auto ctx = make_context(like);
  scale(*ctx, {.tensors = vectors, .factor = scalar_of(kOp, "factor", factor)});
  return {};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) { define(m, "scale_(Tensor(a!)[] tensors, Tensor factor) -> ()"); }
TIGON_TORCH_KERNELS(m) { m.impl("scale_", &boxed<&scale_list>); }

}  // namespace tigon::torch_shim::scale_torch
