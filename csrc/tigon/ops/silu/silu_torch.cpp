#include "tigon/ops/silu/silu.h"

#include "tigon/torch/activation.h"

namespace tigon::torch_shim::silu_torch {
namespace {

Tensor forward(Tensor x) { return activation_forward("silu", silu_fwd, x); }
Tensor backward(Tensor dy, Tensor x) { return activation_backward("silu", silu_bwd, dy, x); }

}  // namespace

TIGON_TORCH_SCHEMAS(m) { define_activation(m, "silu"); }
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "silu", TORCH_BOX(&forward));
  m.impl("silu_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::silu_torch
