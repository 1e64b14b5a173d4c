// Forward of the norm family on the row engine (rows.cuh): the kernels, and which of them a matrix gets. What they do to a row:
// norm_row.cuh. In packs: a block a group of rows, held in registers. Rows that begin anywhere, or are too long for a block: blocks and
// clusters that stay. The rest is swept. The choice depends on the row's length and place alone: a row's bits do not depend on the batch.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/norm_forward_staged.cuh"
#include "tigon/base/cuda/norm_forward_staying.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace norm_detail {

// A block a group of rows that lie in packs.
template <class F, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  using OfRow = ForwardRow<F, W, Y, N, Lying::packs, int>;
  // Parameters are on their way during the reduction where they find room in registers.
  constexpr int kParamBytes = Shape::held * N * int(sizeof(W)) * F::kParams * F::kIn;
  constexpr bool kEarly = kParamBytes <= (Shape::threads == 32 ? 128 : 64);
  __shared__ __align__(16) float slots[2][OfRow::kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  using Tile = RowTile<Shape, N>;
  const Place place(p.sections, Shape::rows);
  const int64_t group = Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads;
  const OfRow row(p, place, place.first + group);
  Pack<X, N> in[Shape::held][F::kIn];
  Pack<W, N> w[Shape::held][F::kParams];
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) row.load(Tile::column(i), in[i]);
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) row.load_params(Tile::column(i), w[i]);
  }
  float middle[Shape::held], mean, rstd;
  int turn = 0;
  row.statistics(
      in, [](int i) { return Tile::column(i); },
      [&](auto& sums) { reduce_row<Sum, Shape::threads, spread_of<Shape>>(sums, slots[turn++]); }, NoSingle{},
      middle, mean, rstd);
  if (!row.live) return;
  if (Tile::thread() == 0) row.save_statistics(mean, rstd);
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    // Several rows a block: without a branch.
    if (Shape::rows == 1 && !row.lie.has(Tile::column(i))) continue;
    if constexpr (!kEarly) row.load_params(Tile::column(i), w[i]);
    row.finish_params(Tile::column(i), w[i]);
    if constexpr (Shape::held > (F::kCentred ? 4 : 2)) row.renew(in[i]);
    row.write(Tile::column(i), in[i], w[i], middle[i], rstd);
  }
}

// Rows too long for registers, wherever they lie: a sweep for each statistic and one that writes, all but the first out of L2.
template <class F, class W, class Y>
__global__ __launch_bounds__(kLoopThreads, kLoopBlocks) void forward_looped_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = Row<X>::N;
  using OfRow = ForwardRow<F, W, Y, N, Lying::apart, int64_t>;
  __shared__ __align__(16) float slots[2][OfRow::kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, 1);
  const OfRow row(p, place, place.first);
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
  float mean = 0.0f, sums[OfRow::kStatistics] = {};
  if constexpr (F::kCentred) {
    sweep(true, [&](int64_t, const Pack<X, N>(&in)[F::kIn]) { mean += row.sum_of(in); });
    mean = row.mean_of(reduce_row<Sum, kLoopThreads>(mean, slots[0]));
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
// as its elements. Percent of a copy of the same size, 16384 rows, 2048 to 12288 columns: RMSNorm 98 to 99, LayerNorm 95 to 98.
template <int Rows, int Params, bool Keeps>
struct ForwardLadder {
  // Bounds on the registers: how many blocks there are beside what a thread can have on its way.
  using One = RowShapes<RowShape<4, 2>, RowShape<4, 4, 16, 8>, RowShape<16, 2, 8, 10>,
                        RowShape<32, 4, 4, Params == 1 ? 8 : 5>, RowBlock<4, 128, 6>, RowBlock<4, 256, 4>,
                        RowBlock<4, 384, 3>, RowBlock<8, 1024>>;
  using Short = RowShapes<RowShape<4, 2>, RowShape<8, 2>, RowShape<16, 2>, RowShape<32, 4>>;
  using Two = typename std::conditional_t<Keeps, typename Short::template with<RowBlock<2, 512>>,
                                          Short>::template with<RowBlock<4, 1024>>;
  using Shapes = std::conditional_t<Rows == 1, One, Two>;
};
// Rows that begin anywhere. Where types differ too, one path has to do.
template <Lying How, class F>
using StayingLadder =
    std::conditional_t<How != Lying::alike, RowShapes<RowBlock<4, 384, 2>, RowBlock<4, 512, 2>>,
                       std::conditional_t<F::kKeeps, RowShapes<RowShape<32, 4, 4, 5>>,
                                          RowShapes<RowShape<32, 4, 4, 5>, RowBlock<4, 384, 2>>>>;
template <class F>
using ForwardCluster = std::conditional_t<F::kIn == 1, RowBlock<8, 384, 2>, RowBlock<4, 512, 2>>;
// In clusters, rows that lie alike: through shared memory. Their clusters are fewer; where a period leaves out many of them and there
// is one input, rows that wait in registers are faster (512 x 100003 of RMSNorm 60 us and 70).
template <class F>
constexpr int kClusterStages = F::kIn == 2   ? 3
                               : F::kCentred ? 5
                                             : 4;
template <class F>
using StagedCluster = StagedBlock<kClusterStages<F>, 4, 512, 1, 1>;

// So many of a multiprocessor wait for what they read, one after the other. Two sums of a row do, and parameters that find no room in the
// registers: with twice the warps 256 x 4096 of LayerNorm takes 5.1 us instead of 5.8. One sum: no difference.
constexpr int kFewWarps = 16;

template <int N, class F, class W, class Y>
bool run_held_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  const int64_t packs = p.cols / N;
  auto run = [&]<class Shape>(Type<Shape>) {
    launch(op, ctx, forward_kernel<F, W, Y, N, Shape>,
           {.blocks = ceil_div(p.rows, Shape::rows) * p.sections,
            .threads = block_threads<Shape>(packs),
            .early = true},
           p);
  };
  return ForwardLadder<F::kIn, F::kParams, F::kKeeps>::Shapes::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (F::kCentred && Shape::threads == 0 && Shape::held == 4) {
      const int64_t warps = p.rows * p.sections * block_threads<Shape>(packs) / 32;
      if (warps <= kFewWarps * device_facts().sms) return run(Type<Spread<2, RowBlock<4, 512>>>{});
    }
    run(Type<Shape>{});
  });
}
// By what one block holds, or by clusters of blocks. `period`: of the rows that lie alike.
template <Lying How, class F, class W, class Y>
bool run_staying_forward(const char* op, Context& ctx, NormForward<F, W, Y>& p, int64_t period) {
  constexpr int N = 16 / int(sizeof(typename F::Element));
  const int64_t packs = std::max<int64_t>(1, p.cols / N);
  const bool one = StayingLadder<How, F>::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    const int threads = block_threads<Shape>(packs);
    const size_t shared = size_t(threads) * Shape::held * F::kParams * N * sizeof(W);
    const auto kernel = forward_staying_kernel<F, W, Y, Shape, How, false>;
    static ClusterRoom room;
    p.shares = persistent_blocks<Shape>(op, room, kernel, threads, shared, p.rows, p.sections, period);
    launch(op, ctx, kernel,
           {.blocks = int64_t(p.shares.workers) * p.sections,
            .threads = threads,
            .shared = shared,
            .early = true},
           p);
    return p.shares.workers > 0;
  });
  if (one) return true;
  using Odd = RowBlock<4, 384, 2>;
  if constexpr (How == Lying::alike && F::kKeeps)
    if (packs <= Odd::packs) {
      launch(op, ctx, forward_odd_kernel<F, W, Y, Odd>,
             {.blocks = p.rows * p.sections, .threads = block_threads<Odd>(packs), .early = true}, p);
      return true;
    }
  if (p.sections > 1) return false;
  static ClusterRoom room;
  auto run = [&](auto* kernel, const Cluster& c, size_t of_thread) {
    if (c.blocks == 0) return false;
    p.shares = shares(p.rows, c.clusters, period);
    launch(op, ctx, kernel,
           {.blocks = int64_t(p.shares.workers) * c.blocks,
            .threads = c.threads,
            .shared = of_thread * c.threads,
            .early = true,
            .cluster = c.blocks},
           p);
    return true;
  };
  if constexpr (How == Lying::alike) {
    using Shape = StagedCluster<F>;
    constexpr size_t kOfThread = Shape::held * Shape::stages * F::kIn * 16;
    const auto kernel = forward_staged_kernel<F, W, Y, Shape>;
    const auto shared = [](int threads) { return kOfThread * threads; };
    static ClusterRoom staged;
    if ((F::kKeeps || period == 1) &&
        run(kernel, large_cluster<Shape>(op, staged, kernel, packs, 128, shared), kOfThread))
      return true;
  }
  if constexpr (How != Lying::alike || !F::kKeeps) {
    using Shape = ForwardCluster<F>;
    constexpr size_t kOfThread = Shape::held * F::kParams * N * sizeof(W);
    const auto kernel = forward_staying_kernel<F, W, Y, Shape, How, true>;
    return run(kernel, best_cluster<Shape>(op, room, kernel, packs, 128, [](int t) { return kOfThread * t; }),
               kOfThread);
  }
  return false;
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
  if (packs && run_held_forward<kPack>(op, ctx, p)) return;
  for (int k = 0; k < F::kIn; ++k)
    p.end[k] = end_of_rows(p.in[k], p.in_stride[k], p.rows, p.sections * p.cols);
  int64_t period = rows_period<Y>(p.y_stride);
  for (int k = 0; k < F::kIn; ++k) period = std::max(period, rows_period<X>(p.in_stride[k]));
  if (F::kKeeps) period = std::max(period, rows_period<X>(p.kept_stride));
  // In the packs of what is written.
  auto run = [&](const auto* written, int64_t stride) {
    if (F::kKeeps && !rows_alike<X>(written, stride, p.y, p.y_stride, p.rows)) return false;
    bool alike = kOneType<F, W, Y>;
    for (int k = 0; k < F::kIn; ++k)
      alike = alike && rows_alike<X>(written, stride, p.in[k], p.in_stride[k], p.rows);
    if constexpr (kOneType<F, W, Y>)
      if (alike && run_staying_forward<Lying::alike>(op, ctx, p, period)) return true;
    return run_staying_forward<Lying::apart>(op, ctx, p, period);
  };
  if (F::kKeeps ? run(p.kept, p.kept_stride) : run(p.y, p.y_stride)) return;
  launch(op, ctx, forward_looped_kernel<F, W, Y>,
         {.blocks = p.rows * p.sections, .threads = kLoopThreads, .early = true}, p);
}

}  // namespace tigon::cuda
