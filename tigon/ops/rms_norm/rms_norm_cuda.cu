// CUDA backend of RMSNorm.
//
// Bytes per element (b = element size): forward 2b, backward 3b; besides, 4 bytes a row of rstd, the weight once per block
// (from L2) and blocks * cols * 4 bytes of dweight partials, written and read back from L2.
// Instructions: about 4 per element forward, 9 backward, against a budget of 31 and 46 at the speed of the memory (bf16).
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/rms_norm/rms_norm_math.inc"

constexpr const char* kOp = "rms_norm";

template <class X, class W, class Y>
struct Forward {
  const X* x;
  const W* weight;  // may be null
  Y* y;
  float* rstd;
  int64_t rows, cols, x_stride, y_stride;
  float eps, offset;
  bool round_h;
};

template <class X, class W, class Y, int N>
__device__ __forceinline__ void write_pack(const Forward<X, W, Y>& p, Y* y, int64_t column, const Pack<X, N>& x, float rstd) {
  Pack<Y, N> out;
  Pack<W, N> w;
  if (p.weight) w = load<W, N>(p.weight + column);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float h = x[j] * rstd;
    if (p.round_h) h = round_to<X>(h);
    out.set(j, p.weight ? rms_norm_scaled(h, w[j], p.offset) : h);
  }
  store(y + column, out);
}

template <class X, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block) void forward_kernel(Forward<X, W, Y> p) {
  __shared__ float slots[32];
  int64_t row = int64_t(blockIdx.x) * Shape::rows + threadIdx.x / Shape::threads;
  bool live = row < p.rows;
  RowTile<X, N, Shape> tile;
  tile.load_row(p.x + (live ? row : 0) * p.x_stride, live ? p.cols : 0);
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < Shape::held; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) s = fma(tile.pack[i][j], tile.pack[i][j], s);
  s = reduce_row<Sum, Shape::threads>(s, slots);
  if (!live) return;
  float rstd = 1.0f / sqrtf(s / float(p.cols) + p.eps);
  if (threadIdx.x % Shape::threads == 0) p.rstd[row] = rstd;
#pragma unroll
  for (int i = 0; i < Shape::held; ++i)
    if (tile.column(i) < p.cols) write_pack<X, W, Y, N>(p, p.y + row * p.y_stride, tile.column(i), tile.pack[i], rstd);
}

constexpr int kLoopThreads = 1024;

// Rows too long for registers: two sweeps, the second out of L2.
template <class X, class W, class Y, int N>
__global__ __launch_bounds__(kLoopThreads) void forward_looped_kernel(Forward<X, W, Y> p) {
  __shared__ float slots[32];
  const X* x = p.x + int64_t(blockIdx.x) * p.x_stride;
  float s = 0.0f;
  for (int64_t c = int64_t(threadIdx.x) * N; c < p.cols; c += int64_t(kLoopThreads) * N) {
    auto pack = load<X, N>(x + c);
#pragma unroll
    for (int j = 0; j < N; ++j) s = fma(pack[j], pack[j], s);
  }
  s = reduce_row<Sum, kLoopThreads>(s, slots);
  float rstd = 1.0f / sqrtf(s / float(p.cols) + p.eps);
  if (threadIdx.x == 0) p.rstd[blockIdx.x] = rstd;
  for (int64_t c = int64_t(threadIdx.x) * N; c < p.cols; c += int64_t(kLoopThreads) * N)
    write_pack<X, W, Y, N>(p, p.y + int64_t(blockIdx.x) * p.y_stride, c, load_stream<X, N>(x + c), rstd);
}

template <class X, class W, class Y>
struct Backward {
  const Y* dy;
  const X* x;
  const W* weight;  // may be null
  const float* rstd;
  X* dx;            // may be null
  float* partials;  // [blocks, cols], may be null
  int64_t rows, cols, dy_stride, x_stride, dx_stride;
  float offset;
  bool round_h;
};

// Persistent blocks: block b takes row groups b, b + grid, ...; dweight is summed in registers over all rows of a thread, then
// over the row groups of the block in order. The next rows are on their way while the current ones are worked on.
template <class X, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block) void backward_kernel(Backward<X, W, Y> p) {
  constexpr bool kPrefetch = Shape::threads <= 512;
  __shared__ float slots[2][32];
  extern __shared__ float column_sums[];  // [cols], only when a block holds several rows
  int group = threadIdx.x / Shape::threads;
  int64_t step = int64_t(gridDim.x) * Shape::rows;
  float dw[Shape::held * N] = {};
  RowTile<X, N, Shape> x;
  RowTile<Y, N, Shape> dy;
  auto fetch = [&](int64_t row) {
    bool live = row < p.rows;
    x.load_row(p.x + (live ? row : 0) * p.x_stride, live ? p.cols : 0);
    dy.load_row(p.dy + (live ? row : 0) * p.dy_stride, live ? p.cols : 0);
  };
  int64_t first = int64_t(blockIdx.x) * Shape::rows;
  if constexpr (kPrefetch) fetch(first + group);
  int parity = 0;
  for (int64_t base = first; base < p.rows; base += step, parity ^= 1) {
    int64_t row = base + group;
    bool live = row < p.rows;
    if constexpr (!kPrefetch) fetch(row);
    RowTile<X, N, Shape> x_now = x;
    RowTile<Y, N, Shape> dy_now = dy;
    if constexpr (kPrefetch)
      if (base + step < p.rows) fetch(row + step);
    float rstd = live ? p.rstd[row] : 0.0f, s = 0.0f;
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      Pack<W, N> w;
      if (p.weight && x.column(i) < p.cols) w = load<W, N>(p.weight + x.column(i));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float h = x_now.pack[i][j] * rstd, d = dy_now.pack[i][j];
        float g = p.weight && x.column(i) < p.cols ? rms_norm_scaled(d, w[j], p.offset) : d;
        s = fma(g, h, s);
        dw[i * N + j] = fma(d, p.round_h ? round_to<X>(h) : h, dw[i * N + j]);
      }
    }
    if (p.dx == nullptr) continue;
    float c = reduce_row<Sum, Shape::threads>(s, slots[parity]) / float(p.cols);
    if (!live) continue;
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      if (x.column(i) >= p.cols) continue;
      Pack<W, N> w;
      if (p.weight) w = load<W, N>(p.weight + x.column(i));
      Pack<X, N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float d = dy_now.pack[i][j], g = p.weight ? rms_norm_scaled(d, w[j], p.offset) : d;
        out.set(j, rms_norm_dx(g, x_now.pack[i][j] * rstd, c, rstd));
      }
      store(p.dx + row * p.dx_stride + x.column(i), out);
    }
  }
  if (p.partials == nullptr) return;
  float* out = p.partials + int64_t(blockIdx.x) * p.cols;
  float* sums = Shape::rows == 1 ? out : column_sums;
#pragma unroll 1
  for (int g = 0; g < Shape::rows; ++g) {
    if (group == g) {
#pragma unroll
      for (int i = 0; i < Shape::held; ++i)
        if (x.column(i) < p.cols)
#pragma unroll
          for (int j = 0; j < N; ++j) {
            float* at = sums + x.column(i) + j;
            *at = g == 0 ? dw[i * N + j] : *at + dw[i * N + j];
          }
    }
    if constexpr (Shape::rows > 1) __syncthreads();
  }
  if constexpr (Shape::rows > 1)
    for (int64_t c = threadIdx.x; c < p.cols; c += Shape::block) out[c] = column_sums[c];
}

// Rows too long for registers. Two kernels: dx by row (two sweeps), dweight by column over chunks of rows.
template <class X, class W, class Y, int N>
__global__ __launch_bounds__(kLoopThreads) void dx_looped_kernel(Backward<X, W, Y> p) {
  __shared__ float slots[32];
  int64_t row = blockIdx.x;
  const X* x = p.x + row * p.x_stride;
  const Y* dy = p.dy + row * p.dy_stride;
  float rstd = p.rstd[row], s = 0.0f;
  auto scaled = [&](const Pack<Y, N>& d, int64_t c, int j) {
    return p.weight ? rms_norm_scaled(d[j], widen(p.weight[c + j]), p.offset) : d[j];
  };
  for (int64_t c = int64_t(threadIdx.x) * N; c < p.cols; c += int64_t(kLoopThreads) * N) {
    auto a = load<X, N>(x + c);
    auto d = load<Y, N>(dy + c);
#pragma unroll
    for (int j = 0; j < N; ++j) s = fma(scaled(d, c, j), a[j] * rstd, s);
  }
  float mean = reduce_row<Sum, kLoopThreads>(s, slots) / float(p.cols);
  for (int64_t c = int64_t(threadIdx.x) * N; c < p.cols; c += int64_t(kLoopThreads) * N) {
    auto a = load_stream<X, N>(x + c);
    auto d = load_stream<Y, N>(dy + c);
    Pack<X, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out.set(j, rms_norm_dx(scaled(d, c, j), a[j] * rstd, mean, rstd));
    store(p.dx + row * p.dx_stride + c, out);
  }
}

constexpr int kColumnThreads = 256;

template <class X, class W, class Y>
__global__ __launch_bounds__(kColumnThreads) void dweight_looped_kernel(Backward<X, W, Y> p, int64_t chunk, int64_t tiles) {
  int64_t column = int64_t(blockIdx.x) % tiles * kColumnThreads + threadIdx.x, part = int64_t(blockIdx.x) / tiles;
  if (column >= p.cols) return;
  float s = 0.0f;
  int64_t end = (part + 1) * chunk < p.rows ? (part + 1) * chunk : p.rows;
  for (int64_t row = part * chunk; row < end; ++row) {
    float h = widen(p.x[row * p.x_stride + column]) * p.rstd[row];
    s = fma(widen(p.dy[row * p.dy_stride + column]), p.round_h ? round_to<X>(h) : h, s);
  }
  p.partials[part * p.cols + column] = s;
}

template <class X, class W, class Y, int N>
void run_forward(Context& ctx, const Forward<X, W, Y>& p) {
  bool held = with_row_shape(p.cols / N, [&](auto shape) {
    using Shape = decltype(shape);
    launch(kOp, ctx, forward_kernel<X, W, Y, N, Shape>,
           {.blocks = ceil_div(p.rows, Shape::rows), .threads = Shape::block}, p);
  });
  if (!held) launch(kOp, ctx, forward_looped_kernel<X, W, Y, N>, {.blocks = p.rows, .threads = kLoopThreads}, p);
}

template <class X, class W, class Y, int N>
void run_backward(Context& ctx, Backward<X, W, Y> p, const Vector& dweight) {
  bool wants_dw = bool(dweight);
  int64_t blocks = 0;
  bool held = with_row_shape<1024, 4>(p.cols / N, [&](auto shape) {
    using Shape = decltype(shape);
    auto kernel = backward_kernel<X, W, Y, N, Shape>;
    size_t shared = Shape::rows > 1 ? sizeof(float) * size_t(p.cols) : 0;
    static const int per_sm = [&] {  // with the largest column buffer of this shape
      int n = 0;
      size_t most = Shape::rows > 1 ? sizeof(float) * size_t(Shape::packs * N) : 0;
      TIGON_CUDA_CHECK(kOp, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, Shape::block, most));
      return n > 0 ? n : 1;
    }();
    blocks = std::min<int64_t>(ceil_div(p.rows, Shape::rows), int64_t(device_facts().sms) * per_sm);
    if (wants_dw) p.partials = ctx.scratch_of<float>(blocks * p.cols);
    launch(kOp, ctx, kernel, {.blocks = blocks, .threads = Shape::block, .shared = shared}, p);
  });
  if (!held) {
    if (p.dx) launch(kOp, ctx, dx_looped_kernel<X, W, Y, N>, {.blocks = p.rows, .threads = kLoopThreads}, p);
    if (wants_dw) {
      int64_t tiles = ceil_div(p.cols, kColumnThreads), chunk = std::max<int64_t>(32, ceil_div(p.rows, 256));
      blocks = ceil_div(p.rows, chunk);
      p.partials = ctx.scratch_of<float>(blocks * p.cols);
      launch(kOp, ctx, dweight_looped_kernel<X, W, Y>, {.blocks = blocks * tiles, .threads = kColumnThreads}, p, chunk, tiles);
    }
  }
  if (wants_dw) sum_partials(kOp, ctx, p.partials, blocks, p.cols, dweight);
}

// fn(x type, weight type, y type) for the combinations that rms_norm_result allows.
template <class Fn>
void with_types(DType x, const Vector& weight, DType y, Fn&& fn) {
  dispatch_float(kOp, "x", x, [&](auto t) {
    using X = typename DeviceType<typename decltype(t)::type>::type;
    if (!weight || weight.dtype == x) return fn(Type<X>{}, Type<X>{}, Type<X>{});
    if (y == x) return fn(Type<X>{}, Type<float>{}, Type<X>{});
    fn(Type<X>{}, Type<float>{}, Type<float>{});
  });
}

}  // namespace

void rms_norm_fwd(Context& ctx, const RmsNormFwd& a) {
  with_types(a.x.dtype, a.weight, a.y.dtype, [&](auto tx, auto tw, auto ty) {
    using X = typename decltype(tx)::type;
    using W = typename decltype(tw)::type;
    using Y = typename decltype(ty)::type;
    constexpr int kPack = 16 / sizeof(X);
    Forward<X, W, Y> p{a.x.row<X>(0), a.weight.as<W>(), a.y.row<Y>(0), a.rstd.as<float>(), a.x.rows, a.x.cols,
                       a.x.stride, a.y.stride, a.eps, a.offset, a.rounding == Rounding::llama};
    bool packs = packs_align(p.x, p.x_stride, p.cols, sizeof(X)) && packs_align(p.y, p.y_stride, p.cols, sizeof(Y)) &&
                 p.y_stride % kPack == 0 && p.cols % kPack == 0 && reinterpret_cast<uintptr_t>(p.weight) % 16 == 0;
    packs ? run_forward<X, W, Y, kPack>(ctx, p) : run_forward<X, W, Y, 1>(ctx, p);
  });
}

void rms_norm_bwd(Context& ctx, const RmsNormBwd& a) {
  if (a.x.rows == 0) {
    if (a.dweight)
      TIGON_CUDA_CHECK(kOp, cudaMemsetAsync(a.dweight.data, 0, size_of(a.dweight.dtype) * size_t(a.dweight.size),
                                            static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  with_types(a.x.dtype, a.weight, a.dy.dtype, [&](auto tx, auto tw, auto ty) {
    using X = typename decltype(tx)::type;
    using W = typename decltype(tw)::type;
    using Y = typename decltype(ty)::type;
    constexpr int kPack = 16 / sizeof(X);
    Backward<X, W, Y> p{a.dy.row<Y>(0), a.x.row<X>(0), a.weight.as<W>(), a.rstd.as<float>(), a.dx.row<X>(0), nullptr,
                        a.x.rows, a.x.cols, a.dy.stride, a.x.stride, a.dx.stride, a.offset,
                        a.rounding == Rounding::llama};
    bool packs = packs_align(p.x, p.x_stride, p.cols, sizeof(X)) && packs_align(p.dy, p.dy_stride, p.cols, sizeof(Y)) &&
                 p.dy_stride % kPack == 0 && packs_align(p.dx, p.dx_stride, p.cols, sizeof(X)) &&
                 reinterpret_cast<uintptr_t>(p.weight) % 16 == 0;
    packs ? run_backward<X, W, Y, kPack>(ctx, p, a.dweight) : run_backward<X, W, Y, 1>(ctx, p, a.dweight);
  });
}

}  // namespace tigon::cuda
