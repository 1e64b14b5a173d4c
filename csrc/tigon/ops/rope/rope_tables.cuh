// Reads cos and sin of a token for the CUDA kernels of rope and qk_norm_rope.
#pragma once

#include <climits>
#include <type_traits>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/rope/rope.h"

namespace tigon::cuda::rope_kernels {

// A vector has this many columns: 16 bytes of 16-bit numbers, 32 of fp32.
constexpr int kVecColumns = 8;

// Gives the order of a thread's columns in registers, and of tables of R columns in memory. Crossed means
// neighbours in registers and halves in memory.
enum class Pairs { halves, neighbours, crossed };
inline Pairs pairs_of(const Rope& a) {
  if (a.form.in != a.form.out) return Pairs::crossed;
  return a.form.in == RopePairs::halves ? Pairs::halves : Pairs::neighbours;
}

// Locates the part of a token's row of a table that a thread reads: one or two vectors.
struct TableCoord {
  // Give the first columns in the table.
  int first, second;
  // Holds the axes of the columns in registers, two bits each.
  uint32_t axes;
  // True if the axes are not all the same.
  bool mixed;
};

// The rotated columns of a row have at most this many vectors, if there are sections.
constexpr int kMaxVecs = 64;
constexpr uint32_t kEachColumn = 0x55555555u;

// Holds the strides of a table; 0 along dimensions of size 1.
struct TableStrides {
  int64_t axis, batch, token;
};
inline TableStrides strides_of(const RopeTable& x) {
  return {x.axes == 1 ? 0 : x.axis_stride, x.batch == 1 ? 0 : x.batch_stride, x.token_stride};
}

// Holds the tables of a call. Template parameters: T16 is the 16-bit type of tables that are not fp32, P the
// order of pairs, N the columns of a vector. cos and sin are requested together, so that neither load waits
// for the other.
struct Tables {
  const void *cos, *sin, *positions;
  TableStrides cos_at, sin_at, position_at;
  // Counts the rows of the tables, which bound the positions.
  int64_t rows;
  // Counts the pairs.
  int half;
  // Give the first pair of each axis.
  int height = 0, width = 0;
  RopeSections sections;
  // Holds TableCoord::axes of each vector.
  uint16_t axes[kMaxVecs] = {};
  // True if the axes within some vector are not all the same.
  bool mixed = false;
  bool sectioned, f32, wide_positions, complex, shared, halves, backward;

  Tables(const Rope& a, bool backward, Pairs pairs)
      : cos(a.cos.data),
        sin(a.sin.data),
        positions(a.positions.data),
        cos_at(strides_of(a.cos)),
        sin_at(strides_of(a.sin)),
        position_at(strides_of(a.positions)),
        rows(a.cos.tokens),
        half(int(a.rotated() / 2)),
        sections(a.form.sections),
        sectioned(a.form.sections.given()),
        f32(a.cos.dtype == DType::f32),
        wide_positions(a.positions.dtype == DType::i64),
        complex(a.cos.col_stride == 2),
        shared(a.form.shared),
        halves(a.form.out == RopePairs::halves),
        backward(backward) {
    height = sectioned ? int(sections.time) : INT_MAX;
    width = sectioned ? int(sections.time + sections.height) : INT_MAX;
    if (!sectioned) return;
    mixed = sections.mixed;
    for (int vec = 0; vec < kMaxVecs && vec * kVecColumns < 2 * half; ++vec) {
      for (int n = 0; n < kVecColumns; ++n) {
        const int column = vec * kVecColumns + n;
        axes[vec] |= sections.axis_of(pairs == Pairs::halves ? column % half : column / 2) << 2 * n;
      }
      mixed = mixed || axes[vec] != ((axes[vec] & 3u) * kEachColumn & 0xffffu);
    }
  }

  // Locates a thread's two vectors: pairs [lane * N, lane * N + N) (halves), or that many columns of each
  // half of the rotated ones.
  template <Pairs P, int N>
  __device__ __forceinline__ TableCoord coord(int lane) const {
    TableCoord p{lane * N, half + lane * N, 0, false};
    if (P != Pairs::halves && shared) p.first = lane * (N / 2), p.second = half / 2 + lane * (N / 2);
    if (sectioned) {
      const int vecs = half / N;
      p.axes = P == Pairs::halves ? axes[lane] * 0x10001u : axes[lane] | uint32_t(axes[lane + vecs]) << 16;
      p.mixed = p.axes != (p.axes & 3u) * kEachColumn;
    }
    return p;
  }
  // Locates one vector that begins at a rotated column. For sin, the backward takes that of the partners if
  // they are another vector.
  template <Pairs P, bool Mixed>
  __device__ __forceinline__ TableCoord vec_coord(int column, bool sine) const {
    const bool second = P == Pairs::halves && column >= half;
    const int pair = P == Pairs::halves ? column - (second ? half : 0) : column / 2;
    TableCoord p{pair, 0, 0, Mixed};
    if (P == Pairs::neighbours && !shared) p.first = column;
    if (P == Pairs::halves && !shared) p.first = second == (sine && backward) ? pair : pair + half;
    p.axes = Mixed ? axes[column / kVecColumns] : (pair >= height) + (pair >= width);
    return p;
  }
  // Locates the two elements of one pair, in any form of tables.
  __device__ __forceinline__ TableCoord coord(int pair) const {
    return {shared || halves ? pair : 2 * pair, halves ? half + pair : 2 * pair + 1,
            sectioned ? uint32_t(sections.axis_of(pair)) : 0u, false};
  }

  // Returns the row of the tables at the token's position; -1 if the position is out of range.
  __device__ __forceinline__ int64_t position(int axis, int64_t b, int64_t t) const {
    const int64_t i = axis * position_at.axis + b * position_at.batch + t * position_at.token;
    const int64_t row = wide_positions ? static_cast<const int64_t*>(positions)[i]
                                       : static_cast<const int32_t*>(positions)[i];
    return uint64_t(row) < uint64_t(rows) ? row : -1;
  }
  // Sets the offsets of the token's rows in both tables, in elements. Returns false if the position is out of
  // range.
  __device__ __forceinline__ bool find(int axis, int64_t b, int64_t t, int64_t& cos_row,
                                       int64_t& sin_row) const {
    cos_row = axis * cos_at.axis + b * cos_at.batch + t * cos_at.token;
    sin_row = axis * sin_at.axis + b * sin_at.batch + t * sin_at.token;
    if (positions == nullptr) return true;
    const int64_t row = position(axis, b, t);
    cos_row = row * cos_at.token, sin_row = row * sin_at.token;
    return row >= 0;
  }

  template <class T, Pairs P, bool Shared, int N>
  __device__ __forceinline__ void read_vec(const T* row, int column, float* v) const {
    if constexpr (P == Pairs::halves || (P == Pairs::neighbours && !Shared)) {
      const auto one = load<T, N>(row + column);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = one[n];
    } else {
      const auto first = load<T, N / 2>(row + column);
      const auto second = Shared ? first : load<T, N / 2>(row + half + column);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = n % 2 == 0 ? first[n / 2] : second[n / 2];
    }
  }
  template <class T, Pairs P, bool Shared, int N, int Columns>
  __device__ __forceinline__ void read_vecs(const T* row, const TableCoord& at, float (&v)[Columns]) const {
    read_vec<T, P, Shared, N>(row, at.first, v);
    if constexpr (Columns > N && P == Pairs::halves && Shared) {
#pragma unroll
      for (int n = 0; n < N; ++n) v[N + n] = v[n];
    } else if constexpr (Columns > N) {
      read_vec<T, P, Shared, N>(row, at.second, v + N);
    }
  }
  // Reads complex numbers of a vector.
  template <Pairs P, bool Cos, bool Sin, int N>
  __device__ __forceinline__ void read_complex(const float* row, int column, float* c, float* s) const {
    constexpr int M = P == Pairs::halves ? N : N / 2;
    const auto numbers = load<float, 2 * M>(row + 2 * column);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int at = 2 * (P == Pairs::halves ? n : n / 2);
      if (Cos) c[n] = numbers[at];
      if (Sin) s[n] = numbers[at + 1];
    }
  }

  // Reads cos, sin or both of vectors of one axis. With Complex the tables may be complex.
  template <class T16, Pairs P, bool Complex, bool Cos, bool Sin, int N, int Columns>
  __device__ __forceinline__ void read_axis(int axis, int64_t b, int64_t t, const TableCoord& cos_coord,
                                            const TableCoord& sin_coord, float (&c)[Columns],
                                            float (&s)[Columns]) const {
    int64_t cos_row, sin_row;
    if (!find(axis, b, t, cos_row, sin_row)) {
#pragma unroll
      for (int n = 0; n < Columns; ++n) {
        if (Cos) c[n] = CUDART_NAN_F;
        if (Sin) s[n] = CUDART_NAN_F;
      }
      return;
    }
    if constexpr (Complex) {
      if (complex) {
        const float* row = static_cast<const float*>(cos) + cos_row;
        read_complex<P, Cos, Sin, N>(row, cos_coord.first, c, s);
        if constexpr (Columns > N)
          read_complex<P, Cos, Sin, N>(row, P == Pairs::halves ? cos_coord.first : cos_coord.second, c + N,
                                       s + N);
        return;
      }
    }
    auto take = [&](auto type, auto one_half) {
      using T = decltype(type);
      if (Cos) read_vecs<T, P, one_half, N>(static_cast<const T*>(cos) + cos_row, cos_coord, c);
      if (Sin) read_vecs<T, P, one_half, N>(static_cast<const T*>(sin) + sin_row, sin_coord, s);
    };
    auto take_type = [&](auto type) {
      shared ? take(type, std::true_type{}) : take(type, std::false_type{});
    };
    if (f32) {
      take_type(float{});
    } else if constexpr (sizeof(T16) == 2) {
      take_type(T16{});
    }
  }

  // Reads cos or sin of a thread's two vectors, for any tables.
  template <class T16, Pairs P, bool Sin, int N>
  __device__ __forceinline__ void read_two(int64_t b, int64_t t, const TableCoord& at,
                                           float (&v)[2 * N]) const {
    if (!at.mixed) return read_axis<T16, P, true, !Sin, Sin, N>(int(at.axes & 3u), b, t, at, at, v, v);
#pragma unroll 1
    for (int axis = 0; axis < 3; ++axis) {
      constexpr uint32_t kEach = kEachColumn >> (32 - 4 * N);
      const uint32_t other = at.axes ^ uint32_t(axis) * kEach;
      // No column belongs to this axis.
      if (((other | other >> 1) & kEach) == kEach) continue;
      float found[2 * N];
      read_axis<T16, P, true, !Sin, Sin, N>(axis, b, t, at, at, found, found);
#pragma unroll
      for (int n = 0; n < 2 * N; ++n)
        if ((at.axes >> 2 * n & 3u) == uint32_t(axis)) v[n] = found[n];
    }
  }
  // Reads both, as rotate() takes them.
  template <class T16, Pairs P, int N>
  __device__ __forceinline__ void read(int64_t b, int64_t t, const TableCoord& at, float (&c)[2 * N],
                                       float (&s)[2 * N]) const {
    read_two<T16, P, false, N>(b, t, at, c);
    read_two<T16, P, true, N>(b, t, at, s);
    if (!backward) return;
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      const int partner = P == Pairs::halves ? n + N : n + 1;
      if (P == Pairs::halves ? n >= N : n % 2 == 1) continue;
      const float first = s[n];
      s[n] = -s[partner], s[partner] = -first;
    }
  }

  // Reads N columns of three axes, all requested at once. Columns of a position out of range are NaN.
  template <class T, int N>
  __device__ __forceinline__ void read_mixed(int64_t b, int64_t t, const TableCoord& at,
                                             const TableCoord& sine_at, float (&c)[N], float (&s)[N]) const {
    Vec<T, N> cosines[3], sines[3];
    constexpr int kWords = int(sizeof(T)) * N / 16;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      int64_t cos_row, sin_row;
      const bool inside = find(axis, b, t, cos_row, sin_row);
      const T *from = static_cast<const T*>(cos) + cos_row + at.first,
              *sine = static_cast<const T*>(sin) + sin_row + sine_at.first;
      // This is a NaN in every type.
      constexpr uint32_t kNaN = 0x7fffffff;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        reinterpret_cast<uint4*>(&cosines[axis])[w] =
            ld_global_predicated(inside, from + w * (N / kWords), kNaN);
        reinterpret_cast<uint4*>(&sines[axis])[w] =
            ld_global_predicated(inside, sine + w * (N / kWords), kNaN);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint32_t axis = at.axes >> 2 * n & 3u;
      c[n] = axis == 0 ? cosines[0][n] : axis == 1 ? cosines[1][n] : cosines[2][n];
      s[n] = axis == 0 ? sines[0][n] : axis == 1 ? sines[1][n] : sines[2][n];
    }
  }

  // True if read_for_vec supports the tables. With halves it takes real tables, of several axes too (Mixed);
  // otherwise vectors of one axis.
  bool vecs_fit(Pairs pairs) const { return pairs == Pairs::halves ? !complex : !mixed; }

  // Reads cos and sin of the vector that begins at a rotated column, such that y = rope_second(partner, x, c,
  // s).
  template <class T16, Pairs P, bool Mixed, int N>
  __device__ __forceinline__ void read_for_vec(int64_t b, int64_t t, int column, float (&c)[N],
                                               float (&s)[N]) const {
    const TableCoord at = vec_coord<P, Mixed>(column, false), sine_at = vec_coord<P, Mixed>(column, true);
    if constexpr (!Mixed) {
      read_axis<T16, P, P != Pairs::halves, true, true, N>(int(at.axes), b, t, at, sine_at, c, s);
    } else if (f32) {
      read_mixed<float, N>(b, t, at, sine_at, c, s);
    } else if constexpr (sizeof(T16) == 2) {
      read_mixed<T16, N>(b, t, at, sine_at, c, s);
    }
#pragma unroll
    for (int n = 0; n < N; n += P == Pairs::halves ? 1 : 2) {
      if constexpr (P == Pairs::halves) {
        if ((column >= half) == backward) s[n] = -s[n];
      } else {
        const float first = s[n];
        s[n] = backward ? s[n + 1] : -first, s[n + 1] = backward ? -first : s[n + 1];
      }
    }
  }
};

template <class X, class Y>
// The type of tables that are not fp32.
using Half = std::conditional_t<sizeof(X) == 2, X, Y>;

}  // namespace tigon::cuda::rope_kernels
