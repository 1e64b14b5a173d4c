// Computes LayerNorm over the last dimension (Ba, Kiros & Hinton 2016, "Layer Normalization", eq. 4).
// Formula     h = (x - mean(x)) * rstd,  rstd = (mean((x - mean(x))^2) + eps)^-1/2,  y = h * weight + bias
//             (weight or bias absent: 1 or 0)
// Gradients   g = dy * weight;  dx = rstd * (g - mean(g) - h * mean(g * h));
//             dweight = sum over rows of dy * h;
//             dbias = sum over rows of dy
// Shapes      x, y, dy, dx [rows, cols], any row stride; weight, bias, dweight, dbias [cols]; mean, rstd
//             [rows]
// Dtypes      x, y f32 | bf16 | f16; weight and bias of one dtype, x's or f32; mean, rstd f32; dweight and
//             dbias of weight's or bias's dtype; accumulation f32
// Rounding    once, on store (torch.nn.functional.layer_norm). The variance is summed about the mean, in a
//             second pass over the row on chip.
// Saved       x, weight, mean, rstd (8 bytes a row)
// Aliasing    y may not overlap x; dx may be dy (same shape and strides) but no other input
// Determinism bitwise: fixed trees inside a row, fixed order over rows
// Traffic     forward 1 read + 1 write of x; backward 2 reads + 1 write, plus weights and row statistics
// Refused     cols < 1, eps < 0, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

struct LayerNormFwd {
  Matrix x;
  Vector weight, bias;  // empty if absent
  Matrix y;
  Vector mean, rstd;  // empty if no backward follows
  float eps = 1e-5f;

  void fields(Fields& f) {
    f.rows("x", x);
    f.parameter("weight", weight, x);
    f.parameter("bias", bias, x, &weight);
    f.eps(eps);
    f.result("y", y, x);
    f.statistics("statistics", {{"mean", mean}, {"rstd", rstd}}, x.rows);
  }
};

struct LayerNormBwd {
  Matrix dy;
  Matrix x;
  Vector weight;
  // Gives dbias its dtype. If empty, dbias has weight's dtype, and without a weight x's or f32.
  Vector bias;
  Vector mean, rstd;
  Matrix dx;              // empty if not wanted
  Vector dweight, dbias;  // empty if not wanted

  DType bias_dtype() const {
    return bias ? bias.dtype : weight ? weight.dtype : dbias.dtype == x.dtype ? x.dtype : DType::f32;
  }
  void fields(Fields& f) {
    f.input("dy", dy, x);
    f.rows("x", x);
    f.parameter("weight", weight, x);
    f.parameter("bias", bias, x, &weight);
    f.saved("statistics", {{"mean", mean}, {"rstd", rstd}}, x.rows);
    f.gradient("dx", dx, x);
    f.gradient("dweight", dweight, "weight", weight);
    f.gradient("dbias", dbias, x.cols, bias_dtype(), &bias);
  }
};

TIGON_API_OP(layer_norm, LayerNorm)

}  // namespace tigon
