// Backward of the norm family for rows of any alignment, for rows too long for a CTA, and with
// lookahead: the first pass runs a row ahead of the second. The passes are those of BackwardRow.
#pragma once

#include "tigon/base/cuda/norm_backward_row.cuh"
#include "tigon/base/cuda/norm_forward_persistent.cuh"

namespace tigon::cuda {
namespace norm_detail {

// Loads the weights of a thread's columns, which begin at column begin + column(i) of all columns; or forms them, where the
// formula does (norm_math.inc).
template <int N, RowConfig kConfig, RowAlignment kAlignment, class B, class W, class Y, class Column>
__device__ __forceinline__ void load_weights(const NormBackward<B, W, Y>& p,
                                             const ColumnWeights<B, W, N, kConfig>& weights, int group,
                                             int64_t begin, Column&& column, int whole, int pitch) {
  auto in_bounds = [&](int i) { return column(i) < whole; };
  if constexpr (kMakesWeights<B>) {
#pragma unroll
    for (int i = 0; i < kConfig.vecs_per_thread; ++i) {
      float w[N] = {};
      if (in_bounds(i)) p.f.weights(group, column(i), w);
      Vec<W, N> vec;
      vec.set(w);
      weights.slots.set(i, vec);
    }
  } else if constexpr (kAlignment != RowAlignment::vectorized && sizeof(W) == sizeof(typename B::Element)) {
    load_shifted_vecs<kConfig.vecs_per_thread>(
        {p.weight}, {1.0f}, begin + column(0), p.groups * p.cols, pitch, in_bounds,
        [&](int i, int, const Vec<W, N>& w) { weights.slots.set(i, w); });
  } else {
#pragma unroll(kAlignment == RowAlignment::vectorized ? kConfig.vecs_per_thread : 1)
    for (int i = 0; i < kConfig.vecs_per_thread; ++i) {
      Vec<W, N> w = fill_vec<W, N>(1.0f);
      if (p.weight && in_bounds(i)) {
        const W* from = p.weight + begin + column(i);
        if constexpr (kAlignment == RowAlignment::vectorized) {
          w = cuda::load<W, N>(from);
        } else {
#pragma unroll
          for (int j = 0; j < N; ++j) w.v[j] = from[j];
        }
      }
      weights.slots.set(i, w);
    }
  }
}

// The rows of a worker: with edges they have one offset.
template <RowConfig kConfig, bool kHasEdges, class B, class W, class Y>
__device__ __forceinline__ RowRange backward_range(const NormBackward<B, W, Y>& p, int64_t worker) {
  if (kHasEdges && kConfig.rows_per_block == 1) return row_range_of(p.row_schedule, p.rows, worker);
  return {worker, p.rows, int(gridDim.x / unsigned(p.groups)) * kConfig.rows_per_block};
}
// Columns before the full vectors of a row, which are those of the first output that is wanted.
template <int N, class B, class W, class Y>
__device__ __forceinline__ int columns_before_vectors(const NormBackward<B, W, Y>& p, int group,
                                                      int64_t row) {
  const typename B::Element* written =
      p.out[0] ? p.out[0] + row * p.out_stride[0] : p.in[0] + row * p.in_stride[0];
  return elements_to_alignment<N>(written + int64_t(group) * int(p.cols), int(p.cols));
}

// Full vectors of the output, and the edge elements, at most one per thread. All rows of a worker
// have the same output offset, so that a thread keeps its columns.
template <class B, class W, class Y, int N, class Config, RowAlignment kAlignment, bool kCluster>
__global__ __launch_bounds__(
    Config::value.max_threads,
    backward_blocks<B, Y>(
        Config::value)) void backward_persistent_kernel(const __grid_constant__ NormBackward<B, W, Y> p) {
  constexpr RowConfig kConfig = Config::value;
  using X = typename B::Element;
  using Rows = BackwardRow<B, W, Y, N>;
  constexpr int kVecsPerThread = kConfig.vecs_per_thread, kLookahead = kConfig.lookahead,
                kMeans = Rows::kMeans;
  constexpr bool kHasEdges = kAlignment != RowAlignment::vectorized;
  static_assert(kConfig.stages > 0);
  __shared__ ReduceStorage<SumArray<kMeans>, kLookahead == 0 ? 2 : 4> storage;
  // Weights and pipeline stages, then the column sums.
  extern __shared__ __align__(16) unsigned char shared[];
  // The next kernel sums the partials.
  if (p.partials) griddepcontrol_launch_dependents();
  RowReducer<kConfig, kCluster, false, SumArray<kMeans>, kLookahead == 0 ? 2 : 4> reducer(storage);
  const BlockCoord coord(p.groups, kConfig.rows_per_block, blockIdx.x / unsigned(reducer.blocks));
  const int cols = int(p.cols);
  const int row_in_block = kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row;
  auto column = [&](int i) { return reducer.vec_index(i) * N; };

  const RowRange range = backward_range<kConfig, kHasEdges>(p, coord.first + row_in_block);
  const int head = kHasEdges ? columns_before_vectors<N>(p, coord.group, range.first) : 0;
  const int whole = kHasEdges ? (cols - head) / N * N : cols;
  const Rows rows(p, coord.group, head);
  const ColumnWeights<B, W, N, kConfig> weights(shared, p.weight ? p.f.offset : 0.0f);
  load_weights<N, kConfig, kAlignment>(p, weights, coord.group, rows.begin, column, whole,
                                       reducer.threads * reducer.blocks * N);
  BackwardEdge<B, Y> edge;
  if constexpr (kHasEdges)
    edge.start(rows, edge_column<N>(reducer, head, whole, cols), cols, weights.offset, head, range.first,
               range.end);
  BackwardPipeline<B, W, Y, N, kConfig> pipeline(rows, range.first, range.step, reducer.vec_index(0),
                                                 reducer.threads * reducer.blocks, whole / N, reducer.threads,
                                                 row_in_block, weights.end());

  Vec<X, N> in[kVecsPerThread][B::kIn];
  Vec<Y, N> dy[kVecsPerThread];
  float sums[B::kSums][kVecsPerThread][N] = {};
  // The means of a row, and its contribution to the column sums.
  auto first_pass = [&](int64_t row, const Statistics& of, int stage, float (&means)[kMeans]) {
    // Else the stage holds another row.
    if (kConfig.rows_per_block == 1 || row < range.end)
      rows.first_pass(of, in, dy, weights, [&](int i) { pipeline.vec(stage, i, in[i], dy[i]); }, means, sums);
    if constexpr (kHasEdges) {
      if (edge.valid && row < range.end) {
        edge.take_next();
        edge.load(rows, head, row + range.step, range.end);
        edge.add(rows, of, means);
      }
    }
  };
  // The gradients of a row. `edge_inputs`: the row's edge element.
  auto second_pass = [&](int64_t row, const Statistics& of, int stage, float (&means)[kMeans],
                         const EdgeInputs<B>& edge_inputs) {
    rows.second_pass(
        of, row, column, row < range.end ? whole : 0, in, dy, weights,
        [&](int i) { pipeline.vec(stage, i, in[i], dy[i]); }, means);
    if constexpr (kHasEdges)
      if (edge.valid && row < range.end) edge.write(rows, of, head, row, edge_inputs, means);
  };

  // An iteration runs the first pass over a row, and the second pass over the same row or, with
  // lookahead, over the row before it, so that a reduction has an iteration to complete.
  const bool wants_rows = rows.wants_rows();
  int read_stage = 0, write_stage = kConfig.stages - 1 - kLookahead;
  auto next_stage = [&](int stage) { return stage + 1 == kConfig.stages ? 0 : stage + 1; };
#pragma unroll
  for (int s = 0; s < kConfig.stages - 1 - kLookahead; ++s)
    pipeline.copy(s, range.first + s * range.step < range.end);
  Statistics current, next = rows.statistics(range.first, range.end);
  reducer.wait_for_cluster();
#pragma unroll 1
  for (int64_t row = range.first - kLookahead * range.step; row - row_in_block < range.end;
       row += range.step) {
    const int64_t ahead_row = row + kLookahead * range.step;
    const Statistics previous = current;
    const EdgeInputs<B> previous_edge = edge.row;
    float means[kMeans] = {};
    current = next;
    next = rows.statistics(ahead_row + range.step, range.end);
    // The stage of the previous iteration, which no other thread has read, is overwritten.
    pipeline.copy(write_stage, row + (kConfig.stages - 1) * range.step < range.end);
    cp_async_wait_group<kConfig.stages - 1 - kLookahead>();
    write_stage = next_stage(write_stage);
    if constexpr (kLookahead == 0) {
      first_pass(row, current, read_stage, means);
      if (wants_rows) {
        reducer.all_reduce(means);
        second_pass(row, current, read_stage, means, edge.row);
      }
    } else {
      const bool first = row < range.first, has_next = ahead_row < range.end;
      if (has_next) {
        first_pass(ahead_row, current, first ? read_stage : next_stage(read_stage), means);
        if (wants_rows) reducer.publish(means);
      }
      if (first) continue;
      if (wants_rows) {
        reducer.collect(reducer.phase - 1 - int(has_next), means);
        second_pass(row, previous, read_stage, means, previous_edge);
      }
    }
    read_stage = next_stage(read_stage);
  }
  cp_async_wait_group<0>();
  if constexpr (kCluster) cluster_arrive();
  reducer.wait_for_cluster();
  reduce_column_sums<kConfig, kHasEdges>(p, coord, sums, column, head, whole, edge, shared);
}

}  // namespace norm_detail
}  // namespace tigon::cuda
