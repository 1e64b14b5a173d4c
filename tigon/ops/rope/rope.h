// Rotary position embedding of q and k together, half-split form (Su et al. 2021, "RoFormer", eq. 34; the pairing of columns
// i and i + R/2 is that of Hugging Face's apply_rotary_pos_emb).
//
// Formula     x1, x2, rest = columns [0, R/2), [R/2, R), [R, D) of a row; c1, c2 and s1, s2 the halves of cos and sin
//             y1 = x1 * c1 - x2 * s1,  y2 = x2 * c2 + x1 * s2,  rest is copied
// Gradients   dx1 = dy1 * c1 + dy2 * s2,  dx2 = dy2 * c2 - dy1 * s1,  rest is copied; none for cos and sin
// Shapes      q [B, Hq, T, D], k [B, Hk, T, D] with any strides of B, H and T; cos, sin [B or 1, T, R], any strides of B and T
// Dtypes      x f32 | bf16 | f16; cos and sin x's dtype or f32; y promote(x, cos); arithmetic f32
// Rounding    once, on store. Hugging Face rounds both products and their sum in 16 bits; this is more accurate.
// Saved       cos, sin
// Aliasing    results may not overlap inputs
// Determinism bitwise: every pair of elements by itself
// Traffic     1 read + 1 write of q and k either way; the tables stay in cache. One launch.
// Refused     odd R, R > D, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/context.h"

namespace tigon {

// [batch, heads, tokens, cols], elements of a row adjacent.
struct RopeHeads {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, heads = 0, tokens = 0, cols = 0;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  bool empty() const { return batch * heads * tokens * cols == 0; }
};

// [batch or 1, tokens, cols]
struct RopeTable {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 1, tokens = 0, cols = 0;
  int64_t batch_stride = 0, token_stride = 0;
};

// Forward: x is q and k, y their rotation. Backward: x is dy, y is dx. Empty q or k: left out.
struct Rope {
  RopeHeads q, k;
  RopeTable cos, sin;
  RopeHeads q_out, k_out;
};

TIGON_API void rope_fwd(Context& ctx, const Rope& a);
TIGON_API void rope_bwd(Context& ctx, const Rope& a);

namespace cpu {
void rope(Context& ctx, const Rope& a, bool backward);
}
namespace cuda {
void rope(Context& ctx, const Rope& a, bool backward);
}

}  // namespace tigon
