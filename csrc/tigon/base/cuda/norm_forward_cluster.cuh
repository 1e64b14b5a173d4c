// Forward of the norm family for rows with the same offset that are too long for a CTA: persistent
// clusters whose rows are staged through shared memory. The row operations are in norm_row.cuh.
#pragma once

#include "tigon/base/cuda/cp_async_pipeline.cuh"
#include "tigon/base/cuda/norm_forward_persistent.cuh"

namespace tigon::cuda {
namespace norm_detail {

// Each iteration runs one pass over each of several rows: the first pass over the newest row, the
// last pass, which writes, over the row that is kDepth iterations older and, where the mean is
// subtracted, the variance pass over the row between them. A pass uses a reduction that was
// published one iteration before, so no warp waits for a reduction, and no row is held in
// registers. A thread reads only what it copied itself; the one barrier per iteration belongs to
// the reduction. Registers are not an alternative: spilled registers live in L1, which every
// acquire at cluster scope invalidates.
template <class F, class W, class Y, class Shape>
__global__ __launch_bounds__(Shape::max_threads, Shape::min_blocks) void forward_pipelined_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X)), kVecsPerThread = Shape::vecs_per_thread, kParams = F::kParams;
  using VecRow = ForwardRow<F, W, Y, N, RowAlignment::vectorized, unsigned>;
  using ElementRow = ForwardRow<F, W, Y, 1, RowAlignment::vectorized, int>;
  constexpr int kStatistics = VecRow::kStatistics;
  constexpr int kDepth = F::kSubtractMean ? 2 : 1, kStagesAhead = Shape::stages - 1 - kDepth;
  constexpr int kPhases = 4, kSums = kStatistics + F::kSubtractMean;
  static_assert(kStagesAhead > 0 && Shape::rows_per_block == 1 && kSameType<F, W, Y>);
  using Sums = SumArray<kSums>;
  using Pipeline = CpAsyncPipeline<X, N, Shape, false>;
  __shared__ ReduceStorage<Sums, kPhases> storage;
  extern __shared__ __align__(16) unsigned char shared[];
  RowReducer<Shape, true, false, Sums, kPhases> reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BlockCoord coord(p.groups, 1, blockIdx.x / unsigned(reducer.blocks));
  const int cols = int(p.cols), vec_stride = reducer.threads * reducer.blocks;
  const RowRange range = row_range_of(p.row_schedule, p.rows, coord.first);
  const int count = range.count();
  ElementRow edge_row(p, coord, range.first);
  const int head = elements_to_alignment<N>(edge_row.written(), cols);
  const int whole = (cols - head) / N * N;
  VecRow row(p, coord, range.first, head, whole);
  auto column = [&](int i) { return reducer.vec_index(i) * N; };
  auto in_bounds = [&](int i) { return column(i) < whole; };

  uint4* words = reinterpret_cast<uint4*>(shared);
  auto pipeline_of = [&](int k) {
    return Pipeline(row.in(k), range.step * p.in_stride[k], reducer.vec_index(0), vec_stride, whole / N,
                    p.end[k], words + k * Pipeline::words(reducer.threads),
                    F::kIn * Pipeline::words(reducer.threads));
  };
  auto pipelines = [&]<size_t... K>(std::index_sequence<K...>) {
    return Array<Pipeline, F::kIn>{{pipeline_of(int(K))...}};
  }(std::make_index_sequence<F::kIn>{});
  // The element of this thread before or after the full vectors, or none.
  EdgeElement<F, W, Y> edge;
  edge.column = edge_column<N>(reducer, head, whole, cols);
  edge.row = &edge_row;
  ElementRow next_edge_row = edge_row, last_edge_row = edge_row;
  // Of the rows of this iteration.
  typename ElementRow::Inputs edge_inputs[kDepth + 1];
  auto start = [&](int stage, int iteration) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) pipelines.data[k].copy(stage, iteration < count);
    cp_async_commit_group();
  };
#pragma unroll
  for (int s = 0; s < kStagesAhead; ++s) start(s, s);
  next_edge_row.live = count > 0;
  next_edge_row.load(edge.column, edge.next);

  Vec<W, N> params[kVecsPerThread][kParams];
  const int64_t begin = edge_row.col_offset + head + column(0);
  if constexpr (!kPerChannel<F>) {
    load_shifted_vecs<kVecsPerThread, true>(p.param, p.default_value, begin, p.groups * p.cols,
                                            vec_stride * N, in_bounds,
                                            [&](int i, int k, const Vec<W, N>& w) { params[i][k] = w; });
  } else {
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i)
#pragma unroll
      for (int k = 0; k < kParams; ++k) {
        if (!in_bounds(i)) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) params[i][k].v[j] = param_of(p, k, begin + i * vec_stride * N + j);
      }
  }
  if (edge.column < cols) load_edge_params(p, edge_row.col_offset, edge);

  auto fetch = [&](int stage, int i, auto& in) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) in[k] = pipelines.data[k].vec(stage, i);
  };
  using Inputs = typename VecRow::Inputs;
  VecRow first_row = row;
  // The sum of the values or, without a mean, the sum of squares.
  auto first_pass = [&](int stage) {
    float of[kVecsPerThread];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      Inputs in;
      fetch(stage, i, in);
      if constexpr (F::kWritesResidual) {
        first_row.merge(in);
        pipelines.data[0].overwrite(stage, i, in[0]);
        store_predicated(in_bounds(i), first_row.residual_out() + column(i), in[0]);
      }
      if constexpr (F::kSubtractMean) {
        of[i] = first_row.sum_of(in);
      } else {
        float of_vec[kStatistics];
        first_row.statistics_of(column(i), in, 0.0f, of_vec);
        of[i] = of_vec[0];
      }
    }
    edge.write_residual();
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) edge_inputs[0][k] = edge.in[k];
    if constexpr (F::kSubtractMean) return edge.sum() + reduce_registers<Sum>(of);
    float s[kStatistics] = {};
    edge.add_to_statistics(0.0f, s);
    return s[0] + reduce_registers<Sum>(of);
  };
  // The statistics about the mean.
  auto variance_pass = [&](int stage, float mean, float (&sums)[kStatistics]) {
    float of[kStatistics][kVecsPerThread];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      Inputs in;
      fetch(stage, i, in);
      float of_vec[kStatistics];
      row.statistics_of(column(i), in, in_bounds(i) ? mean : 0.0f, of_vec);
#pragma unroll
      for (int k = 0; k < kStatistics; ++k) of[k][i] = of_vec[k];
    }
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) sums[k] = 0.0f;
    edge_row.add_to_statistics(edge.column, edge_inputs[1], edge.valid() ? mean : 0.0f, sums);
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) sums[k] += reduce_registers<Sum>(of[k]);
  };
  auto last_pass = [&](int stage, float mean, float rstd) {
    if (reducer.thread + reducer.rank == 0) row.save_statistics(mean, rstd);
    if (edge.valid()) last_edge_row.write(edge.column, edge_inputs[kDepth], edge.param, mean, rstd);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      Inputs in;
      fetch(stage, i, in);
      row.write(column(i), in, params[i], mean, rstd);
    }
  };
  auto next_stage = [](int stage) { return stage + 1 == Shape::stages ? 0 : stage + 1; };
  auto earlier_stage = [](int stage, int by) { return stage < by ? stage + Shape::stages - by : stage - by; };

  int stage = 0, to = kStagesAhead;
  // Of the row of the variance pass, then of the row of the last pass.
  float mean = 0.0f;
  reducer.wait_for_cluster();
#pragma unroll 1
  for (int t = 0; t < count + kDepth; ++t) {
    start(to, t + kStagesAhead);
    to = next_stage(to);
    cp_async_wait_group<kStagesAhead>();
#pragma unroll
    for (int d = kDepth; d > 0; --d)
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) edge_inputs[d][k] = edge_inputs[d - 1][k];
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) edge.in[k] = edge.next[k];
    next_edge_row.advance(range.step, t + 1 < count);
    next_edge_row.load(edge.column, edge.next);
    float sums[kSums] = {}, of_row[kStatistics] = {}, last_mean = mean;
    if constexpr (F::kSubtractMean) {
      // Published by the previous iteration: the sum of one row and the statistics of the row
      // before it.
      if (t > 0) {
        float collected[kSums], of_variance[kStatistics];
        reducer.collect(reducer.phase - 1, collected);
        mean = row.mean_of(collected[0]);
        variance_pass(earlier_stage(stage, 1), mean, of_variance);
#pragma unroll
        for (int k = 0; k < kStatistics; ++k) of_row[k] = collected[k + 1], sums[k + 1] = of_variance[k];
      }
      if (t < count) sums[0] = first_pass(stage);
      if (t + 1 < count + kDepth) reducer.publish(sums);
    } else {
      if (t < count) {
        sums[0] = first_pass(stage);
        reducer.publish(sums);
      }
      if (t > 0) reducer.collect(reducer.phase - 1 - int(t < count), of_row);
    }
    if constexpr (F::kWritesResidual) first_row.advance(range.step, true), edge_row.advance(range.step, true);
    if (t >= kDepth) {
      const float rstd = row.finish_statistics(of_row, last_mean);
      last_pass(earlier_stage(stage, kDepth), last_mean, rstd);
      row.advance(range.step, true);
      last_edge_row.advance(range.step, true);
    }
    stage = next_stage(stage);
  }
  cp_async_wait_group<0>();
  cluster_arrive();
  reducer.wait_for_cluster();
}

}  // namespace norm_detail
}  // namespace tigon::cuda
