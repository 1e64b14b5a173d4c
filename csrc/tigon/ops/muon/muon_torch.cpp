#include "tigon/base/require.h"
#include "tigon/ops/muon/muon.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::muon_torch {
namespace {

constexpr const char* kOp = "muon";

// Contiguous tensors of the sizes of `like`, where it lives.
std::vector<Vector> vectors_of(const char* name, const TensorList& list, const Tensor& like) {
  std::vector<Vector> vectors(list.size());
  const DeviceId device(like.get());
  const Shape sizes(like.get());
  for (size_t i = 0; i < list.size(); ++i) {
    if (!device.has(list[i])) check_same_device(kOp, name, list.tensor(i), like);
    const Shape shape(list[i]);
    TIGON_CHECK(kOp, shape.has_sizes_of(sizes) && shape.is_contiguous(), name,
                " must be contiguous and of one shape, got one of ", shape.numel, " elements that is not");
    vectors[i] = elements_of(kOp, name, list[i], shape.numel);
  }
  return vectors;
}

Vector optional_of(const char* name, const OptionalTensor& t, const Tensor& like) {
  if (!t.has_value()) return {};
  check_same_device(kOp, name, *t, like);
  const Shape shape(t->get());
  TIGON_CHECK(kOp, shape.is_contiguous(), name, " must be contiguous");
  return elements_of(kOp, name, t->get(), shape.numel);
}

std::tuple<> momentum(TensorList momenta, TensorList grads, double momentum, bool nesterov, bool adds,
                      OptionalTensor updates, OptionalTensor factors, OptionalTensor squares,
                      int64_t matrices) {
  if (grads.size() == 0) return {};
  const Tensor like = grads.tensor(0);
  const auto m = vectors_of("momenta", momenta, like), g = vectors_of("grads", grads, like);
  auto ctx = make_context(like);
  muon_momentum(*ctx, {.momenta = m,
                       .grads = g,
                       .updates = optional_of("updates", updates, like),
                       .factors = optional_of("factors", factors, like),
                       .squares = optional_of("squares", squares, like),
                       .matrices = matrices,
                       .momentum = momentum,
                       .nesterov = nesterov,
                       .adds = adds});
  return {};
}

std::tuple<> update(TensorList params, TensorList updates, double lr, OptionalTensor lr_on_device,
                    double ratio, double weight_decay) {
  if (params.size() == 0) return {};
  const Tensor like = params.tensor(0);
  const auto p = vectors_of("params", params, like), u = vectors_of("updates", updates, like);
  MuonUpdate a{.params = p, .updates = u, .lr = lr, .ratio = ratio, .weight_decay = weight_decay};
  const Vector lr_there = optional_of("lr", lr_on_device, like);
  require_optional(kOp, "lr", lr_there, 1);
  a.lr_on_device = lr_there.as<float>();
  auto ctx = make_context(like);
  muon_update(*ctx, a);
  return {};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define(m,
         "muon_momentum_(Tensor(a!)[] momenta, Tensor[] grads, float momentum, bool nesterov, bool adds, "
         "Tensor(b!)? updates, Tensor? factors, Tensor(c!)? squares, int matrices) -> ()");
  define(m,
         "muon_update_(Tensor(a!)[] params, Tensor[] updates, float lr, Tensor? lr_on_device, "
         "float ratio, float weight_decay) -> ()");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("muon_momentum_", &boxed<&momentum>);
  m.impl("muon_update_", &boxed<&update>);
}

}  // namespace tigon::torch_shim::muon_torch
