#include "tigon/ops/layer_norm/layer_norm.h"

#include "tigon/base/dispatch.h"
#include "tigon/base/require.h"

namespace tigon {

void layer_norm_fwd(Context& ctx, const LayerNormFwd& a) {
  const char* op = "layer_norm";
  require_rows(op, "x", a.x);
  require_eps(op, a.eps);
  require_parameter(op, "weight", a.weight, a.x);
  require_parameter(op, "bias", a.bias, a.x);
  if (a.weight && a.bias) require_dtype(op, "bias", a.bias.dtype, a.weight.dtype);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  require_statistics(op, {{"mean", a.mean}, {"rstd", a.rstd}}, a.x.rows);
  if (a.x.rows == 0) return;
  on_device(op, ctx, [&] { cpu::layer_norm_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::layer_norm_fwd(ctx, a)));
}

void layer_norm_bwd(Context& ctx, const LayerNormBwd& a) {
  const char* op = "layer_norm_bwd";
  require_rows(op, "x", a.x);
  require_parameter(op, "weight", a.weight, a.x);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, a.x.dtype);
  require_vector(op, "mean", a.mean, a.x.rows, DType::f32);
  require_vector(op, "rstd", a.rstd, a.x.rows, DType::f32);
  require_result(op, "dx", a.dx, a.x);
  require_dweight(op, a.dweight, a.weight, a.x.cols);
  require_parameter(op, "dbias", a.dbias, a.x);
  if (a.dweight && a.dbias) require_dtype(op, "dbias", a.dbias.dtype, a.dweight.dtype);
  on_device(op, ctx, [&] { cpu::layer_norm_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::layer_norm_bwd(ctx, a)));
}

}  // namespace tigon
