// Sums in double over the threads of a CTA, in a fixed order.
#pragma once

namespace tigon::cuda {

// All-reduces K values over the Threads of the CTA. `slots` is shared memory of (Threads / 32) * K doubles
// that may be overwritten. All threads take part and receive the sums.
template <int Threads, int K>
__device__ __forceinline__ void sum_block(double (&x)[K], double* slots) {
  constexpr int kWarps = Threads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x[k] += __shfl_xor_sync(0xffffffffu, x[k], step);
    if (lane == 0) slots[warp * K + k] = x[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    x[k] = 0.0;
    for (int w = 0; w < kWarps; ++w) x[k] += slots[w * K + k];
  }
  __syncthreads();
}

}  // namespace tigon::cuda
