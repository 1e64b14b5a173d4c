// Forward of the norm family: rows normalised by their own statistics, on the row engine (rows.cuh).
//
// The op gives a formula F (X is the storage type of rows):
//   struct Formula {
//     using Element = X;
//     static constexpr int kIn;          // rows read; the first is what is normalised unless value() says otherwise
//     static constexpr int kParams;      // vectors by column: weight, bias
//     static constexpr bool kCentred;    // the mean is subtracted
//     static constexpr bool kKeeps;      // merge(in), rounded, takes the place of in[0] and is written to `kept`
//     using Spans = void;                // there: `span` adjacent columns share a parameter (channels)
//     bool round_h;                      // the normalised value is rounded to X
//     float value(const float (&in)[kIn]) const;
//     float result(float h, const float (&param)[kParams], const float (&in)[kIn]) const;
//   };
// y = result((value - mean) * rstd), rstd = (mean((value - mean)^2) + eps)^-1/2. The variance is that of the values in
// registers about their mean, not a difference of two large sums.
//
// A row may consist of `sections` of `cols` columns that are normalised one by one (grouped norms); parameters run over all.
// Bytes: every row read once and written once (rows longer than the ladder: read again, from L2).
#pragma once

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {

template <class F, class W, class Y>
struct NormForward {
  using X = typename F::Element;
  F f;
  const X* in[F::kIn];
  int64_t in_stride[F::kIn];
  const W* param[F::kParams];  // null: as if absent[k] everywhere
  float absent[F::kParams];
  X* kept;
  Y* y;
  int64_t kept_stride, y_stride;
  float *rstd, *mean;  // by row and section; mean if F::kCentred
  int64_t rows, cols;
  int sections;
  float eps;
  int64_t span = 1;  // columns that share a parameter, if F::Spans
};

namespace norm_detail {

// Where the threads of a block stand.
struct Place {
  int section;
  int64_t first;  // row of the block
  __device__ Place(int sections, int rows) {
    section = sections == 1 ? 0 : int(blockIdx.x % unsigned(sections));
    first = int64_t(sections == 1 ? blockIdx.x : blockIdx.x / unsigned(sections)) * rows;
  }
};

template <class W, int N>
__device__ __forceinline__ Pack<W, N> filled(float x) {
  Pack<W, N> w;
#pragma unroll
  for (int j = 0; j < N; ++j) w.set(j, x);
  return w;
}

template <class F>
constexpr bool kSpans = requires { typename F::Spans; };

template <int N, class F, class W, class Y>
__device__ __forceinline__ Pack<W, N> parameters(const NormForward<F, W, Y>& p, const W* param,
                                                 int64_t column) {
  if constexpr (kSpans<F>)
    return filled<W, N>(widen(param[column / p.span]));
  else
    return load_now<W, N>(param + column);
}

// Element j of several packs.
template <class T, int N, int K>
__device__ __forceinline__ void element(const Pack<T, N> (&packs)[K], int j, float (&x)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = packs[k][j];
}

template <class F, int N>
__device__ __forceinline__ float value(const F& f, const Pack<typename F::Element, N> (&in)[F::kIn], int j) {
  float x[F::kIn];
  element(in, j, x);
  return f.value(x);
}

// kept = merge(in), which takes in[0]'s place.
template <class F, class W, class Y, int N>
__device__ __forceinline__ void keep(const NormForward<F, W, Y>& p,
                                     Pack<typename F::Element, N> (&in)[F::kIn], int64_t row,
                                     int64_t column) {
  if constexpr (F::kKeeps) {
    float merged[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[F::kIn];
      element(in, j, x);
      merged[j] = p.f.merge(x);
    }
    in[0].set(merged);
    store(p.kept + row * p.kept_stride + column, in[0]);
  }
}

template <class F, class W, class Y, int N>
__device__ __forceinline__ void write(const NormForward<F, W, Y>& p, Y* y,
                                      const Pack<typename F::Element, N> (&in)[F::kIn],
                                      Pack<W, N> (&param)[F::kParams], float mean, float rstd) {
#pragma unroll
  for (int k = 0; k < F::kParams; ++k)
    if (p.param[k] == nullptr) param[k] = filled<W, N>(p.absent[k]);
  float h[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float v = value<F, N>(p.f, in, j);
    h[j] = (F::kCentred ? v - mean : v) * rstd;
  }
  if (p.f.round_h) round_all<typename F::Element>(h);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float x[F::kIn], w[F::kParams];
    element(in, j, x);
    element(param, j, w);
    h[j] = p.f.result(h[j], w, x);
  }
  Pack<Y, N> out;
  out.set(h);
  store(y, out);
}

// Sum of squares about the mean, and, where there is one, the sum of what is left: the sum of a long row far from zero is some
// ulp off, and this says by how much.
template <class F, int K>
__device__ __forceinline__ void add_to_statistics(float v, float mean, float (&sums)[K]) {
  if constexpr (F::kCentred) {
    v -= mean;
    sums[1] += v;
  }
  sums[0] = fma(v, v, sums[0]);
}
template <class F, class W, class Y, int K>
__device__ __forceinline__ float finish_statistics(const NormForward<F, W, Y>& p, const float (&sums)[K],
                                                   float& mean) {
  float variance = sums[0] / float(p.cols);
  if constexpr (F::kCentred) {
    float off = sums[1] / float(p.cols);
    mean += off;
    variance = fma(-off, off, variance);
    if (variance < 0.0f) variance = 0.0f;
  }
  return 1.0f / sqrtf(variance + p.eps);
}

template <class F, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block) void forward_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int kStatistics = F::kCentred ? 2 : 1;
  // Parameters are on their way during the reduction where they find room in registers.
  constexpr bool kEarly = Shape::held <= 4 && (Shape::held * N * sizeof(W) * F::kParams * F::kIn <= 64 ||
                                               Shape::block * F::kParams * F::kIn <= 512);
  __shared__ float slots[2][kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, Shape::rows);
  const int64_t row = place.first + threadIdx.x / Shape::threads, before = int64_t(place.section) * p.cols;
  const bool live = row < p.rows;
  const int cols = int(p.cols);
  auto column = [](int i) { return RowTile<X, N, Shape>::column(i); };
  Pack<X, N> in[Shape::held][F::kIn];
#pragma unroll
  for (int i = 0; i < Shape::held; ++i)
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) {
      if (live && column(i) < cols)
        in[i][k] = load_stream<X, N>(p.in[k] + row * p.in_stride[k] + before + column(i));
      else
        in[i][k] = Pack<X, N>{};
    }
  Pack<W, N> w[Shape::held][F::kParams];
  auto load_params = [&](int i) {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k)
      if (p.param[k] && column(i) < cols) w[i][k] = parameters<N>(p, p.param[k], before + column(i));
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) load_params(i);
  }
  if constexpr (F::kKeeps) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i)
      if (live && column(i) < cols) keep(p, in[i], row, before + column(i));
  }
  float mean = 0.0f, sums[kStatistics] = {};
  if constexpr (F::kCentred) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) mean += value<F, N>(p.f, in[i], j);
    mean = reduce_row<Sum, Shape::threads>(mean, slots[0]) / float(p.cols);
  }
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    if (F::kCentred && column(i) >= cols) continue;  // a zero that is not there is off the mean
#pragma unroll
    for (int j = 0; j < N; ++j) add_to_statistics<F>(value<F, N>(p.f, in[i], j), mean, sums);
  }
  reduce_row<Sum, Shape::threads>(sums, slots[1]);
  if (!live) return;
  float rstd = finish_statistics(p, sums, mean);
  if (RowTile<X, N, Shape>::thread() == 0) {
    p.rstd[row * p.sections + place.section] = rstd;
    if constexpr (F::kCentred) p.mean[row * p.sections + place.section] = mean;
  }
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    if constexpr (!kEarly) load_params(i);
    if (column(i) < cols)
      write<F, W, Y, N>(p, p.y + row * p.y_stride + before + column(i), in[i], w[i], mean, rstd);
  }
}

constexpr int kLoopThreads = 1024;

// Rows too long for registers: a sweep for each statistic and one that writes, all but the first out of L2.
template <class F, class W, class Y, int N>
__global__ __launch_bounds__(kLoopThreads) void forward_looped_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int kStatistics = F::kCentred ? 2 : 1;
  __shared__ float slots[2][kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, 1);
  const int64_t row = place.first, before = int64_t(place.section) * p.cols;
  auto sweep = [&](bool first, auto&& fn) {
    for (int64_t c = int64_t(threadIdx.x) * N; c < p.cols; c += int64_t(kLoopThreads) * N) {
      Pack<X, N> in[F::kIn];
      if (F::kKeeps && !first) {
        in[0] = load_stream<X, N>(p.kept + row * p.kept_stride + before + c);
      } else {
#pragma unroll
        for (int k = 0; k < F::kIn; ++k)
          in[k] = load_stream<X, N>(p.in[k] + row * p.in_stride[k] + before + c);
        keep(p, in, row, before + c);
      }
      fn(in, c);
    }
  };
  float mean = 0.0f, sums[kStatistics] = {};
  if constexpr (F::kCentred) {
    sweep(true, [&](const Pack<X, N>(&in)[F::kIn], int64_t) {
#pragma unroll
      for (int j = 0; j < N; ++j) mean += value<F, N>(p.f, in, j);
    });
    mean = reduce_row<Sum, kLoopThreads>(mean, slots[0]) / float(p.cols);
  }
  sweep(!F::kCentred, [&](const Pack<X, N>(&in)[F::kIn], int64_t) {
#pragma unroll
    for (int j = 0; j < N; ++j) add_to_statistics<F>(value<F, N>(p.f, in, j), mean, sums);
  });
  reduce_row<Sum, kLoopThreads>(sums, slots[1]);
  float rstd = finish_statistics(p, sums, mean);
  if (threadIdx.x == 0) {
    p.rstd[row * p.sections + place.section] = rstd;
    if constexpr (F::kCentred) p.mean[row * p.sections + place.section] = mean;
  }
  sweep(false, [&](const Pack<X, N>(&in)[F::kIn], int64_t c) {
    Pack<W, N> w[F::kParams];
#pragma unroll
    for (int k = 0; k < F::kParams; ++k)
      if (p.param[k]) w[k] = parameters<N>(p, p.param[k], before + c);
    write<F, W, Y, N>(p, p.y + row * p.y_stride + before + c, in, w, mean, rstd);
  });
}

// Rows held in registers, by the length of the row in packs. Single elements (N = 1) are the exception: fewer shapes. Two rows
// read leave no room for the longest, and need fewer threads for the same bytes in flight.
template <int N, int Rows>
struct ForwardLadder {
  using Shapes = RowShapes<RowShape<16, 1>, RowShape<32, 1>, RowShape<32, 2>, RowShape<128, 2>,
                           RowShape<128, 4>, RowShape<256, 4>, RowShape<512, 4>, RowShape<1024, 4>>;
};
template <int N>
struct ForwardLadder<N, 1> {
  using Shapes = RowShapes<RowShape<8, 1>, RowShape<16, 1>, RowShape<32, 1>, RowShape<32, 2>, RowShape<32, 4>,
                           RowShape<128, 2>, RowShape<128, 4>, RowShape<256, 4>, RowShape<512, 4>,
                           RowShape<1024, 4>, RowShape<1024, 8>>;
};
template <int Rows>
struct ForwardLadder<1, Rows> {
  using Shapes = RowShapes<RowShape<32, 4>, RowShape<256, 4>, RowShape<1024, 4>>;
};
template <>
struct ForwardLadder<1, 1> {
  using Shapes = RowShapes<RowShape<32, 4>, RowShape<256, 4>, RowShape<1024, 8>>;
};

template <int N, class F, class W, class Y>
void run_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  bool held = ForwardLadder<N, F::kIn>::Shapes::pick(p.cols / N, [&](auto shape) {
    using Shape = decltype(shape);
    launch(op, ctx, forward_kernel<F, W, Y, N, Shape>,
           {.blocks = ceil_div(p.rows, Shape::rows) * p.sections, .threads = Shape::block, .early = true}, p);
  });
  if (!held)
    launch(op, ctx, forward_looped_kernel<F, W, Y, N>,
           {.blocks = p.rows * p.sections, .threads = kLoopThreads, .early = true}, p);
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace norm_detail

// fn(x type, weight type): the weight's is x's or float.
template <class Fn>
void with_weight_types(const char* op, DType x, const Vector& weight, Fn&& fn) {
  dispatch_float(op, "x", x, [&](auto t) {
    using X = typename DeviceType<typename decltype(t)::type>::type;
    if (!weight || weight.dtype == x) return fn(Type<X>{}, Type<X>{});
    fn(Type<X>{}, Type<float>{});
  });
}
// fn(x type, weight type, y type): y is x's type, or float where a float weight made it so.
template <class Fn>
void with_result_types(const char* op, DType x, const Vector& weight, DType y, Fn&& fn) {
  with_weight_types(op, x, weight, [&](auto tx, auto tw) {
    if (y == x) return fn(tx, tw, tx);
    fn(tx, Type<float>{}, Type<float>{});
  });
}

template <class F, class W, class Y>
void norm_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  using X = typename F::Element;
  using norm_detail::aligned;
  constexpr int kPack = 16 / sizeof(X);
  bool packs =
      packs_align(p.y, p.y_stride, p.cols, sizeof(Y)) && p.y_stride % kPack == 0 && p.cols % kPack == 0;
  for (int k = 0; k < F::kIn; ++k) packs = packs && packs_align(p.in[k], p.in_stride[k], p.cols, sizeof(X));
  for (int k = 0; k < F::kParams; ++k)
    packs = packs && (norm_detail::kSpans<F> ? p.span % kPack == 0 : aligned(p.param[k]));
  if (F::kKeeps) packs = packs && packs_align(p.kept, p.kept_stride, p.cols, sizeof(X));
  packs ? norm_detail::run_forward<kPack>(op, ctx, p) : norm_detail::run_forward<1>(op, ctx, p);
}

}  // namespace tigon::cuda
