// Computes Mish (Misra 2019, "Mish: A Self Regularized Non-Monotonic Activation Function", arXiv:1908.08681,
// equation 1).
// Formula     t = tanh(log(1 + e^x)),  y = x * t
// Gradients   dx = dy * (t + x * s * (1 - t^2)),  s = 1 / (1 + e^-x)
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
TIGON_API_OP(mish, Activation)
}  // namespace tigon
