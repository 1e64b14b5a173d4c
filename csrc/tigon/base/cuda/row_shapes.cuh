// The threads and the rows of a matrix: which columns a thread owns (row_config.h says how rows are divided), and which rows
// a worker takes.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/row_config.h"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// The number of threads that share a row.
template <RowConfig kConfig>
__device__ __forceinline__ int row_threads() {
  return kConfig.threads_per_row ? kConfig.threads_per_row : int(blockDim.x);
}
// The columns of the row that this thread owns, in vectors of N elements.
template <RowConfig kConfig, int N>
struct RowTile {
  __device__ static int thread() {
    return kConfig.rows_per_block == 1 ? threadIdx.x : threadIdx.x % kConfig.threads_per_row;
  }
  __device__ static int column(int i) {
    constexpr int kLaneSplit = kConfig.lane_split, kLanes = 32 / kLaneSplit;
    if constexpr (kLaneSplit == 1) return (thread() + i * row_threads<kConfig>()) * N;
    const int lane = threadIdx.x % 32, as = threadIdx.x / 32 * kLanes + lane % kLanes;
    return (as + (lane / kLanes * kConfig.vecs_per_thread + i) * int(blockDim.x / kLaneSplit)) * N;
  }
};

// An array of a type without a default constructor.
template <class T, int K>
struct Array {
  T data[K];
};

// How rows are distributed over persistent workers: groups of lanes, CTAs or clusters. State that a
// worker keeps across rows (shifted parameters, column sums) requires that its rows have one offset
// within 16 bytes, so its rows are a multiple of the offset period apart. Worker w < main_workers
// takes rows w, w + main_workers, ... below main_rows. The remaining workers share the remaining
// rows in the same way. Workers that run at the same time take neighbouring rows, which is faster
// than a contiguous range of rows for each.
struct RowSchedule {
  int workers = 0, main_workers = 0;
  int64_t main_rows = 0;
};
// Rows first, first + step, ... below `end`.
struct RowRange {
  int64_t first, end;
  int step;
  __device__ __forceinline__ int count() const {
    return first < end ? int((end - first + step - 1) / step) : 0;
  }
};
__device__ __forceinline__ RowRange row_range_of(const RowSchedule& s, int64_t rows, int64_t worker) {
  if (worker < s.main_workers) return {worker, s.main_rows, s.main_workers};
  return {s.main_rows + (worker - s.main_workers), rows, s.workers - s.main_workers};
}
// Host: a schedule for workers of one row each, of which `resident` run at a time. Where rounding
// down to a multiple of the period would leave many of them idle, additional workers take smaller
// shares, some of them after others.
inline RowSchedule make_row_schedule(int64_t rows, int64_t resident, int64_t period) {
  if (rows <= resident) return {int(rows), int(rows), rows};
  const int main_workers = int(resident / period * period), left = int(resident) - main_workers;
  if (left * 8 < resident) return {main_workers, main_workers, rows};
  const int more = int(period) * (main_workers > 0 ? 2 : 4), rounds = (more + left - 1) / left;
  return {main_workers + more, main_workers, rows * main_workers * rounds / (main_workers * rounds + more)};
}

// Host: a schedule for persistent CTAs, each of one of `col_groups` groups of columns; no workers
// where a CTA needs more shared memory than there is. The number of CTAs with several rows is a
// multiple of the period. `most` bounds the number of CTAs.
inline RowSchedule persistent_schedule(const char* op, OccupancyCache& occupancy, const void* entry,
                                       const RowConfig& config, int threads, size_t shared, int64_t rows,
                                       int col_groups, int64_t period, int64_t most = INT64_MAX) {
  int64_t resident = occupancy.max_active(op, entry, 1, threads, shared);
  if (resident == 0) return {};
  resident = std::min(most, std::max<int64_t>(1, resident / col_groups));
  if (config.rows_per_block == 1) return make_row_schedule(rows, resident, period);
  const int64_t groups = ceil_div(rows, config.rows_per_block);
  const int64_t blocks = groups <= resident ? groups : std::max(period, resident / period * period);
  return {int(blocks), int(blocks) * config.rows_per_block, rows};
}

// Sums rows[p] over p < partials in fixed order: the last step of a deterministic column reduction.
// Each row holds the columns of all `outs` side by side; an out without data is skipped. `total` is
// a further sum of `count` numbers in the same launch.
struct Total {
  const float* parts = nullptr;
  int64_t count = 0;
  Vector out = {};
};
void sum_partials(const char* op, Context& ctx, const float* rows, int64_t partials,
                  std::initializer_list<Vector> outs, const Total& total = {});

}  // namespace tigon::cuda
