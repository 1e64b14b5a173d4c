// This epilogue writes the result, rounded to 16 bits, through shared memory by TMA.
#pragma once

#include "tigon/base/cuda/matmul/mainloop.cuh"

namespace tigon::cuda::matmul {

// Returns two values rounded to T, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(const float* x) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x[0], x[1]);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Stores 64 columns from x on of a warpgroup's 64 rows. The lane has w[2 j + h], the columns 8 j + 2 q and
// the next one of row 8 h + t of its warp. They go through `buffer`, which the store before the last one has
// released.
template <View kView>
__device__ __forceinline__ void store_block(const CUtensorMap& map, uint8_t* smem, int consumer, int x,
                                            const Tile& tile, const uint32_t (&w)[16]) {
  const int thread = int(threadIdx.x) % kWarpgroup, warp = thread / 32, lane = thread % 32;
  // This lane gives this row to stmatrix, in swizzled rows of 128 bytes: two matrices below each other, two
  // to the right.
  const int row = 16 * warp + lane % 16, right = lane / 16;
  const uint32_t buffer = cast_smem_ptr_to_uint(smem);
  if (thread == 0) cp_async_bulk_wait_group_read<1>();
  bar_sync(1 + consumer, kWarpgroup);
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    stmatrix_x4(buffer + uint32_t(row * 128 + (((j + right) ^ row % 8) * 16)),
                reinterpret_cast<const uint32_t (&)[4]>(w[2 * j]));
  fence_proxy_async();
  bar_sync(1 + consumer, kWarpgroup);
  if (thread == 0) {
    cp_async_bulk_tensor_store(&map, buffer, x, outer_coordinates<kView>(tile, tile.m + consumer * 64));
    cp_async_bulk_commit_group();
  }
}

// A warpgroup stores its 64 rows by itself, 64 columns at a time. The stores run on during the next tile's
// MMAs.
template <class T, Groups kGroups = Groups::none>
struct StoreEpilogue {
  static constexpr int kRows = 64, kColumns = 64, kBuffers = 2;
  static constexpr View kView = view_of_d(kGroups);
  struct Params {
    CUtensorMap d;
  };
  struct Tensors {
    alignas(1024) uint8_t d[kConsumers][kBuffers][kRows * kColumns * 2];
  };

  const Tile& tile;
  __device__ StoreEpilogue(const Params&, const Tile& tile, int) : tile(tile) {}

  __device__ __forceinline__ void run(const Params& p, Tensors& smem, int consumer,
                                      const float (&acc)[kAccumulators]) const {
#pragma unroll
    for (int c = 0; c < kTileN / kColumns; ++c) {
      uint32_t w[kColumns / 4];
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) w[i] = pack<T>(&acc[c * (kColumns / 2) + i * 2]);
      store_block<kView>(p.d, smem.d[consumer][c % kBuffers], consumer, tile.n + c * kColumns, tile, w);
    }
  }

  // Waits before the CTA's shared memory is released.
  __device__ static __forceinline__ void finish() { cp_async_bulk_wait_group_read<0>(); }
};

}  // namespace tigon::cuda::matmul
