// The epilogue of a loss head that keeps no logits: of each row its maximum and sum of exponentials in a tile, and the logit of
// its label.
#pragma once

#include <cmath>

#include "tigon/base/cuda/matmul/mainloop.cuh"
#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda::matmul {

struct StatisticsParams {
  float2* parts;          // [tiles of columns, rows]: max z, sum of e^(z - max z)
  const int64_t* target;  // [rows]
  float* target_logit;    // [rows]: z of the label, where it is a column
  int rows, cols;
  float scale;  // > 0: z = scale * logit
};

// Logits are rounded to T first, as where they are written; float: not.
template <class T>
struct StatisticsEpilogue {
  using Params = StatisticsParams;
  struct Tensors {};

  // This lane's rows, 8 apart, with the columns 8 j + 2 q + i of the tile, and where in it their labels are.
  int row, n, label[2];
  __device__ StatisticsEpilogue(const Params& p, const Tile& tile, int consumer) : n(tile.n) {
    row = tile.m + consumer * 64 + int(threadIdx.x) % kWarpgroup / 32 * 16 + int(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = row + 8 * h < p.rows ? p.target[row + 8 * h] - n : -1;
      label[h] = at >= 0 && at < min(kTileN, p.cols - n) ? int(at) : -1;
    }
  }

  __device__ __forceinline__ void run(const Params& p, Tensors&, int, float (&acc)[kAccumulators]) const {
    const int q = int(threadIdx.x) % 4;
    // Copies: with a write to the accumulators themselves ptxas serialises the wgmma that form them.
    float logit[kAccumulators];
#pragma unroll
    for (int k = 0; k < kAccumulators; ++k) logit[k] = round_to<T>(acc[k]);
    if (n + kTileN > p.cols) {
#pragma unroll
      for (int k = 0; k < kAccumulators; ++k)
        if (n + k / 4 * 8 + 2 * q + k % 2 >= p.cols) logit[k] = -INFINITY;
    }
    // Four chains of a row each.
    float most[2][4], sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < kAccumulators; ++k) {
      float& x = most[k / 2 % 2][k / 4 % 2 * 2 + k % 2];
      x = k < 8 ? logit[k] : fmaxf(x, logit[k]);
    }
    const float to_log2 = p.scale * 1.44269504f;
    float top[2], zero[2];  // `zero` is what is 1 as an exponential
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(fmaxf(most[h][0], most[h][1]), fmaxf(most[h][2], most[h][3]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      top[h] = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      zero[h] = top[h] == -INFINITY ? 0.0f : top[h];
    }
#pragma unroll
    for (int k = 0; k < kAccumulators; ++k)
      sum[k / 2 % 2][k / 4 % 2 * 2 + k % 2] += ex2_approx_ftz((logit[k] - zero[k / 2 % 2]) * to_log2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float s = (sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]);
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      if (q == 0 && row + 8 * h < p.rows && n < p.cols)  // a pair's second tile may be beyond
        p.parts[int64_t(n / kTileN) * p.rows + row + 8 * h] = make_float2(top[h] * p.scale, s);
    }
    if (__any_sync(0xffffffffu, label[0] >= 0 || label[1] >= 0)) {
#pragma unroll
      for (int k = 0; k < kAccumulators; ++k)
        if (label[k / 2 % 2] == k / 4 * 8 + 2 * q + k % 2)
          p.target_logit[row + k / 2 % 2 * 8] = logit[k] * p.scale;
    }
  }

  __device__ static __forceinline__ void finish() {}
};

// The statistics of whole rows from those of tiles, in an order that depends on the row alone: row_max, log_sum = log of the
// sum of e^(z - row_max), log_prob of the label.
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
