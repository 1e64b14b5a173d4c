// The list of rows in which the answers of a pair are side by side: one read and three writes of 8 bytes a
// row.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/ops/loss_head/engine.h"

namespace tigon::cuda {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void pair_rows_kernel(const int64_t* target, int64_t* index,
                                                             int64_t* labels, int64_t* position,
                                                             int64_t pairs, int64_t tokens, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  const int64_t answer = row / tokens, pair = answer % pairs, side = answer / pairs;
  const int64_t place = (2 * pair + side) * tokens + row % tokens;
  position[row] = place, index[place] = row, labels[place] = target[row];
}

}  // namespace

void loss_head_pairs(Context& ctx, const LossHeadPairs& a) {
  launch("linear_preference", ctx, pair_rows_kernel,
         {.blocks = ceil_div(a.target.size, int64_t(kThreads)), .threads = kThreads}, a.target.as<int64_t>(),
         a.index.as<int64_t>(), a.labels.as<int64_t>(), a.position.as<int64_t>(), a.pairs, a.tokens,
         a.target.size);
}

}  // namespace tigon::cuda
