#include "tigon/ops/relu_squared/relu_squared.h"

#include "tigon/base/require.h"

namespace tigon {

void relu_squared_fwd(Context& ctx, const ReluSquaredFwd& a) {
  const char* op = "relu_squared";
  require_float(op, "x", a.x.dtype);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  if (a.x.rows == 0 || a.x.cols == 0) return;
  on_device(op, ctx, [&] { cpu::relu_squared_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::relu_squared_fwd(ctx, a)));
}

void relu_squared_bwd(Context& ctx, const ReluSquaredBwd& a) {
  const char* op = "relu_squared_bwd";
  require_float(op, "x", a.x.dtype);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, a.x.dtype);
  require_matrix(op, "dx", a.dx, a.x.rows, a.x.cols, a.x.dtype);
  if (a.x.rows == 0 || a.x.cols == 0) return;
  on_device(op, ctx, [&] { cpu::relu_squared_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::relu_squared_bwd(ctx, a)));
}

}  // namespace tigon
