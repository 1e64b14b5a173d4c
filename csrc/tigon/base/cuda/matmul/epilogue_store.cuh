// The epilogue that writes the result: rounded to 16 bits, through shared memory, by TMA.
#pragma once

#include "tigon/base/cuda/matmul/ptx.cuh"

namespace tigon::cuda::matmul {

// Both warpgroups store their 64 rows on their own, 64 columns at a time. The stores run on behind the next tile's products.
template <class T, int kTileN, int kBuffers = 2>
struct StoreEpilogue {
  static constexpr int kRows = 64, kColumns = 64;
  struct Params {
    CUtensorMap d;
  };
  struct Tensors {
    alignas(1024) uint8_t d[2][kBuffers][kRows * kColumns * 2];
  };

  __device__ static __forceinline__ void run(const Params& p, Tensors& smem, int consumer,
                                             const float (&acc)[kTileN / 2], int m, int n) {
    const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    // The row that this lane gives to stmatrix, and its place in a swizzled row of 128 bytes: two matrices of rows below each
    // other, two beside them.
    const int row = 16 * warp + lane % 16;
    const uint32_t place = uint32_t(row * 128), swizzle = uint32_t(row % 8), right = uint32_t(lane / 16);
#pragma unroll
    for (int c = 0; c < kTileN / kColumns; ++c) {
      const uint32_t buffer = cast_smem_ptr_to_uint(smem.d[consumer][c % kBuffers]);
      if (thread == 0) cp_async_bulk_wait_group_read<kBuffers - 1>();
      bar_sync(1 + consumer, 128);
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack(&acc[c * (kColumns / 2) + j * 8 + i * 2]);
        stmatrix_x4(buffer + place + ((2 * j + right ^ swizzle) << 4), w);
      }
      fence_proxy_async();
      bar_sync(1 + consumer, 128);
      if (thread == 0) {
        cp_async_bulk_tensor_store(&p.d, buffer, n + c * kColumns, m + consumer * kRows);
        cp_async_bulk_commit_group();
      }
    }
  }

  // Before the CTA's shared memory goes.
  __device__ static __forceinline__ void finish() { cp_async_bulk_wait_group_read<0>(); }

 private:
  __device__ static __forceinline__ uint32_t pack(const float* x) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair pair;
    if constexpr (std::is_same_v<T, __half>)
      pair = __floats2half2_rn(x[0], x[1]);
    else
      pair = __floats2bfloat162_rn(x[0], x[1]);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
};

}  // namespace tigon::cuda::matmul
