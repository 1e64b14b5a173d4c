// How pointwise CPU kernels walk rows x cols: some 16K elements a task, a function of shape only. Whole dense
// tensors are one long row.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tigon/base/context.h"

namespace tigon::cpu {

// True when every matrix that is there has no gap between rows.
inline bool all_dense(std::initializer_list<const Matrix*> matrices) {
  return std::all_of(matrices.begin(), matrices.end(), [](const Matrix* m) {
    return m->data == nullptr || m->stride == m->cols || m->rows == 1;
  });
}

// Address of an element; nullptr stays nullptr (a result that is not wanted).
inline char* element_at(const Matrix& m, int64_t row, int64_t col) {
  if (m.data == nullptr) return nullptr;
  return static_cast<char*>(m.data) + (row * m.stride + col) * int64_t(size_of(m.dtype));
}

inline char* element_at(const Vector& v, int64_t i) {
  return v ? static_cast<char*>(v.data) + i * int64_t(size_of(v.dtype)) : nullptr;
}

// fn(row, col, n): n adjacent elements from (row, col). With `dense` the matrix counts as one row.
template <class Fn>
void for_each_block(Context& ctx, int64_t rows, int64_t cols, bool dense, const Fn& fn) {
  constexpr int64_t kElements = 16384;
  if (rows == 0 || cols == 0) return;
  if (dense) cols *= rows, rows = 1;
  int64_t width = std::min(cols, kElements), blocks = (cols + width - 1) / width;
  int64_t group = std::max<int64_t>(1, kElements / cols);
  parallel(ctx, (rows + group - 1) / group * blocks, [&](int64_t task) {
    int64_t first = task / blocks * group, col = task % blocks * width, n = std::min(width, cols - col);
    for (int64_t r = first, end = std::min(rows, first + group); r < end; ++r) fn(r, col, n);
  });
}

// fn(row) for every row, some to a task.
template <class Fn>
void for_each_row(Context& ctx, int64_t rows, const Fn& fn) {
  constexpr int64_t kRowsPerTask = 16;
  parallel(ctx, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t r = task * kRowsPerTask, end = std::min(rows, r + kRowsPerTask); r < end; ++r) fn(r);
  });
}

}  // namespace tigon::cpu
