#include "tigon/ops/fp8_linear/fp8_linear.h"

#include "tigon/base/matrix_gemm.h"
#include "tigon/base/op.h"

namespace tigon {

TIGON_DEFINE_ENTRY(fp8_quantize, Fp8Quantize, "fp8_quantize", "fp8_quantize", none)
TIGON_DEFINE_ENTRY(fp8_quantize_transposed, Fp8QuantizeTransposed, "fp8_quantize_transposed",
                   "fp8_quantize_transposed", none)
TIGON_DEFINE_ENTRY(fp8_transpose, Fp8Transpose, "fp8_transpose", "fp8_transpose", none)

namespace {

constexpr const char* kOp = "fp8_linear";

void fp8_gemm(Context& ctx, const Fp8Gemm& p) { TIGON_RUN(kOp, ctx, fp8_gemm, p); }

Matrix bytes(Context& ctx, int64_t rows, int64_t cols) {
  return {ctx.scratch(size_t(rows * cols) + 1), DType::e4m3, rows, cols, cols};
}
Vector floats(Context& ctx, int64_t size) { return {ctx.scratch_of<float>(size), DType::f32, size}; }

Vector ones_of(Context& ctx, int64_t size) {
  const Vector v = floats(ctx, size);
  TIGON_RUN(kOp, ctx, fp8_ones, v);
  return v;
}

}  // namespace

void fp8_linear_fwd(Context& ctx, const Fp8LinearFwd& args) {
  const Fp8LinearFwd a = checked(kOp, ctx, args);
  fp8_gemm(ctx, {.a = a.xq,
                 .a_scales = a.xs,
                 .b = a.wq,
                 .b_scales = a.ws,
                 .bias = a.bias,
                 .c = a.y,
                 .fast_sums = true,
                 .add = a.add});
}

void fp8_linear_bwd(Context& ctx, const Fp8LinearBwd& args) {
  const Fp8LinearBwd a = checked("fp8_linear_bwd", ctx, args);
  const bool quantized = a.need_dweight && !a.x.data;
  Matrix dyq = a.dyq;
  Vector dys = a.dys;
  const Vector ones = a.need_dx || quantized ? ones_of(ctx, a.need_dx ? a.wt.rows : a.xt.rows) : Vector{};
  if ((a.need_dx || quantized) && !dyq.data) {
    dyq = bytes(ctx, a.dy.rows, a.dy.cols), dys = floats(ctx, a.dy.rows);
    fp8_quantize(ctx, {.x = a.dy, .column_factors = a.ws, .q = dyq, .scales = dys});
  }
  if (a.need_dx)
    fp8_gemm(ctx, {.a = dyq, .a_scales = dys, .b = a.wt, .b_scales = ones, .c = a.dx, .add = a.add});
  if (quantized) {
    const Matrix dyt = bytes(ctx, a.dy.cols, fp8_columns(a.dy.rows));
    const Vector dyc = floats(ctx, a.dy.cols);
    fp8_transpose(ctx, {.q = dyq,
                        .row_factors = a.xs,
                        .row_scales = dys,
                        .column_divisors = a.ws,
                        .qt = dyt,
                        .column_scales = dyc});
    fp8_gemm(ctx, {.a = dyt, .a_scales = dyc, .b = a.xt, .b_scales = ones, .c = a.dweight});
  }
  if (a.need_dweight && a.x.data)
    gemm(ctx, {.a = a.dy, .b = a.x, .c = a.dweight, .trans_a = true, .unrounded = true});
}

TIGON_OPERATOR(fp8_linear_fwd, Fp8LinearFwd, "fp8_linear", forward)
TIGON_OPERATOR(fp8_linear_bwd, Fp8LinearBwd, "fp8_linear", backward)

}  // namespace tigon
