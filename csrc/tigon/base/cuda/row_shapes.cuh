// How the threads of a CTA share the rows of a matrix.
//
// A row of `vecs` vectors of N adjacent elements is held in registers by threads_per_row threads.
// Thread t owns vectors t, t + threads_per_row, ..., at most vecs_per_thread of them, so that
// adjacent lanes access adjacent 16-byte words. A CTA has at least 128 threads and holds several
// short rows. A long row has a CTA of its own with as many warps as it needs (BlockPerRow). The
// shape depends on the row's length alone and is selected at run time. Rows longer than the last
// shape of a table take a kernel that loops over the row, with later passes served by L2.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

template <int Threads, int VecsPerThread, int RowsPerBlock = Threads < 128 ? 128 / Threads : 1,
          int MinBlocks = 1>
struct RowShape {
  static constexpr int threads_per_row = Threads;
  static constexpr int vecs_per_thread = VecsPerThread;
  static constexpr int rows_per_block = RowsPerBlock;
  static constexpr int max_threads = Threads * RowsPerBlock;
  // Bounds the registers: CTAs per SM.
  static constexpr int min_blocks = MinBlocks;
  // The longest row.
  static constexpr int64_t max_vecs = int64_t(Threads) * VecsPerThread;
};

// A CTA per row, with as many warps as the row's vectors need, at most MaxThreads threads.
template <int VecsPerThread, int MaxThreads, int MinBlocks = 1>
struct BlockPerRow {
  // All threads of the CTA.
  static constexpr int threads_per_row = 0;
  static constexpr int vecs_per_thread = VecsPerThread, rows_per_block = 1, max_threads = MaxThreads,
                       min_blocks = MinBlocks;
  static constexpr int64_t max_vecs = int64_t(MaxThreads) * VecsPerThread;
};
// A shape that is used for rows of at most MaxVecs vectors.
template <int MaxVecs, class Shape>
struct UpToVecs : Shape {
  static constexpr int64_t max_vecs = MaxVecs;
};
// The same rows by more threads: Split lanes of a warp share the vectors of one thread of Shape. A
// sum that combines these lanes first has the same bits.
template <int Split, class Shape>
struct LaneSplit : Shape {
  static_assert(Shape::threads_per_row == 0 && Shape::vecs_per_thread % Split == 0);
  static constexpr int vecs_per_thread = Shape::vecs_per_thread / Split, max_threads = 1024, min_blocks = 1;
};
template <class Shape>
constexpr int lane_split = 1;
template <int Split, class Shape>
constexpr int lane_split<LaneSplit<Split, Shape>> = Split;
// Threads of a CTA for rows of `vecs` vectors.
template <class Shape>
int block_threads(int64_t vecs) {
  constexpr int kLaneSplit = lane_split<Shape>;
  return Shape::threads_per_row
             ? Shape::max_threads
             : int(ceil_div(vecs, 32 * Shape::vecs_per_thread * kLaneSplit) * 32 * kLaneSplit);
}

// The shapes of a kernel, shortest rows first.
template <class... Shapes>
struct ShapeList {
  template <class Longer>
  using append = ShapeList<Shapes..., Longer>;

  // Calls fn(shape) for the first shape that holds `vecs` vectors and that fn accepts (fn may
  // return bool; void accepts). Returns false when there is none.
  template <class Fn>
  static bool dispatch(int64_t vecs, Fn&& fn) {
    auto accepts = [&](auto shape) {
      if constexpr (std::is_void_v<decltype(fn(shape))>)
        return fn(shape), true;
      else
        return fn(shape);
    };
    return ((vecs <= Shapes::max_vecs && accepts(Shapes{})) || ...);
  }
};

// The number of threads that share a row.
template <class Shape>
__device__ __forceinline__ int row_threads() {
  return Shape::threads_per_row ? Shape::threads_per_row : int(blockDim.x);
}
// The columns of the row that this thread owns, in vectors of N elements.
template <class Shape, int N>
struct RowTile {
  __device__ static int thread() {
    return Shape::rows_per_block == 1 ? threadIdx.x : threadIdx.x % Shape::threads_per_row;
  }
  __device__ static int column(int i) {
    constexpr int kLaneSplit = lane_split<Shape>, kLanes = 32 / kLaneSplit;
    if constexpr (kLaneSplit == 1) return (thread() + i * row_threads<Shape>()) * N;
    const int lane = threadIdx.x % 32, as = threadIdx.x / 32 * kLanes + lane % kLanes;
    return (as + (lane / kLanes * Shape::vecs_per_thread + i) * int(blockDim.x / kLaneSplit)) * N;
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
template <class Shape, class Kernel>
RowSchedule persistent_schedule(const char* op, OccupancyCache& occupancy, Kernel* kernel, int threads,
                                size_t shared, int64_t rows, int col_groups, int64_t period,
                                int64_t most = INT64_MAX) {
  int64_t resident = occupancy.max_active(op, kernel, 1, threads, shared);
  if (resident == 0) return {};
  resident = std::min(most, std::max<int64_t>(1, resident / col_groups));
  if (Shape::rows_per_block == 1) return make_row_schedule(rows, resident, period);
  const int64_t groups = ceil_div(rows, Shape::rows_per_block);
  const int64_t blocks = groups <= resident ? groups : std::max(period, resident / period * period);
  return {int(blocks), int(blocks) * Shape::rows_per_block, rows};
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
