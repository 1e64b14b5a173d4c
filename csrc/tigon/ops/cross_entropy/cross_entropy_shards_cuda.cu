// CUDA backend of cross_entropy_combine: a thread per row.
#include <cmath>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"

namespace tigon::cuda {
namespace {

constexpr int kCombineThreads = 128;

#define TIGON_ROW __device__ __forceinline__
#include "tigon/ops/cross_entropy/cross_entropy_shards.inc"
#undef TIGON_ROW

__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const __grid_constant__ ShardPointers p,
                                                                  int64_t rows) {
  const int64_t r = int64_t(blockIdx.x) * kCombineThreads + threadIdx.x;
  if (r < rows) combine_row(p, r);
}

__global__ __launch_bounds__(kCombineThreads) void empty_kernel(float* part, int64_t rows, int64_t cols,
                                                                int64_t stride) {
  const int64_t i = int64_t(blockIdx.x) * kCombineThreads + threadIdx.x;
  if (i < rows * cols) part[i / cols * stride + i % cols] = -INFINITY;
}

}  // namespace

void cross_entropy_combine(Context& ctx, const CrossEntropyCombine& a) {
  const int64_t rows = a.target.size;
  launch("cross_entropy_combine", ctx, combine_kernel,
         {.blocks = ceil_div(rows, kCombineThreads), .threads = kCombineThreads}, shard_pointers(a), rows);
}

void cross_entropy_empty_part(Context& ctx, const CrossEntropyEmptyPart& a) {
  launch("cross_entropy_combine", ctx, empty_kernel,
         {.blocks = ceil_div(a.part.rows * a.part.cols, kCombineThreads), .threads = kCombineThreads},
         a.part.row<float>(0), a.part.rows, a.part.cols, a.part.stride);
}

}  // namespace tigon::cuda
