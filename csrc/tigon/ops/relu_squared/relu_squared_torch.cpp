#include "tigon/ops/relu_squared/relu_squared.h"

#include "tigon/torch/activation.h"

namespace tigon::torch_shim::relu_squared_torch {
namespace {

Tensor forward(Tensor x) { return activation_forward("relu_squared", relu_squared_fwd, x); }
Tensor backward(Tensor dy, Tensor x) { return activation_backward("relu_squared", relu_squared_bwd, dy, x); }

}  // namespace

TIGON_TORCH_SCHEMAS(m) { define_activation(m, "relu_squared"); }
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "relu_squared", TORCH_BOX(&forward));
  m.impl("relu_squared_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::relu_squared_torch
