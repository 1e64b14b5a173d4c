// Sums a column over partial rows: the last step of deterministic column reductions.
#pragma once

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/reduce.cuh"

namespace tigon::cuda {

// Adds from[0], from[step], ... (`count` numbers) of K columns that are `apart` elements apart, with
// InFlight loads of each at a time.
template <int InFlight, int K>
__device__ __forceinline__ void sum_columns(const float* from, int64_t apart, int64_t step, int count,
                                            float (&sums)[K]) {
#pragma unroll 1
  for (int left = count; left > 0; left -= InFlight) {
    float x[K][InFlight];
#pragma unroll
    for (int i = 0; i < InFlight; ++i, from += step)
#pragma unroll
      for (int k = 0; k < K; ++k) x[k][i] = ld_global_f32_predicated(i < left, from + k * apart);
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < InFlight; ++i) sums[k] += x[k][i];
  }
}

}  // namespace tigon::cuda
