// The core sees a tensor as a plain view: it owns nothing and knows no framework.
#pragma once

#include <cstdint>

#include "tigon/base/dtype.h"

namespace tigon {

enum class Device : int8_t { cpu, cuda };
constexpr const char* name_of(Device d) { return d == Device::cpu ? "cpu" : "cuda"; }

// A matrix is rows x cols. The elements of a row are adjacent, and rows are `stride` elements apart. stride
// may exceed cols, for views of wider tensors.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  template <class T>
  constexpr T* row(int64_t r) const {
    return static_cast<T*>(data) + r * stride;
  }
  explicit operator bool() const { return data != nullptr || rows * cols == 0; }
};

// Returns `count` rows from row `first` on. An absent matrix stays absent.
inline Matrix rows_from(const Matrix& m, int64_t first, int64_t count) {
  Matrix part = m;
  part.rows = count;
  if (m.data) part.data = static_cast<char*>(m.data) + first * m.stride * int64_t(size_of(m.dtype));
  return part;
}

struct Vector {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t size = 0;

  template <class T>
  constexpr T* as() const {
    return static_cast<T*>(data);
  }
  constexpr explicit operator bool() const { return data != nullptr; }
};

// True if a row counts by its label (i64, not `ignore_index`) or by a mask (u8). Without either, all rows
// count.
constexpr bool row_counts(const Vector& target, int64_t row, int64_t ignore_index) {
  if (!target) return true;
  return (target.dtype == DType::u8 ? int64_t(target.as<uint8_t>()[row]) : target.as<int64_t>()[row]) !=
         ignore_index;
}

}  // namespace tigon
