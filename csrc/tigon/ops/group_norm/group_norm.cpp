#include "tigon/ops/group_norm/group_norm.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

void check_parameter(const char* op, const char* name, const Vector& v, const Matrix& x, int64_t channels) {
  require_parameter(op, name, v, {.dtype = x.dtype, .cols = channels});
}

// What both directions ask.
template <class Args>
void check(const char* op, const Args& a) {
  require_float(op, "x", a.x.dtype);
  TIGON_CHECK(op, a.groups >= 1 && a.channels >= 1 && a.channels % a.groups == 0, "groups must divide ",
              a.channels, " channels, got ", a.groups);
  TIGON_CHECK(op, a.x.cols >= 1 && a.x.cols % a.channels == 0, "x must have rows of a multiple of ",
              a.channels, " elements, got ", a.x.cols);
  check_parameter(op, "weight", a.weight, a.x, a.channels);
  require_statistics(op, {{"mean", a.mean}, {"rstd", a.rstd}}, a.x.rows * a.groups);
}

}  // namespace

void group_norm_fwd(Context& ctx, const GroupNormFwd& a) {
  const char* op = "group_norm";
  check(op, a);
  require_eps(op, a.eps);
  check_parameter(op, "bias", a.bias, a.x, a.channels);
  if (a.weight && a.bias) require_dtype(op, "bias", a.bias.dtype, a.weight.dtype);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  if (a.x.rows == 0) return;
  on_device(op, ctx, [&] { cpu::group_norm_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::group_norm_fwd(ctx, a)));
}

void group_norm_bwd(Context& ctx, const GroupNormBwd& a) {
  const char* op = "group_norm_bwd";
  check(op, a);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, a.x.dtype);
  require_result(op, "dx", a.dx, a.x);
  check_parameter(op, "dweight", a.dweight, a.x, a.channels);
  check_parameter(op, "dbias", a.dbias, a.x, a.channels);
  if (a.dweight && a.dbias) require_dtype(op, "dbias", a.dbias.dtype, a.dweight.dtype);
  on_device(op, ctx, [&] { cpu::group_norm_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::group_norm_bwd(ctx, a)));
}

}  // namespace tigon
