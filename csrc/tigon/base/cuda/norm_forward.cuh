// Forward of the norm family: the kernels and their selection. The row operations are in
// norm_row.cuh. Vectorized rows: a CTA holds one or more rows in registers. Rows of other
// alignments and rows too long for a CTA: persistent CTAs and clusters. All others: a looped
// kernel. The selection depends on the row's length and alignment alone, so that a row's bits do
// not depend on the batch.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/norm_forward_persistent.cuh"
#include "tigon/base/cuda/norm_forward_pipelined.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace norm_detail {

// A CTA per group of Shape::rows_per_block vectorized rows.
template <class F, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::max_threads, Shape::min_blocks) void forward_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  using VecRow = ForwardRow<F, W, Y, N, RowAlignment::vectorized, int>;
  // Parameters are loaded before the reduction if they fit in registers.
  constexpr int kParamBytes = Shape::vecs_per_thread * N * int(sizeof(W)) * F::kParams * F::kIn;
  constexpr bool kLoadParamsEarly = kParamBytes <= (Shape::threads_per_row == 32 ? 128 : 64);
  __shared__ __align__(16) float slots[2][VecRow::kStatistics * 32];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  using Tile = RowTile<Shape, N>;
  const BlockCoord coord(p.groups, Shape::rows_per_block);
  const int64_t row_in_block = Shape::rows_per_block == 1 ? 0 : threadIdx.x / Shape::threads_per_row;
  const VecRow row(p, coord, coord.first + row_in_block);
  Vec<X, N> in[Shape::vecs_per_thread][F::kIn];
  Vec<W, N> w[Shape::vecs_per_thread][F::kParams];
#pragma unroll
  for (int i = 0; i < Shape::vecs_per_thread; ++i) row.load(Tile::column(i), in[i]);
  if constexpr (kLoadParamsEarly) {
#pragma unroll
    for (int i = 0; i < Shape::vecs_per_thread; ++i) row.load_params(Tile::column(i), w[i]);
  }
  float center[Shape::vecs_per_thread], mean, rstd;
  int phase = 0;
  row.statistics(
      in, [](int i) { return Tile::column(i); },
      [&](auto& sums) { reduce_row<Sum, Shape::threads_per_row, lane_split<Shape>>(sums, slots[phase++]); },
      NoEdgeElement{}, center, mean, rstd);
  if (!row.live) return;
  if (Tile::thread() == 0) row.save_statistics(mean, rstd);
#pragma unroll
  for (int i = 0; i < Shape::vecs_per_thread; ++i) {
    // CTAs of several rows run without this branch.
    if (Shape::rows_per_block == 1 && !row.view.has(Tile::column(i))) continue;
    if constexpr (!kLoadParamsEarly) row.load_params(Tile::column(i), w[i]);
    row.finish_params(Tile::column(i), w[i]);
    if constexpr (Shape::vecs_per_thread > (F::kSubtractMean ? 4 : 2)) row.hide_inputs(in[i]);
    row.write(Tile::column(i), in[i], w[i], center[i], rstd);
  }
}

// Rows that no register shape holds, of any alignment: a pass for each statistic and one that
// writes; all but the first read from L2.
template <class F, class W, class Y>
__global__ __launch_bounds__(kLoopThreads, kLoopBlocks) void forward_looped_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = AlignedRow<X>::N;
  using VecRow = ForwardRow<F, W, Y, N, RowAlignment::mixed_offset, int64_t>;
  __shared__ __align__(16) float slots[2][VecRow::kStatistics * 32];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BlockCoord coord(p.groups, 1);
  const VecRow row(p, coord, coord.first);
  // Calls fn(column, inputs).
  auto for_each_vec = [&](bool first, auto&& fn) {
    for (int64_t c = int64_t(threadIdx.x) * N + row.view.head; row.view.has(c);
         c += int64_t(kLoopThreads) * N) {
      Vec<X, N> in[F::kIn] = {};
      if (F::kWritesResidual && !first) {
        const X* residual_out = row.residual_out();
        in[0] = row.view.load(true, residual_out, c, false);
        row.view.finish(true, residual_out, c, false, in[0]);
      } else {
        row.load(c, in);
        row.finish(c, in);
        row.write_residual(c, in);
      }
      fn(c, in);
    }
  };
  float mean = 0.0f, sums[VecRow::kStatistics] = {};
  if constexpr (F::kSubtractMean) {
    for_each_vec(true, [&](int64_t, const Vec<X, N>(&in)[F::kIn]) { mean += row.sum_of(in); });
    mean = row.mean_of(reduce_row<Sum, kLoopThreads>(mean, slots[0]));
  }
  for_each_vec(!F::kSubtractMean,
               [&](int64_t c, const auto& in) { row.add_to_statistics(c, in, mean, sums); });
  reduce_row<Sum, kLoopThreads>(sums, slots[1]);
  const float rstd = row.finish_statistics(sums, mean);
  if (threadIdx.x == 0) row.save_statistics(mean, rstd);
  for_each_vec(false, [&](int64_t c, const Vec<X, N>(&in)[F::kIn]) {
    Vec<W, N> w[F::kParams];
    row.load_params(c, w);
    row.finish_params(c, w);
    row.write(c, in, w, mean, rstd);
  });
}

// Shapes of rows in registers by row length in vectors. Short rows take few threads, since the work
// per row costs as much as that per element.
template <int Rows, int Params, bool WritesResidual>
struct ForwardShapeTable {
  // min_blocks bounds the registers: as many CTAs per SM as the loads in flight of a thread allow.
  using One = ShapeList<RowShape<4, 2>, RowShape<4, 4, 16, 8>, RowShape<16, 2, 8, 10>,
                        RowShape<32, 4, 4, Params == 1 ? 8 : 5>, BlockPerRow<4, 128, 6>,
                        BlockPerRow<4, 256, 4>, BlockPerRow<4, 384, 3>, BlockPerRow<8, 1024>>;
  using Short = ShapeList<RowShape<4, 2>, RowShape<8, 2>, RowShape<16, 2>, RowShape<32, 4>>;
  using Two =
      typename std::conditional_t<WritesResidual, typename Short::template append<BlockPerRow<2, 512>>,
                                  Short>::template append<BlockPerRow<4, 1024>>;
  using Shapes = std::conditional_t<Rows == 1, One, Two>;
};
// Rows of other alignments. Mixed offsets have one path for all lengths.
template <RowAlignment kAlignment, class F>
using PersistentShapeTable =
    std::conditional_t<kAlignment != RowAlignment::same_offset,
                       ShapeList<BlockPerRow<4, 384, 2>, BlockPerRow<4, 512, 2>>,
                       std::conditional_t<F::kWritesResidual, ShapeList<RowShape<32, 4, 4, 5>>,
                                          ShapeList<RowShape<32, 4, 4, 5>, BlockPerRow<4, 384, 2>>>>;
template <class F>
using ForwardCluster = std::conditional_t<F::kIn == 1, BlockPerRow<8, 384, 2>, BlockPerRow<4, 512, 2>>;
// Clusters for rows with the same offset, staged through shared memory. Fewer of these clusters are
// resident; where the period leaves many of them idle and there is one input, rows prefetched into
// registers are faster.
template <class F>
constexpr int kClusterStages = F::kIn == 2        ? 3
                               : F::kSubtractMean ? 5
                                                  : 4;
template <class F>
using PipelinedCluster = PipelinedBlock<kClusterStages<F>, 4, 512, 1, 1>;

// Where a launch has at most this many warps per SM, the latency of loads is exposed. With two sums
// per row, and parameters that do not fit in registers, twice the warps are faster then.
constexpr int kFewWarps = 16;

template <int N, class F, class W, class Y>
bool run_forward_in_registers(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  const int64_t vecs = p.cols / N;
  auto run = [&]<class Shape>(Type<Shape>) {
    launch(op, ctx, forward_kernel<F, W, Y, N, Shape>,
           {.blocks = ceil_div(p.rows, Shape::rows_per_block) * p.groups,
            .threads = block_threads<Shape>(vecs),
            .pdl = true},
           p);
  };
  return ForwardShapeTable<F::kIn, F::kParams, F::kWritesResidual>::Shapes::dispatch(vecs, [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (F::kSubtractMean && Shape::threads_per_row == 0 && Shape::vecs_per_thread == 4) {
      const int64_t warps = p.rows * p.groups * block_threads<Shape>(vecs) / 32;
      if (warps <= kFewWarps * device_facts().sms) return run(Type<LaneSplit<2, BlockPerRow<4, 512>>>{});
    }
    run(Type<Shape>{});
  });
}
// A CTA per row, or a cluster per row. `period`: rows after which the offset repeats.
template <RowAlignment kAlignment, class F, class W, class Y>
bool run_persistent_forward(const char* op, Context& ctx, NormForward<F, W, Y>& p, int64_t period) {
  constexpr int N = 16 / int(sizeof(typename F::Element));
  const int64_t vecs = std::max<int64_t>(1, p.cols / N);
  const bool launched = PersistentShapeTable<kAlignment, F>::dispatch(vecs, [&](auto shape) {
    using Shape = decltype(shape);
    const int threads = block_threads<Shape>(vecs);
    const size_t shared = size_t(threads) * Shape::vecs_per_thread * F::kParams * N * sizeof(W);
    const auto kernel = forward_persistent_kernel<F, W, Y, Shape, kAlignment, false>;
    static OccupancyCache occupancy;
    p.row_schedule =
        persistent_schedule<Shape>(op, occupancy, kernel, threads, shared, p.rows, p.groups, period);
    launch(op, ctx, kernel,
           {.blocks = int64_t(p.row_schedule.workers) * p.groups,
            .threads = threads,
            .shared = shared,
            .pdl = true},
           p);
    return p.row_schedule.workers > 0;
  });
  if (launched) return true;
  using Unaligned = BlockPerRow<4, 384, 2>;
  if constexpr (kAlignment == RowAlignment::same_offset && F::kWritesResidual)
    if (vecs <= Unaligned::max_vecs) {
      launch(op, ctx, forward_unaligned_kernel<F, W, Y, Unaligned>,
             {.blocks = p.rows * p.groups, .threads = block_threads<Unaligned>(vecs), .pdl = true}, p);
      return true;
    }
  if (p.groups > 1) return false;
  static OccupancyCache occupancy;
  auto run = [&](auto* kernel, const ClusterShape& c, size_t of_thread) {
    if (c.blocks == 0) return false;
    p.row_schedule = make_row_schedule(p.rows, c.clusters, period);
    launch(op, ctx, kernel,
           {.blocks = int64_t(p.row_schedule.workers) * c.blocks,
            .threads = c.threads,
            .shared = of_thread * c.threads,
            .pdl = true,
            .cluster = c.blocks},
           p);
    return true;
  };
  if constexpr (kAlignment == RowAlignment::same_offset) {
    using Shape = PipelinedCluster<F>;
    constexpr size_t kOfThread = Shape::vecs_per_thread * Shape::stages * F::kIn * 16;
    const auto kernel = forward_pipelined_kernel<F, W, Y, Shape>;
    const auto shared = [](int threads) { return kOfThread * threads; };
    static OccupancyCache pipelined_occupancy;
    if ((F::kWritesResidual || period == 1) &&
        run(kernel, largest_cluster<Shape>(op, pipelined_occupancy, kernel, vecs, 128, shared), kOfThread))
      return true;
  }
  if constexpr (kAlignment != RowAlignment::same_offset || !F::kWritesResidual) {
    using Shape = ForwardCluster<F>;
    constexpr size_t kOfThread = Shape::vecs_per_thread * F::kParams * N * sizeof(W);
    const auto kernel = forward_persistent_kernel<F, W, Y, Shape, kAlignment, true>;
    return run(
        kernel,
        max_occupancy_cluster<Shape>(op, occupancy, kernel, vecs, 128, [](int t) { return kOfThread * t; }),
        kOfThread);
  }
  return false;
}

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace norm_detail

// Calls fn(x type, weight type); the weight's is x's or float.
template <class Fn>
void with_weight_types(const char* op, DType x, const Vector& weight, Fn&& fn) {
  dispatch_float(op, "x", x, [&](auto t) {
    using X = typename DeviceType<typename decltype(t)::type>::type;
    if (!weight || weight.dtype == x) return fn(Type<X>{}, Type<X>{});
    fn(Type<X>{}, Type<float>{});
  });
}
// Calls fn(x type, weight type, y type); y has x's type, or float with a float weight.
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
  p.inv_cols = 1.0f / float(p.cols);
  constexpr int kVecSize = 16 / sizeof(X);
  bool vectorized = is_vectorizable(p.y, p.y_stride, p.cols, sizeof(Y)) && p.y_stride % kVecSize == 0 &&
                    p.cols % kVecSize == 0;
  for (int k = 0; k < F::kIn; ++k)
    vectorized = vectorized && is_vectorizable(p.in[k], p.in_stride[k], p.cols, sizeof(X));
  for (int k = 0; k < F::kParams; ++k)
    vectorized = vectorized && (kPerChannel<F> ? p.cols_per_param % kVecSize == 0 : is_aligned(p.param[k]));
  if (F::kWritesResidual)
    vectorized = vectorized && is_vectorizable(p.residual_out, p.residual_out_stride, p.cols, sizeof(X));
  if (vectorized && run_forward_in_registers<kVecSize>(op, ctx, p)) return;
  for (int k = 0; k < F::kIn; ++k) p.end[k] = end_of_rows(p.in[k], p.in_stride[k], p.rows, p.groups * p.cols);
  int64_t period = row_offset_period<Y>(p.y_stride);
  for (int k = 0; k < F::kIn; ++k) period = std::max(period, row_offset_period<X>(p.in_stride[k]));
  if (F::kWritesResidual) period = std::max(period, row_offset_period<X>(p.residual_out_stride));
  // Offsets are compared with those of the output.
  auto run = [&](const auto* written, int64_t stride) {
    if (F::kWritesResidual && !same_row_offsets<X>(written, stride, p.y, p.y_stride, p.rows)) return false;
    bool inputs_match = kSameType<F, W, Y>;
    for (int k = 0; k < F::kIn; ++k)
      inputs_match = inputs_match && same_row_offsets<X>(written, stride, p.in[k], p.in_stride[k], p.rows);
    if constexpr (kSameType<F, W, Y>)
      if (inputs_match && run_persistent_forward<RowAlignment::same_offset>(op, ctx, p, period)) return true;
    return run_persistent_forward<RowAlignment::mixed_offset>(op, ctx, p, period);
  };
  if (F::kWritesResidual ? run(p.residual_out, p.residual_out_stride) : run(p.y, p.y_stride)) return;
  launch(op, ctx, forward_looped_kernel<F, W, Y>,
         {.blocks = p.rows * p.groups, .threads = kLoopThreads, .pdl = true}, p);
}

}  // namespace tigon::cuda
