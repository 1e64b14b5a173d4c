// How the CUDA kernels of qk_norm_rope share heads among threads, and cos and sin of a token.
//
// A thread owns two packs of the rows of a unit (some heads of one token): both elements of its pairs, so that cos and sin are read
// once for all of them and nothing is exchanged.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/divider.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/rope/rope.h"
#include "tigon/ops/rope/rope_views.h"

namespace tigon::cuda::rope_pairs {

#include "tigon/ops/rope/rope_math.inc"

constexpr int kPack = 8;             // pairs a thread owns
constexpr int kColumns = 2 * kPack;  // and their columns
constexpr int kThreads = 128;        // a block

// --- heads ---------------------------------------------------------------------------------------------------------

// The rows of a unit that a thread has: heads next, next + step, ... below end. The lanes of a warp go over theirs together, and
// over one at least.
struct Run {
  int next, step, end;

  __device__ __forceinline__ bool has() const { return next < end; }
  __device__ __forceinline__ bool any() const { return __any_sync(0xffffffffu, has()); }
};

struct Unit {
  uint32_t batch, token, group;
};

// Rows of q or of k, taken by units: a unit is up to `held` heads (group, group + groups, ...) of one token.
struct Part : HeadsFromTo {
  int groups;

  Part(const RopeHeads& x, const RopeHeads& y, int held)
      : HeadsFromTo(x, y), groups(int(x.empty() ? 0 : ceil_div(x.heads, held))) {}

  __device__ __forceinline__ Run run(const Unit& unit, bool live) const {
    return {live ? int(unit.group) : heads, groups, heads};
  }
};

// The units of q, of k or of both in the order of memory.
struct Units {
  Divider inner, middle;
  bool
      tokens_inside;  // in memory tokens lie inside heads: neighbouring units take neighbouring tokens, else heads
  uint32_t count;

  Units(const RopeHeads& x, int groups)
      : inner(std::max<int64_t>(1, x.token_stride < x.head_stride ? x.tokens : groups)),
        middle(std::max<int64_t>(1, x.token_stride < x.head_stride ? groups : x.tokens)),
        tokens_inside(x.token_stride < x.head_stride),
        count(uint32_t(x.batch * x.tokens * groups)) {}

  __device__ __forceinline__ Unit operator[](uint32_t index) const {
    const uint32_t outer = inner.divide(index), i = index - outer * inner.divisor;
    const uint32_t batch = middle.divide(outer), m = outer - batch * middle.divisor;
    return unit(batch, m, i);
  }
  // The same for any number of units.
  __device__ __forceinline__ Unit far(uint64_t index) const {
    const uint64_t outer = index / inner.divisor, batch = outer / middle.divisor;
    return unit(uint32_t(batch), uint32_t(outer - batch * middle.divisor),
                uint32_t(index - outer * inner.divisor));
  }

 private:
  __device__ __forceinline__ Unit unit(uint32_t batch, uint32_t m, uint32_t i) const {
    return {batch, tokens_inside ? i : m, tokens_inside ? m : i};
  }
};

// Where units are those of q and k: the part that one is of; its group is that of the part from here on.
template <class Params>
__device__ __forceinline__ const Part& part_of(const Params& p, Unit& unit) {
  if (unit.group < uint32_t(p.q.groups)) return p.q;
  unit.group -= p.q.groups;
  return p.k;
}

template <class X>
__device__ __forceinline__ const X* x_of(const Part& p, const Unit& u) {
  return static_cast<const X*>(p.x) + u.batch * p.x_batch + u.token * p.x_token + int(u.group) * p.x_head;
}
template <class Y>
__device__ __forceinline__ Y* y_of(const Part& p, const Unit& u) {
  return static_cast<Y*>(p.y) + u.batch * p.y_batch + u.token * p.y_token + int(u.group) * p.y_head;
}

struct Shape {
  int cols, start, rotated;
  Divider lanes;  // threads that share a row
  int rows;       // that a block has at a time

  // x: q, or k where there is no q
  Shape(const Rope& a, const RopeHeads& x, int64_t lanes)
      : cols(int(x.cols)),
        start(int(a.start(x))),
        rotated(int(a.rotated())),
        lanes(lanes),
        rows(int(kThreads / lanes)) {}
};

// A thread's place in the rows of its unit: the first threads of a row have its pairs, then come those of the columns that
// are not rotated.
struct Place {
  int row;            // of those that the block has at a time
  bool inside;        // the row has such columns
  bool turned;        // and they are rotated
  int lane;           // among those of its kind
  int first, second;  // columns of the packs

  __device__ __forceinline__ int apart() const { return second - first; }

  __device__ __forceinline__ explicit Place(const Shape& shape) {
    const int lanes = shape.rotated >> 4;
    row = int(shape.lanes.divide(threadIdx.x));
    lane = int(threadIdx.x) - row * int(shape.lanes.divisor);
    inside = lane < shape.cols >> 4 && row < shape.rows;
    turned = lane < lanes;
    if (turned) {
      first = shape.start + lane * kPack;
      second = first + shape.rotated / 2;
    } else {
      lane -= lanes;
      first = lane * kColumns;
      if (first >= shape.start) first += shape.rotated;
      second = first + kPack;
    }
  }
};

// --- columns of a thread -------------------------------------------------------------------------------------------
// The 2 N columns of a thread in registers are two packs, one after the other: the first and the second elements of N pairs
// (Halves), or pair after pair.

template <bool Halves, int N>
__device__ constexpr int partner_of(int n) {
  return Halves ? (n + N) % (2 * N) : n ^ 1;
}
template <bool Halves, int N>
__device__ constexpr bool is_first(int n) {
  return Halves ? n < N : n % 2 == 0;
}

template <class T, int N>
__device__ __forceinline__ void widen_packs(const Pack<T, N>& a, const Pack<T, N>& b, float (&v)[2 * N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = a[n], v[N + n] = b[n];
}
template <class T, int N>
__device__ __forceinline__ Pack<T, N> narrow_pack(const float (&v)[2 * N], int which) {
  float half[N];
#pragma unroll
  for (int n = 0; n < N; ++n) half[n] = v[which * N + n];
  Pack<T, N> r;
  r.set(half);
  return r;
}
template <bool Halves, int N>
__device__ __forceinline__ void turn(float (&v)[2 * N], const float (&c)[2 * N], const float (&s)[2 * N]) {
  float x[2 * N];
#pragma unroll
  for (int n = 0; n < 2 * N; ++n) x[n] = v[n];
#pragma unroll
  for (int n = 0; n < 2 * N; ++n) {
    const float other = x[partner_of<Halves, N>(n)];
    v[n] =
        is_first<Halves, N>(n) ? rope_first(x[n], other, c[n], s[n]) : rope_second(other, x[n], c[n], s[n]);
  }
}

// --- cos and sin ---------------------------------------------------------------------------------------------------

// What of a token's rows in the tables belongs to a thread: the same for all tokens.
struct TablePlace {
  int first, second;  // columns of the packs
  uint32_t axes;      // of the columns in registers, two bits each
  bool mixed;         // they are not all the same
};

constexpr int kMostLanes = 32;  // of a row with sections

// The tables of a call. T16: the 16-bit type that they have when they are not fp32.
struct Tables {
  const void *cos, *sin, *positions;
  TableStrides cos_at, sin_at, position_at;
  int64_t rows;  // of the tables, which positions must not pass
  int half;      // pairs
  RopeSections sections;
  uint32_t axes[kMostLanes] = {};  // TablePlace::axes of each lane
  bool mixed = false;              // of one of them
  bool sectioned, f32, wide_positions, complex, shared, halves, backward;

  Tables(const Rope& a, bool backward, bool register_halves)
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
    if (!sectioned) return;
    for (int lane = 0; lane < std::min(kMostLanes, half / kPack); ++lane) {
      for (int n = 0; n < kColumns; ++n) {
        const int inside = lane * (kPack / 2) + n % kPack / 2 + (n < kPack ? 0 : half / 2);
        axes[lane] |= uint32_t(sections.axis_of(register_halves ? lane * kPack + n % kPack : inside))
                      << 2 * n;
      }
      mixed = mixed || axes[lane] != (axes[lane] & 3u) * 0x55555555u;
    }
  }

  // Of the columns that a thread of the rotated ones has.
  template <bool Halves, int N>
  __device__ __forceinline__ TablePlace place(int lane) const {
    TablePlace p{lane * N, half + lane * N, 0, false};
    if (!Halves && shared) p.first = lane * (N / 2), p.second = half / 2 + lane * (N / 2);
    if (sectioned && lane < kMostLanes) p.axes = axes[lane], p.mixed = p.axes != (p.axes & 3u) * 0x55555555u;
    return p;
  }
  // Of one pair, its elements apart, whatever form the tables have.
  __device__ __forceinline__ TablePlace place(int pair) const {
    uint32_t axis = 0;
    if (sectioned && !sections.mixed) {
      axis = pair < int(sections.time) ? 0 : pair < int(sections.time + sections.height) ? 1 : 2;
    } else if (sectioned) {
      const int turn = pair % 3;
      axis = turn == 1 && pair < 3 * int(sections.height)  ? 1
             : turn == 2 && pair < 3 * int(sections.width) ? 2
                                                           : 0;
    }
    return {shared || halves ? pair : 2 * pair, halves ? half + pair : 2 * pair + 1, axis, false};
  }

  // Row of the tables that a token takes; -1: its position lies outside.
  __device__ __forceinline__ int64_t position(int axis, int64_t b, int64_t t) const {
    const int64_t i = axis * position_at.axis + b * position_at.batch + t * position_at.token;
    const int64_t row = wide_positions ? static_cast<const int64_t*>(positions)[i]
                                       : static_cast<const int32_t*>(positions)[i];
    return uint64_t(row) < uint64_t(rows) ? row : -1;
  }

  template <class T, bool Halves, int N>
  __device__ __forceinline__ void read_columns(const void* table, int64_t row, const TablePlace& at,
                                               float (&v)[2 * N]) const {
    const T* from = static_cast<const T*>(table) + row;
    if constexpr (!Halves) {
      if (shared) {
        const auto a = load<T, N / 2>(from + at.first), b = load<T, N / 2>(from + at.second);
#pragma unroll
        for (int n = 0; n < N; ++n) v[n] = a[n / 2], v[N + n] = b[n / 2];
        return;
      }
    }
    const auto a = load<T, N>(from + at.first);
    widen_packs(a, shared ? a : load<T, N>(from + at.second), v);
  }

  // Columns of one axis.
  template <class T16, bool Halves, int N>
  __device__ __forceinline__ void read_axis(int axis, int64_t b, int64_t t, const TablePlace& at,
                                            float (&c)[2 * N], float (&s)[2 * N]) const {
    int64_t cos_row = axis * cos_at.axis + b * cos_at.batch + t * cos_at.token;
    int64_t sin_row = axis * sin_at.axis + b * sin_at.batch + t * sin_at.token;
    if (positions != nullptr) {
      const int64_t row = position(axis, b, t);
      if (row < 0) {
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) c[n] = s[n] = CUDART_NAN_F;
        return;
      }
      cos_row = row * cos_at.token, sin_row = row * sin_at.token;
    }
    if (complex) {
      constexpr int M = Halves ? N : N / 2;
      const float* from = static_cast<const float*>(cos) + cos_row;
      const auto a = load<float, 2 * M>(from + 2 * at.first);
      const auto b = Halves ? a : load<float, 2 * M>(from + 2 * at.second);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int pair = 2 * (Halves ? n : n / 2);
        c[n] = a[pair], s[n] = a[pair + 1], c[N + n] = b[pair], s[N + n] = b[pair + 1];
      }
    } else if (f32) {
      read_columns<float, Halves, N>(cos, cos_row, at, c);
      read_columns<float, Halves, N>(sin, sin_row, at, s);
    } else if constexpr (sizeof(T16) == 2) {
      read_columns<T16, Halves, N>(cos, cos_row, at, c);
      read_columns<T16, Halves, N>(sin, sin_row, at, s);
    }
  }

  // Columns of several axes, of one table.
  template <class T, bool Halves, int N>
  __device__ __forceinline__ void read_mixed(const void* table, const TableStrides& strides, int64_t b,
                                             int64_t t, const TablePlace& at, float (&v)[2 * N]) const {
#pragma unroll 1
    for (int axis = 0; axis < 3; ++axis) {
      const uint32_t other = at.axes ^ uint32_t(axis) * 0x55555555u;
      if (((other | other >> 1) & 0x55555555u) == 0x55555555u) continue;  // no column is of this axis
      int64_t row = axis * strides.axis + b * strides.batch + t * strides.token;
      bool outside = false;
      if (positions != nullptr) {
        row = position(axis, b, t);
        outside = row < 0, row *= strides.token;
      }
      float found[2 * N];
      if (outside) {
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) found[n] = CUDART_NAN_F;
      } else {
        read_columns<T, Halves, N>(table, row, at, found);
      }
#pragma unroll
      for (int n = 0; n < 2 * N; ++n)
        if ((at.axes >> 2 * n & 3u) == uint32_t(axis)) v[n] = found[n];
    }
  }

  // cos and sin of a thread's columns, as turn() takes them; Halves says how those lie, and tables of R columns. Mixed: some lanes' columns are.
  template <class T16, bool Halves, bool Mixed, int N>
  __device__ __forceinline__ void read(int64_t b, int64_t t, const TablePlace& at, float (&c)[2 * N],
                                       float (&s)[2 * N]) const {
    if (!Mixed || !at.mixed) {
      read_axis<T16, Halves, N>(int(at.axes & 3u), b, t, at, c, s);
    } else if constexpr (Mixed) {
      if (f32) {
        read_mixed<float, Halves, N>(cos, cos_at, b, t, at, c);
        read_mixed<float, Halves, N>(sin, sin_at, b, t, at, s);
      } else if constexpr (sizeof(T16) == 2) {
        read_mixed<T16, Halves, N>(cos, cos_at, b, t, at, c);
        read_mixed<T16, Halves, N>(sin, sin_at, b, t, at, s);
      }
    }
    if (!backward) return;
#pragma unroll
    for (int n = 0; n < 2 * N; ++n) {
      if (!is_first<Halves, N>(n)) continue;
      const float first = s[n];
      s[n] = -s[partner_of<Halves, N>(n)], s[partner_of<Halves, N>(n)] = -first;
    }
  }
};

template <class X, class Y>
using Half = std::conditional_t<sizeof(X) == 2, X, Y>;  // the type of tables that are not fp32

// --- what packs need -----------------------------------------------------------------------------------------------

// Rows, tables and their parts begin and end at packs of 16 bytes; a block has the threads of a row.
inline bool packs_fit(const Rope& a, const RopeHeads& x) {
  return (!a.form.sections.given() || (a.cos.col_stride == 1 && x.cols <= kMostLanes * kColumns)) &&
         x.cols % kColumns == 0 && a.start(x) % kColumns == 0 && a.rotated() % kColumns == 0 &&
         x.cols <= kThreads * kColumns && x.batch * x.tokens * (a.q.heads + a.k.heads) < INT32_MAX / 2 &&
         heads_align(a.q) && heads_align(a.k) && heads_align(a.q_out) && heads_align(a.k_out) &&
         table_aligns(a.cos) &&
         (a.cos.col_stride == 2 || table_aligns(a.sin));  // complex: sin lies behind cos
}

}  // namespace tigon::cuda::rope_pairs
