// Pointwise CPU kernels walk rows x cols in tasks of some 16K elements, a function of the shape only. Whole
// dense tensors are treated as one long row.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <span>

#include "tigon/base/context.h"

namespace tigon::cpu {

// True if none of the matrices that are present has a gap between its rows.
inline bool all_dense(std::initializer_list<const Matrix*> matrices) {
  return std::all_of(matrices.begin(), matrices.end(), [](const Matrix* m) {
    return m->data == nullptr || m->stride == m->cols || m->rows == 1;
  });
}

// Returns the address of an element. nullptr, a result that is not wanted, stays nullptr.
inline char* element_at(const Matrix& m, int64_t row, int64_t col) {
  if (m.data == nullptr) return nullptr;
  return static_cast<char*>(m.data) + (row * m.stride + col) * int64_t(size_of(m.dtype));
}

inline char* element_at(const Vector& v, int64_t i) {
  return v ? static_cast<char*>(v.data) + i * int64_t(size_of(v.dtype)) : nullptr;
}

// Splits the vectors of a list into chunks of at most `length` elements, one task each, in the order of the
// list.
class VectorChunks {
 public:
  VectorChunks(Context& ctx, std::span<const Vector> list, int64_t length)
      : list_(list), length_(length), ends_(ctx.scratch_of<int64_t>(int64_t(list.size()))) {
    for (size_t i = 0; i < list.size(); ++i) ends_[i] = count_ += (list[i].size + length - 1) / length;
  }
  int64_t count() const { return count_; }
  Vector operator[](int64_t task) const {
    const int64_t i = std::upper_bound(ends_, ends_ + list_.size(), task) - ends_;
    const Vector& v = list_[size_t(i)];
    const int64_t begin = (task - (i > 0 ? ends_[i - 1] : 0)) * length_;
    return {.data = element_at(v, begin), .dtype = v.dtype, .size = std::min(length_, v.size - begin)};
  }

 private:
  const std::span<const Vector> list_;
  const int64_t length_;
  // ends_[v] counts the chunks of the vectors up to v.
  int64_t* const ends_;
  int64_t count_ = 0;
};

// Calls fn(row, col, n) for n adjacent elements from (row, col). With `dense` the matrix counts as one row.
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

// Calls fn(row) for every row, several rows per task.
template <class Fn>
void for_each_row(Context& ctx, int64_t rows, const Fn& fn) {
  constexpr int64_t kRowsPerTask = 16;
  parallel(ctx, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t r = task * kRowsPerTask, end = std::min(rows, r + kRowsPerTask); r < end; ++r) fn(r);
  });
}

}  // namespace tigon::cpu
