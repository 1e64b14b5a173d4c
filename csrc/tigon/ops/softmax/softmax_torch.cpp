#include "tigon/ops/softmax/softmax.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::softmax_torch {
namespace {

constexpr const char* kOp = "softmax";

Tensor forward(Tensor x) {
  Matrix rows = rows_of(kOp, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  softmax_fwd(*ctx, {.x = rows, .y = rows_of(kOp, "y", y)});
  return y;
}

Tensor backward(Tensor dy, Tensor y) {
  check_same_device(kOp, "dy", dy, y);
  Matrix d = rows_of(kOp, "dy", dy), rows = rows_of(kOp, "y", y);
  Tensor dx = make_like(y, rows.dtype);
  auto ctx = make_context(y);
  softmax_bwd(*ctx, {.dy = d, .y = rows, .dx = rows_of(kOp, "dx", dx)});
  return dx;
}

}  // namespace

// softmax is softmax_fwd under a second name: Python attaches autograd to it, and eager calls stay
// free of that layer.
TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "softmax", "(Tensor x) -> Tensor");
  define(m, "softmax_bwd(Tensor dy, Tensor y) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "softmax", TORCH_BOX(&forward));
  m.impl("softmax_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::softmax_torch
