#include "tigon/ops/sparsemax/sparsemax.h"

#include "tigon/base/require.h"

namespace tigon {

void sparsemax_fwd(Context& ctx, const SparsemaxFwd& a) {
  const char* op = "sparsemax";
  require_float(op, "x", a.x.dtype);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  if (a.x.rows == 0 || a.x.cols == 0) return;
  on_device(op, ctx, [&] { cpu::sparsemax_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::sparsemax_fwd(ctx, a)));
}

void sparsemax_bwd(Context& ctx, const SparsemaxBwd& a) {
  const char* op = "sparsemax_bwd";
  require_float(op, "y", a.y.dtype);
  require_matrix(op, "dy", a.dy, a.y.rows, a.y.cols, a.y.dtype);
  require_matrix(op, "dx", a.dx, a.y.rows, a.y.cols, a.y.dtype);
  if (a.y.rows == 0 || a.y.cols == 0) return;
  on_device(op, ctx, [&] { cpu::sparsemax_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::sparsemax_bwd(ctx, a)));
}

}  // namespace tigon
