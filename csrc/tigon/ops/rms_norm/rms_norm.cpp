#include "tigon/ops/rms_norm/rms_norm.h"

#include "tigon/base/dispatch.h"
#include "tigon/base/require.h"

namespace tigon {
void rms_norm_fwd(Context& ctx, const RmsNormFwd& a) {
  const char* op = "rms_norm";
  require_rows(op, "x", a.x);
  require_eps(op, a.eps);
  require_parameter(op, "weight", a.weight, a.x);
  DType y = rms_norm_result(a.x.dtype, a.weight ? a.weight.dtype : a.x.dtype, a.rounding);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, y);
  require_statistics(op, {{"rstd", a.rstd}}, a.x.rows);
  if (a.x.rows == 0) return;
  on_device(op, ctx, [&] { cpu::rms_norm_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::rms_norm_fwd(ctx, a)));
}

void rms_norm_bwd(Context& ctx, const RmsNormBwd& a) {
  const char* op = "rms_norm_bwd";
  require_rows(op, "x", a.x);
  require_parameter(op, "weight", a.weight, a.x);
  DType y = rms_norm_result(a.x.dtype, a.weight ? a.weight.dtype : a.x.dtype, a.rounding);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, y);
  require_vector(op, "rstd", a.rstd, a.x.rows, DType::f32);
  require_result(op, "dx", a.dx, a.x);
  require_dweight(op, a.dweight, a.weight, a.x.cols);
  on_device(op, ctx, [&] { cpu::rms_norm_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::rms_norm_bwd(ctx, a)));
}

}  // namespace tigon
