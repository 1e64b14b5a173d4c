// Whether what rope reads and writes begins at packs of 16 bytes, row by row.
#pragma once

#include <cstdint>

#include "tigon/ops/rope/rope.h"

namespace tigon::cuda {

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
