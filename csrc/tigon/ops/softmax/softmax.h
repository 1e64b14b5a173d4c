// Computes softmax over the last dimension (Bridle 1990, "Probabilistic interpretation of feedforward
// classification network outputs").
// Formula     y = e^(x - m) / sum(e^(x - m)),  m = max(x)
// Gradients   dx = y * (dy - sum(y * dy))
// Shapes      x, y, dy, dx [rows, cols], any row stride
// Dtypes      f32 | bf16 | f16, one for all; arithmetic f32
// Rounding    once, on store (torch.softmax). A row whose largest is -inf or +inf, or that holds a NaN, is
//             NaN.
// Saved       y
// Aliasing    y may be x, dx may be y or dy (same address and stride); no other overlap
// Determinism bitwise: fixed trees inside a row
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write
// Refused     sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/distribution.h"

namespace tigon {

using SoftmaxFwd = DistributionFwd;
using SoftmaxBwd = DistributionBwd;

TIGON_API_OP(softmax, Softmax)

}  // namespace tigon
