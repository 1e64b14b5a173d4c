// This epilogue serves GEMMs with a symmetric result: alpha op(A) op(B) + beta C + gamma I. Tiles above the
// diagonal are not computed; what is below it is stored a second time, mirrored.
#pragma once

#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda::matmul {

// A warpgroup stores its 64 rows by itself, in squares of 64 columns.
template <class T>
struct SymmetricEpilogue {
  static constexpr int kSquare = 64;
  struct Params {
    CUtensorMap d;
    const T* c;  // matrices of `size` rows and columns, like d; or null
    float alpha, beta, gamma;
    int size;
  };
  struct Tensors {
    // One buffer holds the square as it is, the other one mirrored.
    alignas(1024) uint8_t d[kConsumers][2][kSquare * kSquare * 2];
  };

  const int m, n, matrix;
  __device__ SymmetricEpilogue(const Params&, const Tile& tile, int consumer)
      : m(tile.m + consumer * kSquare), n(tile.n), matrix(tile.matrix) {}

  __device__ __forceinline__ void run(const Params& p, Tensors& smem, int consumer,
                                      float (&acc)[kAccumulators]) const {
    const int thread = int(threadIdx.x) % kWarpgroup, warp = thread / 32, lane = thread % 32;
    const uint32_t plain = cast_smem_ptr_to_uint(smem.d[consumer][0]),
                   mirrored = cast_smem_ptr_to_uint(smem.d[consumer][1]);
    // This lane gives these rows to stmatrix, in swizzled rows of 128 bytes: two matrices below each other
    // and two to the right. Mirrored, rows are columns.
    const int row = 16 * warp + lane % 16, right = lane / 16, mirrored_row = 8 * right + lane % 8,
              mirrored_at = mirrored_row * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int s = 0; s < kTileN / kSquare; ++s) {
      const int column = n + s * kSquare;
      if (column > m || m >= p.size) break;
      float* x = &acc[s * (kSquare / 2)];
      combine(p, m + 16 * warp + lane / 4, column + 2 * (lane % 4), x);
      if (thread == 0) cp_async_bulk_wait_group_read<0>();
      bar_sync(1 + consumer, kWarpgroup);
#pragma unroll
      for (int j = 0; j < kSquare / 8; j += 2) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack<T>(&x[j * 4 + i * 2]);
        stmatrix_x4(plain + uint32_t(row * 128 + ((j + right) ^ row % 8) * 16), w);
        stmatrix_x4<true>(mirrored + uint32_t(j * 8 * 128 + mirrored_at), w);
      }
      fence_proxy_async();
      bar_sync(1 + consumer, kWarpgroup);
      if (thread == 0) {
        cp_async_bulk_tensor_store(&p.d, plain, column, int2{m, matrix});
        if (column < m) cp_async_bulk_tensor_store(&p.d, mirrored, m, int2{column, matrix});
        cp_async_bulk_commit_group();
      }
    }
  }

  __device__ static __forceinline__ void finish() { cp_async_bulk_wait_group_read<0>(); }

 private:
  // Combines the lane's values of a square: x[4 j + 2 h + i] is at (row + 8 h, column + 8 j + i).
  __device__ __forceinline__ void combine(const Params& p, int row, int column, float* x) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row + 8 * h;
      const T* c = p.c + (int64_t(matrix) * p.size + r) * p.size + column;
#pragma unroll
      for (int j = 0; j < kSquare / 8; ++j) {
        float* y = &x[4 * j + 2 * h];
        y[0] *= p.alpha, y[1] *= p.alpha;
        if (p.c != nullptr && r < p.size && column + 8 * j < p.size) {
          const Vec<T, 2> pair = load<T, 2>(c + 8 * j);
          y[0] += p.beta * pair[0], y[1] += p.beta * pair[1];
        }
        y[0] += r == column + 8 * j ? p.gamma : 0.0f, y[1] += r == column + 8 * j + 1 ? p.gamma : 0.0f;
      }
    }
  }
};

}  // namespace tigon::cuda::matmul
