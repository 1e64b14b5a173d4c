// Forward of the norm family for rows with the same offset that are too long for a CTA: persistent
// clusters whose rows are staged through shared memory. The row operations are in norm_row.cuh.
#pragma once

#include "tigon/base/cuda/cp_async_pipeline.cuh"
#include "tigon/base/cuda/norm_forward_persistent.cuh"

namespace tigon::cuda {
namespace norm_detail {

// The stages of the inputs of a thread's rows, and the passes over its vectors of a row.
template <class F, class W, class Y, RowConfig kConfig>
struct ForwardStages {
  using X = typename F::Element;
  static constexpr int N = 16 / int(sizeof(X)), kVecsPerThread = kConfig.vecs_per_thread;
  using Row = ForwardRow<F, W, Y, N, RowAlignment::vectorized, unsigned>;
  using Inputs = typename Row::Inputs;
  using Pipeline = CpAsyncPipeline<X, N, kConfig, false>;
  Array<Pipeline, F::kIn> in;
  // The first vector of this thread, the distance of its vectors, and the full vectors of a row.
  int first_vec, vec_stride, vecs;

  __device__ __forceinline__ ForwardStages(const Row& row, int64_t step, int first_vec, int vec_stride,
                                           int vecs, int threads, uint4* words)
      : ForwardStages(std::make_index_sequence<F::kIn>{}, row, step, first_vec, vec_stride, vecs, threads,
                      words) {}
  __device__ __forceinline__ int column(int i) const { return (first_vec + i * vec_stride) * N; }
  __device__ __forceinline__ bool in_bounds(int i) const { return first_vec + i * vec_stride < vecs; }
  __device__ __forceinline__ void copy(int stage, bool valid) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) in.data[k].copy(stage, valid);
    cp_async_commit_group();
  }
  __device__ __forceinline__ void fetch(int stage, int i, Inputs& vecs) const {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) vecs[k] = in.data[k].vec(stage, i);
  }

  // The sum of the values or, without a mean, the sum of squares. The residual is written.
  __device__ __forceinline__ float first_pass(const Row& row, int stage) const {
    float of[kVecsPerThread];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      Inputs x;
      fetch(stage, i, x);
      if constexpr (F::kWritesResidual) {
        row.merge(x);
        in.data[0].overwrite(stage, i, x[0]);
        store_predicated(in_bounds(i), row.residual_out() + column(i), x[0]);
      }
      if constexpr (F::kSubtractMean) {
        of[i] = row.sum_of(x);
      } else {
        float of_vec[Row::kStatistics];
        row.statistics_of(column(i), x, 0.0f, of_vec);
        of[i] = of_vec[0];
      }
    }
    return reduce_registers<Sum>(of);
  }
  // Adds the statistics about the mean.
  __device__ __forceinline__ void variance_pass(const Row& row, int stage, float mean,
                                                float (&sums)[Row::kStatistics]) const {
    float of[Row::kStatistics][kVecsPerThread];
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      Inputs x;
      fetch(stage, i, x);
      float of_vec[Row::kStatistics];
      row.statistics_of(column(i), x, in_bounds(i) ? mean : 0.0f, of_vec);
#pragma unroll
      for (int k = 0; k < Row::kStatistics; ++k) of[k][i] = of_vec[k];
    }
#pragma unroll
    for (int k = 0; k < Row::kStatistics; ++k) sums[k] += reduce_registers<Sum>(of[k]);
  }
  __device__ __forceinline__ void last_pass(const Row& row, int stage, float mean, float rstd,
                                            const typename Row::Params (&params)[kVecsPerThread]) const {
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      Inputs x;
      fetch(stage, i, x);
      row.write(column(i), x, params[i], mean, rstd);
    }
  }

 private:
  template <size_t... K>
  __device__ __forceinline__ ForwardStages(std::index_sequence<K...>, const Row& row, int64_t step,
                                           int first_vec, int vec_stride, int vecs, int threads, uint4* words)
      : in{{Pipeline(row.in(K), step * row.p.in_stride[K], first_vec, vec_stride, vecs, row.p.end[K],
                     words + int(K) * Pipeline::words(threads), F::kIn * Pipeline::words(threads))...}},
        first_vec(first_vec),
        vec_stride(vec_stride),
        vecs(vecs) {}
};

// Each iteration runs one pass over each of several rows: the first pass over the newest row, the
// last pass, which writes, over the row that is kDepth iterations older and, where the mean is
// subtracted, the variance pass over the row between them. A pass uses a reduction that was
// published one iteration before, so no warp waits for a reduction, and no row is held in
// registers. A thread reads only what it copied itself; the one barrier per iteration belongs to
// the reduction. Registers are not an alternative: spilled registers live in L1, which every
// acquire at cluster scope invalidates.
template <class F, class W, class Y, class Config>
__global__
__launch_bounds__(Config::value.max_threads, Config::value.min_blocks_per_sm) void forward_cluster_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  constexpr RowConfig kConfig = Config::value;
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X)), kVecsPerThread = kConfig.vecs_per_thread;
  using VecRow = ForwardRow<F, W, Y, N, RowAlignment::vectorized, unsigned>;
  using ElementRow = ForwardRow<F, W, Y, 1, RowAlignment::vectorized, int>;
  constexpr int kDepth = F::kSubtractMean ? 2 : 1, kStagesAhead = kConfig.stages - 1 - kDepth;
  constexpr int kPhases = 4, kStatistics = VecRow::kStatistics, kSums = kStatistics + F::kSubtractMean;
  static_assert(kStagesAhead > 0 && kConfig.rows_per_block == 1 && kSameType<F, W, Y>);
  using Sums = SumArray<kSums>;
  __shared__ ReduceStorage<Sums, kPhases> storage;
  extern __shared__ __align__(16) unsigned char shared[];
  RowReducer<kConfig, true, false, Sums, kPhases> reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BlockCoord coord(p.groups, 1, blockIdx.x / unsigned(reducer.blocks));
  const int cols = int(p.cols), vec_stride = reducer.threads * reducer.blocks;
  const RowRange range = row_range_of(p.row_schedule, p.rows, coord.first);
  const int count = range.count();
  ElementRow edge_row(p, coord, range.first);
  const int head = elements_to_alignment<N>(edge_row.written(), cols), whole = (cols - head) / N * N;
  VecRow row(p, coord, range.first, head, whole);
  ForwardStages<F, W, Y, kConfig> stages(row, range.step, reducer.vec_index(0), vec_stride, whole / N,
                                         reducer.threads, reinterpret_cast<uint4*>(shared));
  // The element of this thread before or after the full vectors, or none.
  EdgeElement<F, W, Y> edge;
  edge.column = edge_column<N>(reducer, head, whole, cols);
  edge.row = &edge_row;
  ElementRow next_edge_row = edge_row, last_edge_row = edge_row;
  VecRow first_row = row;
  typename ElementRow::Inputs edge_inputs[kDepth + 1];
#pragma unroll
  for (int s = 0; s < kStagesAhead; ++s) stages.copy(s, s < count);
  next_edge_row.live = count > 0;
  next_edge_row.load(edge.column, edge.next);

  Vec<W, N> params[kVecsPerThread][F::kParams];
  load_columns<kVecsPerThread, true>(
      p, edge_row.col_offset + head + stages.column(0), vec_stride * N,
      [&](int i) { return stages.in_bounds(i); },
      [&](int i, int k, const Vec<W, N>& w) { params[i][k] = w; });
  if (edge.column < cols) load_edge_params(p, edge_row.col_offset, edge);

  // The passes with the edge element.
  auto first_pass = [&](int stage) {
    const float of_vecs = stages.first_pass(first_row, stage);
    edge.write_residual();
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) edge_inputs[0][k] = edge.in[k];
    if constexpr (F::kSubtractMean) return edge.sum() + of_vecs;
    float s[kStatistics] = {};
    edge.add_to_statistics(0.0f, s);
    return s[0] + of_vecs;
  };
  auto variance_pass = [&](int stage, float mean, float (&sums)[kStatistics]) {
    edge_row.add_to_statistics(edge.column, edge_inputs[1], edge.valid() ? mean : 0.0f, sums);
    stages.variance_pass(row, stage, mean, sums);
  };
  auto last_pass = [&](int stage, float mean, float rstd) {
    if (reducer.thread + reducer.rank == 0) row.save_statistics(mean, rstd);
    if (edge.valid()) last_edge_row.write(edge.column, edge_inputs[kDepth], edge.param, mean, rstd);
    stages.last_pass(row, stage, mean, rstd, params);
  };
  auto next_stage = [&](int stage) { return stage + 1 == kConfig.stages ? 0 : stage + 1; };
  auto earlier_stage = [&](int stage, int by) {
    return stage < by ? stage + kConfig.stages - by : stage - by;
  };

  int stage = 0, to = kStagesAhead;
  // Of the row of the variance pass, then of the row of the last pass.
  float mean = 0.0f;
  reducer.wait_for_cluster();
#pragma unroll 1
  for (int t = 0; t < count + kDepth; ++t) {
    stages.copy(to, t + kStagesAhead < count);
    to = next_stage(to);
    cp_async_wait_group<kStagesAhead>();
#pragma unroll
    for (int d = kDepth; d > 0; --d)
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) edge_inputs[d][k] = edge_inputs[d - 1][k];
    edge.take_next();
    next_edge_row.advance(range.step, t + 1 < count);
    next_edge_row.load(edge.column, edge.next);
    float sums[kSums] = {}, of_row[kStatistics] = {}, last_mean = mean;
    if constexpr (F::kSubtractMean) {
      // Published by the previous iteration: the sum of one row and the statistics of the row
      // before it.
      if (t > 0) {
        float collected[kSums], of_variance[kStatistics] = {};
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
