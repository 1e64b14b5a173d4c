// How rows lie in the 16-byte words of memory, and their packs of N elements.
#pragma once

#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

enum class Lying {
  packs,  // every row and every vector by column begins at a word and ends with one
  alike,  // what is read begins at the same place of its words as what is written
  apart,  // or not: packs are the words of the row that is written, and all others are shifted on their way
};

// One element, without a branch.
template <class T>
__device__ __forceinline__ void store_where(bool wanted, T* p, const T& x) {
  if constexpr (sizeof(T) == 2)
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.b16 [%0], %1;\n}" ::"l"(p),
                 "h"(reinterpret_cast<const unsigned short&>(x)), "r"(unsigned(wanted))
                 : "memory");
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(p), "f"(x),
                 "r"(unsigned(wanted))
                 : "memory");
}

// Whether a word that holds the end of row `row` may be read whole: rows of the same tensor cover the rest of it.
__device__ __forceinline__ bool reads_on(int64_t row, int64_t rows, int64_t stride) {
  return (rows - 1 - row) * stride >= 16;
}

// Takes the first `off` elements, less than 16 bytes, from the front of several words; the last word is the filling.
template <class T, int K>
__device__ __forceinline__ void shift_words(uint32_t (&w)[K], int off) {
  const int bytes = off * int(sizeof(T));
  if (bytes == 0) return;
#pragma unroll
  for (int i = 0; i < K - 2; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < K - 3; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
  if constexpr (sizeof(T) < 4) {
#pragma unroll
    for (int i = 0; i < K - 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], bytes % 4 * 8);
  }
}

// Columns [c, c + N) of a row, out of the words that hold them: all loads at once, without a branch.
template <int N, class T, class Column, class Wanted>
__device__ __forceinline__ Pack<T, N> load_words(const T* row, Column c, Wanted&& wanted) {
  constexpr int M = 16 / int(sizeof(T)), kWords = N / M;
  static_assert(N % M == 0);
  const int off = int(reinterpret_cast<uintptr_t>(row + c) % 16 / sizeof(T));
  uint32_t w[4 * (kWords + 1)];
#pragma unroll
  for (int i = 0; i < kWords + 1; ++i) {
    const Column first = c - off + i * M;
    const bool there = wanted(first) && (i < kWords || off != 0);
    uint4 word = load_where(there, static_cast<const void*>(row + first));
    w[4 * i] = word.x, w[4 * i + 1] = word.y, w[4 * i + 2] = word.z, w[4 * i + 3] = word.w;
  }
  shift_words<T>(w, off);
  Pack<T, N> r;
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) reinterpret_cast<uint32_t*>(&r)[i] = w[i];
  return r;
}

// The packs of one row, which lies in them or anywhere (and of all that lie as it does). A pack is loaded in two steps, so that all of a row are on their way
// before the first is looked at: `load`, then `finish`, which makes zeros of what is not the row's.
template <Lying How, int N, class Column>
struct Lie {
  static constexpr bool packs = How == Lying::packs;
  Column cols;
  int head = 0;  // column of the first pack: 0, or less where the row begins inside it

  template <class T>
  __device__ __forceinline__ Lie(const T* row, Column cols) : cols(cols) {
    if constexpr (!packs) head = -int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
  }
  __device__ __forceinline__ bool has(Column c) const { return c < cols; }
  __device__ __forceinline__ bool whole(Column c) const { return packs || (c >= 0 && c + N <= cols); }
  // The words around a pack, however shifted, lie in the row too.
  __device__ __forceinline__ bool inside(Column c) const { return c >= N && c + 2 * N <= cols; }
  __device__ __forceinline__ bool in_row(Column c) const { return packs || (c >= 0 && c < cols); }

  template <class T>
  __device__ __forceinline__ Pack<T, N> load(bool wanted, const T* row, Column c, bool reads_on) const {
    if constexpr (packs)
      return load_where<T, N>(wanted && has(c), row + c);
    else if (inside(c))
      return load_words<N>(row, c, [&](Column) { return wanted; });
    else
      return load_words<N>(row, c, [&](Column first) {  // the word holds one of the row's and may be read
        constexpr int M = 16 / int(sizeof(T));
        return wanted && has(c) && first > -M && first < cols && (reads_on || first + M <= cols);
      });
  }
  template <class T>
  __device__ __forceinline__ void finish(bool wanted, const T* row, Column c, bool reads_on,
                                         Pack<T, N>& pack) const {
    if constexpr (!packs) {
      if (inside(c)) return;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (!wanted || !in_row(c + j))
          pack.v[j] = narrow<T>(0.0f);
        else if (!reads_on)
          pack.v[j] = row[c + j];
      }
    }
  }
  // The same of a vector by column, of which [0, cols) may be a part that others follow. Where packs are not the row's, nothing.
  template <class T>
  __device__ __forceinline__ Pack<T, N> load_vector(const T* vector, Column c, bool reads_on) const {
    if constexpr (packs && sizeof(T) * N % 16 == 0)
      return load_if<T, N>(vector != nullptr && has(c), vector + c);
    return load(vector != nullptr, vector, c, reads_on);
  }
  template <class T>
  __device__ __forceinline__ void finish_vector(const T* vector, Column c, bool reads_on,
                                                Pack<T, N>& pack) const {
    finish(vector != nullptr, vector, c, reads_on, pack);
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, Column c, const Pack<T, N>& pack) const {
    if constexpr (packs && sizeof(T) * N % 16 != 0) {
      cuda::store(row + c, pack);
    } else if (whole(c) && (packs || reinterpret_cast<uintptr_t>(row + c) % 16 == 0)) {
      store_whole(row + c, pack);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) store_where(in_row(c + j), row + c + j, pack.v[j]);
    }
  }
  template <class T>
  __device__ __forceinline__ void store_if_there(T* row, Column c, const Pack<T, N>& pack) const {
    if constexpr (packs && sizeof(T) * N % 16 == 0) {
      store_where(has(c), row + c, pack);
    } else if (has(c)) {
      store(row, c, pack);
    }
  }
};

}  // namespace tigon::cuda
