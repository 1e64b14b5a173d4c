// Says which columns of a matrix a thread owns (row_config.h says how rows are divided), and how many CTAs
// share the rows.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/row_config.h"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// Returns the number of threads that share a row.
template <RowConfig kConfig>
__device__ __forceinline__ int row_threads() {
  return kConfig.threads_per_row ? kConfig.threads_per_row : int(blockDim.x);
}
// Describes the columns of the row that this thread owns, in vectors of N elements.
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

// This array holds a type without a default constructor.
template <class T, int K>
struct Array {
  T data[K];
};

// On the host, returns the number of persistent CTAs for each of `col_groups` groups of columns. They take
// rows, or groups of rows, in turn. It is 0 if a CTA needs more shared memory than there is. `most` bounds
// it.
inline int64_t persistent_workers(const char* op, OccupancyCache& occupancy, const void* entry,
                                  const RowConfig& config, int threads, size_t shared, int64_t rows,
                                  int col_groups, int64_t most = INT64_MAX) {
  const int64_t resident = occupancy.max_active(op, entry, 1, threads, shared);
  if (resident == 0) return 0;
  return std::min({most, std::max<int64_t>(1, resident / col_groups), ceil_div(rows, config.rows_per_block)});
}

// Sums rows[p] over p < partials in a fixed order: the last step of a deterministic column reduction. Each
// row holds the columns of all `outs` side by side; an out without data is skipped. `total` is a further sum
// of `count` numbers in the same launch.
struct Total {
  const float* parts = nullptr;
  int64_t count = 0;
  Vector out = {};
};
void sum_partials(const char* op, Context& ctx, const float* rows, int64_t partials,
                  std::initializer_list<Vector> outs, const Total& total = {});

}  // namespace tigon::cuda
