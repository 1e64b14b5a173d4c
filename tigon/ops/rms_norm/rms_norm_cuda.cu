// CUDA backend of RMSNorm.
//
// Bytes per element (b = element size): forward 2b, backward 3b; besides, 4 bytes a row of rstd, the weight once per block
// (from L2) and blocks * cols * 4 bytes of dweight partials, written and read back from L2.
// Instructions: about 4 per element forward, 10 backward, against a budget of 31 and 46 at the speed of the memory (bf16).
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
__device__ __forceinline__ void write_pack(const Forward<X, W, Y>& p, Y* y, const Pack<X, N>& x,
                                           const Pack<W, N>& w, float rstd) {
  float h[N];
#pragma unroll
  for (int j = 0; j < N; ++j) h[j] = x[j] * rstd;
  if (p.round_h) {
    Pack<X, N> rounded;
    rounded.set(h);
#pragma unroll
    for (int j = 0; j < N; ++j) h[j] = rounded[j];
  }
  if (p.weight) {
#pragma unroll
    for (int j = 0; j < N; ++j) h[j] = rms_norm_scaled(h[j], w[j], p.offset);
  }
  Pack<Y, N> out;
  out.set(h);
  store(y, out);
}

template <class X, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block) void forward_kernel(const __grid_constant__ Forward<X, W, Y> p) {
  // Weights are on their way during the reduction where they find room in registers.
  constexpr bool kEarly = Shape::held <= 4 && (Shape::held * N * sizeof(W) <= 64 || Shape::block <= 512);
  __shared__ float slots[32];
  int64_t row = int64_t(blockIdx.x) * Shape::rows + threadIdx.x / Shape::threads;
  bool live = row < p.rows;
  const int cols = int(p.cols);
  RowTile<X, N, Shape> tile;
  tile.load_row(p.x + (live ? row : 0) * p.x_stride, live ? cols : 0);
  Pack<W, N> w[Shape::held];
  auto load_weight = [&](int i) {
    if (p.weight && tile.column(i) < cols) w[i] = load_now<W, N>(p.weight + tile.column(i));
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) load_weight(i);
  }
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < Shape::held; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) s = fma(tile.pack[i][j], tile.pack[i][j], s);
  s = reduce_row<Sum, Shape::threads>(s, slots);
  if (!live) return;
  float rstd = 1.0f / sqrtf(s / float(p.cols) + p.eps);
  if (tile.thread() == 0) p.rstd[row] = rstd;
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    if constexpr (!kEarly) load_weight(i);
    if (tile.column(i) < cols)
      write_pack<X, W, Y, N>(p, p.y + row * p.y_stride + tile.column(i), tile.pack[i], w[i], rstd);
  }
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
  for (int64_t c = int64_t(threadIdx.x) * N; c < p.cols; c += int64_t(kLoopThreads) * N) {
    Pack<W, N> w;
    if (p.weight) w = load<W, N>(p.weight + c);
    write_pack<X, W, Y, N>(p, p.y + int64_t(blockIdx.x) * p.y_stride + c, load_stream<X, N>(x + c), w, rstd);
  }
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
  uint32_t zero = 0;  // for again()
};

// How the backward keeps its bytes in flight. Ahead: the next row is loaded into registers while this one is worked on, and
// the weights stay in registers. Direct: several blocks a multiprocessor, or long rows, whose loads overlap; weights lie in
// shared memory. Twice: as Direct, where dweight alone takes half of the registers; the row is read again, from L2.
enum class Source { ahead, direct, twice };
template <Source From, int Threads, int Held, int Rows, int MinBlocks>
struct BackwardShape : RowShape<Threads, Held, Rows, MinBlocks> {
  static constexpr bool ahead = From == Source::ahead, twice = From == Source::twice;
};
// Gradients wider than x take more registers.
template <class X, class Y, class Shape>
constexpr int backward_blocks = sizeof(Y) > sizeof(X) && Shape::min_blocks > 1 ? Shape::min_blocks * 3 / 4
                                                                               : Shape::min_blocks;

// Column sums that a block adds up.
template <class Shape>
constexpr int backward_parts = Shape::threads < 32 ? Shape::block / 32 : Shape::rows;

// Persistent blocks: block b takes row groups b, b + grid, ...; dweight is summed in registers over all rows of a thread, then
// over the row groups of the block in order.
template <class X, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block, backward_blocks<X, Y, Shape>) void backward_kernel(
    const __grid_constant__ Backward<X, W, Y> p) {
  constexpr int kHeld = Shape::held, kThreads = Shape::threads, kPair = N % 2 == 0 ? 2 : 1;
  using Weights = Pack<W, N>;
  struct Tile {
    RowTile<X, N, Shape> x;
    RowTile<Y, N, Shape> dy;
    float rstd;
  };
  __shared__ float slots[2][32];
  extern __shared__ __align__(16) unsigned char shared[];  // weights, then the column sums of the groups
  if (p.partials) let_next_kernel_start();                 // the sum over the blocks
  const int group = Shape::rows == 1 ? 0 : threadIdx.x / kThreads, cols = int(p.cols);
  const int64_t first = int64_t(blockIdx.x) * Shape::rows, step = int64_t(gridDim.x) * Shape::rows;
  const float offset = p.weight ? p.offset : 0.0f, inverse = 1.0f / float(cols);
  auto column = [](int i) { return RowTile<X, N, Shape>::column(i); };
  Tile next;
  auto fetch = [&](int64_t row) {
    bool live = row < p.rows;
    if constexpr (!Shape::twice) {
      next.x.load_row(p.x + (live ? row : 0) * p.x_stride, live ? cols : 0);
      next.dy.load_row(p.dy + (live ? row : 0) * p.dy_stride, live ? cols : 0);
    }
    next.rstd = live ? p.rstd[row] : 0.0f;
  };
  if constexpr (Shape::ahead) fetch(first + group);

  float held_w[Shape::ahead ? kHeld : 1][N];
  Weights* shared_w = reinterpret_cast<Weights*>(shared);
  auto read_weights = [&](int c) {
    Weights w;
    if (p.weight) return load<W, N>(p.weight + c);
#pragma unroll
    for (int j = 0; j < N; ++j) w.set(j, 1.0f);
    return w;
  };
  if constexpr (Shape::ahead) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      Weights w{};
      if (column(i) < cols) w = read_weights(column(i));
#pragma unroll
      for (int j = 0; j < N; ++j) held_w[i][j] = offset + w[j];
    }
  } else {
    for (int c = threadIdx.x; c < cols / N; c += Shape::block) shared_w[c] = read_weights(c * N);
    __syncthreads();
  }
  auto weights = [&](int i, float (&w)[N]) {
    if constexpr (Shape::ahead) {
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = held_w[i][j];
    } else {
      Weights pack = shared_w[column(i) < cols ? column(i) / N : 0];
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = offset + pack[j];
    }
  };

  float dw[kHeld][N] = {};
  int parity = 0;
  for (int64_t base = first; base < p.rows; base += step, parity ^= 1) {
    int64_t row = base + group;
    if constexpr (!Shape::ahead) fetch(row);
    Tile now = next;
    if constexpr (Shape::ahead) fetch(row + step);
    auto fetch_pack = [&](int i) {  // `twice` holds a block a row: every row here is live
      if constexpr (Shape::twice) {
        now.x.pack[i] = {}, now.dy.pack[i] = {};
        if (column(i) >= cols) return;
        now.x.pack[i] = load_stream<X, N>(p.x + row * p.x_stride + column(i));
        now.dy.pack[i] = load_stream<Y, N>(p.dy + row * p.dy_stride + column(i));
      } else {
        now.x.pack[i] = again(now.x.pack[i], p.zero), now.dy.pack[i] = again(now.dy.pack[i], p.zero);
      }
    };
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if constexpr (Shape::twice) fetch_pack(i);
      float w[N];
      weights(i, w);
      auto add = [&](auto rounded) {
#pragma unroll
        for (int j = 0; j < N; j += kPair) {
          float h[kPair];
#pragma unroll
          for (int k = 0; k < kPair; ++k) {
            h[k] = now.x.pack[i][j + k] * now.rstd;
            s = fma(now.dy.pack[i][j + k] * w[j + k], h[k], s);
          }
          Pack<X, kPair> r;
          if constexpr (rounded) r.set(h);
#pragma unroll
          for (int k = 0; k < kPair; ++k)
            dw[i][j + k] = fma(now.dy.pack[i][j + k], rounded ? r[k] : h[k], dw[i][j + k]);
        }
      };
      p.round_h ? add(std::true_type{}) : add(std::false_type{});
    }
    if (p.dx == nullptr) continue;
    float c = reduce_row<Sum, kThreads>(s, slots[parity]) * inverse;
    if constexpr (!Shape::ahead) __syncwarp();  // weights are read again, not kept
    if (row >= p.rows) continue;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (column(i) >= cols) continue;
      fetch_pack(i);
      Pack<X, N> out;
      float w[N], dx[N];
      weights(i, w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float h = now.x.pack[i][j] * now.rstd;
        dx[j] = rms_norm_dx(now.dy.pack[i][j] * w[j], h, c, now.rstd);
      }
      out.set(dx);
      store(p.dx + row * p.dx_stride + column(i), out);
    }
  }

  if (p.partials == nullptr) return;
  float* out = p.partials + int64_t(blockIdx.x) * cols;
  if constexpr (Shape::rows == 1) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (column(i) < cols) store(out + column(i), *reinterpret_cast<Pack<float, N>*>(dw[i]));
  } else {
    constexpr bool kSeveral = kThreads < 32;  // rows a warp: added up first
    if constexpr (kSeveral) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
          for (int m = kThreads; m < 32; m <<= 1) dw[i][j] += __shfl_xor_sync(0xffffffffu, dw[i][j], m);
    }
    const int part = kSeveral ? threadIdx.x / 32 : group;
    float* sums = reinterpret_cast<float*>(shared);
    __syncthreads();
    if (!kSeveral || threadIdx.x % 32 < kThreads) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (column(i) < cols)
          store(sums + part * cols + column(i), *reinterpret_cast<Pack<float, N>*>(dw[i]));
    }
    __syncthreads();
    for (int c = threadIdx.x; c < cols; c += Shape::block) {
      float total = sums[c];
      for (int g = 1; g < backward_parts<Shape>; ++g) total += sums[g * cols + c];
      out[c] = total;
    }
  }
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
__global__ __launch_bounds__(kColumnThreads) void dweight_looped_kernel(Backward<X, W, Y> p, int64_t chunk,
                                                                        int64_t tiles) {
  int64_t column = int64_t(blockIdx.x) % tiles * kColumnThreads + threadIdx.x,
          part = int64_t(blockIdx.x) / tiles;
  if (column >= p.cols) return;
  float s = 0.0f;
  int64_t end = (part + 1) * chunk < p.rows ? (part + 1) * chunk : p.rows;
  for (int64_t row = part * chunk; row < end; ++row) {
    float h = widen(p.x[row * p.x_stride + column]) * p.rstd[row];
    s = fma(widen(p.dy[row * p.dy_stride + column]), p.round_h ? round_to<X>(h) : h, s);
  }
  p.partials[part * p.cols + column] = s;
}

// Rows held in registers, by the length of the row in packs. Single elements (N = 1) are the exception: fewer shapes.
template <int N>
using ForwardShapes =
    std::conditional_t<N == 1, RowShapes<RowShape<32, 4>, RowShape<256, 4>, RowShape<1024, 8>>,
                       RowShapes<RowShape<8, 1>, RowShape<16, 1>, RowShape<32, 1>, RowShape<32, 2>,
                                 RowShape<32, 4>, RowShape<128, 2>, RowShape<128, 4>, RowShape<256, 4>,
                                 RowShape<512, 4>, RowShape<1024, 4>, RowShape<1024, 8>>>;

template <int Threads, int Held, int Rows, int MinBlocks>
using Ahead = BackwardShape<Source::ahead, Threads, Held, Rows, MinBlocks>;
template <int Threads, int Held, int Rows, int MinBlocks>
using Direct = BackwardShape<Source::direct, Threads, Held, Rows, MinBlocks>;
template <int N>
using Longest = BackwardShape<N == 1 ? Source::direct : Source::twice, 1024, 4, 1, 1>;

template <int N>
using BackwardShapes = std::conditional_t<
    N == 1, RowShapes<Ahead<32, 4, 4, 4>, Ahead<256, 4, 1, 2>, Direct<1024, 4, 1, 1>>,
    RowShapes<Ahead<8, 1, 32, 4>, Ahead<16, 1, 16, 4>, Ahead<32, 1, 8, 4>, Direct<32, 2, 4, 6>,
              Direct<32, 4, 4, 4>, Ahead<128, 2, 4, 1>, Ahead<256, 2, 2, 1>, Ahead<320, 2, 1, 2>,
              Ahead<512, 2, 1, 1>, Direct<512, 4, 1, 1>, Longest<N>>>;

template <class X, class W, class Y, int N>
void run_forward(Context& ctx, const Forward<X, W, Y>& p) {
  bool held = ForwardShapes<N>::pick(p.cols / N, [&](auto shape) {
    using Shape = decltype(shape);
    launch(kOp, ctx, forward_kernel<X, W, Y, N, Shape>,
           {.blocks = ceil_div(p.rows, Shape::rows), .threads = Shape::block}, p);
  });
  if (!held)
    launch(kOp, ctx, forward_looped_kernel<X, W, Y, N>, {.blocks = p.rows, .threads = kLoopThreads}, p);
}

template <class X, class W, class Y, int N>
void run_backward(Context& ctx, Backward<X, W, Y> p, const Vector& dweight) {
  bool wants_dw = bool(dweight);
  int64_t blocks = 0;
  auto shared_bytes = [](auto shape, int64_t cols) {
    using Shape = decltype(shape);
    size_t weights = Shape::ahead ? 0 : sizeof(W) * size_t(cols);
    size_t sums = Shape::rows == 1 ? 0 : sizeof(float) * size_t(cols) * backward_parts<Shape>;
    return std::max(weights, sums);
  };
  constexpr size_t kPlainShared = 47 << 10;  // more, with the 256 bytes of the reductions, must be asked for
  bool held = false;
  BackwardShapes<N>::pick(p.cols / N, [&](auto shape) {
    using Shape = decltype(shape);
    auto kernel = backward_kernel<X, W, Y, N, Shape>;
    size_t shared = shared_bytes(shape, p.cols);
    if (shared + 1024 > size_t(device_facts().shared_per_block)) return;
    held = true;
    if (shared > kPlainShared)
      TIGON_CUDA_CHECK(
          kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    static const int per_sm = [&] {  // with the longest row of this shape
      int n = 0;
      size_t most = std::min(shared_bytes(shape, Shape::packs * N), kPlainShared);
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
      launch(kOp, ctx, dweight_looped_kernel<X, W, Y>, {.blocks = blocks * tiles, .threads = kColumnThreads},
             p, chunk, tiles);
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
    Forward<X, W, Y> p{a.x.row<X>(0),
                       a.weight.as<W>(),
                       a.y.row<Y>(0),
                       a.rstd.as<float>(),
                       a.x.rows,
                       a.x.cols,
                       a.x.stride,
                       a.y.stride,
                       a.eps,
                       a.offset,
                       a.rounding == Rounding::llama};
    bool packs = packs_align(p.x, p.x_stride, p.cols, sizeof(X)) &&
                 packs_align(p.y, p.y_stride, p.cols, sizeof(Y)) && p.y_stride % kPack == 0 &&
                 p.cols % kPack == 0 && reinterpret_cast<uintptr_t>(p.weight) % 16 == 0;
    packs ? run_forward<X, W, Y, kPack>(ctx, p) : run_forward<X, W, Y, 1>(ctx, p);
  });
}

void rms_norm_bwd(Context& ctx, const RmsNormBwd& a) {
  if (a.x.rows == 0) {
    if (a.dweight)
      TIGON_CUDA_CHECK(kOp,
                       cudaMemsetAsync(a.dweight.data, 0, size_of(a.dweight.dtype) * size_t(a.dweight.size),
                                       static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  with_types(a.x.dtype, a.weight, a.dy.dtype, [&](auto tx, auto tw, auto ty) {
    using X = typename decltype(tx)::type;
    using W = typename decltype(tw)::type;
    using Y = typename decltype(ty)::type;
    constexpr int kPack = 16 / sizeof(X);
    Backward<X, W, Y> p{a.dy.row<Y>(0),
                        a.x.row<X>(0),
                        a.weight.as<W>(),
                        a.rstd.as<float>(),
                        a.dx.row<X>(0),
                        nullptr,
                        a.x.rows,
                        a.x.cols,
                        a.dy.stride,
                        a.x.stride,
                        a.dx.stride,
                        a.offset,
                        a.rounding == Rounding::llama};
    bool packs = packs_align(p.x, p.x_stride, p.cols, sizeof(X)) &&
                 packs_align(p.dy, p.dy_stride, p.cols, sizeof(Y)) && p.dy_stride % kPack == 0 &&
                 packs_align(p.dx, p.dx_stride, p.cols, sizeof(X)) &&
                 reinterpret_cast<uintptr_t>(p.weight) % 16 == 0;
    packs ? run_backward<X, W, Y, kPack>(ctx, p, a.dweight) : run_backward<X, W, Y, 1>(ctx, p, a.dweight);
  });
}

}  // namespace tigon::cuda
