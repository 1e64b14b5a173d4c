// What the CUDA kernels of rope and qk_norm_rope share: cos and sin of a token, and how threads share heads.
#pragma once

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/rope/rope.h"
#include "tigon/ops/rope/rope_views.h"

namespace tigon::cuda::rope_kernels {

#include "tigon/ops/rope/rope_math.inc"

constexpr int kPack = 8;       // columns a thread owns: 16 bytes of 16-bit numbers, 32 of fp32
constexpr int kThreads = 128;  // a block
constexpr int kHeld = 4;       // rows (heads of a token) a thread has in flight

// --- cos and sin ---------------------------------------------------------------------------------------------------

inline bool plain_tables(const Rope& a) {
  return a.positions.data == nullptr && !a.form.sections.given() && a.cos.col_stride == 1;
}

// The tables of a call. Plain: no positions, sections and complex numbers, which cost registers. T16: the 16-bit type that
// tables have when they are not fp32.
template <bool Plain>
struct Tables {
  const void *cos, *sin, *positions;
  TableStrides cos_at, sin_at, position_at;
  int64_t rows;  // of the tables, which positions must not pass
  int half;      // pairs
  int time, height, width;
  bool sections, mixed, f32, wide_positions, complex, shared, halves, backward;

  Tables(const Rope& a, bool backward)
      : cos(a.cos.data),
        sin(a.sin.data),
        positions(a.positions.data),
        cos_at(strides_of(a.cos)),
        sin_at(strides_of(a.sin)),
        position_at(strides_of(a.positions)),
        rows(a.cos.tokens),
        half(int(a.rotated() / 2)),
        time(int(a.form.sections.time)),
        height(int(a.form.sections.height)),
        width(int(a.form.sections.width)),
        sections(a.form.sections.given()),
        mixed(a.form.sections.mixed),
        f32(a.cos.dtype == DType::f32),
        wide_positions(a.positions.dtype == DType::i64),
        complex(a.cos.col_stride == 2),
        shared(a.form.shared),
        halves(a.form.out == RopePairs::halves),
        backward(backward) {}

  // Where the token's row begins in a table, in elements; -1: its position lies outside.
  __device__ __forceinline__ int64_t row(const TableStrides& at, int axis, int64_t b, int64_t t) const {
    if (Plain || positions == nullptr) return axis * at.axis + b * at.batch + t * at.token;
    int64_t i = axis * position_at.axis + b * position_at.batch + t * position_at.token;
    int64_t row = wide_positions ? static_cast<const int64_t*>(positions)[i]
                                 : static_cast<const int32_t*>(positions)[i];
    return uint64_t(row) < uint64_t(rows) ? row * at.token : -1;
  }

  __device__ __forceinline__ int axis_of(int pair) const {
    if (!mixed) return pair < time ? 0 : pair < time + height ? 1 : 2;
    int turn = pair % 3;
    return turn == 1 && pair < 3 * height ? 1 : turn == 2 && pair < 3 * width ? 2 : 0;
  }

  // N adjacent columns of one axis.
  template <class T16, int N>
  __device__ __forceinline__ void read_axis(const void* table, const TableStrides& at, int axis, int64_t b,
                                            int64_t t, int column, float (&v)[N]) const {
    int64_t first = row(at, axis, b, t);
    if constexpr (!Plain) {
      if (first < 0) {
#pragma unroll
        for (int n = 0; n < N; ++n) v[n] = CUDART_NAN_F;
        return;
      }
      if (complex) return read_parts(first + 2 * column, table == sin, v);
    }
    if (f32) {
      auto pack = load<float, N>(static_cast<const float*>(table) + first + column);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = pack[n];
    } else if constexpr (sizeof(T16) == 2) {
      auto pack = load<T16, N>(static_cast<const T16*>(table) + first + column);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = pack[n];
    }
  }
  // Real or imaginary parts of N complex numbers.
  template <int N>
  __device__ __forceinline__ void read_parts(int64_t first, bool imaginary, float (&v)[N]) const {
    const float* numbers = static_cast<const float*>(cos) + first;
    if constexpr (N == 1) {
      v[0] = numbers[imaginary];
    } else {
      auto both = load<float, 2 * N>(numbers);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = imaginary ? both[2 * n + 1] : both[2 * n];
    }
  }

  // The axes of N adjacent columns, two bits each: the first is `pair`'s, every Step columns comes the next pair.
  template <int N, int Step = 1>
  __device__ __forceinline__ uint32_t axes_of(int pair) const {
    uint32_t axes = 0;
    if constexpr (!Plain) {
      if (!sections) return 0;
#pragma unroll
      for (int n = 0; n < N; n += Step)
        axes |= uint32_t(axis_of(pair + n / Step) * (Step == 1 ? 1 : 5)) << 2 * n;
    }
    return axes;
  }
  // N adjacent columns.
  template <class T16, int N>
  __device__ __forceinline__ void read(const void* table, const TableStrides& at, int64_t b, int64_t t,
                                       int column, uint32_t axes, float (&v)[N]) const {
    if constexpr (!Plain) {
      constexpr uint32_t kEach = 0x55555555u >> (32 - 2 * N);
      if (axes != (axes & 3u) * kEach) {
#pragma unroll 1
        for (int axis = 0; axis < 3; ++axis) {
          uint32_t other = axes ^ uint32_t(axis) * kEach;
          if (((other | other >> 1) & kEach) == kEach) continue;
          float found[N];
          read_axis<T16, N>(table, at, axis, b, t, column, found);
#pragma unroll
          for (int n = 0; n < N; ++n)
            if ((axes >> 2 * n & 3u) == uint32_t(axis)) v[n] = found[n];
        }
        return;
      }
    }
    read_axis<T16, N>(table, at, int(axes & 3u), b, t, column, v);
  }

  // Rotated columns [column, column + N) where x and y have the pairs of the tables, so that
  // y = rope_second(partner, x, c, s).
  template <class T16, int N>
  __device__ __forceinline__ void columns(int64_t b, int64_t t, int column, float (&c)[N],
                                          float (&s)[N]) const {
    if (N == 1 || halves) {
      bool second = halves ? column >= half : column % 2 == 1;
      int pair = halves ? column - (second ? half : 0) : column / 2;
      int partner = halves ? (second ? pair : column + half) : column ^ 1;
      const uint32_t axes = axes_of<N>(pair);
      read<T16, N>(cos, cos_at, b, t, shared ? pair : column, axes, c);
      read<T16, N>(sin, sin_at, b, t, shared ? pair : backward ? partner : column, axes, s);
#pragma unroll
      for (int n = 0; n < N; ++n) s[n] = second == backward ? -s[n] : s[n];
    } else if constexpr (N > 1) {
      float raw[N];
      if (shared) {
        float one[N / 2];
        const uint32_t axes = axes_of<N / 2>(column / 2);
        read<T16, N / 2>(cos, cos_at, b, t, column / 2, axes, one);
#pragma unroll
        for (int n = 0; n < N; ++n) c[n] = one[n / 2];
        read<T16, N / 2>(sin, sin_at, b, t, column / 2, axes, one);
#pragma unroll
        for (int n = 0; n < N; ++n) raw[n] = one[n / 2];
      } else {
        const uint32_t axes = axes_of<N, 2>(column / 2);
        read<T16, N>(cos, cos_at, b, t, column, axes, c);
        read<T16, N>(sin, sin_at, b, t, column, axes, raw);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float own = backward ? raw[n ^ 1] : raw[n];
        s[n] = (n % 2 == 1) == backward ? -own : own;
      }
    }
  }

  // Pairs [pair, pair + N), as rope_first and rope_second take them.
  template <class T16, int N>
  __device__ __forceinline__ void pairs(int64_t b, int64_t t, int pair, float (&c1)[N], float (&c2)[N],
                                        float (&s1)[N], float (&s2)[N]) const {
    const uint32_t axes = shared || halves ? axes_of<N>(pair) : axes_of<2 * N, 2>(pair);
    auto both = [&](const void* table, const TableStrides& at, float (&first)[N], float (&second)[N]) {
      if (shared) {
        read<T16, N>(table, at, b, t, pair, axes, first);
#pragma unroll
        for (int n = 0; n < N; ++n) second[n] = first[n];
      } else if (halves) {
        read<T16, N>(table, at, b, t, pair, axes, first);
        read<T16, N>(table, at, b, t, half + pair, axes, second);
      } else {
        float v[2 * N];
        read<T16, 2 * N>(table, at, b, t, 2 * pair, axes, v);
#pragma unroll
        for (int n = 0; n < N; ++n) first[n] = v[2 * n], second[n] = v[2 * n + 1];
      }
    };
    both(cos, cos_at, c1, c2);
    both(sin, sin_at, s1, s2);
    if (!backward) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float first = s1[n];
      s1[n] = -s2[n], s2[n] = -first;
    }
  }
};

// --- heads ---------------------------------------------------------------------------------------------------------

// Rows of q or of k, taken by units: a unit is up to `held` heads (group, group + groups, ...) of one token.
struct Part : HeadsFromTo {
  int groups;
  int64_t units;

  Part(const RopeHeads& x, const RopeHeads& y, int held)
      : HeadsFromTo(x, y),
        groups(int(ceil_div(x.heads, held))),
        units(x.empty() ? 0 : x.batch * x.tokens * groups) {}
};

struct Shape {
  int64_t tokens;
  int cols, start, rotated;
  bool
      tokens_inside;  // in memory tokens lie inside heads: neighbouring units take neighbouring tokens, else heads

  // x: q, or k where there is no q
  Shape(const Rope& a, const RopeHeads& x)
      : tokens(x.tokens),
        cols(int(x.cols)),
        start(int(a.start(x))),
        rotated(int(a.rotated())),
        tokens_inside(x.token_stride < x.head_stride) {}
};

struct Unit {
  int64_t b, t;
  int group;

  __device__ __forceinline__ Unit(const Shape& shape, const Part& part, uint32_t unit) {
    uint32_t inner = shape.tokens_inside ? uint32_t(shape.tokens) : part.groups;
    uint32_t middle = shape.tokens_inside ? part.groups : uint32_t(shape.tokens);
    uint32_t outer = unit / inner, i = unit - outer * inner, batch = outer / middle,
             m = outer - batch * middle;
    b = batch;
    t = shape.tokens_inside ? i : m;
    group = shape.tokens_inside ? m : i;
  }
};

template <class X>
__device__ __forceinline__ const X* x_of(const Part& p, const Unit& u, int head) {
  return static_cast<const X*>(p.x) + u.b * p.x_batch + u.t * p.x_token + head * p.x_head;
}
template <class Y>
__device__ __forceinline__ Y* y_of(const Part& p, const Unit& u, int head) {
  return static_cast<Y*>(p.y) + u.b * p.y_batch + u.t * p.y_token + head * p.y_head;
}

// Where a thread's packs of x and y lie in the rows of its unit.
template <class X, class Y>
struct Rows {
  const X* x;
  Y* y;
  int64_t x_step, y_step;
  int head, groups, heads;  // none are left where the thread has no pack

  __device__ __forceinline__ Rows(const Part& p, const Unit& u, int column, bool live)
      : x(x_of<X>(p, u, u.group) + column),
        y(y_of<Y>(p, u, u.group) + column),
        x_step(p.groups * p.x_head),
        y_step(p.groups * p.y_head),
        head(u.group),
        groups(p.groups),
        heads(live ? p.heads : 0) {}
  __device__ __forceinline__ bool has(int i) const { return head + i * groups < heads; }
};

// The lanes of a warp that share a row: a power of two, one pack each, some idle where the row's packs are not.
struct Lanes {
  int width, log;

  explicit Lanes(int packs) : width(1), log(0) {
    while (width < packs) width *= 2, ++log;
  }
};

// The pack of lane `from`, bit for bit.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> exchange(const Pack<T, N>& x, int from) {
  Pack<T, N> r;
#pragma unroll
  for (int i = 0; i < int(sizeof(x) / 4); ++i)
    reinterpret_cast<uint32_t*>(&r)[i] =
        __shfl_sync(0xffffffffu, reinterpret_cast<const uint32_t*>(&x)[i], from);
  return r;
}

// A thread's place in its row.
struct Place {
  int column;   // of the row
  bool inside;  // the row has such a pack
  bool turned;  // and it is rotated
  int rotated;  // column among the rotated ones
  int partner;  // the lane that holds the partners of its columns (halves)

  __device__ __forceinline__ Place(const Shape& shape, int width) {
    int lane = threadIdx.x % 32, in_row = lane & (width - 1), half = shape.rotated / 2;
    column = in_row * kPack;
    inside = column < shape.cols;
    rotated = column - shape.start;
    turned = inside && rotated >= 0 && rotated < shape.rotated;
    partner = !turned ? lane : lane + (rotated < half ? half : -half) / kPack;
  }
};

// --- what packs need -----------------------------------------------------------------------------------------------

// Rows, tables and their parts begin and end at packs of 16 bytes.
inline bool packs_fit(const Rope& a, const RopeHeads& x) {
  bool halves = a.form.in == RopePairs::halves || a.form.out == RopePairs::halves;
  return x.cols % kPack == 0 && a.start(x) % kPack == 0 && a.rotated() % (halves ? 2 * kPack : kPack) == 0 &&
         heads_align(a.q) && heads_align(a.k) && heads_align(a.q_out) && heads_align(a.k_out) &&
         table_aligns(a.cos) &&
         (a.cos.col_stride == 2 || table_aligns(a.sin));  // complex: sin lies behind cos
}
// And a row has the lanes of one warp.
inline bool columns_fit(const Rope& a, const RopeHeads& x) {
  constexpr int64_t kMost = int64_t(1) << 31;
  return packs_fit(a, x) && a.form.in == a.form.out && x.cols <= 32 * kPack &&
         x.batch * x.tokens * (a.q.heads + a.k.heads) < kMost;
}

}  // namespace tigon::cuda::rope_kernels
