// Applies RMSNorm to every head of q and k, then rotary embedding, in one pass (Dehghani et al. 2023,
// "Scaling Vision Transformers to 22 Billion Parameters", section 2, normalizes q and k; Qwen3 and Gemma 3 do
// so by RMSNorm, and then apply RoPE).
// Formula     rope(n, cos, sin) with n = rms_norm(x, weight) of each row of D columns:
//             tigon/ops/rms_norm/rms_norm.h and tigon/ops/rope/rope.h have them in full
// Gradients   g = rope's gradient of dy, kept in f32; dx and dweight as rms_norm's, with g for dy
// Shapes      q [B, Hq, T, D], k [B, Hk, T, D], tables, positions and sections as rope; weights [D], dweight
//             [2, D]: q, then k
// Dtypes      x f32 | bf16 | f16; weights of x's dtype or f32, both the same; cos and sin x's dtype or f32; y
//             promote(n, cos) or x's; dweight of the weights' dtype; arithmetic and sums f32
// Rounding    n as rms_norm rounds it (llama: h, then n; gemma: n to x's dtype; none: n), then once more on
//             store
// Saved       q, k, weights, cos, sin, positions; the statistics are computed again
// Aliasing    results may not overlap inputs
// Determinism bitwise: fixed trees inside a row, fixed order over rows
// Traffic     forward 1 read + 1 write of q and k, backward 2 reads + 1 write; weights and tables stay in
//             cache
// Refused     D > 1024, halves out of neighbours, eps < 0, sizes or dtypes that do not fit: tigon::Error
//             before anything is written; positions as in rope
#pragma once

#include "tigon/ops/rms_norm/rms_norm.h"
#include "tigon/ops/rope/rope.h"

namespace tigon {

struct QkNorm {
  Vector q_weight, k_weight;  // empty if absent
  float eps = 1e-6f;
  float offset = 0.0f;
  Rounding rounding = Rounding::llama;

  const Vector& any_weight() const { return q_weight ? q_weight : k_weight; }
  // Returns the dtype of n.
  DType result(DType x) const { return rms_norm_result(x, any_weight() ? any_weight().dtype : x, rounding); }
};

struct QkNormRopeFwd {
  // Holds q and k, their results, the tables and the form.
  Rope rope;
  QkNorm norm;
};

struct QkNormRopeBwd {
  // Here q and k are dy, and q_out and k_out are dx.
  Rope rope;
  RopeHeads q, k;
  QkNorm norm;
  Matrix dweight;  // [2, D]; empty if not wanted
};

TIGON_API_OP(qk_norm_rope, QkNormRope)

}  // namespace tigon
