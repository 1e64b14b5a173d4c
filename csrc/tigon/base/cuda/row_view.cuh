// Rows of any alignment, accessed in 16-byte vectors.
#pragma once

#include "tigon/base/cuda/row_config.h"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// Stores one element under a predicate, without a branch.
template <class T>
__device__ __forceinline__ void store_predicated(bool pred, T* p, const T& x) {
  if constexpr (sizeof(T) == 2)
    st_global_predicated(pred, p, reinterpret_cast<const unsigned short&>(x));
  else
    st_global_predicated(pred, p, x);
}

// Drops the first `off` elements (less than 16 bytes) of K words.
template <class T, int K>
__device__ __forceinline__ void shift_words(uint32_t (&w)[K], int off) {
  if (const int bytes = off * int(sizeof(T)); bytes != 0) drop_bytes<T>(w, bytes);
}

// Loads N elements from the aligned words that hold them, with all loads in flight at once and no branch. Zeros where `pred` is
// false.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_unaligned(bool pred, const T* p) {
  constexpr int M = 16 / int(sizeof(T)), kWords = N / M;
  static_assert(N % M == 0);
  const int off = int(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T));
  uint32_t w[4 * (kWords + 1)];
#pragma unroll
  for (int i = 0; i < kWords + 1; ++i) {
    uint4 word = ld_global_predicated(pred && (i < kWords || off != 0), p - off + i * M);
    w[4 * i] = word.x, w[4 * i + 1] = word.y, w[4 * i + 2] = word.z, w[4 * i + 3] = word.w;
  }
  shift_words<T>(w, off);
  Vec<T, N> r;
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) reinterpret_cast<uint32_t*>(&r)[i] = w[i];
  return r;
}

// The vectors of one row, and of all rows with the same offset. A load has two steps, so that all
// loads of a row are in flight before the first result is used: load(), then finish(), which loads the
// vectors at the row's ends by elements, with zeros for those that are not the row's.
template <RowAlignment kAlignment, int N, class Column>
struct RowView {
  static constexpr bool kVectorized = kAlignment == RowAlignment::vectorized;
  Column cols;
  // Column of the first vector: 0, or negative where the row begins inside it.
  int head = 0;

  template <class T>
  __device__ __forceinline__ RowView(const T* row, Column cols) : cols(cols) {
    if constexpr (!kVectorized) head = -int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
  }
  __device__ __forceinline__ bool has(Column c) const { return c < cols; }
  __device__ __forceinline__ bool is_full(Column c) const { return kVectorized || (c >= 0 && c + N <= cols); }
  // The words that hold the vector, at any shift, are in the row.
  __device__ __forceinline__ bool is_interior(Column c) const { return c >= N && c + 2 * N <= cols; }
  __device__ __forceinline__ bool in_row(Column c) const { return kVectorized || (c >= 0 && c < cols); }

  template <class T>
  __device__ __forceinline__ Vec<T, N> load(bool pred, const T* row, Column c) const {
    if constexpr (kVectorized)
      return load_predicated<T, N>(pred && has(c), row + c);
    else
      return load_unaligned<N>(pred && is_interior(c), row + c);
  }
  template <class T>
  __device__ __forceinline__ void finish(bool pred, const T* row, Column c, Vec<T, N>& vec) const {
    if constexpr (!kVectorized)
      if (!is_interior(c)) vec = load_elements<T, N>(row + c, [&](int j) { return pred && in_row(c + j); });
  }
  // load() of a parameter by column. The result is undefined past a vectorized row.
  template <class T>
  __device__ __forceinline__ Vec<T, N> load_vector(const T* vector, Column c) const {
    if constexpr (kVectorized && sizeof(T) * N % 16 == 0)
      return load_predicated_uninit<T, N>(vector != nullptr && has(c), vector + c);
    return load(vector != nullptr, vector, c);
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, Column c, const Vec<T, N>& vec) const {
    if constexpr (kVectorized && sizeof(T) * N % 16 != 0) {
      cuda::store(row + c, vec);
    } else if (is_full(c) && (kVectorized || reinterpret_cast<uintptr_t>(row + c) % 16 == 0)) {
      store_v4(row + c, vec);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) store_predicated(in_row(c + j), row + c + j, vec.v[j]);
    }
  }
  template <class T>
  __device__ __forceinline__ void store_if_valid(T* row, Column c, const Vec<T, N>& vec) const {
    if constexpr (kVectorized && sizeof(T) * N % 16 == 0) {
      store_predicated(has(c), row + c, vec);
    } else if (has(c)) {
      store(row, c, vec);
    }
  }
};

}  // namespace tigon::cuda
