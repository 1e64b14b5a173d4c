// The row engine: how threads share the rows of a matrix.
//
// A row of `packs` packs (N adjacent elements each) is held in registers by `threads` threads; thread t owns packs
// t, t + threads, ... (at most `held` of them), so neighbouring lanes touch neighbouring 16-byte words. Blocks have at least
// 128 threads and then hold several rows. The choice depends on the row length alone, at run time: nothing is compiled per
// width. A row of many packs has a block, with as many warps as it needs (RowBlock); rows longer than the ladder's end are swept
// twice by one block, the second sweep out of L2.
#pragma once

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
// Threads of a block for rows of `packs` packs.
template <class Shape>
int block_threads(int64_t packs) {
  return Shape::threads ? Shape::block : int(ceil_div(packs, 32 * Shape::held) * 32);
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
  __device__ static int column(int i) { return (thread() + i * thread_stride<Shape>()) * N; }
};

// Sums over p < partials of rows[p]: the last step of a deterministic column reduction, in fixed order. A row holds the `outs`
// side by side, as many numbers as each one's size; one without data is not wanted.
void sum_partials(const char* op, Context& ctx, const float* rows, int64_t partials,
                  std::initializer_list<Vector> outs);

}  // namespace tigon::cuda
