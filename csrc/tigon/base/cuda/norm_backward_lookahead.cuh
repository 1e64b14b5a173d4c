// This backward of the norm family runs the first pass one row ahead of the second. It also serves rows too
// long for a CTA. The passes are those of BackwardRow.
#pragma once

#include "tigon/base/cuda/norm_backward_row.cuh"

namespace tigon::cuda {
namespace norm_detail {

template <class B, class W, class Y, int N, class Config, bool kCluster>
__global__ __launch_bounds__(
    Config::value.max_threads,
    backward_blocks<B, Y>(
        Config::value)) void backward_lookahead_kernel(const __grid_constant__ NormBackward<B, W, Y> p) {
  constexpr RowConfig kConfig = Config::value;
  using X = typename B::Element;
  using Rows = BackwardRow<B, W, Y, N>;
  constexpr int kVecsPerThread = kConfig.vecs_per_thread, kLookahead = kConfig.lookahead,
                kMeans = Rows::kMeans;
  static_assert(kConfig.stages > 0 && kConfig.rows_per_block == 1);
  __shared__ ReduceStorage<SumArray<kMeans>, kLookahead == 0 ? 2 : 4> storage;
  // Holds weights and pipeline stages, then the column sums.
  extern __shared__ __align__(16) unsigned char shared[];
  // The next kernel sums the partials.
  if (p.partials) griddepcontrol_launch_dependents();
  RowReducer<kConfig, kCluster, false, SumArray<kMeans>, kLookahead == 0 ? 2 : 4> reducer(storage);
  const BlockCoord coord(p.groups, 1, blockIdx.x / unsigned(reducer.blocks));
  const int cols = int(p.cols), step = int(gridDim.x / unsigned(reducer.blocks * p.groups));
  auto column = [&](int i) { return reducer.vec_index(i) * N; };
  const Rows rows(p, coord.group);
  const ColumnWeights<B, W, N, kConfig> weights(shared, p.weight ? p.f.offset : 0.0f);
  load_weights<N, kConfig>(p, weights, coord.group, rows.begin, column);
  BackwardPipeline<B, W, Y, N, kConfig> pipeline(rows, coord.first, step, reducer.vec_index(0),
                                                 reducer.threads * reducer.blocks, cols / N, reducer.threads,
                                                 0, weights.end());

  Vec<X, N> in[kVecsPerThread][B::kIn];
  Vec<Y, N> dy[kVecsPerThread];
  float sums[B::kSums][kVecsPerThread][N] = {};
  // Computes the means of a row, and its contribution to the column sums.
  auto first_pass = [&](const Statistics& of, int stage, float (&means)[kMeans]) {
    rows.first_pass(of, in, dy, weights, [&](int i) { pipeline.vec(stage, i, in[i], dy[i]); }, means, sums);
  };
  // Computes the gradients of a row.
  auto second_pass = [&](int64_t row, const Statistics& of, int stage, float (&means)[kMeans]) {
    rows.second_pass(
        of, row, column, cols, in, dy, weights, [&](int i) { pipeline.vec(stage, i, in[i], dy[i]); }, means);
  };

  // An iteration runs the first pass over a row, and the second pass over the same row or, with
  // lookahead, over the row before it, so that a reduction has an iteration to complete.
  const bool wants_rows = rows.wants_rows();
  int read_stage = 0, write_stage = kConfig.stages - 1 - kLookahead;
  auto next_stage = [&](int stage) { return stage + 1 == kConfig.stages ? 0 : stage + 1; };
#pragma unroll
  for (int s = 0; s < kConfig.stages - 1 - kLookahead; ++s) pipeline.copy(s, coord.first + s * step < p.rows);
  Statistics current, next = rows.statistics(coord.first, p.rows);
  reducer.wait_for_cluster();
#pragma unroll 1
  for (int64_t row = coord.first - kLookahead * step; row < p.rows; row += step) {
    const int64_t ahead_row = row + kLookahead * step;
    const Statistics previous = current;
    float means[kMeans] = {};
    current = next;
    next = rows.statistics(ahead_row + step, p.rows);
    // This overwrites the stage of the previous iteration, which no other thread has read.
    pipeline.copy(write_stage, row + (kConfig.stages - 1) * step < p.rows);
    cp_async_wait_group<kConfig.stages - 1 - kLookahead>();
    write_stage = next_stage(write_stage);
    if constexpr (kLookahead == 0) {
      first_pass(current, read_stage, means);
      if (wants_rows) {
        reducer.all_reduce(means);
        second_pass(row, current, read_stage, means);
      }
    } else {
      const bool first = row < coord.first, has_next = ahead_row < p.rows;
      if (has_next) {
        first_pass(current, first ? read_stage : next_stage(read_stage), means);
        if (wants_rows) reducer.publish(means);
      }
      if (first) continue;
      if (wants_rows) {
        reducer.collect(reducer.phase - 1 - int(has_next), means);
        second_pass(row, previous, read_stage, means);
      }
    }
    read_stage = next_stage(read_stage);
  }
  cp_async_wait_group<0>();
  if constexpr (kCluster) cluster_arrive();
  reducer.wait_for_cluster();
  reduce_column_sums<kConfig>(p, coord, sums, column, shared);
}

}  // namespace norm_detail
}  // namespace tigon::cuda
