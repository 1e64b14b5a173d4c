// Computes RMSNorm over the last dimension (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization",
// eq. 4).
// Formula     h = x * rstd,  rstd = (mean(x^2) + eps)^-1/2,
//             y = h * (offset + weight)  (weight absent: y = h)
// Gradients   g = dy * (offset + weight);  dx = rstd * (g - h * mean(g * h));
//             dweight = sum over rows of dy * h
// Shapes      x, y, dy, dx [rows, cols], any row stride; weight, dweight [cols]; rstd [rows]
// Dtypes      x f32 | bf16 | f16; weight of x's dtype or f32; rstd f32; dweight of weight's dtype;
//             accumulation f32
// Rounding    llama: h is rounded to x's dtype before the weight, y in promote(x, weight)
//             (Hugging Face Llama, Qwen, ...)
//             gemma: one rounding at the end, y in x's dtype (torch.nn.functional.rms_norm, Gemma with offset
//             1, OLMo 2)
//             none:  one rounding at the end, y in promote(x, weight)  (a weight wider than x)
//             The backward uses h with the same rounding in dweight, and rounds dx once.
// Saved       x, weight, rstd (4 bytes a row)
// Aliasing    y may not overlap x; dx may be dy (same shape and strides) but no other input
// Determinism bitwise: fixed trees inside a row, fixed order over rows
// Traffic     forward 1 read + 1 write of x; backward 2 reads + 1 write, plus weights and row statistics
// Refused     cols < 1, eps < 0, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"
#include "tigon/base/row_bytes.h"

namespace tigon {

enum class Rounding : int { llama = 0, gemma = 1, none = 2 };

// Returns the dtype of y. An absent weight counts as having x's.
constexpr DType rms_norm_result(DType x, DType weight, Rounding rounding) {
  return rounding == Rounding::gemma ? x : promote(x, weight);
}
inline DType rms_norm_result(const Matrix& x, const Vector& weight, Rounding rounding) {
  return rms_norm_result(x.dtype, weight ? weight.dtype : x.dtype, rounding);
}

struct RmsNormFwd {
  Matrix x;
  Vector weight;  // empty if absent
  Matrix y;
  Vector rstd;  // empty if no backward follows
  float eps = 1e-6f;
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;
  RowBytes bytes;  // of y

  void fields(Fields& f) {
    f.rows("x", x);
    f.parameter("weight", weight, x);
    f.eps(eps);
    f.option("offset", offset);
    f.option("rounding", rounding);
    f.result("y", y, x, rms_norm_result(x, weight, rounding));
    f.statistics("rstd", {{"rstd", rstd}}, x.rows);
  }
};

struct RmsNormBwd {
  Matrix dy;
  Matrix x;
  Vector weight;
  Vector rstd;
  Matrix dx;       // empty if not wanted
  Vector dweight;  // empty if not wanted
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;

  void fields(Fields& f) {
    f.input("dy", dy, x, rms_norm_result(x, weight, rounding));
    f.rows("x", x);
    f.parameter("weight", weight, x);
    f.saved("rstd", {{"rstd", rstd}}, x.rows);
    f.option("offset", offset);
    f.option("rounding", rounding);
    f.gradient("dx", dx, x);
    f.gradient("dweight", dweight, "weight", weight);
  }
};

TIGON_API_OP(rms_norm, RmsNorm)

}  // namespace tigon
