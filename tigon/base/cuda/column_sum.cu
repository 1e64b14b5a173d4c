// Traffic: partials * cols * 4 bytes read (in L2: written just before), cols * size written.
#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace {

constexpr int kColumns = 32, kLanes = 32;  // a block: 32 columns, 32 partial rows at a time

template <class T>
__global__ __launch_bounds__(kColumns* kLanes) void sum_partials_kernel(const float* rows, int64_t partials,
                                                                        int64_t cols, T* out) {
  __shared__ float sums[kLanes][kColumns + 1];
  wait_for_kernel_ahead();
  int c = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
  int64_t column = int64_t(blockIdx.x) * kColumns + c;
  float s = 0.0f;
  if (column < cols)
    for (int64_t p = lane; p < partials; p += kLanes) s += rows[p * cols + column];
  sums[lane][c] = s;
  __syncthreads();
  // Warp `lane` finishes column `lane`: its 32 threads hold that column's 32 partial sums.
  s = reduce_lanes<Sum, 32>(sums[c][lane]);
  int64_t mine = int64_t(blockIdx.x) * kColumns + lane;
  if (c == 0 && mine < cols) out[mine] = narrow<T>(s);
}

}  // namespace

void sum_partials(const char* op, Context& ctx, const float* rows, int64_t partials, int64_t cols,
                  const Vector& out) {
  dispatch_float(op, "column sum", out.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    launch(op, ctx, sum_partials_kernel<T>,
           {.blocks = ceil_div(cols, kColumns), .threads = kColumns * kLanes, .early = true}, rows, partials,
           cols, out.as<T>());
  });
}

}  // namespace tigon::cuda
