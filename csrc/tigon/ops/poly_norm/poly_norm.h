// Computes PolyNorm over the last dimension (Zhuo et al. 2024, "Polynomial Composition Activations", eq. 4,
// order 3).
// Formula     h_k = x^k * rstd_k,  rstd_k = (mean(x^2k) + eps)^-1/2,
//             y = weight[0] * h_3 + weight[1] * h_2 + weight[2] * h_1 + bias
// Gradients   a_k = weight[3 - k] * rstd_k;  m_k = mean(dy * h_k);
//             dx = sum over k of k * x^(k - 1) * a_k * (dy - h_k * m_k);
//             dweight[3 - k] = sum of dy * h_k over everything;  dbias = sum of dy over everything
// Shapes      x, y, dy, dx [rows, cols], any row stride; weight, dweight [3]; bias, dbias [1]; rstd [rows *
//             3]: of x, x^2, x^3
// Dtypes      x, y f32 | bf16 | f16; weight and bias of one dtype, x's or f32, their gradients too; rstd f32;
//             accumulation f32: if the sum of x^6 over a row overflows (entries of 6e5 in 4096 columns) rstd
//             of x^3 is 0, and h_3 with it
// Rounding    once, on store
// Saved       x, weight, rstd (12 bytes a row)
// Aliasing    y may be x, dx may be dy or x (same address and stride); no other overlap
// Determinism bitwise: fixed trees inside a row, fixed order over rows
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write; plus 16 bytes a row of partial sums
// Refused     cols < 1, eps < 0, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

struct PolyNormFwd {
  Matrix x;
  Vector weight, bias;
  Matrix y;
  Vector rstd;  // empty if no backward follows
  float eps = 1e-6f;

  void fields(Fields& f) {
    f.rows("x", x);
    f.coefficients("weight", weight, 3, x.dtype);
    f.coefficients("bias", bias, 1, x.dtype, &weight);
    f.eps(eps);
    f.result("y", y, x);
    f.statistics("rstd", {{"rstd", rstd}}, x.rows * 3);
  }
};

struct PolyNormBwd {
  Matrix dy;
  Matrix x;
  Vector weight;
  Vector rstd;
  Matrix dx;              // empty if not wanted
  Vector dweight, dbias;  // empty if not wanted

  void fields(Fields& f) {
    f.input("dy", dy, x);
    f.rows("x", x);
    f.coefficients("weight", weight, 3, x.dtype);
    f.saved("rstd", {{"rstd", rstd}}, x.rows * 3);
    f.gradient("dx", dx, x);
    f.gradient("dweight", dweight, 3, weight.dtype);
    f.gradient("dbias", dbias, 1, weight.dtype);
  }
};

TIGON_API_OP(poly_norm, PolyNorm)

}  // namespace tigon
