// This epilogue serves a loss head that keeps no logits: for each row it computes the maximum and the sum of
// exponentials in a tile, and the logit of the label.
#pragma once

#include <cmath>

#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda::matmul {

struct StatisticsParams {
  float2* parts;          // [tiles of columns, rows]: max z, sum of e^(z - max z)
  const int64_t* target;  // [rows]
  // [rows]: z of the label, if it is one of the columns.
  float* target_logit;
  int rows, cols;
  float scale;  // > 0: z = scale * logit
};

// Logits are first rounded to T, as if they were written. With float they are not rounded.
template <class T>
struct StatisticsEpilogue {
  using Params = StatisticsParams;
  struct Tensors {};

  // Holds this lane's rows, 8 apart, with the columns 8 j + 2 q + i of the tile.
  const Tile& tile;
  const int row, q = int(threadIdx.x) % 4;
  __device__ StatisticsEpilogue(const Params&, const Tile& tile, int consumer)
      : tile(tile),
        row(tile.m + consumer * 64 + int(threadIdx.x) % kWarpgroup / 32 * 16 + int(threadIdx.x) % 32 / 4) {}

  // Must neither write the accumulators nor copy all of them: ptxas then keeps their registers for the next
  // tile's MMAs.
  __device__ __forceinline__ void run(const Params& p, Tensors&, int,
                                      const float (&acc)[kAccumulators]) const {
    // Holds the columns of the rows' labels within the tile.
    int label[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = row + 8 * h < p.rows ? p.target[row + 8 * h] - tile.n : -1;
      label[h] = at >= 0 && at < min(kTileN, p.cols - tile.n) ? int(at) : -1;
    }
    if (tile.n + kTileN > p.cols)
      reduce<true>(p, acc);
    else
      reduce<false>(p, acc);
    if (!__any_sync(0xffffffffu, label[0] >= 0 || label[1] >= 0)) return;
#pragma unroll
    for (int k = 0; k < kAccumulators; ++k)
      if (label[k / 2 % 2] == k / 4 * 8 + 2 * q + k % 2)
        p.target_logit[row + k / 2 % 2 * 8] = round_to<T>(acc[k]) * p.scale;
  }

  __device__ static __forceinline__ void finish() {}

 private:
  // kTail: columns of the tile are beyond the last one.
  template <bool kTail>
  __device__ __forceinline__ void reduce(const Params& p, const float (&acc)[kAccumulators]) const {
    constexpr bool kRounded = !std::is_same_v<T, float>;
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    auto exact = [&](int k) {
      return kTail && tile.n + k / 4 * 8 + 2 * q + k % 2 >= p.cols ? -INFINITY : acc[k];
    };
    uint32_t pairs[kAccumulators / 2];
    if constexpr (kRounded)
#pragma unroll
      for (int i = 0; i < kAccumulators / 2; ++i) {
        const float two[2] = {exact(2 * i), exact(2 * i + 1)};
        pairs[i] = pack<T>(two);
      }
    auto logit = [&](int k) -> float {
      if constexpr (kRounded)
        return reinterpret_cast<const Vec<T, 2>&>(pairs[k / 2])[k % 2];
      else
        return exact(k);
    };
    const float to_log2 = p.scale * 1.44269504f;
    // The exponential of a logit of zero[h] is 1.
    float top[2], zero[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Maxima and sums run in four chains each.
      float most[4];
      if constexpr (kRounded) {
        Pair two[4];
#pragma unroll
        for (int j = 0; j < kAccumulators / 4; ++j) {
          const Pair& x = reinterpret_cast<const Pair&>(pairs[2 * j + h]);
          two[j % 4] = j < 4 ? x : __hmax2(two[j % 4], x);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const auto& x = reinterpret_cast<const Vec<T, 2>&>(two[c]);
          most[c] = fmaxf(x[0], x[1]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kAccumulators / 2; ++j) {
          const float x = logit(j / 2 * 4 + 2 * h + j % 2);
          most[j % 4] = j < 4 ? x : fmaxf(most[j % 4], x);
        }
      }
      float x = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      top[h] = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      zero[h] = top[h] == -INFINITY ? 0.0f : top[h];
    }
    float sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < kAccumulators; ++k)
      sum[k / 2 % 2][k / 4 % 2 * 2 + k % 2] += ex2_approx_ftz((logit(k) - zero[k / 2 % 2]) * to_log2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float s = (sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]);
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      // The second tile of a pair may be beyond the last column.
      if (q == 0 && row + 8 * h < p.rows && tile.n < p.cols)
        p.parts[int64_t(tile.n / kTileN) * p.rows + row + 8 * h] = make_float2(top[h] * p.scale, s);
    }
  }
};

// Combines the statistics of tiles into those of whole rows, in an order that depends on the row only:
// row_max, log_sum = log of the sum of e^(z - row_max), log_prob of the label.
constexpr int kCombineWarps = 16;
static __global__ void __launch_bounds__(kCombineWarps * 32)
    combine_statistics_kernel(StatisticsParams p, float* row_max, float* log_sum, float* log_prob) {
  __shared__ float slots[2][kCombineWarps][32];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, row = int(blockIdx.x) * 32 + lane;
  const int tiles = (p.cols + kTileN - 1) / kTileN;
  const bool mine = row < p.rows;
  float most = -INFINITY, sum = 0.0f;
  for (int t = warp; mine && t < tiles; t += kCombineWarps)
    most = fmaxf(most, p.parts[int64_t(t) * p.rows + row].x);
  slots[0][warp][lane] = most;
  __syncthreads();
  for (int w = 0; w < kCombineWarps; ++w) most = fmaxf(most, slots[0][w][lane]);
  for (int t = warp; mine && t < tiles; t += kCombineWarps) {
    const float2 part = p.parts[int64_t(t) * p.rows + row];
    sum += part.y * ex2_approx_ftz((part.x - most) * 1.44269504f);
  }
  slots[1][warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || !mine) return;
  for (int w = 1; w < kCombineWarps; ++w) sum += slots[1][w][lane];
  const float log = logf(sum);
  const int64_t y = p.target[row];
  row_max[row] = most;
  log_sum[row] = log;
  log_prob[row] = y >= 0 && y < p.cols ? p.target_logit[row] - most - log : -INFINITY;
}

}  // namespace tigon::cuda::matmul
