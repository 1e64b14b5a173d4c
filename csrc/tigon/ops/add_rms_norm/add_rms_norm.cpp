#include "tigon/ops/add_rms_norm/add_rms_norm.h"

#include "tigon/base/dispatch.h"
#include "tigon/base/require.h"

namespace tigon {

void add_rms_norm_fwd(Context& ctx, const AddRmsNormFwd& a) {
  const char* op = "add_rms_norm";
  require_rows(op, "x", a.x);
  require_eps(op, a.eps);
  require_matrix(op, "residual", a.residual, a.x.rows, a.x.cols, a.x.dtype);
  require_parameter(op, "weight", a.weight, a.x);
  DType y = rms_norm_result(a.x.dtype, a.weight ? a.weight.dtype : a.x.dtype, a.rounding);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, y);
  require_matrix(op, "h", a.h, a.x.rows, a.x.cols, a.x.dtype);
  require_statistics(op, {{"rstd", a.rstd}}, a.x.rows);
  if (a.x.rows == 0) return;
  on_device(op, ctx, [&] { cpu::add_rms_norm_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::add_rms_norm_fwd(ctx, a)));
}

void add_rms_norm_bwd(Context& ctx, const AddRmsNormBwd& a) {
  const char* op = "add_rms_norm_bwd";
  require_rows(op, "h", a.h);
  require_parameter(op, "weight", a.weight, a.h);
  DType y = rms_norm_result(a.h.dtype, a.weight ? a.weight.dtype : a.h.dtype, a.rounding);
  require_matrix(op, "dy", a.dy, a.h.rows, a.h.cols, y);
  require_result(op, "dh", a.dh, a.h);
  require_vector(op, "rstd", a.rstd, a.h.rows, DType::f32);
  require_result(op, "dx", a.dx, a.h);
  require_dweight(op, a.dweight, a.weight, a.h.cols);
  on_device(op, ctx, [&] { cpu::add_rms_norm_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::add_rms_norm_bwd(ctx, a)));
}

}  // namespace tigon
