#include "tigon/ops/gated_rms_norm/gated_rms_norm.h"

#include "tigon/base/dispatch.h"
#include "tigon/base/require.h"

namespace tigon {
namespace {

// What both directions ask; returns y's dtype.
template <class Args>
DType check(const char* op, const Args& a) {
  require_rows(op, "x", a.x);
  require_matrix(op, "gate", a.gate, a.x.rows, a.x.cols, a.x.dtype);
  require_parameter(op, "weight", a.weight, a.x);
  TIGON_CHECK(op, a.how.group > 0 && a.x.cols % a.how.group == 0, "group_size must divide ", a.x.cols,
              ", got ", a.how.group);
  TIGON_CHECK(op, a.how.rounding != Rounding::none, "rounding must be llama or gemma, got none");
  require_statistics(op, {{"rstd", a.rstd}}, a.x.rows * (a.x.cols / a.how.group));
  return gated_rms_norm_result(a.x.dtype, a.weight ? a.weight.dtype : a.x.dtype, a.how);
}

template <class Args>
Args with_group(Args a) {
  if (a.how.group == 0) a.how.group = a.x.cols;
  return a;
}

}  // namespace

void gated_rms_norm_fwd(Context& ctx, const GatedRmsNormFwd& args) {
  const char* op = "gated_rms_norm";
  GatedRmsNormFwd a = with_group(args);
  DType y = check(op, a);
  require_eps(op, a.eps);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, y);
  if (a.x.rows == 0) return;
  on_device(
      op, ctx, [&] { cpu::gated_rms_norm_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::gated_rms_norm_fwd(ctx, a)));
}

void gated_rms_norm_bwd(Context& ctx, const GatedRmsNormBwd& args) {
  const char* op = "gated_rms_norm_bwd";
  GatedRmsNormBwd a = with_group(args);
  DType y = check(op, a);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, y);
  require_result(op, "dx", a.dx, a.x);
  require_result(op, "dgate", a.dgate, a.x);
  require_dweight(op, a.dweight, a.weight, a.x.cols);
  on_device(
      op, ctx, [&] { cpu::gated_rms_norm_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::gated_rms_norm_bwd(ctx, a)));
}

}  // namespace tigon
