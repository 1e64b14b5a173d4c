// Computes sparsemax over the last dimension (Martins & Astudillo 2016, "From Softmax to Sparsemax", eq. 1,
// proposition 1 and eq. 14). tau is found without sorting (Michelot 1986; Newton's method on sum(max(z - tau,
// 0)) = 1): it starts from tau = -1, which is below that of the result, and computes S = {z > tau} and tau =
// (sum of z over S - 1) / |S| in turn, until S does not shrink. Steps are few: each one halves the excess of
// the sum or |S|.
// Formula     y = max(z - tau, 0),  z = x - max(x);  tau such that sum(y) = 1
// Gradients   dx = dy - mean of dy over S in S, 0 elsewhere,  S = {y > 0}
// Shapes      x, y, dy, dx [rows, cols], any row stride
// Dtypes      f32 | bf16 | f16, one for all; arithmetic f32
// Rounding    once, on store; in f16 an entry of S is 2^-24 at least, so that none becomes 0 and leaves S.
//             Entries of -inf are outside of S. A row whose largest is -inf or +inf, or that holds a NaN, is
//             NaN, and so is its gradient.
// Saved       y
// Aliasing    y may be x, dx may be y or dy (same address and stride); no other overlap
// Determinism bitwise: fixed trees inside a row
// Traffic     forward 1 read + 1 write; backward 2 reads + 1 write; rows that no cluster of blocks holds: one
//             more read per step of tau
// Refused     sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/distribution.h"

namespace tigon {

// f16 has no smaller positive number.
constexpr float kLeastF16 = 0x1p-24f;

using SparsemaxFwd = DistributionFwd;
using SparsemaxBwd = DistributionBwd;

TIGON_API_OP(sparsemax, Sparsemax)

}  // namespace tigon
