// Applies rotary position embedding to q and k together (Su et al. 2021, "RoFormer", eq. 34; M-RoPE: Wang et
// al. 2024, "Qwen2-VL", section 2.1).
// Formula     pair i < R/2 of a row's R rotated columns is (x1, x2) = columns (i, i + R/2) of halves,
//             (2i, 2i + 1) of neighbours:  y1 = x1 * c1 - x2 * s1,  y2 = x2 * c2 + x1 * s2;
//             the other D - R columns are copied. The results may be halves while the pairs are neighbours
//             (DeepSeek). (c1, c2) are the columns of cos at the places of y1 and y2; of tables with R/2
//             columns, both are column i.
//             M-RoPE: pair i takes the table of its section (axis 0, 1 or 2); positions: token t takes row
//             positions[t].
// Gradients   dx1 = dy1 * c1 + dy2 * s2,  dx2 = dy2 * c2 - dy1 * s1,  the rest is copied;
//             none for cos and sin
// Shapes      q [B, Hq, T, D], k [B, Hk, T, D] with any strides of B, H and T; cos, sin
//             [A, B or 1, T, R or R/2], A = 3 with sections, else 1; with positions [A, B or 1, T] they are
//             [1, 1, P, R or R/2]; any strides except those of columns
// Dtypes      x f32 | bf16 | f16; cos and sin x's dtype or f32; y promote(x, cos) or x's; positions i64 |
//             i32; arithmetic f32
// Rounding    once, on store. Hugging Face rounds both products and their sum in 16 bits; this is more
//             accurate.
// Saved       cos, sin, positions
// Aliasing    a result may be its input (same strides, dtype and pairs), and may not overlap it otherwise
// Determinism bitwise: every pair of elements by itself
// Traffic     1 read + 1 write of q and k either way; the tables stay in cache. One launch.
// Refused     odd R, R > D, sizes or dtypes that do not fit: tigon::Error before anything is written. A
//             position outside the table is refused on the CPU; on CUDA it makes the token's rotated columns
//             NaN, and nothing is read outside.
#pragma once

#include "tigon/base/context.h"

namespace tigon {

// The sizes are [batch, heads, tokens, cols]. The elements of a row are adjacent.
struct RopeHeads {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch = 0, heads = 0, tokens = 0, cols = 0;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  bool empty() const { return batch * heads * tokens * cols == 0; }
};

// The sizes are [axes, batch or 1, tokens, cols]. A dimension of axes or batches that is 1 serves all.
struct RopeTable {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t axes = 1, batch = 1, tokens = 0, cols = 0;
  int64_t axis_stride = 0, batch_stride = 0, token_stride = 0;
  // The stride is 2 for the real or imaginary parts of complex numbers (f32, with sin right after cos).
  int64_t col_stride = 1;

  // Returns the offset in elements. Axes and batches that serve all do not count.
  int64_t offset(int64_t axis, int64_t b, int64_t t) const {
    return (axes == 1 ? 0 : axis * axis_stride) + (batch == 1 ? 0 : b * batch_stride) + t * token_stride;
  }
  // Reads a position on the CPU.
  int64_t position(int64_t axis, int64_t b, int64_t t) const {
    const int64_t i = offset(axis, b, t);
    return dtype == DType::i64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

enum class RopePairs : int { halves = 0, neighbours = 1 };

// M-RoPE says how many of a row's pairs belong to time, height and width. They are in order, or mixed
// (Qwen3-VL): pair 3j + 1 is height's for j < height, 3j + 2 is width's for j < width, and all others are
// time's.
struct RopeSections {
  int64_t time = 0, height = 0, width = 0;
  bool mixed = false;

  constexpr bool given() const { return time + height + width > 0; }
  constexpr int axis_of(int64_t pair) const {
    if (!given()) return 0;
    if (!mixed) return pair < time ? 0 : pair < time + height ? 1 : 2;
    return pair % 3 == 1 && pair < 3 * height ? 1 : pair % 3 == 2 && pair < 3 * width ? 2 : 0;
  }
};

// Says how a row is rotated.
struct RopeForm {
  RopePairs in = RopePairs::halves;   // of x, and of dx
  RopePairs out = RopePairs::halves;  // of y, dy and of tables with R columns
  // Tables have R/2 columns: one cos and one sin per pair.
  bool shared = false;
  // The last R columns are rotated instead of the first.
  bool tail = false;
  RopeSections sections;
};

// In the forward x is q and k, and y their rotation. In the backward x is dy, and y is dx. An empty q or k is
// left out.
struct Rope {
  RopeHeads q, k;
  RopeTable cos, sin;
  RopeHeads q_out, k_out;
  // The sizes are [axes, batch or 1, tokens, 1]. Without data, token t takes row t.
  RopeTable positions;
  RopeForm form;

  int64_t rotated() const { return form.shared ? 2 * cos.cols : cos.cols; }
  int64_t start(const RopeHeads& x) const {
    return form.tail ? x.cols - rotated() : 0;
    // Returns the first rotated column.
  }
};

TIGON_API void rope_fwd(Context& ctx, const Rope& a);
TIGON_API void rope_bwd(Context& ctx, const Rope& a);

// Makes the checks that every op with tables shares: the sizes of x, or all but the number of heads and the
// dtype; tables and form against a tensor of heads; positions (their values on the CPU only).
void check_rope_sizes(const char* op, const char* of, const char* name, const RopeHeads& y,
                      const RopeHeads& x);
void check_rope_heads(const char* op, const char* name, const RopeHeads& k, const RopeHeads& x);
void check_rope_tables(const char* op, const Rope& a, const RopeHeads& x);
void check_rope_positions(const char* op, const Context& ctx, const Rope& a, const RopeHeads& x);

namespace cpu {
void rope(Context& ctx, const Rope& a, bool backward);
}
namespace cuda {
void rope(Context& ctx, const Rope& a, bool backward);
}

}  // namespace tigon
