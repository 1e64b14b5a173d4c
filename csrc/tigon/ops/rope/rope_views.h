// Strides of heads and tables as the kernels of rope and qk_norm_rope take them, and whether all of their
// rows begin at 16-byte boundaries.
#pragma once

#include <cstdint>

#include "tigon/ops/rope/rope.h"

namespace tigon::cuda {

// Strides of a table; 0 along dimensions of size 1.
struct TableStrides {
  int64_t axis, batch, token;
};
inline TableStrides strides_of(const RopeTable& x) {
  return {x.axes == 1 ? 0 : x.axis_stride, x.batch == 1 ? 0 : x.batch_stride, x.token_stride};
}

// Heads of q or of k, read from x and written to y.
struct HeadsFromTo {
  const void* x;
  void* y;
  int64_t x_batch, x_head, x_token, y_batch, y_head, y_token;
  int heads;

  HeadsFromTo(const RopeHeads& x, const RopeHeads& y)
      : x(x.data),
        y(y.data),
        x_batch(x.batch_stride),
        x_head(x.head_stride),
        x_token(x.token_stride),
        y_batch(y.batch_stride),
        y_head(y.head_stride),
        y_token(y.token_stride),
        heads(int(x.heads)) {}
};

inline bool stride_aligns(int64_t size, int64_t stride, size_t element) {
  return size <= 1 || stride * int64_t(element) % 16 == 0;
}
inline bool heads_align(const RopeHeads& x) {
  size_t e = size_of(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && stride_aligns(x.batch, x.batch_stride, e) &&
         stride_aligns(x.heads, x.head_stride, e) && stride_aligns(x.tokens, x.token_stride, e);
}
inline bool table_aligns(const RopeTable& x) {
  size_t e = size_of(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && stride_aligns(x.axes, x.axis_stride, e) &&
         stride_aligns(x.batch, x.batch_stride, e) && stride_aligns(x.tokens, x.token_stride, e);
}

}  // namespace tigon::cuda
