// Reductions over the threads that share a row. Fixed trees: the same bits every run.
#pragma once

namespace tigon::cuda {

struct Sum {
  static constexpr float identity = 0.0f;
  __device__ static float combine(float a, float b) { return a + b; }
};
struct Max {
  static constexpr float identity = -INFINITY;
  __device__ static float combine(float a, float b) { return fmaxf(a, b); }
};

// All lanes of each group of `Width` adjacent lanes (a power of two <= 32) get the result.
template <class Op, int Width>
__device__ __forceinline__ float reduce_lanes(float x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step >>= 1) x = Op::combine(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Threads [row * Threads, (row+1) * Threads) of the block share a row; every one of them gets the result.
// `slots` is shared memory for one float per warp of the block; callers that reduce twice must pass two arrays (or
// synchronise in between). All threads of the block must take part.
template <class Op, int Threads>
__device__ __forceinline__ float reduce_row(float x, float* slots) {
  if constexpr (Threads <= 32) {
    return reduce_lanes<Op, Threads>(x);
  } else {
    x = reduce_lanes<Op, 32>(x);
    constexpr int kWarps = Threads / 32;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp / kWarps * kWarps;
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    x = lane < kWarps ? slots[first + lane] : Op::identity;
    constexpr int kWidth = kWarps <= 1    ? 1
                           : kWarps <= 2  ? 2
                           : kWarps <= 4  ? 4
                           : kWarps <= 8  ? 8
                           : kWarps <= 16 ? 16
                                          : 32;
    x = reduce_lanes<Op, kWidth>(x);
    return __shfl_sync(0xffffffffu, x, 0);
  }
}

}  // namespace tigon::cuda
