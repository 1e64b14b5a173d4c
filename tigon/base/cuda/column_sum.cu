// Traffic: partials * cols * 4 bytes read (in L2: written just before), cols * size written.
#include <algorithm>

#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace {

// A block: few columns (a sector of 32 bytes) and many partial rows at a time. Even a short row has a block a multiprocessor then,
// and every thread few loads to wait for: what counts in a kernel that stands behind another one.
constexpr int kColumns = 8, kLanes = 64;
constexpr size_t kMostSums = 3;

template <class T>
struct Results {
  T* data[kMostSums] = {};  // null: not wanted
  int64_t end[kMostSums] = {};
};

template <class T>
__global__ __launch_bounds__(kColumns* kLanes) void sum_partials_kernel(
    const float* rows, int64_t partials, int64_t cols, const __grid_constant__ Results<T> out) {
  __shared__ float sums[kLanes][kColumns + 1];
  wait_for_kernel_ahead();
  const int c = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
  const int64_t column = int64_t(blockIdx.x) * kColumns + c;
  float s = 0.0f;
  if (column < cols) {
#pragma unroll 8
    for (int64_t p = lane; p < partials; p += kLanes) s += rows[p * cols + column];
  }
  sums[lane][c] = s;
  __syncthreads();
  // Warp w finishes column w.
  const int warp = threadIdx.x / 32, part = threadIdx.x % 32;
  if (warp >= kColumns) return;
  s = 0.0f;
#pragma unroll
  for (int i = 0; i < kLanes; i += 32) s += sums[i + part][warp];
  s = reduce_lanes<Sum, 32>(s);
  const int64_t mine = int64_t(blockIdx.x) * kColumns + warp;
  if (part != 0) return;
  int64_t begin = 0;
#pragma unroll
  for (int i = 0; i < kMostSums; ++i) {
    if (mine >= begin && mine < out.end[i] && out.data[i]) out.data[i][mine - begin] = narrow<T>(s);
    begin = out.end[i];
  }
}

}  // namespace

void sum_partials(const char* op, Context& ctx, const float* rows, int64_t partials,
                  std::initializer_list<Vector> outs) {
  TIGON_CHECK(op, outs.size() <= kMostSums, "at most ", kMostSums, " column sums, got ", outs.size());
  const Vector* wanted = std::find_if(outs.begin(), outs.end(), [](const Vector& v) { return bool(v); });
  if (wanted == outs.end()) return;
  dispatch_float(op, "column sum", wanted->dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    Results<T> results;
    int64_t cols = 0;
    int i = 0;
    for (const Vector& v : outs) {
      TIGON_CHECK(op, !v || v.dtype == wanted->dtype, "column sums must share a dtype");
      results.data[i] = v.as<T>();
      results.end[i++] = cols += v.size;
    }
    launch(op, ctx, sum_partials_kernel<T>,
           {.blocks = ceil_div(cols, kColumns), .threads = kColumns * kLanes, .early = true}, rows, partials,
           cols, results);
  });
}

}  // namespace tigon::cuda
