// The row engine: how threads share the rows of a matrix.
//
// A row of `packs` packs (N adjacent elements each) is held in registers by `threads` threads; thread t owns packs
// t, t + threads, ... (at most `held` of them), so neighbouring lanes touch neighbouring 16-byte words. Blocks have at least
// 128 threads and then hold several rows. The choice depends on the row length alone, at run time: nothing is compiled per
// width. A row of many packs has a block, with as many warps as it needs (RowBlock); rows longer than the ladder's end are swept
// twice by one block, the second sweep out of L2.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

template <int Threads, int Held, int Rows = Threads < 128 ? 128 / Threads : 1, int MinBlocks = 1>
struct RowShape {
  static constexpr int threads = Threads;  // that share a row
  static constexpr int held = Held;        // packs a thread holds
  static constexpr int rows = Rows;        // rows a block holds at a time
  static constexpr int block = Threads * Rows;
  static constexpr int min_blocks = MinBlocks;               // a multiprocessor: bounds the registers
  static constexpr int64_t packs = int64_t(Threads) * Held;  // longest row
};

// A block a row, with as many warps as the row's packs need; at most Most threads.
template <int Held, int Most, int MinBlocks = 1>
struct RowBlock {
  static constexpr int threads = 0;  // all of the block
  static constexpr int held = Held, rows = 1, block = Most, min_blocks = MinBlocks;
  static constexpr int64_t packs = int64_t(Most) * Held;
};
// A shape for rows of fewer packs than it could hold.
template <int Packs, class Shape>
struct UpTo : Shape {
  static constexpr int64_t packs = Packs;
};
// The same rows by more threads: what a thread held, `Lanes` of a warp do, and a sum in which they come first is the same to the bit.
template <int Lanes, class Shape>
struct Spread : Shape {
  static_assert(Shape::threads == 0 && Shape::held % Lanes == 0);
  static constexpr int held = Shape::held / Lanes, block = 1024, min_blocks = 1;
};
template <class Shape>
constexpr int spread_of = 1;
template <int Lanes, class Shape>
constexpr int spread_of<Spread<Lanes, Shape>> = Lanes;
// Threads of a block for rows of `packs` packs.
template <class Shape>
int block_threads(int64_t packs) {
  constexpr int kSpread = spread_of<Shape>;
  return Shape::threads ? Shape::block : int(ceil_div(packs, 32 * Shape::held * kSpread) * 32 * kSpread);
}

// A kernel's ladder of shapes, shortest rows first.
template <class... Shapes>
struct RowShapes {
  template <class Longer>
  using with = RowShapes<Shapes..., Longer>;

  // fn(RowShape<...>{}) for the first shape that holds `packs` and that fn, if it says, takes; false when there is none.
  template <class Fn>
  static bool pick(int64_t packs, Fn&& fn) {
    auto takes = [&](auto shape) {
      if constexpr (std::is_void_v<decltype(fn(shape))>)
        return fn(shape), true;
      else
        return fn(shape);
    };
    return ((packs <= Shapes::packs && takes(Shapes{})) || ...);
  }
};

// Threads that share a row.
template <class Shape>
__device__ __forceinline__ int thread_stride() {
  return Shape::threads ? Shape::threads : int(blockDim.x);
}
// The packs of N elements of its row that this thread holds.
template <class Shape, int N>
struct RowTile {
  __device__ static int thread() { return Shape::rows == 1 ? threadIdx.x : threadIdx.x % Shape::threads; }
  __device__ static int column(int i) {
    constexpr int kSpread = spread_of<Shape>, kLanes = 32 / kSpread;
    if constexpr (kSpread == 1) return (thread() + i * thread_stride<Shape>()) * N;
    const int lane = threadIdx.x % 32, as = threadIdx.x / 32 * kLanes + lane % kLanes;
    return (as + (lane / kLanes * Shape::held + i) * int(blockDim.x / kSpread)) * N;
  }
};

// An array of what has no default.
template <class T, int K>
struct Several {
  T of[K];
};

// How rows are dealt out to workers that stay: groups of lanes, blocks, or clusters. What a worker keeps from row to row asks for rows
// that lie alike, multiples of a period apart: it takes every `main`th of the first `main_rows`, or, if it is one of those behind
// `main`, every so many of the rest as there are of them. All take neighbouring rows at a time: far apart they are 10 to 20 % slower.
struct Shares {
  int workers = 0, main = 0;
  int64_t main_rows = 0;
};
// Rows first, first + step, ... before `end`.
struct RowRun {
  int64_t first, end;
  int step;
  __device__ __forceinline__ int count() const {
    return first < end ? int((end - first + step - 1) / step) : 0;
  }
};
__device__ __forceinline__ RowRun run_of(const Shares& s, int64_t rows, int64_t worker) {
  if (worker < s.main) return {worker, s.main_rows, s.main};
  return {s.main_rows + (worker - s.main), rows, s.workers - s.main};
}
// Host: for workers of one row each, of which `resident` run at a time. Where multiples of the period leave room for more, these take
// smaller shares, one after the other: 15 instead of 8 clusters are at work.
inline Shares shares(int64_t rows, int64_t resident, int64_t period) {
  if (rows <= resident) return {int(rows), int(rows), rows};
  const int main = int(resident / period * period), left = int(resident) - main;
  if (left * 8 < resident) return {main, main, rows};
  const int more = int(period) * (main > 0 ? 2 : 4), turns = (more + left - 1) / left;
  return {main + more, main, rows * main * turns / (main * turns + more)};
}

// Persistent blocks of a section; none where a block needs more shared memory than there is. Of blocks of several rows there are so
// many that a period leaves none out. `most`: so many are enough.
template <class Shape, class Kernel>
Shares persistent_blocks(const char* op, ClusterRoom& room, Kernel* kernel, int threads, size_t shared,
                         int64_t rows, int sections, int64_t period, int64_t most = INT64_MAX) {
  int64_t resident = room.of(op, kernel, 1, threads, shared);
  if (resident == 0) return {};
  resident = std::min(most, std::max<int64_t>(1, resident / sections));
  if (Shape::rows == 1) return shares(rows, resident, period);
  const int64_t groups = ceil_div(rows, Shape::rows);
  const int64_t blocks = groups <= resident ? groups : std::max(period, resident / period * period);
  return {int(blocks), int(blocks) * Shape::rows, rows};
}

// Sums over p < partials of rows[p]: the last step of a deterministic column reduction, in fixed order. A row holds the `outs`
// side by side, as many numbers as each one's size; one without data is not wanted. Total: in the same launch, the sum of so many
// numbers.
struct Total {
  const float* parts = nullptr;
  int64_t count = 0;
  Vector out = {};
};
void sum_partials(const char* op, Context& ctx, const float* rows, int64_t partials,
                  std::initializer_list<Vector> outs, const Total& total = {});

}  // namespace tigon::cuda
