// Backward of the norm family: the gradients of rows and, in the same launch, the sums over rows that are the gradients of
// weight and bias.
//
// The op gives a formula B (X is the storage type of rows, h the normalised value, weight the one by column):
//   struct Formula {
//     using Element = X;
//     static constexpr int kIn;        // rows read beside dy; all but the first may be null and then read as zero
//     static constexpr int kOut;       // gradients of rows, each of which may be null
//     static constexpr int kSums;      // gradients by column: 1 weight, 2 weight and bias
//     static constexpr bool kCentred;  // the mean was subtracted
//     bool round_h;                    // h was rounded to X before the weight
//     float offset;                    // added to the weight
//     float value(const float (&in)[kIn]) const;               // what was normalised
//     float upstream(float dy, const float (&in)[kIn]) const;  // gradient of h * weight: summed over rows it is dbias
//     void results(float dv, float dy, float h, float weight, const float (&in)[kIn], float (&out)[kOut]) const;
//   };
// where dv, the gradient of value, is rstd * (g - h * mean(g * h) - mean(g)), g = upstream * (offset + weight); the last mean
// only where the value was centred.
//
// Persistent blocks: block b takes row groups b, b + grid, ... of one section. The sums by column are kept in registers over all
// rows of a thread, added over the row groups of the block and over the blocks (sum_partials) in fixed order.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_forward.cuh"

namespace tigon::cuda {

template <class B, class W, class Y>
struct NormBackward {
  using X = typename B::Element;
  B f;
  const Y* dy;
  const X* in[B::kIn];
  X* out[B::kOut];
  int64_t dy_stride, in_stride[B::kIn], out_stride[B::kOut];
  const W* weight;           // null: ones, and no offset
  const float *rstd, *mean;  // by row and section
  int64_t rows, cols;
  int sections;
  float* partials = nullptr;  // [parts, kSums, sections * cols], null: not wanted
  uint32_t zero = 0;          // for again()
};

// How the backward keeps its bytes in flight. Ahead: the next row is loaded into registers while this one is worked on, and
// the weights stay in registers. Direct: several blocks a multiprocessor, or long rows, whose loads overlap; weights lie in
// shared memory. Twice: as Direct, where the sums alone take half of the registers; the row is read again, from L2.
enum class Source { ahead, direct, twice };
template <Source From, int Threads, int Held, int Rows, int MinBlocks>
struct BackwardShape : RowShape<Threads, Held, Rows, MinBlocks> {
  static constexpr bool ahead = From == Source::ahead, twice = From == Source::twice;
};
template <int Threads, int Held, int Rows, int MinBlocks>
using Ahead = BackwardShape<Source::ahead, Threads, Held, Rows, MinBlocks>;
template <int Threads, int Held, int Rows, int MinBlocks>
using Direct = BackwardShape<Source::direct, Threads, Held, Rows, MinBlocks>;
template <int Threads, int Held, int Rows, int MinBlocks>
using Twice = BackwardShape<Source::twice, Threads, Held, Rows, MinBlocks>;

// The ladder where two sums by column leave fewer registers. By the length of the row in packs.
template <int N>
using TwoSumsLadder = std::conditional_t<
    N == 1, RowShapes<Ahead<32, 4, 4, 4>, Ahead<256, 4, 1, 2>, Direct<1024, 4, 1, 1>>,
    RowShapes<Ahead<8, 1, 32, 3>, Ahead<16, 1, 16, 3>, Ahead<32, 1, 8, 3>, Direct<32, 2, 4, 5>,
              Direct<32, 4, 4, 3>, Direct<128, 2, 1, 6>, Direct<256, 2, 1, 3>, Direct<320, 2, 1, 2>,
              Ahead<512, 2, 1, 1>, Direct<512, 4, 1, 1>>>;

namespace norm_detail {

#include "tigon/base/norm_math.inc"

// Gradients wider than x take more registers.
template <class X, class Y, class Shape>
constexpr int backward_blocks = sizeof(Y) > sizeof(X) && Shape::min_blocks > 1 ? Shape::min_blocks * 3 / 4
                                                                               : Shape::min_blocks;
// Column sums that a block adds up.
template <class Shape>
constexpr int backward_parts = Shape::threads < 32 ? Shape::block / 32 : Shape::rows;

// Where threads leave their column sums, and where those of the block go.
template <class B, class Shape, int N>
__device__ __forceinline__ void add_up(float (&sums)[B::kSums][Shape::held][N], float* shared, float* out,
                                       int64_t out_pitch, int cols) {
  constexpr int kThreads = Shape::threads, kParts = backward_parts<Shape>;
  auto column = [](int i) { return RowTile<float, N, Shape>::column(i); };
  if constexpr (Shape::rows == 1) {
#pragma unroll
    for (int k = 0; k < B::kSums; ++k)
#pragma unroll
      for (int i = 0; i < Shape::held; ++i)
        if (column(i) < cols)
          store(out + k * out_pitch + column(i), *reinterpret_cast<Pack<float, N>*>(sums[k][i]));
  } else {
    constexpr bool kSeveral = kThreads < 32;  // rows a warp: added up first
    if constexpr (kSeveral) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k)
#pragma unroll
        for (int i = 0; i < Shape::held; ++i)
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int m = kThreads; m < 32; m <<= 1)
              sums[k][i][j] += __shfl_xor_sync(0xffffffffu, sums[k][i][j], m);
    }
    const int part = kSeveral ? threadIdx.x / 32 : threadIdx.x / kThreads;
    __syncthreads();
    if (!kSeveral || threadIdx.x % 32 < kThreads) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k)
#pragma unroll
        for (int i = 0; i < Shape::held; ++i)
          if (column(i) < cols)
            store(shared + (k * kParts + part) * cols + column(i),
                  *reinterpret_cast<Pack<float, N>*>(sums[k][i]));
    }
    __syncthreads();
    for (int k = 0; k < B::kSums; ++k)
      for (int c = threadIdx.x; c < cols; c += Shape::block) {
        const float* mine = shared + k * kParts * cols + c;
        float total = mine[0];
        for (int g = 1; g < kParts; ++g) total += mine[g * cols];
        out[k * out_pitch + c] = total;
      }
  }
}

template <class B, class W, class Y, int N, class Shape>
__global__
__launch_bounds__(Shape::block, backward_blocks<typename B::Element, Y, Shape>) void backward_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kHeld = Shape::held, kThreads = Shape::threads, kPair = N % 2 == 0 ? 2 : 1;
  constexpr int kMeans = B::kCentred ? 2 : 1;
  using Weights = Pack<W, N>;
  struct Tile {
    RowTile<X, N, Shape> in[B::kIn];
    RowTile<Y, N, Shape> dy;
    float rstd, mean;
  };
  __shared__ float slots[2][kMeans * 32];
  extern __shared__ __align__(16) unsigned char shared[];  // weights, then the column sums of the groups
  if (p.partials) let_next_kernel_start();                 // the sum over the blocks
  const Place place(p.sections, Shape::rows);
  const int group = Shape::rows == 1 ? 0 : threadIdx.x / kThreads, cols = int(p.cols);
  const int64_t first = place.first, before = int64_t(place.section) * cols;
  const int64_t step = int64_t(gridDim.x / unsigned(p.sections)) * Shape::rows;
  const float offset = p.weight ? p.f.offset : 0.0f, inverse = 1.0f / float(cols);
  auto column = [](int i) { return RowTile<X, N, Shape>::column(i); };
  Tile next;
  auto fetch = [&](int64_t row) {
    bool live = row < p.rows;
    if constexpr (!Shape::twice) {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k)
        next.in[k].load_row(p.in[k] + (live ? row : 0) * p.in_stride[k] + before,
                            live && (k == 0 || p.in[k]) ? cols : 0);
      next.dy.load_row(p.dy + (live ? row : 0) * p.dy_stride + before, live ? cols : 0);
    }
    next.rstd = live ? p.rstd[row * p.sections + place.section] : 0.0f;
    if constexpr (B::kCentred) next.mean = live ? p.mean[row * p.sections + place.section] : 0.0f;
  };
  if constexpr (Shape::ahead) fetch(first + group);

  float held_w[Shape::ahead ? kHeld : 1][N];
  Weights* shared_w = reinterpret_cast<Weights*>(shared);
  auto read_weights = [&](int c) {
    return p.weight ? load<W, N>(p.weight + before + c) : filled<W, N>(1.0f);
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

  bool wants_rows = false;
#pragma unroll
  for (int k = 0; k < B::kOut; ++k) wants_rows = wants_rows || p.out[k] != nullptr;
  float sums[B::kSums][kHeld][N] = {};
  int parity = 0;
  for (int64_t base = first; base < p.rows; base += step, parity ^= 1) {
    int64_t row = base + group;
    if constexpr (!Shape::ahead) fetch(row);
    Tile now = next;
    if constexpr (Shape::ahead) fetch(row + step);
    auto fetch_pack = [&](int i) {  // `twice` holds a block a row: every row here is live
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) {
        auto& pack = now.in[k].pack[i];
        if constexpr (!Shape::twice)
          pack = again(pack, p.zero);
        else if (column(i) < cols && (k == 0 || p.in[k]))
          pack = load_stream<X, N>(p.in[k] + row * p.in_stride[k] + before + column(i));
        else
          pack = {};
      }
      if constexpr (!Shape::twice)
        now.dy.pack[i] = again(now.dy.pack[i], p.zero);
      else if (column(i) < cols)
        now.dy.pack[i] = load_stream<Y, N>(p.dy + row * p.dy_stride + before + column(i));
      else
        now.dy.pack[i] = {};
    };
    auto inputs = [&](int i, int j, float (&x)[B::kIn]) {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) x[k] = now.in[k].pack[i][j];
    };
    auto normalised = [&](const float (&x)[B::kIn]) {
      float v = p.f.value(x);
      if constexpr (B::kCentred) v -= now.mean;
      return v * now.rstd;
    };
    float means[kMeans] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if constexpr (Shape::twice) fetch_pack(i);
      float w[N];
      weights(i, w);
      auto add = [&](auto rounded) {
#pragma unroll
        for (int j = 0; j < N; j += kPair) {
          float h[kPair], d[kPair];
#pragma unroll
          for (int k = 0; k < kPair; ++k) {
            float x[B::kIn];
            inputs(i, j + k, x);
            h[k] = normalised(x);
            d[k] = p.f.upstream(now.dy.pack[i][j + k], x);
            means[0] = fma(d[k] * w[j + k], h[k], means[0]);
            if constexpr (B::kCentred) means[1] = fma(d[k], w[j + k], means[1]);
          }
          if constexpr (rounded) round_all<X>(h);
#pragma unroll
          for (int k = 0; k < kPair; ++k) {
            sums[0][i][j + k] = fma(d[k], h[k], sums[0][i][j + k]);
            if constexpr (B::kSums > 1) sums[1][i][j + k] += d[k];
          }
        }
      };
      p.f.round_h ? add(std::true_type{}) : add(std::false_type{});
    }
    if (!wants_rows) continue;
    reduce_row<Sum, kThreads>(means, slots[parity]);
#pragma unroll
    for (int k = 0; k < kMeans; ++k) means[k] *= inverse;
    if constexpr (!Shape::ahead) __syncwarp();  // weights are read again, not kept
    if (row >= p.rows) continue;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (column(i) >= cols) continue;
      fetch_pack(i);
      float w[N], results[B::kOut][N];
      weights(i, w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float x[B::kIn], out[B::kOut], dy = now.dy.pack[i][j];
        inputs(i, j, x);
        float h = normalised(x), g = p.f.upstream(dy, x) * w[j];
        if constexpr (B::kCentred) g -= means[1];
        p.f.results(norm_gradient(g, h, means[0], now.rstd), dy, h, w[j], x, out);
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) results[k][j] = out[k];
      }
#pragma unroll
      for (int k = 0; k < B::kOut; ++k) {
        if (B::kOut > 1 && p.out[k] == nullptr) continue;
        Pack<X, N> out;
        out.set(results[k]);
        store(p.out[k] + row * p.out_stride[k] + before + column(i), out);
      }
    }
  }
  if (p.partials == nullptr) return;
  const int64_t pitch = int64_t(p.sections) * cols;
  float* out = p.partials + (first / Shape::rows) * B::kSums * pitch + before;
  add_up<B, Shape, N>(sums, reinterpret_cast<float*>(shared), out, pitch, cols);
}

// Rows too long for registers. Two kernels: gradients of rows (two sweeps), sums by column over chunks of rows.
template <class B, class W, class Y>
__device__ __forceinline__ float weight_at(const NormBackward<B, W, Y>& p, int64_t c) {
  return p.weight ? p.f.offset + widen(p.weight[c]) : 1.0f;
}

template <class B, class W, class Y, int N>
__global__ __launch_bounds__(kLoopThreads) void backward_looped_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kMeans = B::kCentred ? 2 : 1;
  __shared__ float slots[kMeans * 32];
  const Place place(p.sections, 1);
  const int64_t row = place.first, before = int64_t(place.section) * p.cols;
  const float rstd = p.rstd[row * p.sections + place.section];
  const float mean = B::kCentred ? p.mean[row * p.sections + place.section] : 0.0f;
  // fn(column, element, its inputs, dy, h, g)
  auto sweep = [&](auto&& fn, auto&& done) {
    for (int64_t c = int64_t(threadIdx.x) * N; c < p.cols; c += int64_t(kLoopThreads) * N) {
      Pack<X, N> in[B::kIn];
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) {
        in[k] = Pack<X, N>{};
        if (k == 0 || p.in[k]) in[k] = load_stream<X, N>(p.in[k] + row * p.in_stride[k] + before + c);
      }
      auto dy = load_stream<Y, N>(p.dy + row * p.dy_stride + before + c);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float x[B::kIn], w = weight_at(p, before + c + j);
        element(in, j, x);
        float v = p.f.value(x), h = (B::kCentred ? v - mean : v) * rstd;
        fn(j, x, dy[j], h, w, p.f.upstream(dy[j], x) * w);
      }
      done(c);
    }
  };
  float means[kMeans] = {};
  sweep(
      [&](int, const float (&)[B::kIn], float, float h, float, float g) {
        means[0] = fma(g, h, means[0]);
        if constexpr (B::kCentred) means[1] += g;
      },
      [](int64_t) {});
  reduce_row<Sum, kLoopThreads>(means, slots);
#pragma unroll
  for (int k = 0; k < kMeans; ++k) means[k] /= float(p.cols);
  Pack<X, N> results[B::kOut];
  sweep(
      [&](int j, const float (&x)[B::kIn], float dy, float h, float w, float g) {
        float out[B::kOut];
        if constexpr (B::kCentred) g -= means[1];
        p.f.results(norm_gradient(g, h, means[0], rstd), dy, h, w, x, out);
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) results[k].set(j, out[k]);
      },
      [&](int64_t c) {
#pragma unroll
        for (int k = 0; k < B::kOut; ++k)
          if (p.out[k]) store(p.out[k] + row * p.out_stride[k] + before + c, results[k]);
      });
}

constexpr int kColumnThreads = 256;

template <class B, class W, class Y, int N>
__global__ __launch_bounds__(kColumnThreads) void column_sums_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p, int64_t chunk, int64_t tiles) {
  using X = typename B::Element;
  const int64_t column = (int64_t(blockIdx.x) % tiles * kColumnThreads + threadIdx.x) * N,
                part = int64_t(blockIdx.x) / tiles, pitch = p.cols * p.sections;
  let_next_kernel_start();
  if (column >= pitch) return;
  const int64_t section = column / p.cols;  // of all N: they lie in one
  float sums[B::kSums][N] = {};
  const int64_t end = min((part + 1) * chunk, p.rows);
#pragma unroll 4
  for (int64_t row = part * chunk; row < end; ++row) {
    Pack<X, N> in[B::kIn];
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) {
      in[k] = Pack<X, N>{};
      if (k == 0 || p.in[k]) in[k] = load_stream<X, N>(p.in[k] + row * p.in_stride[k] + column);
    }
    auto dy = load_stream<Y, N>(p.dy + row * p.dy_stride + column);
    const float rstd = p.rstd[row * p.sections + section];
    const float mean = B::kCentred ? p.mean[row * p.sections + section] : 0.0f;
    float h[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[B::kIn];
      element(in, j, x);
      h[j] = (B::kCentred ? p.f.value(x) - mean : p.f.value(x)) * rstd;
    }
    if (p.f.round_h) round_all<X>(h);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[B::kIn];
      element(in, j, x);
      float d = p.f.upstream(dy[j], x);
      sums[0][j] = fma(d, h[j], sums[0][j]);
      if constexpr (B::kSums > 1) sums[1][j] += d;
    }
  }
#pragma unroll
  for (int k = 0; k < B::kSums; ++k)
    store(p.partials + (part * B::kSums + k) * pitch + column, *reinterpret_cast<Pack<float, N>*>(sums[k]));
}

template <int N, class Shapes, class B, class W, class Y>
void run_backward(const char* op, Context& ctx, NormBackward<B, W, Y> p, bool wants_sums,
                  std::initializer_list<Vector> outs) {
  int64_t parts = 0, pitch = p.cols * p.sections * B::kSums;
  auto shared_bytes = [](auto shape, int64_t cols) {
    using Shape = decltype(shape);
    size_t weights = Shape::ahead ? 0 : sizeof(W) * size_t(cols);
    size_t sums = Shape::rows == 1 ? 0 : sizeof(float) * size_t(cols) * backward_parts<Shape> * B::kSums;
    return std::max(weights, sums);
  };
  constexpr size_t kPlainShared = 47 << 10;  // more, with the 512 bytes of the reductions, must be asked for
  bool held = false;
  Shapes::pick(p.cols / N, [&](auto shape) {
    using Shape = decltype(shape);
    auto kernel = backward_kernel<B, W, Y, N, Shape>;
    size_t shared = shared_bytes(shape, p.cols);
    if (shared + 1024 > size_t(device_facts().shared_per_block)) return;
    held = true;
    if (shared > kPlainShared)
      TIGON_CUDA_CHECK(
          op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    static const int per_sm = [&] {  // with the longest row of this shape
      int n = 0;
      size_t most = std::min(shared_bytes(shape, Shape::packs * N), kPlainShared);
      TIGON_CUDA_CHECK(op, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, Shape::block, most));
      return n > 0 ? n : 1;
    }();
    int64_t resident = std::max<int64_t>(1, int64_t(device_facts().sms) * per_sm / p.sections);
    parts = std::min<int64_t>(ceil_div(p.rows, Shape::rows), resident);
    if (wants_sums) p.partials = ctx.scratch_of<float>(parts * pitch);
    launch(op, ctx, kernel, {.blocks = parts * p.sections, .threads = Shape::block, .shared = shared}, p);
  });
  if (!held) {
    bool wants_rows = std::any_of(p.out, p.out + B::kOut, [](auto* out) { return out != nullptr; });
    if (wants_rows)
      launch(op, ctx, backward_looped_kernel<B, W, Y, N>,
             {.blocks = p.rows * p.sections, .threads = kLoopThreads}, p);
    if (wants_sums) {
      int64_t tiles = ceil_div(p.cols * p.sections, kColumnThreads * N);
      int64_t chunk = std::max<int64_t>(32, ceil_div(p.rows, 256));
      parts = ceil_div(p.rows, chunk);
      p.partials = ctx.scratch_of<float>(parts * pitch);
      launch(op, ctx, column_sums_kernel<B, W, Y, N>, {.blocks = parts * tiles, .threads = kColumnThreads}, p,
             chunk, tiles);
    }
  }
  if (wants_sums) sum_partials(op, ctx, p.partials, parts, outs);
}

}  // namespace norm_detail

// Packs<N>: the ladder of shapes. `outs`: the B::kSums gradients by column, each of sections * cols numbers; without data where
// not wanted.
template <template <int> class Ladder, class B, class W, class Y>
void norm_backward(const char* op, Context& ctx, const NormBackward<B, W, Y>& p,
                   std::initializer_list<Vector> outs) {
  using X = typename B::Element;
  bool wants_sums = std::any_of(outs.begin(), outs.end(), [](const Vector& v) { return bool(v); });
  if (p.rows == 0) {
    for (const Vector& v : outs)
      if (v)
        TIGON_CUDA_CHECK(op, cudaMemsetAsync(v.data, 0, size_of(v.dtype) * size_t(v.size),
                                             static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  constexpr int kPack = 16 / sizeof(X);
  bool packs = packs_align(p.dy, p.dy_stride, p.cols, sizeof(Y)) && p.dy_stride % kPack == 0 &&
               p.cols % kPack == 0 && norm_detail::aligned(p.weight);
  for (int k = 0; k < B::kIn; ++k)
    packs = packs && (!p.in[k] || packs_align(p.in[k], p.in_stride[k], p.cols, sizeof(X)));
  for (int k = 0; k < B::kOut; ++k)
    packs = packs && (!p.out[k] || packs_align(p.out[k], p.out_stride[k], p.cols, sizeof(X)));
  packs ? norm_detail::run_backward<kPack, Ladder<kPack>>(op, ctx, p, wants_sums, outs)
        : norm_detail::run_backward<1, Ladder<1>>(op, ctx, p, wants_sums, outs);
}

}  // namespace tigon::cuda
