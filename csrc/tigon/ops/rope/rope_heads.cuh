// The CUDA kernels of rope and qk_norm_rope distribute heads over threads in one way: a thread owns vectors
// of the rows of a unit, some heads of one token, so that cos and sin are read once for all of them.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/divider.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/ops/rope/rope_tables.cuh"

namespace tigon::cuda::rope_kernels {

#include "tigon/ops/rope/rope_math.inc"

// A CTA has this many threads.
constexpr int kThreads = 128;
// A thread that owns both elements of its pairs has this many columns.
constexpr int kColumns = 2 * kVecColumns;

// --- heads ----------------------------------------------------------------------------------

// Holds the rows of a unit that a thread has: heads next, next + step, ... below end. The lanes of a warp
// iterate together, at least once.
struct HeadRange {
  int next, step, end;

  __device__ __forceinline__ bool has() const { return next < end; }
  __device__ __forceinline__ bool any() const { return __any_sync(0xffffffffu, has()); }
};

struct Unit {
  uint32_t batch, token, group;
};

// Divides heads of q or of k, read from x and written to y, into units: a unit has up to heads_per_unit heads
// (group, group + groups, ...) of one token.
struct HeadTensors {
  const void* x;
  void* y;
  int64_t x_batch, x_head, x_token, y_batch, y_head, y_token;
  int heads, groups;

  HeadTensors(const RopeHeads& x, const RopeHeads& y, int heads_per_unit)
      : x(x.data),
        y(y.data),
        x_batch(x.batch_stride),
        x_head(x.head_stride),
        x_token(x.token_stride),
        y_batch(y.batch_stride),
        y_head(y.head_stride),
        y_token(y.token_stride),
        heads(int(x.heads)),
        groups(int(x.empty() ? 0 : ceil_div(x.heads, heads_per_unit))) {}

  __device__ __forceinline__ HeadRange range(const Unit& unit, bool live) const {
    return {live ? int(unit.group) : heads, groups, heads};
  }
};

// Counts the units of q, of k or of both, in memory order.
struct Units {
  Divider inner, middle;
  // If tokens are the inner dimension in memory, adjacent units take adjacent tokens, else adjacent heads.
  bool tokens_inner;
  uint32_t count;

  Units(const RopeHeads& x, int groups)
      : inner(std::max<int64_t>(1, x.token_stride < x.head_stride ? x.tokens : groups)),
        middle(std::max<int64_t>(1, x.token_stride < x.head_stride ? groups : x.tokens)),
        tokens_inner(x.token_stride < x.head_stride),
        count(uint32_t(x.batch * x.tokens * groups)) {}

  __device__ __forceinline__ Unit operator[](uint32_t index) const {
    const uint32_t outer = inner.divide(index), i = index - outer * inner.divisor;
    const uint32_t batch = middle.divide(outer), m = outer - batch * middle.divisor;
    return unit(batch, m, i);
  }
  // Does the same for any number of units.
  __device__ __forceinline__ Unit at64(uint64_t index) const {
    const uint64_t outer = index / inner.divisor, batch = outer / middle.divisor;
    return unit(uint32_t(batch), uint32_t(outer - batch * middle.divisor),
                uint32_t(index - outer * inner.divisor));
  }

 private:
  __device__ __forceinline__ Unit unit(uint32_t batch, uint32_t m, uint32_t i) const {
    return {batch, tokens_inner ? i : m, tokens_inner ? m : i};
  }
};

// Returns the tensors of a unit if units are those of q and k; its group becomes that within the tensors.
template <class Params>
__device__ __forceinline__ const HeadTensors& tensors_of(const Params& p, Unit& unit) {
  if (unit.group < uint32_t(p.q.groups)) return p.q;
  unit.group -= p.q.groups;
  return p.k;
}

template <class X>
__device__ __forceinline__ const X* x_of(const HeadTensors& p, const Unit& u) {
  return static_cast<const X*>(p.x) + u.batch * p.x_batch + u.token * p.x_token + int(u.group) * p.x_head;
}
template <class Y>
__device__ __forceinline__ Y* y_of(const HeadTensors& p, const Unit& u) {
  return static_cast<Y*>(p.y) + u.batch * p.y_batch + u.token * p.y_token + int(u.group) * p.y_head;
}

struct Shape {
  int cols, start, rotated;
  // Divides by the threads that share a row.
  Divider lanes;
  // Counts the rows of a CTA at a time.
  int rows;

  // x is q, or k if there is no q.
  Shape(const Rope& a, const RopeHeads& x, int64_t lanes)
      : cols(int(x.cols)),
        start(int(a.start(x))),
        rotated(int(a.rotated())),
        lanes(lanes),
        rows(int(kThreads / lanes)) {}
};

// Returns the number of threads that share a row, with `columns` columns each, if a row must not span two
// warps: a power of two.
inline int lanes_of(const RopeHeads& x, int columns) {
  int lanes = 1;
  while (lanes * columns < x.cols) lanes *= 2;
  return lanes;
}

// Gives the position of a thread that owns both elements of its pairs: the first threads of a row have its
// pairs, the next ones the columns that are not rotated.
struct PairCoord {
  // Counts among the rows of the CTA at a time.
  int row;
  // True if the row has such columns.
  bool in_row;
  // True if the columns are rotated.
  bool is_rotated;
  // Counts among the threads of its kind.
  int lane;
  // Give the first columns of the two vectors.
  int first, second;

  __device__ __forceinline__ int vec_stride() const { return second - first; }

  __device__ __forceinline__ explicit PairCoord(const Shape& shape) {
    const int lanes = shape.rotated >> 4;
    row = int(shape.lanes.divide(threadIdx.x));
    lane = int(threadIdx.x) - row * int(shape.lanes.divisor);
    in_row = lane < shape.cols >> 4 && row < shape.rows;
    is_rotated = lane < lanes;
    if (is_rotated) {
      first = shape.start + lane * kVecColumns;
      second = first + shape.rotated / 2;
    } else {
      lane -= lanes;
      first = lane * kColumns;
      if (first >= shape.start) first += shape.rotated;
      second = first + kVecColumns;
    }
  }
};

// --- columns of a thread --------------------------------------------------------------------
// The 2 N columns of a thread are two vectors in registers: the first and the second elements of N pairs
// (halves), or pair after pair.

template <Pairs P, int N>
__device__ constexpr int partner_of(int n) {
  return P == Pairs::halves ? (n + N) % (2 * N) : n ^ 1;
}
template <Pairs P, int N>
__device__ constexpr bool is_first(int n) {
  return P == Pairs::halves ? n < N : n % 2 == 0;
}

template <class T, int N>
__device__ __forceinline__ void widen_vecs(const Vec<T, N>& a, const Vec<T, N>& b, float (&v)[2 * N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = a[n], v[N + n] = b[n];
}
template <class T, int N>
__device__ __forceinline__ Vec<T, N> narrow_vec(const float (&v)[2 * N], int which) {
  float half[N];
#pragma unroll
  for (int n = 0; n < N; ++n) half[n] = v[which * N + n];
  Vec<T, N> r;
  r.set(half);
  return r;
}
template <Pairs P, int N>
__device__ __forceinline__ void rotate(float (&v)[2 * N], const float (&c)[2 * N], const float (&s)[2 * N]) {
  float x[2 * N];
#pragma unroll
  for (int n = 0; n < 2 * N; ++n) x[n] = v[n];
#pragma unroll
  for (int n = 0; n < 2 * N; ++n) {
    const float other = x[partner_of<P, N>(n)];
    v[n] = is_first<P, N>(n) ? rope_first(x[n], other, c[n], s[n]) : rope_second(other, x[n], c[n], s[n]);
  }
}

// --- requirements of vectors ----------------------------------------------------------------

// True if all rows begin at 16-byte boundaries.
inline bool stride_aligns(int64_t size, int64_t stride, size_t element) {
  return size <= 1 || stride * int64_t(element) % 16 == 0;
}
inline bool heads_align(const RopeHeads& x) {
  size_t e = size_of(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && stride_aligns(x.batch, x.batch_stride, e) &&
         stride_aligns(x.heads, x.head_stride, e) && stride_aligns(x.tokens, x.token_stride, e);
}
inline bool table_aligns(const RopeTable& x) {
  size_t e = size_of(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && stride_aligns(x.axes, x.axis_stride, e) &&
         stride_aligns(x.batch, x.batch_stride, e) && stride_aligns(x.tokens, x.token_stride, e);
}

// True if heads and tables begin at 16-byte boundaries, row by row.
inline bool all_align(const Rope& a) {
  // In complex tables sin follows cos.
  return heads_align(a.q) && heads_align(a.k) && heads_align(a.q_out) && heads_align(a.k_out) &&
         table_aligns(a.cos) && (a.cos.col_stride == 2 || table_aligns(a.sin));
}
// True if rows and their parts consist of vectors whose axes Tables knows, and units can be counted in 31
// bits.
inline bool vecs_fit(const Rope& a, const RopeHeads& x, int columns) {
  return all_align(a) && x.cols % columns == 0 && a.start(x) % columns == 0 && a.rotated() % columns == 0 &&
         (!a.form.sections.given() || x.cols <= kMaxVecs * kVecColumns) &&
         x.batch * x.tokens * (a.q.heads + a.k.heads) < INT32_MAX / 2;
}

}  // namespace tigon::cuda::rope_kernels
