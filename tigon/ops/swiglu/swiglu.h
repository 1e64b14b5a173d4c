// SwiGLU: silu(gate) * up (Shazeer 2020, "GLU Variants Improve Transformer", section 2, without the projections).
//
// Formula     s = 1 / (1 + e^-gate),  y = gate * s * up
// Gradients   dup = dy * gate * s;  dgate = dy * up * s * (1 + gate * (1 - s))
// Shapes      all [rows, cols], any row stride (gate and up may be the halves of one [rows, 2 * cols] tensor)
// Dtypes      f32 | bf16 | f16, one for all; arithmetic f32
// Rounding    once, on store. Hugging Face rounds silu(gate) to 16 bits before the product; this is more accurate.
// Saved       gate, up
// Aliasing    y, dgate and dup may be any of the inputs (same address and stride) but overlap none in part
// Determinism bitwise: every element by itself
// Traffic     forward 2 reads + 1 write; backward 3 reads + 2 writes (dgate alone: 3 + 1; dup alone: 2 + 1)
// Refused     sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/context.h"

namespace tigon {

struct SwigluFwd {
  Matrix gate;
  Matrix up;
  Matrix y;
};

struct SwigluBwd {
  Matrix dy;
  Matrix gate;
  Matrix up;
  Matrix dgate;  // empty: not wanted
  Matrix dup;    // empty: not wanted
};

TIGON_API void swiglu_fwd(Context& ctx, const SwigluFwd& a);
TIGON_API void swiglu_bwd(Context& ctx, const SwigluBwd& a);

namespace cpu {
void swiglu_fwd(Context& ctx, const SwigluFwd& a);
void swiglu_bwd(Context& ctx, const SwigluBwd& a);
}  // namespace cpu
namespace cuda {
void swiglu_fwd(Context& ctx, const SwigluFwd& a);
void swiglu_bwd(Context& ctx, const SwigluBwd& a);
}  // namespace cuda

}  // namespace tigon
