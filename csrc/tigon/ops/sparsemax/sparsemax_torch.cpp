#include "tigon/ops/sparsemax/sparsemax.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::sparsemax_torch {
namespace {

constexpr const char* kOp = "sparsemax";

Tensor forward(Tensor x) {
  Matrix rows = rows_of(kOp, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  sparsemax_fwd(*ctx, {.x = rows, .y = rows_of(kOp, "y", y)});
  return y;
}

Tensor backward(Tensor dy, Tensor y) {
  check_same_device(kOp, "dy", dy, y);
  Matrix d = rows_of(kOp, "dy", dy), rows = rows_of(kOp, "y", y);
  Tensor dx = make_like(y, rows.dtype);
  auto ctx = make_context(y);
  sparsemax_bwd(*ctx, {.dy = d, .y = rows, .dx = rows_of(kOp, "dx", dx)});
  return dx;
}

}  // namespace

// sparsemax is sparsemax_fwd under a second name: Python attaches autograd to it, and eager calls stay
// free of that layer.
TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "sparsemax", "(Tensor x) -> Tensor");
  define(m, "sparsemax_bwd(Tensor dy, Tensor y) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "sparsemax", TORCH_BOX(&forward));
  m.impl("sparsemax_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::sparsemax_torch
