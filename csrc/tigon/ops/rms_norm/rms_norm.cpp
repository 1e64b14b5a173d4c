#include "tigon/ops/rms_norm/rms_norm.h"

#include "tigon/base/dispatch.h"
#include "tigon/base/require.h"

namespace tigon {
void rms_norm_fwd(Context& ctx, const RmsNormFwd& a) {
  const char* op = "rms_norm";
  require_float(op, "x", a.x.dtype);
  TIGON_CHECK(op, a.x.cols >= 1, "x must have at least one column, got ", a.x.cols);
  TIGON_CHECK(op, a.eps >= 0.0f, "eps must be >= 0, got ", a.eps);
  require_parameter(op, "weight", a.weight, a.x);
  DType y = rms_norm_result(a.x.dtype, a.weight ? a.weight.dtype : a.x.dtype, a.rounding);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, y);
  require_statistics(op, {{"rstd", a.rstd}}, a.x.rows);
  if (a.x.rows == 0) return;
  on_device(op, ctx, [&] { cpu::rms_norm_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::rms_norm_fwd(ctx, a)));
}

void rms_norm_bwd(Context& ctx, const RmsNormBwd& a) {
  const char* op = "rms_norm_bwd";
  require_float(op, "x", a.x.dtype);
  TIGON_CHECK(op, a.x.cols >= 1, "x must have at least one column, got ", a.x.cols);
  require_parameter(op, "weight", a.weight, a.x);
  DType y = rms_norm_result(a.x.dtype, a.weight ? a.weight.dtype : a.x.dtype, a.rounding);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, y);
  require_vector(op, "rstd", a.rstd, a.x.rows, DType::f32);
  if (a.dx.data != nullptr) require_matrix(op, "dx", a.dx, a.x.rows, a.x.cols, a.x.dtype);
  if (a.dweight) {
    TIGON_CHECK(op, bool(a.weight), "dweight must be absent when weight is, got [", a.dweight.size, "]");
    require_vector(op, "dweight", a.dweight, a.x.cols, a.weight.dtype);
  }
  on_device(op, ctx, [&] { cpu::rms_norm_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::rms_norm_bwd(ctx, a)));
}

}  // namespace tigon
