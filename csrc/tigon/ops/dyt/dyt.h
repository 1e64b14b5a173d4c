// Computes Dynamic Tanh (Zhu et al. 2025, "Transformers without Normalization", eq. 1).
// Formula     t = tanh(alpha * x),  y = t * weight + bias  (weight or bias absent: 1 or 0)
// Gradients   e = dy * weight * (1 - t^2);  dx = alpha * e;  dalpha = sum of e * x over everything;
//             dweight = sum over rows of dy * t;  dbias = sum over rows of dy
// Shapes      x, y, dy, dx [rows, cols], any row stride; alpha, dalpha [1]; weight, bias, dweight, dbias
//             [cols]
// Dtypes      x, y f32 | bf16 | f16; alpha, weight and bias of one dtype, x's or f32, their gradients too;
//             accumulation f32
// Rounding    once, on store
// Saved       x, alpha, weight
// Aliasing    y may be x; dx may be dy or x (same address and stride)
// Determinism bitwise: fixed order over rows and columns
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write
// Refused     cols < 1, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

struct DytFwd {
  Matrix x;
  Vector alpha;
  Vector weight, bias;  // empty if absent
  Matrix y;

  void fields(Fields& f) {
    f.rows("x", x);
    f.scalar("alpha", alpha, x.dtype);
    f.parameter("weight", weight, x, &alpha);
    f.parameter("bias", bias, x, &alpha);
    f.result("y", y, x);
  }
};

struct DytBwd {
  Matrix dy;
  Matrix x;
  Vector alpha;
  Vector weight;
  Matrix dx;                      // empty if not wanted
  Vector dalpha, dweight, dbias;  // empty if not wanted

  void fields(Fields& f) {
    f.input("dy", dy, x);
    f.rows("x", x);
    f.scalar("alpha", alpha, x.dtype);
    f.parameter("weight", weight, x, &alpha);
    f.gradient("dx", dx, x);
    f.scalar_gradient("dalpha", dalpha, alpha);
    f.gradient("dweight", dweight, x.cols, alpha.dtype);
    f.gradient("dbias", dbias, x.cols, alpha.dtype);
  }
};

TIGON_API_OP(dyt, Dyt)

}  // namespace tigon
