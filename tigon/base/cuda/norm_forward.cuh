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

#include <algorithm>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_packs.cuh"
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
  int sections = 1;
  float eps;
  int64_t span = 1;      // columns that share a parameter, if F::Spans
  float inverse = 0.0f;  // 1 / cols, made by norm_forward
  uint32_t zero = 0;     // for again()
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

// How a row lies. In packs: from its first column on, all rows and parameters on 16-byte boundaries. Anywhere: packs are those
// of the row that is written first; rows that lie differently, and parameters, are shifted on their way. What is before the
// first of its packs and behind the last goes element by element, each of them (fewer than 3 N) a thread's: the last whole pack
// too, so that the words of a row that lies differently end inside it.
template <bool Anywhere, int N, class Column>
struct Lie {
  static constexpr bool anywhere = Anywhere;
  Column cols;
  int head = 0;  // columns before the first pack

  template <class T>
  __device__ __forceinline__ Lie(const T* written, Column cols) : cols(cols) {
    if constexpr (Anywhere) {
      int lead = int(reinterpret_cast<uintptr_t>(written) % 16 / sizeof(T));
      head = int(min(cols, Column((N - lead) % N)));
    }
  }
  // Whether the pack at column c is there.
  __device__ __forceinline__ bool has(Column c) const { return Anywhere ? c + 2 * N <= cols : c < cols; }
  // The single column of a thread, or -1.
  __device__ __forceinline__ Column edge(int thread) const {
    if (thread < N) return thread < head ? thread : -1;
    Column packs = max(Column(0), (cols - head) / N - 1), c = head + packs * N + thread - N;
    return thread < 3 * N && c < cols ? c : -1;
  }
  template <class T>
  __device__ __forceinline__ Pack<T, N> load(bool wanted, const T* row, Column c) const {
    if constexpr (Anywhere)
      return load_shifted<T, N>(wanted && has(c), row + c);
    else
      return load_where<T, N>(wanted && has(c), row + c);
  }
  template <class T>
  __device__ __forceinline__ void store(T* row, Column c, const Pack<T, N>& pack) const {
    if constexpr (Anywhere)
      store_anywhere(row + c, pack);
    else if constexpr (sizeof(T) * N % 16 == 0)
      store_whole(row + c, pack);
    else
      cuda::store(row + c, pack);
  }
};

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

// One row, or section of one, and what is done to a pack of it; `c` counts columns of the section.
template <class F, class W, class Y, int N, bool Anywhere, class Column>
struct ForwardRow {
  using X = typename F::Element;
  using Inputs = Pack<X, N>[F::kIn];
  using Params = Pack<W, N>[F::kParams];
  const NormForward<F, W, Y>& p;
  int64_t row, before, statistic;
  bool live;
  Y* y;
  Lie<Anywhere, N, Column> lie;

  // `live`: the row is there, and (of a thread without a single column) the column.
  __device__ __forceinline__ ForwardRow(const NormForward<F, W, Y>& p, const Place& place, int64_t row,
                                        bool live = true)
      : p(p),
        row(row),
        before(int64_t(place.section) * p.cols),
        statistic(row * p.sections + place.section),
        live(live && row < p.rows),
        y(p.y + row * p.y_stride + before),
        lie(written(), Column(p.cols)) {}
  // What takes another row's place must lie as that one does: its packs may be read only by who writes them.
  __device__ __forceinline__ auto written() const {
    if constexpr (F::kKeeps)
      return kept();
    else
      return y;
  }
  __device__ __forceinline__ X* kept() const { return p.kept + row * p.kept_stride + before; }
  __device__ __forceinline__ const X* in(int k) const { return p.in[k] + row * p.in_stride[k] + before; }

  __device__ __forceinline__ void load(Column c, Inputs& packs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) packs[k] = lie.load(live, in(k), c);
  }
  __device__ __forceinline__ void load_params(Column c, Params& packs) const {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      const W* param = p.param[k];
      if constexpr (!kSpans<F>) {
        packs[k] = lie.load(param != nullptr, param + before, c);
      } else if constexpr (Anywhere) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (param && lie.has(c)) packs[k].v[j] = param[(before + c + j) / p.span];
      } else {
        if (param && lie.has(c)) packs[k] = filled<W, N>(widen(param[(before + c) / p.span]));
      }
    }
  }
  // kept = merge(in), which takes in[0]'s place.
  __device__ __forceinline__ void keep(Column c, Inputs& packs) const {
    if constexpr (F::kKeeps) {
      if (!live || !lie.has(c)) return;
      float merged[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float x[F::kIn];
        element(packs, j, x);
        merged[j] = p.f.merge(x);
      }
      packs[0].set(merged);
      lie.store(kept(), c, packs[0]);
    }
  }
  __device__ __forceinline__ void write(Column c, const Inputs& packs, Params& params, float mean,
                                        float rstd) const {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k)
      if (p.param[k] == nullptr) params[k] = filled<W, N>(p.absent[k]);
    float h[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float v = value<F, N>(p.f, packs, j);
      h[j] = (F::kCentred ? v - mean : v) * rstd;
    }
    if (p.f.round_h) round_all<X>(h);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[F::kIn], w[F::kParams];
      element(packs, j, x);
      element(params, j, w);
      h[j] = p.f.result(h[j], w, x);
    }
    Pack<Y, N> out;
    out.set(h);
    lie.store(y, c, out);
  }

  // Sum of squares about the mean, and, where there is one, the sum of what is left: the sum of a long row far from zero is
  // some ulp off, and this says by how much.
  template <int K>
  __device__ __forceinline__ void add_to_statistics(Column c, const Inputs& packs, float mean,
                                                    float (&sums)[K]) const {
    if (F::kCentred && !(live && lie.has(c))) return;  // a zero that is not there is off the mean
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float v = value<F, N>(p.f, packs, j);
      if constexpr (F::kCentred) {
        v -= mean;
        sums[1] += v;
      }
      sums[0] = fma(v, v, sums[0]);
    }
  }
  template <int K>
  __device__ __forceinline__ float finish_statistics(const float (&sums)[K], float& mean) const {
    float variance = sums[0] * p.inverse;
    if constexpr (F::kCentred) {
      float off = sums[1] * p.inverse;
      mean += off;
      variance = fma(-off, off, variance);
      if (variance < 0.0f) variance = 0.0f;
    }
    // Short rows feel every instruction of this: division and root by the book are 60.
    return sizeof(X) == 2 ? rsqrtf(variance + p.eps) : 1.0f / sqrtf(variance + p.eps);
  }
  __device__ __forceinline__ void save_statistics(float mean, float rstd) const {
    p.rstd[statistic] = rstd;
    if constexpr (F::kCentred) p.mean[statistic] = mean;
  }
};

// A block a group of rows. Anywhere: shifted parameters are dear, so a block goes on to rows that lie as its first one does; the
// host's grid is such that these are a step apart.
template <class F, class W, class Y, int N, class Shape, bool Anywhere>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int kStatistics = F::kCentred ? 2 : 1;
  // Parameters are on their way during the reduction where they find room in registers.
  constexpr bool kEarly =
      !Anywhere && Shape::held <= 4 && Shape::held * N * sizeof(W) * F::kParams * F::kIn <= 64;
  __shared__ float slots[Anywhere ? 2 : 1][2][kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  using Tile = RowTile<X, N, Shape>;
  const Place place(p.sections, Shape::rows);
  const int64_t group = Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads;
  auto renew = [&](Pack<X, N>(&packs)[F::kIn]) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) packs[k] = again(packs[k], p.zero);
  };
  Pack<X, N> in[Shape::held][F::kIn];
  Pack<W, N> w[Shape::held][F::kParams];
  Pack<X, 1> one_in[F::kIn];
  Pack<W, 1> one_w[F::kParams];
  auto work = [&](int64_t first, float (&slots)[2][kStatistics* 32], bool has_params) {
    const ForwardRow<F, W, Y, N, Anywhere, int> row(p, place, first + group);
    auto column = [&](int i) { return Tile::column(i) + row.lie.head; };
    const int edge = Anywhere ? row.lie.edge(Tile::thread()) : -1;
    const ForwardRow<F, W, Y, 1, false, int> one(p, place, first + group, edge >= 0);
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) row.load(column(i), in[i]);
    if constexpr (Anywhere) one.load(edge, one_in);
    if (kEarly || (Anywhere && !has_params)) {
#pragma unroll
      for (int i = 0; i < Shape::held; ++i) row.load_params(column(i), w[i]);
      if (Anywhere && edge >= 0) one.load_params(edge, one_w);
    }
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) row.keep(column(i), in[i]);
    if constexpr (Anywhere) one.keep(edge, one_in);
    float mean = 0.0f, sums[kStatistics] = {};
    if constexpr (F::kCentred) {
#pragma unroll
      for (int i = 0; i < Shape::held; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) mean += value<F, N>(p.f, in[i], j);
      if constexpr (Anywhere) mean += value<F, 1>(p.f, one_in, 0);
      mean = reduce_row<Sum, Shape::threads>(mean, slots[0]) * p.inverse;
    }
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      if (F::kCentred) renew(in[i]);
      row.add_to_statistics(column(i), in[i], mean, sums);
    }
    if constexpr (Anywhere) one.add_to_statistics(edge, one_in, mean, sums);
    reduce_row<Sum, Shape::threads>(sums, slots[1]);
    if (!row.live) return;
    const float rstd = row.finish_statistics(sums, mean);
    if (Tile::thread() == 0) row.save_statistics(mean, rstd);
    if (Anywhere && edge >= 0) one.write(edge, one_in, one_w, mean, rstd);
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      if (!row.lie.has(column(i))) continue;
      if constexpr (!kEarly && !Anywhere) row.load_params(column(i), w[i]);
      renew(in[i]);
      if constexpr (Anywhere) {
#pragma unroll
        for (int k = 0; k < F::kParams; ++k) w[i][k] = again(w[i][k], p.zero);
      }
      row.write(column(i), in[i], w[i], mean, rstd);
    }
  };
  if constexpr (Anywhere) {
    const int64_t step = int64_t(gridDim.x / unsigned(p.sections)) * Shape::rows;
    int parity = 0;
    for (int64_t first = place.first; first < p.rows; first += step, parity ^= 1)
      work(first, slots[parity], first != place.first);
  } else {
    work(place.first, slots[0], false);
  }
}

constexpr int kLoopThreads = 1024;

// Rows too long for registers: a sweep for each statistic and one that writes, all but the first out of L2.
template <class F, class W, class Y, int N, bool Anywhere>
__global__ __launch_bounds__(kLoopThreads) void forward_looped_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int kStatistics = F::kCentred ? 2 : 1;
  __shared__ float slots[2][kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, 1);
  const ForwardRow<F, W, Y, N, Anywhere, int64_t> row(p, place, place.first);
  const int64_t edge = Anywhere ? row.lie.edge(threadIdx.x) : -1;
  const ForwardRow<F, W, Y, 1, false, int64_t> one(p, place, place.first, edge >= 0);
  // fn(row, or what of it is single, column, inputs)
  auto sweep = [&](bool first, auto&& fn) {
    auto visit = [&]<int M>(const auto& part, int64_t c, std::integral_constant<int, M>) {
      Pack<X, M> in[F::kIn] = {};
      if (F::kKeeps && !first) {
        const X* kept = part.kept();
        in[0] = part.lie.load(part.live, kept, c);
      } else {
        part.load(c, in);
        part.keep(c, in);
      }
      fn(part, c, in);
    };
    for (int64_t c = int64_t(threadIdx.x) * N + row.lie.head; row.lie.has(c); c += int64_t(kLoopThreads) * N)
      visit(row, c, std::integral_constant<int, N>{});
    if (Anywhere && edge >= 0) visit(one, edge, std::integral_constant<int, 1>{});
  };
  float mean = 0.0f, sums[kStatistics] = {};
  if constexpr (F::kCentred) {
    sweep(true, [&]<int M>(const auto&, int64_t, const Pack<X, M>(&in)[F::kIn]) {
#pragma unroll
      for (int j = 0; j < M; ++j) mean += value<F, M>(p.f, in, j);
    });
    mean = reduce_row<Sum, kLoopThreads>(mean, slots[0]) * p.inverse;
  }
  sweep(!F::kCentred,
        [&](const auto& part, int64_t c, const auto& in) { part.add_to_statistics(c, in, mean, sums); });
  reduce_row<Sum, kLoopThreads>(sums, slots[1]);
  const float rstd = row.finish_statistics(sums, mean);
  if (threadIdx.x == 0) row.save_statistics(mean, rstd);
  sweep(false, [&]<int M>(const auto& part, int64_t c, const Pack<X, M>(&in)[F::kIn]) {
    Pack<W, M> w[F::kParams];
    part.load_params(c, w);
    part.write(c, in, w, mean, rstd);
  });
}

// Rows held in registers, by the length of the row in packs. Short rows take few threads: what is done once a row costs as much
// as its elements. Longer ones leave room for other blocks. Shifted ones hold as many words again on their way.
template <int Rows, bool Anywhere>
struct ForwardLadder {
  using Short = RowShapes<RowShape<4, 4>, RowShape<16, 2>, RowShape<32, 4>>;
  using Shapes =
      std::conditional_t<Rows == 1,
                         typename Short::template with<RowBlock<4, 224, 5>>::template with<RowBlock<8, 1024>>,
                         typename Short::template with<RowBlock<4, 1024>>>;
};
template <int Rows>
struct ForwardLadder<Rows, true> {
  using Shapes = RowShapes<RowShape<32, 4>, RowBlock<4 / Rows, 384, 2>>;
};

template <bool Anywhere, int N, class F, class W, class Y>
void run_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  const int64_t packs = p.cols / N;
  bool held = ForwardLadder<F::kIn, Anywhere>::Shapes::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    const int threads = block_threads<Shape>(packs);
    int64_t parts = ceil_div(p.rows, Shape::rows);
    const int64_t enough = int64_t(device_facts().sms) * (1024 / threads) / p.sections;
    if (Anywhere && parts > enough) parts = std::max<int64_t>(N, enough / N * N);
    launch(op, ctx, forward_kernel<F, W, Y, N, Shape, Anywhere>,
           {.blocks = parts * p.sections, .threads = threads, .early = true}, p);
  });
  if (!held)
    launch(op, ctx, forward_looped_kernel<F, W, Y, N, Anywhere>,
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
void norm_forward(const char* op, Context& ctx, NormForward<F, W, Y> p) {
  using X = typename F::Element;
  p.inverse = 1.0f / float(p.cols);
  using norm_detail::aligned;
  constexpr int kPack = 16 / sizeof(X);
  bool packs =
      packs_align(p.y, p.y_stride, p.cols, sizeof(Y)) && p.y_stride % kPack == 0 && p.cols % kPack == 0;
  for (int k = 0; k < F::kIn; ++k) packs = packs && packs_align(p.in[k], p.in_stride[k], p.cols, sizeof(X));
  for (int k = 0; k < F::kParams; ++k)
    packs = packs && (norm_detail::kSpans<F> ? p.span % kPack == 0 : aligned(p.param[k]));
  if (F::kKeeps) packs = packs && packs_align(p.kept, p.kept_stride, p.cols, sizeof(X));
  packs ? norm_detail::run_forward<false, kPack>(op, ctx, p)
        : norm_detail::run_forward<true, kPack>(op, ctx, p);
}

}  // namespace tigon::cuda
