#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"

#include "tigon/base/dispatch.h"
#include "tigon/base/require.h"

namespace tigon {
namespace {

// A row of `m` for as many rows of x each.
void require_modulation(const char* op, const char* name, const Matrix& m, const Matrix& x, DType dtype) {
  TIGON_CHECK(op, m.rows > 0 ? x.rows % m.rows == 0 : x.rows == 0, name,
              " must have a number of rows that divides ", x.rows, ", got ", m.rows);
  require_matrix(op, name, m, m.rows, x.cols, dtype);
}

// What both directions ask.
template <class Args>
void check(const char* op, const Args& a) {
  require_rows(op, "x", a.x);
  require_parameter(op, "weight", a.weight, a.x);
  TIGON_CHECK(op, a.scale.dtype == a.x.dtype || a.scale.dtype == DType::f32, "scale must be ",
              name_of(a.x.dtype), " or float32, got ", name_of(a.scale.dtype));
  require_modulation(op, "scale", a.scale, a.x, a.scale.dtype);
  if (a.weight) require_dtype(op, "weight", a.weight.dtype, a.scale.dtype);
}

}  // namespace

void modulated_rms_norm_fwd(Context& ctx, const ModulatedRmsNormFwd& a) {
  const char* op = "modulated_rms_norm";
  check(op, a);
  require_eps(op, a.eps);
  if (a.shift.data != nullptr) require_matrix(op, "shift", a.shift, a.scale.rows, a.x.cols, a.scale.dtype);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  require_statistics(op, {{"rstd", a.rstd}}, a.x.rows);
  if (a.x.rows == 0) return;
  on_device(
      op, ctx, [&] { cpu::modulated_rms_norm_fwd(ctx, a); },
      TIGON_ON_CUDA(cuda::modulated_rms_norm_fwd(ctx, a)));
}

void modulated_rms_norm_bwd(Context& ctx, const ModulatedRmsNormBwd& a) {
  const char* op = "modulated_rms_norm_bwd";
  check(op, a);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, a.x.dtype);
  require_vector(op, "rstd", a.rstd, a.x.rows, DType::f32);
  require_result(op, "dx", a.dx, a.x);
  require_dweight(op, a.dweight, a.weight, a.x.cols);
  require_result(op, "dscale", a.dscale, a.scale);
  require_result(op, "dshift", a.dshift, a.scale);
  on_device(
      op, ctx, [&] { cpu::modulated_rms_norm_bwd(ctx, a); },
      TIGON_ON_CUDA(cuda::modulated_rms_norm_bwd(ctx, a)));
}

}  // namespace tigon
