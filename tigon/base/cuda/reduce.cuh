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

// Threads [row * Threads, (row+1) * Threads) of the block share a row (0: all of them); every one of them gets the K results.
// `slots` is shared memory for 32 * K floats; callers that reduce twice must pass two arrays (or synchronise in between).
// All threads of the block must take part.
template <class Op, int Threads, int K>
__device__ __forceinline__ void reduce_row(float (&x)[K], float* slots) {
  constexpr int kWarps = Threads == 0 ? 32 : Threads / 32, kLanes = kWarps > 0 ? 32 : Threads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = warp / (kWarps > 0 ? kWarps : 1) * kWarps,
            warps = Threads == 0 ? blockDim.x / 32 : kWarps;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    x[k] = reduce_lanes<Op, kLanes>(x[k]);
    if (kWarps > 1 && lane == 0) slots[k * 32 + warp] = x[k];
  }
  if constexpr (kWarps > 1) {
    __syncthreads();
    constexpr int kWidth = kWarps <= 2 ? 2 : kWarps <= 4 ? 4 : kWarps <= 8 ? 8 : kWarps <= 16 ? 16 : 32;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float y = lane < warps ? slots[k * 32 + first + lane] : Op::identity;
      x[k] = __shfl_sync(0xffffffffu, reduce_lanes<Op, kWidth>(y), 0);
    }
  }
}
template <class Op, int Threads>
__device__ __forceinline__ float reduce_row(float x, float* slots) {
  float one[1] = {x};
  reduce_row<Op, Threads>(one, slots);
  return one[0];
}

}  // namespace tigon::cuda
