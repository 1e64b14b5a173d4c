// The CUDA backend of Dynamic Tanh moves 2b bytes per element forward and 3b backward (b = element size), and
// also weight and bias once per CTA (from L2), and the gradients' partials through L2. An element takes about
// 17 instructions forward and 24 backward; the memory-bound budget is 31 and 46 (bf16). A row needs no
// reduction, so a CTA takes a tile of columns and loops over rows: a thread keeps the parameters and sums of
// its columns in registers and loads several rows at a time. The backward has few, long CTAs and prefetches
// the next rows. Rows shorter than a tile share it.
#include <algorithm>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/dyt/dyt.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/dyt/dyt_math.inc"

constexpr const char* kOp = "dyt";
// Counts the threads of a CTA, the rows loaded at a time, and the CTAs per SM that the registers allow. A
// forward CTA takes only the rows that it loads at once: many short CTAs end together. Backward CTAs end with
// a reduction, so there are only as many as are resident.
template <bool Backward>
constexpr int kThreads = Backward ? 256 : 128;
template <bool Backward>
constexpr int kInFlight = Backward ? 2 : 8;
template <bool Backward>
constexpr int kMinBlocks = Backward ? 2 : 6;
// For single elements the forward divides its rows into this many parts per SM.
constexpr int kScalarParts = 64;

// Says how CTAs share the matrix: threads side by side in a row, rows of a CTA at a time (groups), tiles of
// columns, rows of a part (chunk).
struct Tiling {
  int64_t rows, cols, chunk;
  uint32_t tiles, row_threads, groups;
  // 1 / row_threads is stored in units of 2^-16, rounded up, which is exact for the threads of a CTA.
  uint32_t inv_row_threads;
};

template <class X, class W>
struct Dyt {
  // Only the backward has dy.
  const X *dy, *x;
  // The result is y, or dx, which may be null.
  X* out;
  int64_t dy_stride, x_stride, out_stride;
  const W *alpha, *weight, *bias;
  // [parts * tiles] and [parts, 2, cols]; may be null.
  float *dalpha, *sums;
  Tiling tiling;
};

// Holds what a thread loads at once.
template <class X, int N, bool Backward>
struct Rows {
  // Only the backward has dy.
  Vec<X, N> x[kInFlight<Backward>], dy[kInFlight<Backward>];
};

template <class X, class W, int N, bool Backward>
__global__ __launch_bounds__(kThreads<Backward>,
                             kMinBlocks<Backward>) void dyt_kernel(const __grid_constant__ Dyt<X, W> p) {
  __shared__ __align__(16) float slots[32];
  __shared__ __align__(16) float shared[Backward ? kThreads<Backward> * N : 1];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int row_threads = int(p.tiling.row_threads), groups = int(p.tiling.groups);
  const int group = int(threadIdx.x * p.tiling.inv_row_threads >> 16),
            lane = int(threadIdx.x) - group * row_threads;
  const int64_t part = blockIdx.x / p.tiling.tiles, tile = blockIdx.x % p.tiling.tiles;
  const int64_t column = (tile * row_threads + lane) * N;
  const bool inside = column < p.tiling.cols && group < groups;
  const float alpha = widen(*p.alpha);
  Vec<W, N> weight, bias;
#pragma unroll
  for (int j = 0; j < N; ++j) weight.set(j, 1.0f), bias.set(j, 0.0f);
  if (Backward && inside && p.weight) weight = load<W, N>(p.weight + column);
  float dweight[N] = {}, dbias[N] = {}, dalpha = 0.0f;
  const int64_t end = min((part + 1) * p.tiling.chunk, p.tiling.rows);
  auto load_rows = [&](int64_t first, Rows<X, N, Backward>& rows) {
#pragma unroll
    for (int i = 0; i < kInFlight<Backward>; ++i) {
      int64_t row = first + i * groups;
      rows.x[i] = load_predicated<X, N>(row < end, p.x + row * p.x_stride + column);
      if constexpr (Backward)
        rows.dy[i] = load_predicated<X, N>(row < end, p.dy + row * p.dy_stride + column);
    }
  };
  int64_t first = part * p.tiling.chunk + group;
  Rows<X, N, Backward> next;
  if (Backward && inside) load_rows(first, next);
  for (; inside && first < end; first += groups * kInFlight<Backward>) {
    Rows<X, N, Backward> rows;
    if constexpr (Backward)
      rows = next, load_rows(first + groups * kInFlight<Backward>, next);
    else
      load_rows(first, rows);
    const auto& [x, dy] = rows;
    // Parameters are loaded after the rows.
    if (!Backward && p.weight) weight = load<W, N>(p.weight + column);
    if (!Backward && p.bias) bias = load<W, N>(p.bias + column);
#pragma unroll
    for (int i = 0; i < kInFlight<Backward>; ++i) {
      int64_t row = first + i * groups;
      if (row >= end) continue;
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float t = dyt_t(ApproxFor<W>(x[i][j]), ApproxFor<W>(alpha));
        if constexpr (Backward) {
          float inner = dyt_inner(dy[i][j], t, weight[j]);
          out[j] = alpha * inner;
          dalpha = fma(inner, x[i][j], dalpha);
          dweight[j] = fma(dy[i][j], t, dweight[j]);
          dbias[j] += dy[i][j];
        } else {
          out[j] = dyt_y(t, weight[j], bias[j]);
        }
      }
      if (Backward && p.out == nullptr) continue;
      Vec<X, N> packed;
      packed.set(out);
      store(p.out + row * p.out_stride + column, packed);
    }
  }
  if constexpr (Backward) {
    dalpha = reduce_row<Sum, 0>(dalpha, slots);
    if (threadIdx.x == 0 && p.dalpha) p.dalpha[blockIdx.x] = dalpha;
    if (p.sums == nullptr) return;
    float* sums = p.sums + part * 2 * p.tiling.cols + column;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      // Adds over the row groups of the CTA, in order.
      if (groups > 1) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < N; ++j)
          shared[j * kThreads<Backward> + threadIdx.x] = k == 0 ? dweight[j] : dbias[j];
        __syncthreads();
      }
      if (group != 0 || column >= p.tiling.cols) continue;
      Vec<float, N> total;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        total.v[j] = k == 0 ? dweight[j] : dbias[j];
        for (int g = 1; g < groups; ++g)
          total.v[j] += shared[j * kThreads<Backward> + g * row_threads + lane];
      }
      store<float, N>(sums + k * p.tiling.cols, total);
    }
  }
}

// Short rows take as many row groups as fit in a CTA. Long rows take tiles that begin at memory
// lines, narrow enough that most threads have columns.
template <bool Backward>
Tiling make_tiling(int64_t rows, int64_t cols, int vec_size) {
  constexpr int64_t kAll = kThreads<Backward>;
  const int64_t vecs = ceil_div(cols, vec_size);
  int64_t row_threads = std::min(vecs, kAll), tiles = ceil_div(vecs, row_threads),
          groups = kAll / row_threads;
  for (int64_t narrow = kAll / 2; narrow >= 32 && narrow < vecs; narrow /= 2) {
    const int64_t more = ceil_div(vecs, narrow), of_block = kAll / narrow;
    if (of_block * tiles * 10 > groups * more * 11) row_threads = narrow, tiles = more, groups = of_block;
  }
  const int64_t least = groups * kInFlight<Backward>, sms = device_facts().sms;
  const int64_t parts = std::max<int64_t>(1, sms * (Backward ? kMinBlocks<Backward> : kScalarParts) / tiles);
  return {.rows = rows,
          .cols = cols,
          .chunk = Backward || vec_size == 1 ? std::max(least, ceil_div(rows, parts)) : least,
          .tiles = uint32_t(tiles),
          .row_threads = uint32_t(row_threads),
          .groups = uint32_t(groups),
          .inv_row_threads = uint32_t(65536 / row_threads + 1)};
}

// Calls fn(x type, parameter type).
template <class Fn>
void with_types(DType x, DType parameters, Fn&& fn) {
  dispatch_float(kOp, "x", x, [&](auto t) {
    using X = typename DeviceType<typename decltype(t)::type>::type;
    parameters == x ? fn(Type<X>{}, Type<X>{}) : fn(Type<X>{}, Type<float>{});
  });
}

template <bool Backward, class X, class W>
int64_t run(Context& ctx, Dyt<X, W>& p, int64_t rows, int64_t cols, bool wants_sums) {
  constexpr int kVecSize = 16 / sizeof(X);
  auto vectorizable = [&](const void* m, int64_t stride) {
    return m == nullptr || is_vectorizable(m, stride, cols, sizeof(X));
  };
  auto aligned = [](const void* v) { return reinterpret_cast<uintptr_t>(v) % 16 == 0; };
  bool vectorized = vectorizable(p.x, p.x_stride) && vectorizable(p.dy, p.dy_stride) &&
                    vectorizable(p.out, p.out_stride) && aligned(p.weight) && aligned(p.bias);
  p.tiling = make_tiling<Backward>(rows, cols, vectorized ? kVecSize : 1);
  int64_t parts = ceil_div(rows, p.tiling.chunk);
  if (Backward) p.dalpha = ctx.scratch_of<float>(parts * p.tiling.tiles);
  if (wants_sums) p.sums = ctx.scratch_of<float>(parts * 2 * cols);
  LaunchConfig grid{.blocks = parts * p.tiling.tiles,
                    .threads = int(ceil_div(p.tiling.row_threads * p.tiling.groups, 32) * 32),
                    .pdl = true};
  launch(kOp, ctx, vectorized ? dyt_kernel<X, W, kVecSize, Backward> : dyt_kernel<X, W, 1, Backward>, grid,
         p);
  return parts;
}

}  // namespace

void dyt_fwd(Context& ctx, const DytFwd& a) {
  with_types(a.x.dtype, a.alpha.dtype, [&]<class X, class W>(Type<X>, Type<W>) {
    Dyt<X, W> p{.x = a.x.row<X>(0),
                .out = a.y.row<X>(0),
                .x_stride = a.x.stride,
                .out_stride = a.y.stride,
                .alpha = a.alpha.as<W>(),
                .weight = a.weight.as<W>(),
                .bias = a.bias.as<W>()};
    run<false>(ctx, p, a.x.rows, a.x.cols, false);
  });
}

void dyt_bwd(Context& ctx, const DytBwd& a) {
  Vector dweight = a.dweight, dbias = a.dbias;
  // One row of partials holds both gradients.
  dweight.size = dbias.size = a.x.cols;
  if (a.x.rows == 0) {
    for (const Vector& v : {a.dalpha, a.dweight, a.dbias})
      if (v)
        TIGON_CUDA_CHECK(kOp, cudaMemsetAsync(v.data, 0, size_of(v.dtype) * size_t(v.size),
                                              static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  with_types(a.x.dtype, a.alpha.dtype, [&]<class X, class W>(Type<X>, Type<W>) {
    Dyt<X, W> p{.dy = a.dy.row<X>(0),
                .x = a.x.row<X>(0),
                .out = a.dx.row<X>(0),
                .dy_stride = a.dy.stride,
                .x_stride = a.x.stride,
                .out_stride = a.dx.stride,
                .alpha = a.alpha.as<W>(),
                .weight = a.weight.as<W>()};
    int64_t parts = run<true>(ctx, p, a.x.rows, a.x.cols, a.dweight || a.dbias);
    sum_partials(kOp, ctx, p.sums, parts, {dweight, dbias}, {p.dalpha, parts * p.tiling.tiles, a.dalpha});
  });
}

}  // namespace tigon::cuda
