// The vocabulary of the shared <op>_math.inc formulas for one fp32 value per thread. Approximate instructions are chosen
// here, by name, with their error; nothing depends on a fast-math flag.
#pragma once

#include <math_constants.h>

#include <type_traits>

#define TIGON_FN __device__ __forceinline__

namespace tigon::cuda {

// log2(e), and what its rounding has left.
constexpr float kLog2e = 1.44269504f, kLog2eLow = 1.92596303e-8f;

TIGON_FN float constant(float, float c) { return c; }
TIGON_FN float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TIGON_FN float abs(float x) { return fabsf(x); }
TIGON_FN float select(bool m, float a, float b) { return m ? a : b; }
TIGON_FN bool lt(float a, float b) { return a < b; }
TIGON_FN bool gt(float a, float b) { return a > b; }
TIGON_FN bool le(float a, float b) { return a <= b; }

// 2^t, ex2.approx: 2 ulp over the full range, NaN and infinities as IEEE.
TIGON_FN float exp2_approx(float t) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(t));
  return r;
}
TIGON_FN float exp2_neg(float t) { return exp2_approx(t); }
// log2, lg2.approx: 2^-22 beside 1, 2 ulp elsewhere; exactly 0 at 1.
TIGON_FN float log2_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// 2^(x * (slope + slope_low)), < 1 ulp for products from -127 to 127; 0 below, NaN stays. Cody-Waite, a minimax polynomial on
// [-1/2, 1/2] (2e-9) and a multiplication by 2^n, all on the multiply-add units. slope > 0.
TIGON_FN float exp2_fine(float x, float slope, float slope_low) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: integers beside it are the last bits
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-127.25f / slope));
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
// e^x with the rounding error of x*log2(e) carried to the exponent: < 3 ulp for every finite x.
TIGON_FN float exp(float x) {
  float t = x * kLog2e, low = __fmaf_rn(x, kLog2e, -t) + x * kLog2eLow;
  float r = exp2_approx(t);
  if (!(r > 0.0f && r < CUDART_INF_F)) return r;  // nothing to correct, and low may be NaN
  return __fmaf_rn(r, low * 0.693147181f, r);
}
// The reciprocal rounds correctly: the error is exp's.
TIGON_FN float sigmoid(float x) { return __frcp_rn(1.0f + exp(-x)); }
TIGON_FN float log(float x) { return ::logf(x); }
TIGON_FN float tanh(float x) { return ::tanhf(x); }
TIGON_FN float reciprocal(float x) { return __fdividef(1.0f, x); }
#include "tigon/base/normal.inc"

// A value on its way to 16 bits: its functions may be off by 2^-18 of the result, in a third of the instructions. Formulas take it
// for V where rows are stored so (BriefFor<X>); arithmetic makes a plain float of it.
struct Brief {
  float v;
  TIGON_FN Brief(float x) : v(x) {}
  TIGON_FN operator float() const { return v; }
};
template <class X>
using BriefFor = std::conditional_t<sizeof(X) == 2, Brief, float>;
TIGON_FN float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
TIGON_FN Brief sigmoid(Brief x) { return reciprocal_approx(1.0f + exp2_approx(x.v * -1.44269504f)); }
TIGON_FN Brief tanh(Brief x) {
  float square = x.v * x.v, near = x.v * fma(square, fma(square, 0.133333333f, -0.333333333f), 1.0f);
  float far = fma(-2.0f, reciprocal_approx(1.0f + exp2_approx(x.v * 2.88539008f)), 1.0f);
  return fabsf(x.v) < 0.1f ? near : far;
}

}  // namespace tigon::cuda
