// Reads and writes rows of any alignment in 16-byte vectors, for softmax and the losses.
//   AlignedRow        counts vectors from the 16-byte boundary before the row; those at its ends may be
//                     partial
//   AlignedRowLoader  loads a row in the vectors of another one, as full words that are masked afterwards
//   PeeledRow         takes full vectors only, with the elements before and after them handled one by one
#pragma once

#include "tigon/base/cuda/row_config.h"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/tensor.h"

namespace tigon::cuda {

// Describes the 16-byte vectors that a row of `cols` elements touches. With kAligned no vector is partial.
template <class T, bool kAligned = false>
struct AlignedRow {
  static constexpr int N = 16 / sizeof(T);
  // Points to the 16-byte boundary at or before the first element.
  T* base;
  int lead = 0, cols, vecs;

  __device__ AlignedRow(T* row, int cols) : base(row), cols(cols) {
    if constexpr (!kAligned) {
      lead = int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
      base = row - lead;
    }
    vecs = (lead + cols + N - 1) / N;
  }
  __device__ __forceinline__ int column(int k) const { return k * N - lead; }
  __device__ __forceinline__ bool is_full(int k) const {
    return kAligned || (column(k) >= 0 && column(k) + N <= cols);
  }
  __device__ __forceinline__ bool has(int c) const { return c >= 0 && c < cols; }
};

// Returns the number of elements (at most n) before the first 16-byte boundary at or after x.
template <int N, class T>
__device__ __forceinline__ int elements_to_alignment(const T* x, int n) {
  return min(n, int((0 - reinterpret_cast<uintptr_t>(x) / sizeof(T)) % N));
}

// Splits a row into columns [0, head) one by one, then `vecs` full vectors, then the remaining columns one by
// one. Each single column belongs to one thread.
template <class T>
struct PeeledRow {
  static constexpr int N = 16 / int(sizeof(T));
  T* x;
  int head, vecs;

  __device__ __forceinline__ PeeledRow(T* x, int n) : x(x) {
    head = elements_to_alignment<N>(x, n);
    vecs = (n - head) / N;
  }
  __device__ __forceinline__ T* vec(int k) const { return x + head + int64_t(k) * N; }
  // Returns the single column of this thread, or -1.
  __device__ __forceinline__ int edge_column(int n) const {
    int t = int(threadIdx.x);
    if (t < N) return t < head ? t : -1;
    int c = head + N * vecs + t - N;
    return t < 2 * N && c < n ? c : -1;
  }
};

// Accesses another row in the vector numbering of `like`, whatever its own offset.
template <class T>
__device__ __forceinline__ AlignedRow<T> aligned_row_like(T* out, const AlignedRow<const T>& like) {
  AlignedRow<T> row(out, like.cols);
  row.lead = like.lead, row.base = out - like.lead, row.vecs = like.vecs;
  return row;
}

// True if rows of a and b, of any element types, have the same offset in elements from a 16-byte boundary of
// X.
template <class X, class A, class B>
bool same_row_offsets(const A* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t rows) {
  constexpr int64_t N = 16 / int64_t(sizeof(X));
  auto element = [](const auto* p) { return int64_t(reinterpret_cast<uintptr_t>(p) / sizeof(*p)); };
  return (element(a) - element(b)) % N == 0 && (rows == 1 || (a_stride - b_stride) % N == 0);
}
template <class T>
bool same_row_offsets(const Matrix& a, const Matrix& b) {
  return same_row_offsets<T>(a.row<T>(0), a.stride, b.row<T>(0), b.stride, a.rows);
}
// Returns the most vectors that a row of any offset touches.
template <class T>
int64_t max_vecs_of_row(const T* row, int64_t stride, int64_t cols) {
  constexpr int N = 16 / sizeof(T);
  return is_vectorizable(row, stride, cols, sizeof(T)) ? cols / N : ceil_div(cols + N - 1, N);
}
// Returns the address one past the last element of the rows.
template <class T>
const T* end_of_rows(const T* x, int64_t stride, int64_t rows, int64_t cols) {
  return x + (stride > 0 ? rows - 1 : 0) * stride + cols;
}

// Returns a 32-bit word in which every element is -inf.
template <class T>
__device__ constexpr uint32_t kMinusInf = sizeof(T) == 4                                   ? 0xff800000u
                                          : std::is_same_v<std::remove_const_t<T>, __half> ? 0xfc00fc00u
                                                                                           : 0xff80ff80u;

// Loads a row in the vectors of `out`; with kShifted the row may have another offset. All words, the first
// and last too, are loaded in full and masked by trim(), so that no load waits for another load or a branch.
// A word may hold memory before or after the row within the same 16 bytes. Only the last word of the tensor,
// which would cross `end`, is read by elements. Elements outside the row become `fill` (one word of it).
// Loads are plain, since results may overwrite what is read. With kAligned both rows consist of full vectors,
// and nothing is masked.
template <class T, bool kShifted, bool kAligned = false>
struct AlignedRowLoader {
  static_assert(!(kShifted && kAligned));
  static constexpr int N = AlignedRow<const T>::N;
  AlignedRow<const T, kAligned> row;
  int readable_words;
  // Vector 0 of `out` begins in this word.
  int first;
  // It begins at this byte of that word.
  unsigned shift_bytes;
  uint32_t fill;

  __device__ __forceinline__ AlignedRowLoader(const AlignedRow<T, kAligned>& out, const T* x, const T* end,
                                              uint32_t fill, bool valid)
      : row(x, out.cols), fill(fill) {
    readable_words = valid ? row.vecs - int(!kAligned && row.base + int64_t(row.vecs) * N > end) : 0;
    first = kShifted && row.lead < out.lead ? -1 : 0;
    shift_bytes = kShifted ? unsigned((row.lead - out.lead) * int(sizeof(T))) % 16 : 0;
  }
  // Returns the word in which vector k begins.
  __device__ __forceinline__ uint4 load(int k) const { return word(k + first); }
  __device__ __forceinline__ uint4 word(int w) const {
    return ld_global_predicated(unsigned(w) < unsigned(readable_words), row.base + int64_t(w) * N, fill);
  }
  // Reads the last word by elements.
  __device__ __forceinline__ uint4 last_word() const {
    constexpr int kBits = 8 * int(sizeof(T));
    const uint64_t none = uint64_t(fill) << 32 | fill;
    uint64_t low = none, high = none;
    const int column = row.column(row.vecs - 1);
#pragma unroll 1
    for (int c = column + N - 1; c >= column; --c) {
      using Bits = typename Word<sizeof(T)>::type;
      const Bits* from = reinterpret_cast<const Bits*>(row.base) + (row.lead + c);
      const uint64_t x = row.has(c) ? *from : none >> (64 - kBits);
      high = high << kBits | low >> (64 - kBits);
      low = low << kBits | x;
    }
    return make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
  }
  // Returns a mask of the bits of elements [begin, end) of a vector.
  __device__ __forceinline__ static uint4 element_mask(int begin, int end) {
    constexpr int kBits = 8 * int(sizeof(T));
    uint32_t mask[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = min(max(begin * kBits - 32 * i, 0), 32), high = min(max(end * kBits - 32 * i, 0), 32);
      mask[i] = uint32_t((uint64_t(1) << high) - (uint64_t(1) << low));
    }
    return make_uint4(mask[0], mask[1], mask[2], mask[3]);
  }
  // Returns the elements under the mask, and `fill` elsewhere.
  __device__ __forceinline__ uint4 blend(const uint4& w, const uint4& mask) const {
    return make_uint4((w.x & mask.x) | (fill & ~mask.x), (w.y & mask.y) | (fill & ~mask.y),
                      (w.z & mask.z) | (fill & ~mask.z), (w.w & mask.w) | (fill & ~mask.w));
  }
  // Turns q[i], as loaded for vector k(i) of `out`, into that vector. k(0) is the smallest index.
  template <int VecsPerThread, class Index>
  __device__ __forceinline__ void trim(const AlignedRow<T, kAligned>& out, uint4 (&q)[VecsPerThread],
                                       Index k) const {
    if constexpr (kAligned) return;
    const int rest = (out.lead + out.cols) % N;
    if ((shift_bytes | unsigned(out.lead) | unsigned(rest)) == 0) return;
    const bool partial_last = readable_words < row.vecs;
    uint4 end = {};
    if (partial_last) end = last_word();
    if (partial_last) {
#pragma unroll
      for (int i = 0; i < VecsPerThread; ++i)
        if (k(i) + first == row.vecs - 1) q[i] = end;
    }
    if (shift_bytes != 0) {
#pragma unroll
      for (int i = 0; i < VecsPerThread; ++i) {
        const int w = k(i) + first + 1;
        uint4 next = word(w);
        if (partial_last && w == row.vecs - 1) next = end;
        next = funnel_shift(q[i], next, shift_bytes);
        q[i] = k(i) < out.vecs ? next : make_uint4(fill, fill, fill, fill);
      }
    }
    if (out.lead != 0 && k(0) == 0) q[0] = blend(q[0], element_mask(out.lead, N));
    if (rest == 0) return;
    const uint4 mask = element_mask(0, rest);
#pragma unroll
    for (int i = 0; i < VecsPerThread; ++i)
      if (k(i) == out.vecs - 1) q[i] = blend(q[i], mask);
  }
  // Returns the 16 bytes of a, b that begin at byte `bytes`.
  __device__ __forceinline__ static uint4 funnel_shift(const uint4& a, const uint4& b, unsigned bytes) {
    uint32_t v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    drop_bytes<T>(v, bytes);
    return make_uint4(v[0], v[1], v[2], v[3]);
  }
};
// Stores a vector of a row in one access, or by elements at the row's ends and if the vectors are not
// aligned.
template <class T, bool kAligned>
__device__ __forceinline__ void store_vec(const AlignedRow<T, kAligned>& row, int k,
                                          const float (&v)[AlignedRow<T>::N], bool aligned = true) {
  constexpr int N = AlignedRow<T>::N;
  Vec<T, N> vec;
  vec.set(v);
  if (kAligned || (aligned && row.is_full(k))) {
    store_v4(row.base + int64_t(k) * N, vec);
  } else if constexpr (!kAligned) {
    constexpr int kBits = 8 * int(sizeof(T));
    using Bits = typename Word<sizeof(T)>::type;
    Bits* to = reinterpret_cast<Bits*>(row.base) + row.lead;
    uint64_t low = reinterpret_cast<const uint64_t*>(&vec)[0],
             high = reinterpret_cast<const uint64_t*>(&vec)[1];
    const int column = row.column(k), end = min(column + N, row.cols);
#pragma unroll 1
    for (int c = column; c < end; ++c) {
      if (c >= 0) to[c] = Bits(low);
      low = low >> kBits | high << (64 - kBits);
      high >>= kBits;
    }
  }
}

// Loads a vector as raw words, with `fill` outside the row. The load is plain, since the gradient may
// overwrite the logits.
template <class T>
__device__ __forceinline__ uint4 load_vec(const AlignedRow<const T>& row, int k, float fill = -INFINITY) {
  constexpr int N = AlignedRow<T>::N;
  if (row.is_full(k)) return *reinterpret_cast<const uint4*>(row.base + int64_t(k) * N);
  Vec<T, N> vec;
#pragma unroll
  for (int j = 0; j < N; ++j)
    vec.v[j] = row.has(row.column(k) + j) ? row.base[int64_t(k) * N + j] : narrow<T>(fill);
  return *reinterpret_cast<const uint4*>(&vec);
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
__device__ __forceinline__ void unpack(const uint4& words, float (&x)[AlignedRow<T>::N]) {
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

// Take the elementwise maximum or minimum of packed words. A NaN may be lost here; the sums of exponentials
// propagate it.
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
__device__ __forceinline__ uint32_t min_words(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(fminf(__uint_as_float(a), __uint_as_float(b)));
  } else if constexpr (std::is_same_v<T, __half>) {
    __half2 r = __hmin2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(r);
  } else {
    __nv_bfloat162 r =
        __hmin2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(r);
  }
}
template <class T>
__device__ __forceinline__ uint32_t min_words(const uint4& w) {
  return min_words<T>(min_words<T>(w.x, w.y), min_words<T>(w.z, w.w));
}
template <class T>
__device__ __forceinline__ float max_of_word(uint32_t w) {
  if constexpr (sizeof(T) == 4)
    return __uint_as_float(w);
  else
    return fmaxf(low(w, T{}), high(w, T{}));
}

}  // namespace tigon::cuda
