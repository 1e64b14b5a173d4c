// Rows that start and end anywhere, in 16-byte packs. Row: packs are counted from the boundary before the row, those at its two
// ends are moved element by element, all others in one instruction. Part: whole packs
// only, what is before and behind them one by one.
#pragma once

#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// The 16-byte packs that a row of `cols` elements touches.
template <class T>
struct Row {
  static constexpr int N = 16 / sizeof(T);
  T* base;  // the boundary at or before the row's first element
  int lead, cols, packs;

  __device__ Row(T* row, int cols) : cols(cols) {
    lead = int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    base = row - lead;
    packs = (lead + cols + N - 1) / N;
  }
  __device__ __forceinline__ int column(int k) const { return k * N - lead; }
  __device__ __forceinline__ bool whole(int k) const { return column(k) >= 0 && column(k) + N <= cols; }
  __device__ __forceinline__ bool has(int c) const { return c >= 0 && c < cols; }
};

// The same row without packs in part: columns [0, n) one by one up to `head`, then whole packs, then one by one again, each of
// the single ones a thread's.
template <class T>
struct Part {
  static constexpr int N = 16 / int(sizeof(T));
  T* x;
  int head, packs;

  __device__ __forceinline__ Part(T* x, int n) : x(x) {
    head = min(n, int((0 - reinterpret_cast<uintptr_t>(x) / sizeof(T)) % N));
    packs = (n - head) / N;
  }
  __device__ __forceinline__ T* pack(int k) const { return x + head + int64_t(k) * N; }
  // The single column of this thread, or -1.
  __device__ __forceinline__ int edge(int n) const {
    int t = int(threadIdx.x);
    if (t < N) return t < head ? t : -1;
    int c = head + N * packs + t - N;
    return t < 2 * N && c < n ? c : -1;
  }
};

// Packs are held as the words they arrived in, `fill` where the row is not. Not through the read-only path: the gradient may take the logits' place.
template <class T>
__device__ __forceinline__ uint4 fetch(const Row<const T>& row, int k, float fill = -INFINITY) {
  constexpr int N = Row<T>::N;
  if (row.whole(k)) return *reinterpret_cast<const uint4*>(row.base + int64_t(k) * N);
  Pack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j)
    pack.v[j] = row.has(row.column(k) + j) ? row.base[int64_t(k) * N + j] : narrow<T>(fill);
  return *reinterpret_cast<const uint4*>(&pack);
}

__device__ __forceinline__ float low(uint32_t w, __nv_bfloat16) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(uint32_t w, __nv_bfloat16) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ float low(uint32_t w, __half) {
  return __half2float(__ushort_as_half(uint16_t(w)));
}
__device__ __forceinline__ float high(uint32_t w, __half) {
  return __half2float(__ushort_as_half(uint16_t(w >> 16)));
}

template <class T>
__device__ __forceinline__ void unpack(const uint4& words, float (&x)[Row<T>::N]) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(w[i]);
    } else {
      x[2 * i] = low(w[i], T{});
      x[2 * i + 1] = high(w[i], T{});
    }
  }
}

// Maxima of the elements of words, place by place; a NaN may get lost here, sums of exponentials keep it.
template <class T>
__device__ __forceinline__ uint32_t max_words(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  } else if constexpr (std::is_same_v<T, __half>) {
    __half2 r = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(r);
  } else {
    __nv_bfloat162 r =
        __hmax2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(r);
  }
}
template <class T>
__device__ __forceinline__ uint32_t max_words(const uint4& w) {
  return max_words<T>(max_words<T>(w.x, w.y), max_words<T>(w.z, w.w));
}
template <class T>
__device__ __forceinline__ float max_of_word(uint32_t w) {
  if constexpr (sizeof(T) == 4)
    return __uint_as_float(w);
  else
    return fmaxf(low(w, T{}), high(w, T{}));
}

}  // namespace tigon::cuda
