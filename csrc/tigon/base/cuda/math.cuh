// These functions serve the shared <op>_math.inc formulas, for one fp32 value per thread. Approximate
// instructions are named here with their error; nothing depends on a fast-math flag.
#pragma once

#include <math_constants.h>

#include <type_traits>

#include "tigon/base/cuda/ptx.cuh"

#define TIGON_FN __device__ __forceinline__

namespace tigon::cuda {

// Holds log2(e) and its rounding error.
constexpr float kLog2e = 1.44269504f, kLog2eLow = 1.92596303e-8f;

TIGON_FN float constant(float, float c) { return c; }
TIGON_FN float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TIGON_FN float mul(float a, float b) { return __fmul_rn(a, b); }
TIGON_FN float sqrt(float x) { return __fsqrt_rn(x); }
TIGON_FN float abs(float x) { return fabsf(x); }
TIGON_FN float select(bool m, float a, float b) { return m ? a : b; }
TIGON_FN bool lt(float a, float b) { return a < b; }
TIGON_FN bool gt(float a, float b) { return a > b; }
TIGON_FN bool le(float a, float b) { return a <= b; }

// Computes 2^t by ex2.approx: 2 ulp over the full range; NaN and infinities as in IEEE 754.
TIGON_FN float exp2_approx(float t) { return ex2_approx_ftz(t); }
TIGON_FN float exp2_neg(float t) { return exp2_approx(t); }
// Computes log2(x) by lg2.approx: absolute error 2^-22 near 1, 2 ulp elsewhere; exactly 0 at 1.
TIGON_FN float log2_approx(float x) { return lg2_approx_ftz(x); }
// Computes 2^(x * (slope + slope_low)) for slope > 0, with an error below 1 ulp for exponents from -127 to
// 127, and 0 below; NaN propagates. It takes a Cody-Waite reduction, a minimax polynomial on [-1/2, 1/2]
// (error 2e-9) and a scaling by 2^n, all on the FMA units.
TIGON_FN float exp2_precise(float x, float slope, float slope_low) {
  // Adding kShift, 1.5 * 2^23, rounds to an integer, which is then in the low bits.
  constexpr float kShift = 12582912.0f;
  x = max_NaN(x, -127.25f / slope);
  const float shifted = __fmaf_rn(x, slope, kShift), n = shifted - kShift;
  const float f = __fmaf_rn(x, slope_low, __fmaf_rn(x, slope, -n));
  float y = 1.53533547e-4f;
  y = __fmaf_rn(y, f, 1.33988750e-3f);
  y = __fmaf_rn(y, f, 9.61843785e-3f);
  y = __fmaf_rn(y, f, 5.55033237e-2f);
  y = __fmaf_rn(y, f, 2.40226477e-1f);
  y = __fmaf_rn(y, f, 6.93147182e-1f);
  y = __fmaf_rn(y, f, 1.0f);
  return y * __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
}
// Computes e^x with the rounding error of x * log2(e) compensated: below 3 ulp for every finite x.
TIGON_FN float exp(float x) {
  float t = x * kLog2e, low = __fmaf_rn(x, kLog2e, -t) + x * kLog2eLow;
  float r = exp2_approx(t);
  // There is nothing to correct, and `low` may be NaN.
  if (!(r > 0.0f && r < CUDART_INF_F)) return r;
  return __fmaf_rn(r, low * 0.693147181f, r);
}
// The reciprocal is correctly rounded, so the error is that of exp.
TIGON_FN float sigmoid(float x) { return __frcp_rn(1.0f + exp(-x)); }
TIGON_FN float log(float x) { return ::logf(x); }
TIGON_FN float tanh(float x) { return ::tanhf(x); }
TIGON_FN float reciprocal(float x) { return __fdividef(1.0f, x); }
#include "tigon/base/normal.inc"
#include "tigon/base/silu.inc"

// Approx is an fp32 value whose functions may have a relative error of 2^-18, in a third of the instructions.
// Formulas take it as V if results are stored in 16 bits (ApproxFor<X>). Arithmetic converts it to float.
struct Approx {
  float v;
  TIGON_FN Approx(float x) : v(x) {}
  TIGON_FN operator float() const { return v; }
};
template <class X>
using ApproxFor = std::conditional_t<sizeof(X) == 2, Approx, float>;
TIGON_FN float reciprocal_approx(float x) { return rcp_approx_ftz(x); }
TIGON_FN Approx sigmoid(Approx x) { return reciprocal_approx(1.0f + exp2_approx(x.v * -1.44269504f)); }
TIGON_FN Approx tanh(Approx x) {
  float square = x.v * x.v, near = x.v * fma(square, fma(square, 0.133333333f, -0.333333333f), 1.0f);
  float far = fma(-2.0f, reciprocal_approx(1.0f + exp2_approx(x.v * 2.88539008f)), 1.0f);
  return fabsf(x.v) < 0.1f ? near : far;
}

}  // namespace tigon::cuda
