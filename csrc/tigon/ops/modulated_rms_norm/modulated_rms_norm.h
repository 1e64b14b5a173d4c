// Computes RMSNorm with modulation: adaptive layer norm (Peebles & Xie 2023, "Scalable Diffusion Models with
// Transformers", section 3.2) over RMSNorm (Zhang & Sennrich 2019, eq. 4).
// Formula     h = x * rstd,  rstd = (mean(x^2) + eps)^-1/2,  y = h * (offset + weight) * (1 + scale) + shift
//             (weight absent: y = h * (1 + scale) + shift)
// Gradients   dx as rms_norm, with (offset + weight) * (1 + scale) for its weight; over the rows that share a
//             row of scale:
//             u = sum of dy * h,  dscale = (offset + weight) * u,  dshift = sum of dy;
//             dweight = sum over rows of scale of (1 + scale) * u
// Shapes      x, y, dy, dx [rows, cols]; scale, shift, dscale, dshift [groups, cols], groups a divisor of
//             rows: rows / groups adjacent rows share a row of scale and shift; any row strides; weight,
//             dweight [cols]; rstd [rows]
// Dtypes      x f32 | bf16 | f16, y in x's dtype; weight, scale and shift all of x's dtype or all f32; rstd
//             f32; gradients of the dtype of what they belong to; accumulation f32
// Rounding    llama: h is rounded to x's dtype before the weight, y once at the end. gemma, none: y once at
//             the end. The backward uses h with the same rounding in u. Every gradient is rounded once.
// Saved       x, weight, scale, rstd (4 bytes a row)
// Aliasing    y may not overlap x, scale or shift; dx may be dy (same shape and strides) but no other input
// Determinism bitwise: fixed trees inside a row, fixed order over rows
// Traffic     forward 1 read + 1 write of x, 1 read of scale and shift; backward 2 reads + 1 write of x. On
//             CUDA an element of scale also costs the backward 16 bytes for each block of its rows (sums in
//             f32), which counts if few rows share it. If each row has a row of scale of x's dtype, that
//             costs 1 read and 2 writes
// Refused     cols < 1, eps < 0, groups that do not divide rows, sizes or dtypes that do not fit:
//             tigon::Error before anything is written
#pragma once

#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon {

inline void require_modulation(const Fields& f, const Matrix& x, const Vector& weight, const Matrix& scale) {
  f.require(scale.rows > 0 ? x.rows % scale.rows == 0 : x.rows == 0,
            "scale must have a number of rows that divides ", x.rows, ", got ", scale.rows);
  f.require(!weight || weight.dtype == scale.dtype, "weight must be ", name_of(scale.dtype), ", got ",
            name_of(weight.dtype));
}

struct ModulatedRmsNormFwd {
  Matrix x;
  Vector weight;  // empty if absent
  Matrix scale;
  Matrix shift;  // empty if absent
  Matrix y;
  Vector rstd;  // empty if no backward follows
  float eps = 1e-6f;
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;

  void fields(Fields& f) {
    f.rows("x", x);
    f.parameter("weight", weight, x);
    f.input_rows("scale", scale, scale.rows, x);
    require_modulation(f, x, weight, scale);
    f.optional("shift", shift, scale);
    f.eps(eps);
    f.option("offset", offset);
    f.option("rounding", rounding);
    f.result("y", y, x);
    f.statistics("rstd", {{"rstd", rstd}}, x.rows);
  }
};

struct ModulatedRmsNormBwd {
  Matrix dy;
  Matrix x;
  Vector weight;
  Matrix scale;
  Vector rstd;
  Matrix dx;       // empty if not wanted
  Vector dweight;  // empty if not wanted
  Matrix dscale;   // empty if not wanted
  Matrix dshift;   // empty if not wanted
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;

  void fields(Fields& f) {
    f.input("dy", dy, x);
    f.rows("x", x);
    f.parameter("weight", weight, x);
    f.input_rows("scale", scale, scale.rows, x);
    require_modulation(f, x, weight, scale);
    f.saved("rstd", {{"rstd", rstd}}, x.rows);
    f.option("offset", offset);
    f.option("rounding", rounding);
    f.gradient("dx", dx, x);
    f.gradient("dweight", dweight, "weight", weight);
    f.gradient("dscale", dscale, scale);
    f.gradient("dshift", dshift, scale);
  }
};

TIGON_API_OP(modulated_rms_norm, ModulatedRmsNorm)

}  // namespace tigon
