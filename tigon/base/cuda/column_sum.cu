// Traffic: partials * cols * 4 bytes read (in L2: written just before), cols * size written.
#include <algorithm>

#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace {

// A block: some columns and many partial rows at a time, so that every thread has few loads to wait for, all of them together: what
// counts in a kernel that stands behind another one. A whole line of columns, and of short rows a sector of 32 bytes, so that there is
// more than a handful of blocks. Small blocks where large ones would not run all at a time.
constexpr int kThreads = 1024, kSmall = 256, kFew = 8, kLine = 32, kAtOnce = 8;
constexpr int64_t kLongRow = 512, kManyLines = 8192;
constexpr size_t kMostSums = 3;

template <class T>
struct Results {
  T* data[kMostSums] = {};  // null: not wanted
  int64_t end[kMostSums] = {};

  __device__ __forceinline__ void put(int64_t column, float sum) const {
    int64_t begin = 0;
#pragma unroll
    for (int i = 0; i < int(kMostSums); ++i) {
      if (column >= begin && column < end[i] && data[i]) data[i][column - begin] = narrow<T>(sum);
      begin = end[i];
    }
  }
};
// The last block's, if there is one.
template <class T>
struct TotalOf {
  const float* parts;
  int64_t count;
  T* out;  // null: not wanted
};

// Issued where it stands and without a branch (vec.cuh).
__device__ __forceinline__ float load_or_zero(bool wanted, const float* p) {
  float x;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.f32 %0, 0f00000000;\n@p ld.global.f32 %0, [%1];\n}"
      : "=f"(x)
      : "l"(p), "r"(unsigned(wanted)));
  return x;
}

template <class T, int Columns, int Threads>
__global__ __launch_bounds__(Threads) void sum_partials_kernel(const float* rows, int64_t partials,
                                                               int64_t cols,
                                                               const __grid_constant__ Results<T> out,
                                                               const TotalOf<T> total) {
  constexpr int kLanes = Threads / Columns;
  __shared__ float sums[kLanes][Columns + 1];
  wait_for_kernel_ahead();
  const int c = threadIdx.x % Columns, lane = threadIdx.x / Columns;
  const bool totals = total.out != nullptr && blockIdx.x + 1 == gridDim.x;
  const int64_t first = totals ? 0 : int64_t(blockIdx.x) * Columns, column = first + c;
  if (totals) rows = total.parts, partials = total.count, cols = 1;
  float s = 0.0f;
  if (column < cols) {
    const float* from = rows + lane * cols + column;
    const int64_t step = kLanes * cols;
#pragma unroll 1
    for (int left = int((partials - lane + kLanes - 1) / kLanes); left > 0; left -= kAtOnce) {
      float x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, from += step) x[i] = load_or_zero(i < left, from);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) s += x[i];
    }
  }
  sums[lane][c] = s;
  __syncthreads();
  // A warp finishes a column.
  const int part = threadIdx.x % 32;
  for (int w = threadIdx.x / 32; w < Columns; w += Threads / 32) {
    s = part < kLanes ? sums[part][w] : 0.0f;
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

// A few rows of so many columns that there are blocks enough when a thread has one to itself (7 x 262144: 34 us with blocks as above).
constexpr int kColumnThreads = 256;
constexpr int64_t kManyColumns = 65536, kFewPartials = 32;

template <class T>
__global__ __launch_bounds__(kColumnThreads) void sum_long_partials_kernel(
    const float* rows, int64_t partials, int64_t cols, const __grid_constant__ Results<T> out) {
  wait_for_kernel_ahead();
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
  TIGON_CHECK(op, outs.size() <= kMostSums, "at most ", kMostSums, " column sums, got ", outs.size());
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
                    {.blocks = ceil_div(cols, kColumnThreads), .threads = kColumnThreads, .early = true},
                    rows, partials, cols, results);
    const bool line = cols >= kLongRow, small = cols > kManyLines;
    launch(op, ctx,
           small  ? sum_partials_kernel<T, kLine, kSmall>
           : line ? sum_partials_kernel<T, kLine, kThreads>
                  : sum_partials_kernel<T, kFew, kThreads>,
           {.blocks = ceil_div(cols, line ? kLine : kFew) + bool(total.out),
            .threads = small ? kSmall : kThreads,
            .early = true},
           rows, partials, cols, results, TotalOf<T>{total.parts, total.count, total.out.template as<T>()});
  });
}

}  // namespace tigon::cuda
