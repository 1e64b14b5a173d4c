// Dynamic Tanh (Zhu et al. 2025, "Transformers without Normalization", eq. 1).
//
// Formula     t = tanh(alpha * x),  y = t * weight + bias                          (weight or bias absent: 1 or 0)
// Gradients   e = dy * weight * (1 - t^2);  dx = alpha * e;  dalpha = sum of e * x over everything;
//             dweight = sum over rows of dy * t;  dbias = sum over rows of dy
// Shapes      x, y, dy, dx [rows, cols], any row stride; alpha, dalpha [1]; weight, bias, dweight, dbias [cols]
// Dtypes      x, y f32 | bf16 | f16; alpha, weight and bias of one dtype, x's or f32, their gradients too; accumulation f32
// Rounding    once, on store
// Saved       x, alpha, weight
// Aliasing    y may be x; dx may be dy or x (same address and stride)
// Determinism bitwise: fixed order over rows and columns
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write
// Refused     cols < 1, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/context.h"

namespace tigon {

struct DytFwd {
  Matrix x;
  Vector alpha;
  Vector weight, bias;  // empty: none
  Matrix y;
};

struct DytBwd {
  Matrix dy;
  Matrix x;
  Vector alpha;
  Vector weight;
  Matrix dx;                      // empty: not wanted
  Vector dalpha, dweight, dbias;  // empty: not wanted
};

TIGON_API void dyt_fwd(Context& ctx, const DytFwd& a);
TIGON_API void dyt_bwd(Context& ctx, const DytBwd& a);

namespace cpu {
void dyt_fwd(Context& ctx, const DytFwd& a);
void dyt_bwd(Context& ctx, const DytBwd& a);
}  // namespace cpu
namespace cuda {
void dyt_fwd(Context& ctx, const DytFwd& a);
void dyt_bwd(Context& ctx, const DytBwd& a);
}  // namespace cuda

}  // namespace tigon
