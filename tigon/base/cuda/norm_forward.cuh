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
#include "tigon/base/cuda/staged_rows.cuh"
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
template <class F, class W, class Y, int N, Lying How, class Column>
struct ForwardRow {
  using X = typename F::Element;
  using Inputs = Pack<X, N>[F::kIn];
  using Params = Pack<W, N>[F::kParams];
  const NormForward<F, W, Y>& p;
  int64_t row, before, statistic;
  bool live, params_read_on;
  Y* y;
  Lie<How, N, Column> lie;

  __device__ __forceinline__ ForwardRow(const NormForward<F, W, Y>& p, const Place& place, int64_t row)
      : p(p),
        row(row),
        before(int64_t(place.section) * p.cols),
        statistic(row * p.sections + place.section),
        live(row < p.rows),
        params_read_on(place.section + 1 < p.sections && p.cols >= 16),
        y(p.y + row * p.y_stride + before),
        lie(written(), Column(p.cols)) {}
  // As another row of which `lie` is known.
  __device__ __forceinline__ ForwardRow(const NormForward<F, W, Y>& p, const Place& place, int64_t row,
                                        const Lie<How, N, Column>& lie)
      : p(p),
        row(row),
        before(int64_t(place.section) * p.cols),
        statistic(row * p.sections + place.section),
        live(row < p.rows),
        params_read_on(false),
        y(p.y + row * p.y_stride + before),
        lie(lie) {}
  // What takes another row's place must lie as that one does: its packs may be read only by who writes them.
  __device__ __forceinline__ auto written() const {
    if constexpr (F::kKeeps)
      return kept();
    else
      return y;
  }
  __device__ __forceinline__ X* kept() const { return p.kept + row * p.kept_stride + before; }
  __device__ __forceinline__ const X* in(int k) const { return p.in[k] + row * p.in_stride[k] + before; }
  __device__ __forceinline__ bool read_on(int k) const { return reads_on(row, p.rows, p.in_stride[k]); }

  __device__ __forceinline__ void load(Column c, Inputs& packs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) packs[k] = lie.load(live, in(k), c, read_on(k));
  }
  __device__ __forceinline__ void finish(Column c, Inputs& packs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) lie.finish(live, in(k), c, read_on(k), packs[k]);
  }
  __device__ __forceinline__ void load_params(Column c, Params& packs) const {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      const W* param = p.param[k];
      if constexpr (!kSpans<F>) {
        packs[k] = lie.load_vector(param ? param + before : nullptr, c, params_read_on);
      } else if constexpr (!lie.packs) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (param && lie.in_row(c + j)) packs[k].v[j] = param[(before + c + j) / p.span];
      } else {
        if (param && lie.has(c)) packs[k] = filled<W, N>(widen(param[(before + c) / p.span]));
      }
    }
  }
  __device__ __forceinline__ void finish_params(Column c, Params& packs) const {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) {
      if (p.param[k] == nullptr)
        packs[k] = filled<W, N>(p.absent[k]);
      else if constexpr (!kSpans<F>)
        lie.finish_vector(p.param[k] + before, c, params_read_on, packs[k]);
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
  __device__ __forceinline__ void write(Column c, const Inputs& packs, const Params& params, float mean,
                                        float rstd) const {
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
    auto add = [&](auto whole) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float v = value<F, N>(p.f, packs, j);
        if constexpr (F::kCentred) {
          v = whole || lie.in_row(c + j) ? v - mean : 0.0f;
          sums[1] += v;
        }
        sums[0] = fma(v, v, sums[0]);
      }
    };
    if (!F::kCentred || lie.whole(c))
      add(std::true_type{});
    else
      add(std::false_type{});
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
  __device__ __forceinline__ void renew(Inputs& packs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) packs[k] = again(packs[k], p.zero);
  }
  // Of a row in registers, which all of its threads hold; what it keeps is written.
  template <class Shape>
  __device__ __forceinline__ void statistics(Inputs (&in)[Shape::held],
                                             float (&slots)[2][32 * (1 + F::kCentred)], float& mean,
                                             float& rstd) const {
    auto column = [&](int i) { return RowTile<Shape, N>::column(i) + lie.head; };
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) keep(column(i), in[i]);
    float sums[1 + F::kCentred] = {};
    mean = 0.0f;
    if constexpr (F::kCentred) {
#pragma unroll
      for (int i = 0; i < Shape::held; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) mean += value<F, N>(p.f, in[i], j);
      mean = reduce_row<Sum, Shape::threads>(mean, slots[0]) * p.inverse;
    }
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      if (F::kCentred) renew(in[i]);
      add_to_statistics(column(i), in[i], mean, sums);
    }
    reduce_row<Sum, Shape::threads>(sums, slots[1]);
    rstd = finish_statistics(sums, mean);
  }
  __device__ __forceinline__ void save_statistics(float mean, float rstd) const {
    p.rstd[statistic] = rstd;
    if constexpr (F::kCentred) p.mean[statistic] = mean;
  }
};

// A block a group of rows that lie in packs.
template <class F, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int kStatistics = F::kCentred ? 2 : 1;
  // Parameters are on their way during the reduction where they find room in registers.
  constexpr bool kEarly = Shape::held <= 4 && Shape::held * N * sizeof(W) * F::kParams * F::kIn <= 64;
  __shared__ float slots[2][kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  using Tile = RowTile<Shape, N>;
  const Place place(p.sections, Shape::rows);
  const int64_t group = Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads;
  const ForwardRow<F, W, Y, N, Lying::packs, int> row(p, place, place.first + group);
  Pack<X, N> in[Shape::held][F::kIn];
  Pack<W, N> w[Shape::held][F::kParams];
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) row.load(Tile::column(i), in[i]);
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) row.load_params(Tile::column(i), w[i]);
  }
  float mean, rstd;
  row.template statistics<Shape>(in, slots, mean, rstd);
  if (!row.live) return;
  if (Tile::thread() == 0) row.save_statistics(mean, rstd);
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    if (!row.lie.has(Tile::column(i))) continue;
    if constexpr (!kEarly) row.load_params(Tile::column(i), w[i]);
    row.finish_params(Tile::column(i), w[i]);
    row.renew(in[i]);
    row.write(Tile::column(i), in[i], w[i], mean, rstd);
  }
}

// Persistent blocks for rows that lie otherwise: they come through shared memory, and so do the shifted parameters, which are the
// same for all rows of a thread: the host's `step` brings it to rows that are written as its first one is.
template <class F, class W, class Y, int N, class Shape, Lying How>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_staged_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  using Tile = RowTile<Shape, N>;
  using Staged = StagedRows<X, N, Shape, How>;
  constexpr int kStatistics = F::kCentred ? 2 : 1;
  __shared__ float slots[2][2][kStatistics * 32];
  extern __shared__ __align__(16) unsigned char shared[];  // parameters, then stages
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, Shape::rows);
  const int group = Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads, threads = blockDim.x / Shape::rows;
  const int64_t step = int64_t(gridDim.x / unsigned(p.sections)) * Shape::rows, first = place.first + group;
  const ForwardRow<F, W, Y, N, How, int> first_row(p, place, first);
  auto param_slot = [&](int i, int k) {
    return reinterpret_cast<Pack<W, N>*>(shared) + (i * F::kParams + k) * blockDim.x + threadIdx.x;
  };
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    Pack<W, N> w[F::kParams];
    const int c = Tile::column(i) + first_row.lie.head;
    first_row.load_params(c, w);
    first_row.finish_params(c, w);
#pragma unroll
    for (int k = 0; k < F::kParams; ++k) *param_slot(i, k) = w[k];
  }
  constexpr int kPerStage = F::kIn * Shape::rows;
  auto rows_of = [&](int k) {
    uint4* words = reinterpret_cast<uint4*>(param_slot(Shape::held, 0) - threadIdx.x);
    return Staged(p.in[k] + first_row.before, first, step, p.rows, p.in_stride[k], int(p.cols),
                  -first_row.lie.head, words + (k * Shape::rows + group) * Staged::words(threads),
                  kPerStage * Staged::words(threads));
  };
  auto staged = [&]<size_t... K>(std::index_sequence<K...>) {
    return Several<Staged, F::kIn>{{rows_of(int(K))...}};
  }(std::make_index_sequence<F::kIn>{});
  auto start = [&](int stage, int64_t r) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) staged.of[k].copy(stage, r, true, word_of(p.in[0]));
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < Shape::stages - 1; ++s) start(s, first + s * step);
  int from = 0, to = Shape::stages - 1, parity = 0;
#pragma unroll 1
  for (int64_t base = place.first, r = first; base < p.rows; base += step, r += step, parity ^= 1) {
    const ForwardRow<F, W, Y, N, How, int> row(p, place, r, first_row.lie);
    start(to, r + (Shape::stages - 1) * step);
    copies_wait<Shape::stages - 1>();
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) staged.of[k].mend(from, r, Shape::stages, true);
    if constexpr (How == Lying::apart) sync_row<Shape>();
    Pack<X, N> in[Shape::held][F::kIn];
#pragma unroll
    for (int i = 0; i < Shape::held; ++i)
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) in[i][k] = staged.of[k].pack(from, i);
    float mean, rstd;
    row.template statistics<Shape>(in, slots[parity], mean, rstd);
    to = from;
    from = from + 1 == Shape::stages ? 0 : from + 1;
    if (!row.live) continue;
    if (Tile::thread() == 0) row.save_statistics(mean, rstd);
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      const int c = Tile::column(i) + row.lie.head;
      if (!row.lie.has(c)) continue;
      Pack<W, N> w[F::kParams];
#pragma unroll
      for (int k = 0; k < F::kParams; ++k) w[k] = *param_slot(i, k);
      row.renew(in[i]);
      row.write(c, in[i], w, mean, rstd);
    }
  }
  copies_wait<0>();
}

constexpr int kLoopThreads = 512;
// Blocks a multiprocessor, so that a few long rows are all under way; shifted words take registers.
constexpr int loop_blocks(Lying how) { return how == Lying::packs ? 3 : 2; }

// Rows too long for registers: a sweep for each statistic and one that writes, all but the first out of L2.
template <class F, class W, class Y, int N, Lying How>
__global__ __launch_bounds__(kLoopThreads, loop_blocks(How)) void forward_looped_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int kStatistics = F::kCentred ? 2 : 1;
  __shared__ float slots[2][kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, 1);
  const ForwardRow<F, W, Y, N, How, int64_t> row(p, place, place.first);
  // fn(column, inputs)
  auto sweep = [&](bool first, auto&& fn) {
    for (int64_t c = int64_t(threadIdx.x) * N + row.lie.head; row.lie.has(c);
         c += int64_t(kLoopThreads) * N) {
      Pack<X, N> in[F::kIn] = {};
      if (F::kKeeps && !first) {
        const X* kept = row.kept();
        in[0] = row.lie.load(true, kept, c, false);
        row.lie.finish(true, kept, c, false, in[0]);
      } else {
        row.load(c, in);
        row.finish(c, in);
        row.keep(c, in);
      }
      fn(c, in);
    }
  };
  float mean = 0.0f, sums[kStatistics] = {};
  if constexpr (F::kCentred) {
    sweep(true, [&](int64_t, const Pack<X, N>(&in)[F::kIn]) {
#pragma unroll
      for (int j = 0; j < N; ++j) mean += value<F, N>(p.f, in, j);
    });
    mean = reduce_row<Sum, kLoopThreads>(mean, slots[0]) * p.inverse;
  }
  sweep(!F::kCentred, [&](int64_t c, const auto& in) { row.add_to_statistics(c, in, mean, sums); });
  reduce_row<Sum, kLoopThreads>(sums, slots[1]);
  const float rstd = row.finish_statistics(sums, mean);
  if (threadIdx.x == 0) row.save_statistics(mean, rstd);
  sweep(false, [&](int64_t c, const Pack<X, N>(&in)[F::kIn]) {
    Pack<W, N> w[F::kParams];
    row.load_params(c, w);
    row.finish_params(c, w);
    row.write(c, in, w, mean, rstd);
  });
}

// Rows held in registers, by the length of the row in packs. Short rows take few threads: what is done once a row costs as much
// as its elements. Longer ones leave room for other blocks: few threads, and 8 packs each where two sums are waited for.
template <int Rows, bool Centred>
struct ForwardLadder {
  using Short = RowShapes<RowShape<4, 4>, RowShape<16, 2>, RowShape<32, 4>>;
  using Long = typename Short::template with<RowBlock<8, 1024>>;
  using Shapes =
      std::conditional_t<Rows != 1, typename Short::template with<RowBlock<4, 1024>>,
                         std::conditional_t<Centred, Long,
                                            typename Short::template with<RowBlock<4, 224, 5>>::template with<
                                                RowBlock<8, 1024>>>>;
};
// Rows that lie otherwise, 16384 x 4097 bf16: RMSNorm 86 % of a copy, LayerNorm 70; apart 80 and 60.
template <bool Centred>
using AlikeLadder = RowShapes<Staged<2, 32, 4, 4, 4>,
                              std::conditional_t<Centred, StagedBlock<3, 4, 256>, StagedBlock<2, 2, 512, 2>>,
                              StagedBlock<2, 4, 1024>>;
using ApartLadder = RowShapes<StagedBlock<2, 4, 1024>>;

template <int N, class F, class W, class Y>
bool run_held_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  const int64_t packs = p.cols / N;
  return ForwardLadder<F::kIn, F::kCentred>::Shapes::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    launch(op, ctx, forward_kernel<F, W, Y, N, Shape>,
           {.blocks = ceil_div(p.rows, Shape::rows) * p.sections,
            .threads = block_threads<Shape>(packs),
            .early = true},
           p);
  });
}
template <Lying How, int N, class Ladder, class F, class W, class Y>
bool run_staged_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  using X = typename F::Element;
  const int64_t packs = ceil_div(p.cols + N - 1, N);
  return Ladder::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    const int threads = block_threads<Shape>(packs);
    const size_t params = size_t(threads) * Shape::held * F::kParams * sizeof(Pack<W, N>);
    const size_t stages = size_t(Shape::stages) * F::kIn * Shape::rows * 16 *
                          StagedRows<X, N, Shape, How>::words(threads / Shape::rows);
    auto kernel = forward_staged_kernel<F, W, Y, N, Shape, How>;
    static std::atomic<int> known[33];
    const int64_t blocks =
        persistent_blocks<Shape>(op, kernel, threads, params + stages, p.rows, p.sections, N, known);
    if (blocks == 0) return false;
    launch(op, ctx, kernel,
           {.blocks = blocks * p.sections, .threads = threads, .shared = params + stages, .early = true}, p);
    return true;
  });
}
template <Lying How, int N, class F, class W, class Y>
void run_looped_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  launch(op, ctx, forward_looped_kernel<F, W, Y, N, How>,
         {.blocks = p.rows * p.sections, .threads = kLoopThreads, .early = true}, p);
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// How rows of X lie, and whether others lie so.
struct LieOf {
  int64_t lead, stride, rows;  // elements from a boundary to the first row
  template <class T>
  LieOf(const T* p, int64_t stride, int64_t rows)
      : lead(int64_t(reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T))), stride(stride), rows(rows) {}
  template <class T>
  bool alike(const T* p, int64_t other) const {
    constexpr int64_t kSize = sizeof(T);
    return (int64_t(reinterpret_cast<uintptr_t>(p)) - lead * kSize) % 16 == 0 &&
           (rows == 1 || (other - stride) * kSize % 16 == 0);
  }
};

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
  using namespace norm_detail;
  using X = typename F::Element;
  p.inverse = 1.0f / float(p.cols);
  constexpr int kPack = 16 / sizeof(X);
  bool packs =
      packs_align(p.y, p.y_stride, p.cols, sizeof(Y)) && p.y_stride % kPack == 0 && p.cols % kPack == 0;
  for (int k = 0; k < F::kIn; ++k) packs = packs && packs_align(p.in[k], p.in_stride[k], p.cols, sizeof(X));
  for (int k = 0; k < F::kParams; ++k)
    packs = packs && (kSpans<F> ? p.span % kPack == 0 : aligned(p.param[k]));
  if (F::kKeeps) packs = packs && packs_align(p.kept, p.kept_stride, p.cols, sizeof(X));
  if (packs) {
    if (!run_held_forward<kPack>(op, ctx, p)) run_looped_forward<Lying::packs, kPack>(op, ctx, p);
    return;
  }
  const LieOf written = F::kKeeps ? LieOf(p.kept, p.kept_stride, p.rows) : LieOf(p.y, p.y_stride, p.rows);
  bool alike = (F::kKeeps || sizeof(Y) == sizeof(X)) && written.alike(p.y, p.y_stride);
  for (int k = 0; k < F::kIn; ++k) alike = alike && written.alike(p.in[k], p.in_stride[k]);
  if (alike ? run_staged_forward<Lying::alike, kPack, AlikeLadder<F::kCentred>>(op, ctx, p)
            : run_staged_forward<Lying::apart, kPack, ApartLadder>(op, ctx, p))
    return;
  run_looped_forward<Lying::apart, kPack>(op, ctx, p);
}

}  // namespace tigon::cuda
