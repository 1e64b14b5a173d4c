// The CPU backends of rope and qk_norm_rope share this: the turns of a token, and rows of pairs.
#pragma once

#include "tigon/ops/rope/rope.h"

namespace tigon::cpu {

// Holds cos and sin of a run of pairs, as the rotation takes them: y1 = x1 * c1 - x2 * s1, y2 = x2 * c2 + x1
// * s2. The backward is the same rotation with s1 = -sin2, s2 = -sin1.
struct Turns {
  float *c1, *c2, *s1, *s2;
  Turns(float* buffer, int64_t pairs)
      : c1(buffer), c2(buffer + pairs), s1(buffer + 2 * pairs), s2(buffer + 3 * pairs) {}
};

struct RopeKernels {
  // Computes the turns of pairs [first, first + n). cos and sin are rows of the token in the tables of the
  // axes.
  void (*turns[3])(const void* const* cos, const void* const* sin, const RopeForm& form, int64_t col_stride,
                   int64_t half, int64_t first, int64_t n, bool backward, const Turns& out);
  // Rotates pairs [first, first + n) of the rotated columns, which begin at `start`. It is null if there is
  // no such pair of dtypes.
  void (*rotate[3][3])(const void* x, const Turns& turns, void* y, int64_t start, int64_t first, int64_t n,
                       int64_t half, RopePairs from, RopePairs to);
  // Copies columns [begin, end).
  void (*copy[3][3])(const void* x, void* y, int64_t begin, int64_t end);
};

const RopeKernels& rope_kernels();
void find_turns(const RopeKernels& kernels, const Rope& a, bool backward, int64_t b, int64_t t, int64_t first,
                int64_t n, const Turns& out);

inline char* element_of(const RopeHeads& x, int64_t b, int64_t h, int64_t t) {
  return static_cast<char*>(x.data) +
         (b * x.batch_stride + h * x.head_stride + t * x.token_stride) * int64_t(size_of(x.dtype));
}

}  // namespace tigon::cpu
