// Rows that start and end anywhere, in 16-byte packs. Row: packs are counted from the boundary before the row; those at its two
// ends are in part. RowWords: a row read in the packs of another, all in whole words, trimmed afterwards. Part: whole packs only,
// what is before and behind them one by one. The norms' rows: row_lie.cuh.
#pragma once

#include <numeric>

#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/tensor.h"

namespace tigon::cuda {

// The 16-byte packs that a row of `cols` elements touches. Whole: all of them are the row's alone.
template <class T, bool Whole = false>
struct Row {
  static constexpr int N = 16 / sizeof(T);
  T* base;  // the boundary at or before the row's first element
  int lead = 0, cols, packs;

  __device__ Row(T* row, int cols) : base(row), cols(cols) {
    if constexpr (!Whole) {
      lead = int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
      base = row - lead;
    }
    packs = (lead + cols + N - 1) / N;
  }
  __device__ __forceinline__ int column(int k) const { return k * N - lead; }
  __device__ __forceinline__ bool whole(int k) const {
    return Whole || (column(k) >= 0 && column(k) + N <= cols);
  }
  __device__ __forceinline__ bool has(int c) const { return c >= 0 && c < cols; }
};

// Of n elements from x on, so many lie before the first whole pack.
template <int N, class T>
__device__ __forceinline__ int elements_before_packs(const T* x, int n) {
  return min(n, int((0 - reinterpret_cast<uintptr_t>(x) / sizeof(T)) % N));
}

// The same row without packs in part: columns [0, n) one by one up to `head`, then whole packs, then one by one again, each of
// the single ones a thread's.
template <class T>
struct Part {
  static constexpr int N = 16 / int(sizeof(T));
  T* x;
  int head, packs;

  __device__ __forceinline__ Part(T* x, int n) : x(x) {
    head = elements_before_packs<N>(x, n);
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

// A row counted in the packs of another, where it may lie differently.
template <class T>
__device__ __forceinline__ Row<T> row_like(T* out, const Row<const T>& like) {
  Row<T> row(out, like.cols);
  row.lead = like.lead, row.base = out - like.lead, row.packs = like.packs;
  return row;
}

// Whether rows of b begin as many elements before a multiple of 16 bytes of X as those of a, of any type.
template <class X, class A, class B>
bool rows_alike(const A* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t rows) {
  constexpr int64_t N = 16 / int64_t(sizeof(X));
  auto element = [](const auto* p) { return int64_t(reinterpret_cast<uintptr_t>(p) / sizeof(*p)); };
  return (element(a) - element(b)) % N == 0 && (rows == 1 || (a_stride - b_stride) % N == 0);
}
template <class T>
bool rows_alike(const Matrix& a, const Matrix& b) {
  return rows_alike<T>(a.row<T>(0), a.stride, b.row<T>(0), b.stride, a.rows);
}
// Rows of T so many apart begin at the same place of their words of 16 bytes.
template <class T>
int64_t rows_period(int64_t stride) {
  return 16 / std::gcd(int64_t(16), stride * int64_t(sizeof(T)));
}
// Where the memory of rows ends.
template <class T>
const T* end_of_rows(const T* x, int64_t stride, int64_t rows, int64_t cols) {
  return x + (stride > 0 ? rows - 1 : 0) * stride + cols;
}

// Words whose every element is -inf.
template <class T>
__device__ constexpr uint32_t kMinusInf = sizeof(T) == 4                                   ? 0xff800000u
                                          : std::is_same_v<std::remove_const_t<T>, __half> ? 0xfc00fc00u
                                                                                           : 0xff80ff80u;

// A row that is read in the packs of another one, `out`; Moved: which may lie differently. Whole words, those at the two ends too,
// that are trimmed afterwards, so that no load waits for another or for a branch. A word holds memory of the row's tensor or of
// what lies beside it before the next boundary of 16 bytes; only the last one of the tensor, which ends at `end`, is read by
// elements. What is not there is `fill` (a word of it). Not through the read-only path: results may take the place of what is read.
// Whole: both rows are whole packs, and there is nothing to trim.
template <class T, bool Moved, bool Whole = false>
struct RowWords {
  static_assert(!(Moved && Whole));
  static constexpr int N = Row<const T>::N;
  Row<const T, Whole> row;
  int readable;    // words
  int first;       // word that pack 0 of `out` begins in
  unsigned moved;  // bytes that it begins after that word
  uint32_t fill;

  __device__ __forceinline__ RowWords(const Row<T, Whole>& out, const T* x, const T* end, uint32_t fill,
                                      bool live)
      : row(x, out.cols), fill(fill) {
    readable = live ? row.packs - int(!Whole && row.base + int64_t(row.packs) * N > end) : 0;
    first = Moved && row.lead < out.lead ? -1 : 0;
    moved = Moved ? unsigned((row.lead - out.lead) * int(sizeof(T))) % 16 : 0;
  }
  // The word that pack k begins in.
  __device__ __forceinline__ uint4 load(int k) const { return word(k + first); }
  __device__ __forceinline__ uint4 word(int w) const {
    return load_where(unsigned(w) < unsigned(readable), row.base + int64_t(w) * N, fill);
  }
  // The last word, by its elements.
  __device__ __forceinline__ uint4 last() const {
    constexpr int kBits = 8 * int(sizeof(T));
    const uint64_t none = uint64_t(fill) << 32 | fill;
    uint64_t low = none, high = none;
    const int column = row.column(row.packs - 1);
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
  // The bits of elements [begin, end) of a pack.
  __device__ __forceinline__ static uint4 bits_of(int begin, int end) {
    constexpr int kBits = 8 * int(sizeof(T));
    uint32_t mask[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int low = min(max(begin * kBits - 32 * i, 0), 32), high = min(max(end * kBits - 32 * i, 0), 32);
      mask[i] = uint32_t((uint64_t(1) << high) - (uint64_t(1) << low));
    }
    return make_uint4(mask[0], mask[1], mask[2], mask[3]);
  }
  // Those of a word, fill around them.
  __device__ __forceinline__ uint4 only(const uint4& w, const uint4& mask) const {
    return make_uint4((w.x & mask.x) | (fill & ~mask.x), (w.y & mask.y) | (fill & ~mask.y),
                      (w.z & mask.z) | (fill & ~mask.z), (w.w & mask.w) | (fill & ~mask.w));
  }
  // q[i], as loaded for pack k(i) of `out`, becomes that pack; k(0) is the least of them.
  template <int Held, class Index>
  __device__ __forceinline__ void trim(const Row<T, Whole>& out, uint4 (&q)[Held], Index k) const {
    if constexpr (Whole) return;
    const int rest = (out.lead + out.cols) % N;
    if ((moved | unsigned(out.lead) | unsigned(rest)) == 0) return;
    const bool apart = readable < row.packs;
    uint4 end = {};
    if (apart) end = last();
    if (apart) {
#pragma unroll
      for (int i = 0; i < Held; ++i)
        if (k(i) + first == row.packs - 1) q[i] = end;
    }
    if (moved != 0) {
#pragma unroll
      for (int i = 0; i < Held; ++i) {
        const int w = k(i) + first + 1;
        uint4 next = word(w);
        if (apart && w == row.packs - 1) next = end;
        next = shifted(q[i], next, moved);
        q[i] = k(i) < out.packs ? next : make_uint4(fill, fill, fill, fill);
      }
    }
    if (out.lead != 0 && k(0) == 0) q[0] = only(q[0], bits_of(out.lead, N));
    if (rest == 0) return;
    const uint4 mask = bits_of(0, rest);
#pragma unroll
    for (int i = 0; i < Held; ++i)
      if (k(i) == out.packs - 1) q[i] = only(q[i], mask);
  }
  // 16 of the 32 bytes, from `bytes` on.
  __device__ __forceinline__ static uint4 shifted(const uint4& a, const uint4& b, unsigned bytes) {
    uint32_t v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) v[i] = bytes & 8 ? v[i + 2] : v[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) v[i] = bytes & 4 ? v[i + 1] : v[i];
    if constexpr (sizeof(T) < 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = __funnelshift_r(v[i], v[i + 1], bytes % 4 * 8);
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
  }
};
// A pack of a row, in whole or, at the row's ends and where the row's packs lie apart from words of 16 bytes, by elements.
template <class T, bool Whole>
__device__ __forceinline__ void store_pack(const Row<T, Whole>& row, int k, const float (&v)[Row<T>::N],
                                           bool aligned = true) {
  constexpr int N = Row<T>::N;
  Pack<T, N> pack;
  pack.set(v);
  if (Whole || (aligned && row.whole(k))) {
    store_whole(row.base + int64_t(k) * N, pack);
  } else if constexpr (!Whole) {
    constexpr int kBits = 8 * int(sizeof(T));
    using Bits = typename Word<sizeof(T)>::type;
    Bits* to = reinterpret_cast<Bits*>(row.base) + row.lead;
    uint64_t low = reinterpret_cast<const uint64_t*>(&pack)[0],
             high = reinterpret_cast<const uint64_t*>(&pack)[1];
    const int column = row.column(k), end = min(column + N, row.cols);
#pragma unroll 1
    for (int c = column; c < end; ++c) {
      if (c >= 0) to[c] = Bits(low);
      low = low >> kBits | high << (64 - kBits);
      high >>= kBits;
    }
  }
}

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
