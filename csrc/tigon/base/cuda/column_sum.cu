// Sums partial rows. It reads partials * cols * 4 bytes, mostly from L2, and writes cols * size bytes.
#include <algorithm>

#include "tigon/base/cuda/column_sum.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace {

// A CTA sums some columns of many partial rows, so that every thread has few loads, all in flight
// together: latency matters in a kernel that follows another one. It takes 32 columns (a 128-byte
// line), or 8 (a 32-byte sector) if there are few columns, so that more SMs take part. Matrices
// of many columns take small CTAs, which are all resident at a time.
constexpr int kThreads = 1024, kSmall = 256, kFew = 8, kLine = 32, kLoadsInFlight = 8;
constexpr int64_t kLongRow = 512, kManyLines = 8192;
constexpr size_t kMaxSums = 3;

template <class T>
struct Results {
  // Null means not wanted.
  T* data[kMaxSums] = {};
  int64_t end[kMaxSums] = {};

  __device__ __forceinline__ void put(int64_t column, float sum) const {
    int64_t begin = 0;
#pragma unroll
    for (int i = 0; i < int(kMaxSums); ++i) {
      if (column >= begin && column < end[i] && data[i]) data[i][column - begin] = narrow<T>(sum);
      begin = end[i];
    }
  }
};
// The last CTA forms this sum, if one is wanted.
template <class T>
struct TotalOf {
  const float* parts;
  int64_t count;
  // Null means not wanted.
  T* out;
};

template <class T, int Columns, int Threads>
__global__ __launch_bounds__(Threads) void sum_partials_kernel(const float* rows, int64_t partials,
                                                               int64_t cols,
                                                               const __grid_constant__ Results<T> out,
                                                               const TotalOf<T> total) {
  constexpr int kLanes = Threads / Columns;
  __shared__ float sums[kLanes][Columns + 1];
  griddepcontrol_wait();
  const int c = threadIdx.x % Columns, lane = threadIdx.x / Columns;
  const bool totals = total.out != nullptr && blockIdx.x + 1 == gridDim.x;
  const int64_t first = totals ? 0 : int64_t(blockIdx.x) * Columns, column = first + c;
  if (totals) rows = total.parts, partials = total.count, cols = 1;
  float sum[1] = {};
  if (column < cols)
    sum_columns<kLoadsInFlight>(rows + lane * cols + column, 0, kLanes * cols,
                                int((partials - lane + kLanes - 1) / kLanes), sum);
  sums[lane][c] = sum[0];
  __syncthreads();
  // A warp finishes a column.
  const int part = threadIdx.x % 32;
  for (int w = threadIdx.x / 32; w < Columns; w += Threads / 32) {
    float s = part < kLanes ? sums[part][w] : 0.0f;
#pragma unroll
    for (int i = 32; i < kLanes; i += 32) s += sums[i + part][w];
    s = reduce_lanes<Sum, 32>(s);
    const int64_t mine = first + w;
    if (part != 0 || mine >= cols) continue;
    if (totals)
      *total.out = narrow<T>(s);
    else
      out.put(mine, s);
  }
}

// If there are few partial rows of many columns, one thread per column fills the device.
constexpr int kColumnThreads = 256;
constexpr int64_t kManyColumns = 65536, kFewPartials = 32;

template <class T>
__global__ __launch_bounds__(kColumnThreads) void sum_long_partials_kernel(
    const float* rows, int64_t partials, int64_t cols, const __grid_constant__ Results<T> out) {
  griddepcontrol_wait();
  const int64_t column = int64_t(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (column >= cols) return;
  float s = 0.0f;
#pragma unroll 8
  for (int64_t p = 0; p < partials; ++p) s += rows[p * cols + column];
  out.put(column, s);
}

}  // namespace

void sum_partials(const char* op, Context& ctx, const float* rows, int64_t partials,
                  std::initializer_list<Vector> outs, const Total& total) {
  TIGON_CHECK(op, outs.size() <= kMaxSums, "at most ", kMaxSums, " column sums, got ", outs.size());
  const Vector* some = std::find_if(outs.begin(), outs.end(), [](const Vector& v) { return bool(v); });
  const Vector* wanted = some != outs.end() ? some : &total.out;
  if (!*wanted) return;
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
    if (some == outs.end()) cols = 0;
    TIGON_CHECK(op, !total.out || total.out.dtype == wanted->dtype, "column sums must share a dtype");
    if (cols >= kManyColumns && partials <= kFewPartials && !total.out)
      return launch(op, ctx, sum_long_partials_kernel<T>,
                    {.blocks = ceil_div(cols, kColumnThreads), .threads = kColumnThreads, .pdl = true}, rows,
                    partials, cols, results);
    const bool line = cols >= kLongRow, small = cols > kManyLines;
    launch(op, ctx,
           small  ? sum_partials_kernel<T, kLine, kSmall>
           : line ? sum_partials_kernel<T, kLine, kThreads>
                  : sum_partials_kernel<T, kFew, kThreads>,
           {.blocks = ceil_div(cols, line ? kLine : kFew) + bool(total.out),
            .threads = small ? kSmall : kThreads,
            .pdl = true},
           rows, partials, cols, results, TotalOf<T>{total.parts, total.count, total.out.template as<T>()});
  });
}

}  // namespace tigon::cuda
