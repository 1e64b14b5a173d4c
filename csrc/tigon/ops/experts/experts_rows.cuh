// Holds what the kernels of experts know of sorted rows.
#pragma once

#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/tensor.h"

namespace tigon::cuda {

// Holds where the experts' rows begin, in `experts` + 1 numbers.
struct Offsets {
  const int32_t* first;
  int experts;
  __device__ __forceinline__ int here() const { return first[experts]; }
  __device__ __forceinline__ int expert_of(int row) const {
    return last([&](int e) { return first[e] <= row; });
  }
  // Returns whose tile of so many rows this is: expert e has those from first[e] / rows + e on, of which the
  // last one may be empty.
  __device__ __forceinline__ int expert_of_tile(int tile, int rows) const {
    return last([&](int e) { return first[e] / rows + e <= tile; });
  }

 private:
  template <class F>
  __device__ __forceinline__ int last(F holds) const {
    int low = 0, high = experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (holds(middle) ? low : high) = middle;
    }
    return low;
  }
};
inline Offsets offsets_of(const Vector& v) { return {v.as<int32_t>(), int(v.size - 1)}; }

// Describes a matrix to a kernel.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  __device__ __forceinline__ T* operator[](int64_t r) const { return data + r * stride; }
};
template <class T>
Rows<T> rows_of(const Matrix& m) {
  return {m.row<T>(0), m.stride};
}

inline bool vectorized(const Matrix& m) {
  return m.data == nullptr || is_vectorizable(m.data, m.stride, m.cols, size_of(m.dtype));
}

}  // namespace tigon::cuda
