#include "tigon/ops/dyt/dyt.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

void check_parameter(const char* op, const char* name, const Vector& v, const Matrix& x, int64_t size,
                     DType dtype) {
  if (!v) return;
  TIGON_CHECK(op, v.dtype == x.dtype || v.dtype == DType::f32, name, " must be ", name_of(x.dtype),
              " or float32, got ", name_of(v.dtype));
  require_vector(op, name, v, size, dtype);
}

}  // namespace

void dyt_fwd(Context& ctx, const DytFwd& a) {
  const char* op = "dyt";
  require_rows(op, "x", a.x);
  TIGON_CHECK(op, bool(a.alpha), "alpha must be a tensor of one element, got none");
  check_parameter(op, "alpha", a.alpha, a.x, 1, a.alpha.dtype);
  check_parameter(op, "weight", a.weight, a.x, a.x.cols, a.alpha.dtype);
  check_parameter(op, "bias", a.bias, a.x, a.x.cols, a.alpha.dtype);
  require_matrix(op, "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  if (a.x.rows == 0) return;
  on_device(op, ctx, [&] { cpu::dyt_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::dyt_fwd(ctx, a)));
}

void dyt_bwd(Context& ctx, const DytBwd& a) {
  const char* op = "dyt_bwd";
  require_rows(op, "x", a.x);
  TIGON_CHECK(op, bool(a.alpha), "alpha must be a tensor of one element, got none");
  check_parameter(op, "alpha", a.alpha, a.x, 1, a.alpha.dtype);
  check_parameter(op, "weight", a.weight, a.x, a.x.cols, a.alpha.dtype);
  require_matrix(op, "dy", a.dy, a.x.rows, a.x.cols, a.x.dtype);
  require_result(op, "dx", a.dx, a.x);
  check_parameter(op, "dalpha", a.dalpha, a.x, 1, a.alpha.dtype);
  check_parameter(op, "dweight", a.dweight, a.x, a.x.cols, a.alpha.dtype);
  check_parameter(op, "dbias", a.dbias, a.x, a.x.cols, a.alpha.dtype);
  on_device(op, ctx, [&] { cpu::dyt_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::dyt_bwd(ctx, a)));
}

}  // namespace tigon
