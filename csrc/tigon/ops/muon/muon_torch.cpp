#include <cmath>

#include "tigon/ops/muon/muon.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::muon_torch {
namespace {

constexpr const char* kOp = "muon";

// Contiguous tensors of the sizes of `like`, where it lives.
std::vector<Vector> vectors_of(const char* name, const TensorList& list, const Tensor& like) {
  std::vector<Vector> vectors(list.size());
  const Shape sizes(like.get());
  for (size_t i = 0; i < list.size(); ++i) {
    const Tensor t = list.tensor(i);
    check_same_device(kOp, name, t, like);
    const Shape shape(t.get());
    TIGON_CHECK(kOp, shape.has_sizes_of(sizes) && shape.is_contiguous(), name,
                " must be contiguous and of one shape, got one of ", t.numel(), " elements that is not");
    vectors[i] = {.data = data_of(kOp, name, t), .dtype = dtype_of(kOp, name, t), .size = t.numel()};
  }
  return vectors;
}

// The directions, stacked, and sums of squares of each of their matrices.
std::tuple<Tensor, Tensor> momentum(TensorList momenta, TensorList grads, double momentum, bool nesterov) {
  TIGON_CHECK(kOp, grads.size() > 0, "grads must have at least one tensor, got none");
  const Tensor like = grads.tensor(0);
  const auto sizes = like.sizes();
  const int64_t count = int64_t(grads.size()), dims = int64_t(sizes.size());
  TIGON_CHECK(kOp, dims >= 2 && like.numel() > 0, "grads must be matrices with elements");
  const int64_t matrix = sizes[size_t(dims - 2)] * sizes[size_t(dims - 1)], matrices = like.numel() / matrix;
  const auto m = vectors_of("momenta", momenta, like), g = vectors_of("grads", grads, like);
  std::vector<int64_t> stacked{count};
  stacked.insert(stacked.end(), sizes.begin(), sizes.end());
  Tensor updates = empty(like, stacked.data(), dims + 1, g[0].dtype),
         squares = make(like, {count * matrices, muon_chunks(matrix)}, DType::f64);
  auto ctx = make_context(like);
  muon_momentum(*ctx, {.momenta = m,
                       .grads = g,
                       .updates = {updates.data_ptr(), g[0].dtype, updates.numel()},
                       .squares = {squares.data_ptr(), DType::f64, squares.numel()},
                       .matrices = matrices,
                       .momentum = momentum,
                       .nesterov = nesterov});
  return {updates, squares};
}

std::tuple<> update(TensorList params, TensorList updates, double lr, OptionalTensor lr_on_device,
                    double ratio, double weight_decay) {
  if (params.size() == 0) return {};
  const Tensor like = params.tensor(0);
  const auto p = vectors_of("params", params, like), u = vectors_of("updates", updates, like);
  MuonUpdate a{.params = p, .updates = u, .lr = lr, .ratio = ratio, .weight_decay = weight_decay};
  if (lr_on_device.has_value()) {
    check_same_device(kOp, "lr", *lr_on_device, like);
    const Vector v = scalar_of(kOp, "lr", *lr_on_device);
    TIGON_CHECK(kOp, v.dtype == DType::f32, "lr must be float32, got ", name_of(v.dtype));
    a.lr_on_device = v.as<float>();
  }
  auto ctx = make_context(like);
  muon_update(*ctx, a);
  return {};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define(m, "muon_momentum_(Tensor(a!)[] momenta, Tensor[] grads, float momentum, bool nesterov) -> "
            "(Tensor, Tensor)");
  define(m, "muon_update_(Tensor(a!)[] params, Tensor[] updates, float lr, Tensor? lr_on_device, "
            "float ratio, float weight_decay) -> ()");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("muon_momentum_", &boxed<&momentum>);
  m.impl("muon_update_", &boxed<&update>);
}

}  // namespace tigon::torch_shim::muon_torch
