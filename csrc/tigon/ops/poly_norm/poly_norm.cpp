#include "tigon/ops/poly_norm/poly_norm.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

void require_coefficients(const char* op, const char* name, const Vector& v, int64_t size, DType dtype,
                          const Matrix& x) {
  require_vector(op, name, v, size, dtype);
  TIGON_CHECK(op, v.dtype == x.dtype || v.dtype == DType::f32, name, " must be ", name_of(x.dtype),
              " or float32, got ", name_of(v.dtype));
}

}  // namespace

void poly_norm_fwd(Context& ctx, const PolyNormFwd& a) {
  const char* op = "poly_norm";
  require_rows(op, "x", a.x);
  require_eps(op, a.eps);
  require_coefficients(op, "weight", a.weight, 3, a.weight.dtype, a.x);
  require_coefficients(op, "bias", a.bias, 1, a.weight.dtype, a.x);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  require_statistics(op, {{"rstd", a.rstd}}, a.x.rows * 3);
  if (a.x.rows == 0) return;
  on_device(op, ctx, [&] { cpu::poly_norm_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::poly_norm_fwd(ctx, a)));
}

void poly_norm_bwd(Context& ctx, const PolyNormBwd& a) {
  const char* op = "poly_norm_bwd";
  require_rows(op, "x", a.x);
  require_coefficients(op, "weight", a.weight, 3, a.weight.dtype, a.x);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, a.x.dtype);
  require_vector(op, "rstd", a.rstd, a.x.rows * 3, DType::f32);
  require_result(op, "dx", a.dx, a.x);
  if (a.dweight) require_vector(op, "dweight", a.dweight, 3, a.weight.dtype);
  if (a.dbias) require_vector(op, "dbias", a.dbias, 1, a.weight.dtype);
  on_device(op, ctx, [&] { cpu::poly_norm_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::poly_norm_bwd(ctx, a)));
}

}  // namespace tigon
