#include "tigon/ops/silu/silu.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "silu";

Tensor forward(Tensor x) {
  Matrix rows = rows_of(kOp, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  silu_fwd(*ctx, {.x = rows, .y = rows_of(kOp, "y", y)});
  return y;
}

Tensor backward(Tensor dy, Tensor x) {
  check_same_device(kOp, "dy", dy, x);
  Matrix d = rows_of(kOp, "dy", dy), rows = rows_of(kOp, "x", x);
  Tensor dx = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  silu_bwd(*ctx, {.dy = d, .x = rows, .dx = rows_of(kOp, "dx", dx)});
  return dx;
}

}  // namespace

// silu is silu_fwd under a second name: Python attaches autograd to it, and eager calls stay
// free of that layer.
TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "silu", "(Tensor x) -> Tensor");
  define(m, "silu_bwd(Tensor dy, Tensor x) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "silu", TORCH_BOX(&forward));
  m.impl("silu_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim
