// The backward of the norm family computes the gradients of rows and, in the same launch, the sums over rows
// that are the gradients of weight and bias. This file also launches the kernel that plan_backward
// (norm_plan.h) selects. Each persistent CTA processes rows of one group. A thread keeps its column sums in
// registers over all of its rows. They are then added over the rows of the CTA and, by sum_partials, over the
// CTAs, in a fixed order.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/norm_backward_lookahead.cuh"
#include "tigon/base/cuda/norm_backward_looped.cuh"
#include "tigon/base/cuda/norm_forward.cuh"

namespace tigon::cuda {
namespace norm_detail {

// The passes are those of backward_lookahead_kernel. One kernel for both made rows slower.
template <class B, class W, class Y, int N, class Config>
__global__
__launch_bounds__(Config::value.max_threads, backward_blocks<B, Y>(Config::value)) void backward_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  constexpr RowConfig kConfig = Config::value;
  using X = typename B::Element;
  using Rows = BackwardRow<B, W, Y, N>;
  constexpr int kVecsPerThread = kConfig.vecs_per_thread, kMeans = Rows::kMeans;
  constexpr bool kPipelined = kConfig.stages > 0;
  __shared__ __align__(16) float slots[2][kMeans * 32];
  // Holds weights and pipeline stages, then the column sums of the row groups.
  extern __shared__ __align__(16) unsigned char shared[];
  // The next kernel sums the partials.
  if (p.partials) griddepcontrol_launch_dependents();
  const BlockCoord coord(p.groups, kConfig.rows_per_block);
  const int cols = int(p.cols);
  const int64_t step = int64_t(gridDim.x / unsigned(p.groups)) * kConfig.rows_per_block;
  const int64_t first =
      coord.first + (kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row);
  const Rows rows(p, coord.group);
  auto vec_of = [&](int i) { return RowTile<kConfig, 1>::thread() + row_threads<kConfig>() * i; };
  auto column = [&](int i) { return vec_of(i) * N; };
  const ColumnWeights<B, W, N, kConfig> weights(shared, p.weight ? p.f.offset : 0.0f);
  Vec<X, N> in[kVecsPerThread][B::kIn];
  Vec<Y, N> dy[kVecsPerThread];
  const int threads = weights.slots.pitch / kConfig.rows_per_block,
            row_in_block = kConfig.rows_per_block == 1 ? 0 : threadIdx.x / threads;
  BackwardPipeline<B, W, Y, N, kConfig> pipeline(rows, first, step, vec_of(0), threads, cols / N, threads,
                                                 row_in_block, weights.end());
  const bool wants_rows = rows.wants_rows();
  float sums[B::kSums][kVecsPerThread][N] = {};
  Statistics next;
  int read_stage = 0, write_stage = kConfig.stages - 1, parity = 0;
  if constexpr (kPipelined) {
#pragma unroll
    for (int s = 0; s < kConfig.stages - 1; ++s) pipeline.copy(s, first + s * step < p.rows);
    next = rows.statistics(first, p.rows);
  }
  // The weights are loaded after the first copies, which do not wait for them.
  load_weights<N, kConfig>(p, weights, coord.group, rows.begin, column);
#pragma unroll 1
  for (int64_t base = coord.first, row = first; base < p.rows; base += step, row += step, ++parity) {
    if constexpr (!kPipelined) {
#pragma unroll
      for (int i = 0; i < kVecsPerThread; ++i)
        rows.load(column(i) < cols, row, p.rows, column(i), in[i], dy[i]);
      next = rows.statistics(row, p.rows);
    }
    const Statistics current = next;
    if constexpr (kPipelined) {
      next = rows.statistics(row + step, p.rows);
      // This overwrites the stage of the previous iteration.
      pipeline.copy(write_stage, row + (kConfig.stages - 1) * step < p.rows);
      cp_async_wait_group<kConfig.stages - 1>();
      write_stage = write_stage + 1 == kConfig.stages ? 0 : write_stage + 1;
    }
    float means[kMeans] = {};
    // Otherwise the stage holds another row.
    if (!kPipelined || kConfig.rows_per_block == 1 || row < p.rows)
      rows.first_pass(
          current, in, dy, weights,
          [&](int i) {
            if constexpr (kPipelined) pipeline.vec(read_stage, i, in[i], dy[i]);
          },
          means, sums);
    if (wants_rows) {
      reduce_row<Sum, kConfig.threads_per_row>(means, slots[parity & 1]);
      rows.second_pass(
          current, row, column, row < p.rows ? cols : 0, in, dy, weights,
          [&](int i) {
            if constexpr (kPipelined)
              pipeline.vec(read_stage, i, in[i], dy[i]);
            else
              rows.hide(in[i], dy[i]);
          },
          means);
    }
    read_stage = read_stage + 1 == kConfig.stages ? 0 : read_stage + 1;
  }
  if constexpr (kPipelined) cp_async_wait_group<0>();
  reduce_column_sums<kConfig>(p, coord, sums, column, shared);
}

// Bounds the number of CTAs: every CTA writes a row of partial sums, so with few rows one CTA per SM is
// enough, as many as have equal work.
inline int64_t enough_blocks(int64_t rows, int groups) {
  const int64_t rounds = ceil_div(rows * groups, device_facts().sms);
  return rounds > 8 ? INT64_MAX : ceil_div(rows, rounds);
}

// Handles rows of any length in two launches. Returns the number of partial rows.
template <int N, class B, class W, class Y>
int64_t run_looped_backward(const char* op, Context& ctx, NormBackward<B, W, Y>& p, bool wants_sums) {
  if (std::any_of(p.out, p.out + B::kOut, [](auto* out) { return out != nullptr; }))
    launch(op, ctx, backward_looped_kernel<B, W, Y, N>,
           {.blocks = p.rows * p.groups, .threads = kLoopThreads}, p);
  if (!wants_sums) return 0;
  const int64_t tiles = ceil_div(ceil_div(p.cols, N), kColumnThreads);
  const int64_t chunk = std::max<int64_t>(32, ceil_div(p.rows, 256)), parts = ceil_div(p.rows, chunk);
  p.partials = ctx.scratch_of<float>(parts * B::kSums * p.cols * p.groups);
  launch(op, ctx, column_sums_kernel<B, W, Y, N>,
         {.blocks = parts * tiles * p.groups, .threads = kColumnThreads}, p, chunk, tiles);
  return parts;
}

}  // namespace norm_detail

// Computes the gradients of rows and, if wanted, p.partials: partial rows of the sums by column, [parts,
// B::kSums, groups * cols], in scratch memory. Returns their number. There is at least one row.
template <class B, class W, class Y>
int64_t norm_backward_rows(const char* op, Context& ctx, NormBackward<B, W, Y>& p, bool wants_sums) {
  using namespace norm_detail;
  constexpr NormTraits kTraits = backward_traits<B, W, Y>();
  constexpr int kVecSize = kTraits.vec_size();
  NormOperand rows[B::kIn + B::kOut + 1] = {{p.dy, p.dy_stride, kTraits.y_bytes}};
  for (int k = 0; k < B::kIn; ++k) rows[1 + k] = {p.in[k], p.in_stride[k], kTraits.x_bytes};
  for (int k = 0; k < B::kOut; ++k) rows[1 + B::kIn + k] = {p.out[k], p.out_stride[k], kTraits.x_bytes};
  const NormOperand params[] = {{p.weight, 0, kTraits.weight_bytes}};
  const NormPlan plan = plan_backward(
      kTraits, norm_problem(p.rows, p.cols, p.groups, kTraits.x_bytes, rows, params), device_limits());

  // The plan's kernel, and its CTAs or clusters, each of which writes a partial row. Without a kernel, the
  // plan is `looped`.
  const void* entry = nullptr;
  int64_t parts = 0;
  LaunchConfig grid{.threads = plan.threads, .shared = size_t(plan.shared)};
  if (plan.kernel == NormKernel::cluster) {
    if constexpr (kTraits.clusters) {
      constexpr RowConfig kConfig = backward_cluster_configs(kTraits).at[0];
      const auto shared = [&](int threads) {
        return size_t(backward_shared(kTraits, kConfig, threads, p.cols));
      };
      entry = entry_of(backward_lookahead_kernel<B, W, Y, kVecSize, ConfigType<kConfig>, true>);
      static OccupancyCache cache;
      // The more arithmetic a thread has, the more it needs other CTAs on the SM.
      const ClusterShape c = max_occupancy_cluster(op, cache, entry, kConfig, p.cols / kVecSize,
                                                   B::kSubtractMean ? 96 : 192, shared);
      if (c.blocks > 0) {
        parts = std::min(p.rows, c.clusters);
        grid.threads = c.threads, grid.shared = shared(c.threads), grid.cluster = c.blocks;
      }
    }
  } else if (plan.kernel != NormKernel::looped) {
    OccupancyCache* occupancy = nullptr;
    with_config<backward_register_configs(kTraits)>(plan.config, [&]<RowConfig kConfig>() {
      static OccupancyCache cache;
      occupancy = &cache;
      if constexpr (kConfig.lookahead == 0)
        entry = entry_of(backward_kernel<B, W, Y, kVecSize, ConfigType<kConfig>>);
      else
        entry = entry_of(backward_lookahead_kernel<B, W, Y, kVecSize, ConfigType<kConfig>, false>);
    });
    const int64_t most =
        wants_sums && plan.rows.rows_per_block == 1 ? enough_blocks(p.rows, p.groups) : INT64_MAX;
    parts = persistent_workers(op, *occupancy, entry, plan.rows, grid.threads, grid.shared, p.rows, p.groups,
                               most);
  }
  if (parts > 0) {
    grid.blocks = parts * p.groups * grid.cluster;
    if (wants_sums) p.partials = ctx.scratch_of<float>(parts * B::kSums * p.cols * p.groups);
    void* parameters[] = {&p};
    launch_entry(op, ctx, entry, grid, parameters);
  }
  // `looped` also serves if no cluster fits on this device.
  return parts > 0 ? parts : run_looped_backward<kVecSize>(op, ctx, p, wants_sums);
}

// `outs` are the B::kSums gradients by column, of groups * cols elements each. Those without data are not
// wanted.
template <class B, class W, class Y>
void norm_backward(const char* op, Context& ctx, NormBackward<B, W, Y> p,
                   std::initializer_list<Vector> outs) {
  const bool wants_sums = std::any_of(outs.begin(), outs.end(), [](const Vector& v) { return bool(v); });
  if (p.rows == 0) {
    for (const Vector& v : outs)
      if (v)
        TIGON_CUDA_CHECK(op, cudaMemsetAsync(v.data, 0, size_of(v.dtype) * size_t(v.size),
                                             static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  const int64_t parts = norm_backward_rows(op, ctx, p, wants_sums);
  if (wants_sums) sum_partials(op, ctx, p.partials, parts, outs);
}

}  // namespace tigon::cuda
