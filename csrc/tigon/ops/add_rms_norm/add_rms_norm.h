// Adds a residual and applies RMSNorm in one pass (the pre-norm block of Llama; RMSNorm: Zhang & Sennrich
// 2019, eq. 4).
// Formula     h = x + residual,  y = rms_norm(h)  (tigon/ops/rms_norm/rms_norm.h)
// Gradients   dx = dresidual = dh + gradient of rms_norm with respect to h;  dweight as in rms_norm
// Shapes      x, residual, h, y, dy, dh, dx [rows, cols], any row stride; weight, dweight [cols]; rstd [rows]
// Dtypes      x, residual, h f32 | bf16 | f16, one for all; weight of that dtype or f32; y and dy by
//             rms_norm_result; rstd f32
// Rounding    h is rounded to x's dtype and normalized as rounded (Hugging Face's eager addition); then as
//             rms_norm. dx once: the sum with dh is made in f32.
// Saved       h, weight, rstd (4 bytes a row); neither x nor residual
// Aliasing    h may be residual or x (same address and strides); y overlaps no input; dx may be dh or dy
// Determinism bitwise: fixed trees inside a row, fixed order over rows
// Traffic     forward 2 reads + 2 writes; backward 3 reads + 1 write, without dh 2 + 1
// Refused     cols < 1, eps < 0, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon {

struct AddRmsNormFwd {
  Matrix x;
  Matrix residual;
  Vector weight;  // empty if absent
  Matrix y;
  Matrix h;
  Vector rstd;  // empty if no backward follows
  float eps = 1e-6f;
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;
  RowBytes bytes;  // of y

  void fields(Fields& f) {
    f.rows("x", x);
    f.input("residual", residual, x);
    f.parameter("weight", weight, x);
    f.eps(eps);
    f.option("offset", offset);
    f.option("rounding", rounding);
    f.result("y", y, x, rms_norm_result(x, weight, rounding));
    f.result_over("h", h, "residual", residual);
    f.statistics("rstd", {{"rstd", rstd}}, x.rows);
  }
};

struct AddRmsNormBwd {
  Matrix dy;
  Matrix dh;  // empty means zero
  Matrix h;
  Vector weight;
  Vector rstd;
  Matrix dx;       // empty if not wanted
  Vector dweight;  // empty if not wanted
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;

  void fields(Fields& f) {
    f.input("dy", dy, h, rms_norm_result(h, weight, rounding));
    f.optional("dh", dh, h);
    f.rows("h", h);
    f.parameter("weight", weight, h);
    f.saved("rstd", {{"rstd", rstd}}, h.rows);
    f.option("offset", offset);
    f.option("rounding", rounding);
    f.gradient("dx", dx, h);
    f.gradient("dweight", dweight, "weight", weight);
  }
};

TIGON_API_OP(add_rms_norm, AddRmsNorm)

}  // namespace tigon
