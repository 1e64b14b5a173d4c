// Computes squared ReLU, relu(x)^2 (So et al. 2021, "Primer", arXiv:2109.08668, its feed-forward activation).
// Formula     r = max(x, 0),  y = r^2
// Gradients   dx = 2 * r * dy
// Shapes      all [rows, cols], any row stride
// Dtypes      f32 | bf16 | f16, one for all; arithmetic f32
// Rounding    once, on store. As in PyTorch y is inf in f16 from x = 256 on. A NaN in x stays NaN. A NaN or
//             inf in dy makes dx NaN even if r is 0, as the formula says; the autograd of relu has 0 there.
// Saved       x
// Aliasing    y and dx may be any of the inputs (same address and stride) but overlap none in part
// Determinism bitwise: every element by itself
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write
// Refused     sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/activation.h"

namespace tigon {

using ReluSquaredFwd = ActivationFwd;
using ReluSquaredBwd = ActivationBwd;

TIGON_API_OP(relu_squared, ReluSquared)

}  // namespace tigon
