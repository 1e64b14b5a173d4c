// Computes SiLU, x * sigmoid(x) (Elfwing et al. 2017, "Sigmoid-Weighted Linear Units", arXiv:1702.03118,
// equation 5; Hendrycks & Gimpel 2016, arXiv:1606.08415).
// Formula     s = 1 / (1 + e^-x),  y = x * s
// Gradients   dx = dy * s * (1 + x * (1 - s))
// Shapes      all [rows, cols], any row stride
// Dtypes      f32 | bf16 | f16, one for all; arithmetic f32
// Rounding    once, on store. As in PyTorch y is NaN if x is -inf, and dx if x is infinite
// Saved       x
// Aliasing    y and dx may be any of the inputs (same address and stride) but overlap none in part
// Determinism bitwise: every element by itself
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write
// Refused     sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/activation.h"

namespace tigon {

using SiluFwd = ActivationFwd;
using SiluBwd = ActivationBwd;

TIGON_API_OP(silu, Silu)

}  // namespace tigon
