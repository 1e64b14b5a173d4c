// The CPU backend widens the float8 operands to fp32 and multiplies those.
#include <algorithm>
#include <bit>

#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/fp8_linear/fp8_linear.h"

namespace tigon::cpu {
namespace {

#include "tigon/base/e4m3.inc"

float at(const Vector& v, int64_t i, float absent) {
  if (!v) return absent;
  float x = absent;
  dispatch_float("fp8_linear", "bias", v.dtype,
                 [&](auto type) { x = to_float(v.as<typename decltype(type)::type>()[i]); });
  return x;
}

Matrix widened(Context& ctx, const Matrix& m, const Vector& scales) {
  const Matrix wide = {ctx.scratch_of<float>(m.rows * m.cols), DType::f32, m.rows, m.cols, m.cols};
  for_each_row(ctx, m.rows, [&](int64_t r) {
    const float scale = scales.as<float>()[r];
    for (int64_t c = 0; c < m.cols; ++c)
      wide.row<float>(r)[c] = std::bit_cast<float>(e4m3_widen(m.row<uint8_t>(r)[c])) * scale;
  });
  return wide;
}

}  // namespace

void fp8_ones(Context&, const Vector& v) { std::fill_n(v.as<float>(), v.size, 1.0f); }

void fp8_gemm(Context& ctx, const Fp8Gemm& p) {
  if (p.c.rows == 0) return;
  const Matrix a = widened(ctx, p.a, p.a_scales), b = widened(ctx, p.b, p.b_scales);
  float* sums = ctx.scratch_of<float>(p.c.rows * p.c.cols);
  ctx.gemm({.m = p.c.rows,
            .n = p.c.cols,
            .k = a.cols,
            .a = a.data,
            .lda = a.stride,
            .b = b.data,
            .ldb = b.stride,
            .trans_b = true,
            .c = sums,
            .ldc = p.c.cols});
  dispatch_float("fp8_linear", "y", p.c.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_row(ctx, p.c.rows, [&](int64_t r) {
      for (int64_t c = 0; c < p.c.cols; ++c) {
        T& y = p.c.row<T>(r)[c];
        y = from_float<T>(sums[r * p.c.cols + c] + (p.add ? to_float(y) : 0.0f));
        if (p.bias) y = from_float<T>(to_float(y) + at(p.bias, c, 0.0f));
      }
    });
  });
}

}  // namespace tigon::cpu
