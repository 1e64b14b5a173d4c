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
#include <atomic>

#include "tigon/base/cuda/async_copy.cuh"
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
  int sections = 1;
  float* partials = nullptr;  // [parts, kSums, sections * cols], null: not wanted
  uint32_t zero = 0;          // for again()
};

// How the backward keeps its bytes in flight. Direct: several blocks a multiprocessor, or long rows, whose loads overlap. Staged:
// the rows of the next turns are on their way into shared memory, where no register waits for them. Twice: as direct, where the
// sums alone take half of the registers; the row is read again, from L2. Weights lie in shared memory.
enum class Source { direct, staged, twice };
template <Source From, class Rows, int Stages = 0>
struct BackwardShape : Rows {
  static constexpr bool twice = From == Source::twice;
  static constexpr int stages = Stages;
};
template <int Threads, int Held, int Rows, int MinBlocks>
using Direct = BackwardShape<Source::direct, RowShape<Threads, Held, Rows, MinBlocks>>;
template <int Stages, int Threads, int Held, int Rows, int MinBlocks>
using Staged = BackwardShape<Source::staged, RowShape<Threads, Held, Rows, MinBlocks>, Stages>;
template <int Held, int Most, int MinBlocks = 1>
using DirectBlock = BackwardShape<Source::direct, RowBlock<Held, Most, MinBlocks>>;
template <int Stages, int Held, int Most, int MinBlocks = 1>
using StagedBlock = BackwardShape<Source::staged, RowBlock<Held, Most, MinBlocks>, Stages>;
template <int Held, int Most, int MinBlocks = 1>
using TwiceBlock = BackwardShape<Source::twice, RowBlock<Held, Most, MinBlocks>>;

// By the length of the row in packs. Short, Long: blocks a multiprocessor of the shorter rows, so their registers.
template <int Short, int Long>
using BackwardLadder = RowShapes<Direct<8, 2, 32, Short>, Direct<32, 2, 8, Short>, Direct<32, 4, 4, Long>,
                                 StagedBlock<4, 2, 512>, StagedBlock<2, 4, 512>>;

namespace norm_detail {

#include "tigon/base/norm_math.inc"

// Gradients wider than x take more registers.
template <class X, class Y, class Shape>
constexpr int backward_blocks = sizeof(Y) > sizeof(X) && Shape::min_blocks > 1 ? Shape::min_blocks * 3 / 4
                                                                               : Shape::min_blocks;
// Column sums that a block adds up.
template <class Shape>
constexpr int backward_parts = Shape::threads > 0 && Shape::threads < 32 ? Shape::block / 32 : Shape::rows;

// Rows that lie anywhere: the ladder of every op. Shifted words take registers.
template <int Sums>
using AnywhereLadder = RowShapes<Direct<32, 4, 4, 3>, DirectBlock<Sums == 1 ? 4 : 2, 512>>;

// Where threads leave their column sums, and where those of the block go.
template <class B, class Shape, int N, class Lie>
__device__ __forceinline__ void add_up(float (&sums)[B::kSums][Shape::held][N],
                                       const float (&single)[B::kSums], const Lie& lie, int edge,
                                       float* shared, float* out, int64_t out_pitch) {
  constexpr int kParts = backward_parts<Shape>;
  const int cols = lie.cols;
  auto column = [&](int i) { return RowTile<float, N, Shape>::column(i) + lie.head; };
  auto leave = [&](float* to, int k) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      if (!lie.has(column(i))) continue;
      if constexpr (Lie::anywhere) {
#pragma unroll
        for (int j = 0; j < N; ++j) to[column(i) + j] = sums[k][i][j];
      } else {
        store(to + column(i), *reinterpret_cast<Pack<float, N>*>(sums[k][i]));
      }
    }
    if (Lie::anywhere && edge >= 0) to[edge] = single[k];
  };
  if constexpr (Shape::rows == 1) {
#pragma unroll
    for (int k = 0; k < B::kSums; ++k) leave(out + k * out_pitch, k);
  } else {
    constexpr bool kSeveral = Shape::threads < 32;  // rows a warp: added up first
    if constexpr (kSeveral) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k)
#pragma unroll
        for (int i = 0; i < Shape::held; ++i)
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int m = Shape::threads; m < 32; m <<= 1)
              sums[k][i][j] += __shfl_xor_sync(0xffffffffu, sums[k][i][j], m);
    }
    const int part = kSeveral ? threadIdx.x / 32 : threadIdx.x / Shape::threads;
    __syncthreads();
    if (!kSeveral || threadIdx.x % 32 < Shape::threads) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k) leave(shared + (k * kParts + part) * cols, k);
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

// Rows that lie anywhere: the host's `step` brings a thread to rows that lie as its first one does, so it keeps its columns.
template <class B, class W, class Y, int N, class Shape, bool Anywhere>
__global__
__launch_bounds__(Shape::block, backward_blocks<typename B::Element, Y, Shape>) void backward_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kHeld = Shape::held, kPair = N % 2 == 0 ? 2 : 1, kMeans = B::kCentred ? 2 : 1;
  constexpr bool kStaged = Shape::stages > 0, kDirect = !kStaged && !Shape::twice;
  static_assert(!(kStaged && Anywhere));
  __shared__ float slots[2][kMeans * 32];
  extern __shared__ __align__(
      16) unsigned char shared[];           // weights and stages, then the column sums of the groups
  if (p.partials) let_next_kernel_start();  // the sum over the blocks
  const Place place(p.sections, Shape::rows);
  const int cols = int(p.cols), block = Shape::threads ? Shape::block : blockDim.x;
  const int64_t before = int64_t(place.section) * cols;
  const int64_t step = int64_t(gridDim.x / unsigned(p.sections)) * Shape::rows;
  const int64_t first = place.first + (Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads);
  const float offset = p.weight ? p.f.offset : 0.0f, inverse = 1.0f / float(cols);
  auto in_row = [&](int k, int64_t row) { return p.in[k] + row * p.in_stride[k] + before; };
  auto dy_row = [&](int64_t row) { return p.dy + row * p.dy_stride + before; };
  auto out_row = [&](int k, int64_t row) { return p.out[k] + row * p.out_stride[k] + before; };
  const Lie<Anywhere, N, int> lie(p.out[0] ? out_row(0, first) : in_row(0, first), cols);
  auto column = [&](int i) { return RowTile<X, N, Shape>::column(i) + lie.head; };
  const int edge = Anywhere ? lie.edge(RowTile<X, N, Shape>::thread()) : -1;
  const float edge_weight =
      Anywhere && edge >= 0 && p.weight ? offset + widen(p.weight[before + edge]) : 1.0f;

  // What a thread leaves in shared memory it alone reads: no barrier.
  auto weight_slot = [&](int i) { return reinterpret_cast<Pack<W, N>*>(shared) + i * block + threadIdx.x; };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    auto w = lie.load(p.weight != nullptr, p.weight + before, column(i));
    *weight_slot(i) = p.weight ? w : filled<W, N>(1.0f);
  }
  auto weights = [&](int i, float (&w)[N]) {
    Pack<W, N> pack = *weight_slot(i);
#pragma unroll
    for (int j = 0; j < N; ++j) w[j] = offset + pack[j];
  };
  constexpr int kInWords = N * int(sizeof(X)) / 16, kDyWords = N * int(sizeof(Y)) / 16;
  constexpr int kWords = B::kIn * kInWords + kDyWords;
  auto slot = [&](int stage, int i, int word) {
    return reinterpret_cast<uint4*>(shared) + (kHeld * N * int(sizeof(W)) / 16) * block +
           ((stage * kHeld + i) * kWords + word) * block + threadIdx.x;
  };
  auto stage = [&](int to, int64_t row) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const bool here = row < p.rows && column(i) < cols;
#pragma unroll
      for (int k = 0; k < B::kIn; ++k)
#pragma unroll
        for (int j = 0; j < kInWords; ++j) {
          const bool wanted = here && (k == 0 || p.in[k]);
          const X* from = wanted ? in_row(k, row) + column(i) : p.in[0];
          copy_async(slot(to, i, k * kInWords + j), reinterpret_cast<const uint4*>(from) + j,
                     wanted ? 16 : 0);
        }
      const Y* from = here ? dy_row(row) + column(i) : p.dy;
#pragma unroll
      for (int j = 0; j < kDyWords; ++j)
        copy_async(slot(to, i, B::kIn * kInWords + j), reinterpret_cast<const uint4*>(from) + j,
                   here ? 16 : 0);
    }
    copies_commit();
  };

  Pack<X, N> in[kHeld][B::kIn];
  Pack<Y, N> dy[kHeld];
  auto load = [&](int i, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      in[i][k] = lie.load(row < p.rows && (k == 0 || p.in[k]), in_row(k, row), column(i));
    dy[i] = lie.load(row < p.rows, dy_row(row), column(i));
  };
  // Before a pack is worked on, both times.
  auto fetch = [&](int i, int64_t row, int from) {
    if constexpr (kStaged) {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k)
#pragma unroll
        for (int j = 0; j < kInWords; ++j)
          reinterpret_cast<uint4*>(&in[i][k])[j] = *slot(from, i, k * kInWords + j);
#pragma unroll
      for (int j = 0; j < kDyWords; ++j)
        reinterpret_cast<uint4*>(&dy[i])[j] = *slot(from, i, B::kIn * kInWords + j);
    } else if constexpr (Shape::twice) {
      load(i, row);
    } else {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) in[i][k] = again(in[i][k], p.zero);
      dy[i] = again(dy[i], p.zero);
    }
  };

  bool wants_rows = false;
#pragma unroll
  for (int k = 0; k < B::kOut; ++k) wants_rows = wants_rows || p.out[k] != nullptr;
  float sums[B::kSums][kHeld][N] = {}, single[B::kSums] = {}, rstd = 0.0f, mean = 0.0f;
  auto load_statistics = [&](int64_t row) {
    rstd = row < p.rows ? p.rstd[row * p.sections + place.section] : 0.0f;
    if constexpr (B::kCentred) mean = row < p.rows ? p.mean[row * p.sections + place.section] : 0.0f;
  };
  int from = 0, to = Shape::stages - 1, parity = 0;
  if constexpr (kStaged) {
#pragma unroll
    for (int s = 0; s < Shape::stages - 1; ++s) stage(s, first + s * step);
    load_statistics(first);
  }
  for (int64_t base = place.first, row = first; base < p.rows; base += step, row += step, parity ^= 1) {
    if constexpr (kDirect) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) load(i, row);
    }
    if constexpr (!kStaged) load_statistics(row);
    const float now_rstd = rstd, now_mean = mean;
    if constexpr (kStaged) {
      load_statistics(row + step);
      stage(to, row + (Shape::stages - 1) * step);
      to = to + 1 == Shape::stages ? 0 : to + 1;
      copies_wait<Shape::stages - 1>();
    }
    auto normalised = [&](const float (&x)[B::kIn]) {
      float v = p.f.value(x);
      if constexpr (B::kCentred) v -= now_mean;
      return v * now_rstd;
    };
    float means[kMeans] = {}, x1[B::kIn] = {}, dy1 = 0.0f;
    if constexpr (Anywhere) {
      if (edge >= 0 && row < p.rows) {
#pragma unroll
        for (int k = 0; k < B::kIn; ++k)
          if (k == 0 || p.in[k]) x1[k] = widen(in_row(k, row)[edge]);
        dy1 = widen(dy_row(row)[edge]);
        float h = normalised(x1), d = p.f.upstream(dy1, x1);
        means[0] = d * edge_weight * h;
        if constexpr (B::kCentred) means[1] = d * edge_weight;
        single[0] = fma(d, p.f.round_h ? round_to<X>(h) : h, single[0]);
        if constexpr (B::kSums > 1) single[1] += d;
      }
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if constexpr (!kDirect) fetch(i, row, from);
      float w[N];
      weights(i, w);
      auto add = [&](auto rounded) {
#pragma unroll
        for (int j = 0; j < N; j += kPair) {
          float h[kPair], d[kPair];
#pragma unroll
          for (int k = 0; k < kPair; ++k) {
            float x[B::kIn];
            element(in[i], j + k, x);
            h[k] = normalised(x);
            d[k] = p.f.upstream(dy[i][j + k], x);
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
    if (wants_rows) {
      reduce_row<Sum, Shape::threads>(means, slots[parity]);
#pragma unroll
      for (int k = 0; k < kMeans; ++k) means[k] *= inverse;
      __syncwarp();  // weights are read again, not kept
      if constexpr (Anywhere) {
        if (edge >= 0 && row < p.rows) {
          float h = normalised(x1), g = __fmul_rn(p.f.upstream(dy1, x1), edge_weight), out[B::kOut];
          if constexpr (B::kCentred) g -= means[1];
          p.f.results(norm_gradient(g, h, means[0], now_rstd), dy1, h, edge_weight, x1, out);
#pragma unroll
          for (int k = 0; k < B::kOut; ++k)
            if (p.out[k]) out_row(k, row)[edge] = narrow<X>(out[k]);
        }
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (row >= p.rows || !lie.has(column(i))) continue;
        fetch(i, row, from);
        float w[N], results[B::kOut][N];
        weights(i, w);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          float x[B::kIn], out[B::kOut];
          element(in[i], j, x);
          float h = normalised(x),
                g = __fmul_rn(p.f.upstream(dy[i][j], x), w[j]);  // as it went into the means
          if constexpr (B::kCentred) g -= means[1];
          p.f.results(norm_gradient(g, h, means[0], now_rstd), dy[i][j], h, w[j], x, out);
#pragma unroll
          for (int k = 0; k < B::kOut; ++k) results[k][j] = out[k];
        }
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) {
          if (B::kOut > 1 && p.out[k] == nullptr) continue;
          Pack<X, N> out;
          out.set(results[k]);
          lie.store(out_row(k, row), column(i), out);
        }
      }
    }
    from = from + 1 == Shape::stages ? 0 : from + 1;
  }
  if constexpr (kStaged) copies_wait<0>();
  if (p.partials == nullptr) return;
  const int64_t pitch = int64_t(p.sections) * cols;
  float* out = p.partials + (place.first / Shape::rows) * B::kSums * pitch + before;
  add_up<B, Shape, N>(sums, single, lie, edge, reinterpret_cast<float*>(shared), out, pitch);
}

// Rows too long for registers. Two kernels: gradients of rows (two sweeps), sums by column over chunks of rows.
template <class B, class W, class Y, int N, bool Anywhere>
__global__ __launch_bounds__(kLoopThreads) void backward_looped_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kMeans = B::kCentred ? 2 : 1;
  __shared__ float slots[kMeans * 32];
  const Place place(p.sections, 1);
  const int64_t row = place.first, before = int64_t(place.section) * p.cols;
  const float rstd = p.rstd[row * p.sections + place.section];
  const float mean = B::kCentred ? p.mean[row * p.sections + place.section] : 0.0f;
  const float offset = p.weight ? p.f.offset : 0.0f;
  auto out_row = [&](int k) { return p.out[k] + row * p.out_stride[k] + before; };
  const Lie<Anywhere, N, int64_t> lie(out_row(0), p.cols);
  const Lie<false, 1, int64_t> one(out_row(0), p.cols);
  const int64_t edge = Anywhere ? lie.edge(threadIdx.x) : -1;
  // fn(element, its inputs, dy, h, weight, g), then done(how its pack lies, column)
  auto sweep = [&](auto&& fn, auto&& done) {
    auto visit = [&]<int M>(const auto& lie, int64_t c, std::integral_constant<int, M>) {
      Pack<X, M> in[B::kIn];
#pragma unroll
      for (int k = 0; k < B::kIn; ++k)
        in[k] = lie.load(k == 0 || p.in[k], p.in[k] + row * p.in_stride[k] + before, c);
      auto dy = lie.load(true, p.dy + row * p.dy_stride + before, c);
      auto weight = p.weight ? lie.load(true, p.weight + before, c) : filled<W, M>(1.0f);
#pragma unroll
      for (int j = 0; j < M; ++j) {
        float x[B::kIn], w = offset + weight[j];
        element(in, j, x);
        float v = p.f.value(x), h = (B::kCentred ? v - mean : v) * rstd;
        fn(j, x, dy[j], h, w, p.f.upstream(dy[j], x) * w);
      }
      done(lie, c, std::integral_constant<int, M>{});
    };
    for (int64_t c = int64_t(threadIdx.x) * N + lie.head; lie.has(c); c += int64_t(kLoopThreads) * N)
      visit(lie, c, std::integral_constant<int, N>{});
    if (Anywhere && edge >= 0) visit(one, edge, std::integral_constant<int, 1>{});
  };
  float means[kMeans] = {};
  sweep(
      [&](int, const float (&)[B::kIn], float, float h, float, float g) {
        means[0] = fma(g, h, means[0]);
        if constexpr (B::kCentred) means[1] += g;
      },
      [](const auto&, int64_t, auto) {});
  reduce_row<Sum, kLoopThreads>(means, slots);
#pragma unroll
  for (int k = 0; k < kMeans; ++k) means[k] /= float(p.cols);
  float results[B::kOut][N];
  sweep(
      [&](int j, const float (&x)[B::kIn], float dy, float h, float w, float g) {
        float out[B::kOut];
        if constexpr (B::kCentred) g -= means[1];
        p.f.results(norm_gradient(g, h, means[0], rstd), dy, h, w, x, out);
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) results[k][j] = out[k];
      },
      [&]<int M>(const auto& lie, int64_t c, std::integral_constant<int, M>) {
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) {
          Pack<X, M> pack;
#pragma unroll
          for (int j = 0; j < M; ++j) pack.set(j, results[k][j]);
          if (p.out[k]) lie.store(out_row(k), c, pack);
        }
      });
}

constexpr int kColumnThreads = 256;

template <class B, class W, class Y, int N, bool Anywhere>
__global__ __launch_bounds__(kColumnThreads) void column_sums_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p, int64_t chunk, int64_t tiles) {
  using X = typename B::Element;
  const int64_t part = int64_t(blockIdx.x) / (tiles * p.sections),
                section = int64_t(blockIdx.x) / tiles % p.sections;
  const int64_t before = section * p.cols, pitch = p.cols * p.sections;
  let_next_kernel_start();
  // Packs from the first column on (Lie says how many), then the single columns that are left, fewer than 2 N.
  const int64_t mine = int64_t(blockIdx.x) % tiles * kColumnThreads + threadIdx.x;
  const int64_t packs = max(int64_t(0), p.cols / N - Anywhere);
  const int64_t end = min((part + 1) * chunk, p.rows);
  auto add = [&]<int M>(const auto& lie, int64_t c, std::integral_constant<int, M>) {
    float sums[B::kSums][M] = {};
#pragma unroll 4
    for (int64_t row = part * chunk; row < end; ++row) {
      Pack<X, M> in[B::kIn];
#pragma unroll
      for (int k = 0; k < B::kIn; ++k)
        in[k] = lie.load(k == 0 || p.in[k], p.in[k] + row * p.in_stride[k] + before, c);
      auto dy = lie.load(true, p.dy + row * p.dy_stride + before, c);
      const float rstd = p.rstd[row * p.sections + section];
      const float mean = B::kCentred ? p.mean[row * p.sections + section] : 0.0f;
      float h[M];
#pragma unroll
      for (int j = 0; j < M; ++j) {
        float x[B::kIn];
        element(in, j, x);
        h[j] = (B::kCentred ? p.f.value(x) - mean : p.f.value(x)) * rstd;
      }
      if (p.f.round_h) round_all<X>(h);
#pragma unroll
      for (int j = 0; j < M; ++j) {
        float x[B::kIn];
        element(in, j, x);
        float d = p.f.upstream(dy[j], x);
        sums[0][j] = fma(d, h[j], sums[0][j]);
        if constexpr (B::kSums > 1) sums[1][j] += d;
      }
    }
#pragma unroll
    for (int k = 0; k < B::kSums; ++k)
#pragma unroll
      for (int j = 0; j < M; ++j) p.partials[(part * B::kSums + k) * pitch + before + c + j] = sums[k][j];
  };
  const X* aligned = nullptr;
  if (mine < packs)
    add(Lie<Anywhere, N, int64_t>(aligned, p.cols), mine * N, std::integral_constant<int, N>{});
  else if (Anywhere && packs * N + mine - packs < p.cols)
    add(Lie<false, 1, int64_t>(aligned, p.cols), packs * N + mine - packs, std::integral_constant<int, 1>{});
}

template <bool Anywhere, int N, class Shapes, class B, class W, class Y>
void run_backward(const char* op, Context& ctx, NormBackward<B, W, Y> p, bool wants_sums,
                  std::initializer_list<Vector> outs) {
  using X = typename B::Element;
  int64_t parts = 0, pitch = p.cols * p.sections * B::kSums;
  const int64_t packs = p.cols / N;
  bool held = Shapes::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    auto kernel = backward_kernel<B, W, Y, N, Shape, Anywhere>;
    const int threads = block_threads<Shape>(packs);
    const size_t tile = size_t(threads) * Shape::held * N;
    const size_t rows = tile * (sizeof(W) + Shape::stages * (B::kIn * sizeof(X) + sizeof(Y)));
    const size_t sums =
        Shape::rows == 1 ? 0 : sizeof(float) * size_t(p.cols) * backward_parts<Shape> * B::kSums;
    const size_t shared = std::max(rows, sums);
    if (shared + 1024 > size_t(device_facts().shared_per_block)) return false;
    static std::atomic<int> known[33];  // blocks a multiprocessor, by warps
    std::atomic<int>& per_sm = known[threads / 32];
    if (per_sm == 0) {
      constexpr int kMost = 227 << 10;
      int n = 0;
      TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                std::min(kMost, device_facts().shared_per_block - 1024)));
      TIGON_CUDA_CHECK(op, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, threads, shared));
      per_sm = std::max(n, 1);
    }
    const int64_t resident = std::max<int64_t>(1, int64_t(device_facts().sms) * per_sm / p.sections);
    parts = std::min<int64_t>(ceil_div(p.rows, Shape::rows), resident);
    if (Anywhere && parts * Shape::rows < p.rows)  // rows a step apart lie alike
      parts = std::max<int64_t>(N, parts / N * N);
    if (wants_sums) p.partials = ctx.scratch_of<float>(parts * pitch);
    launch(op, ctx, kernel, {.blocks = parts * p.sections, .threads = threads, .shared = shared}, p);
    return true;
  });
  if (!held) {
    bool wants_rows = std::any_of(p.out, p.out + B::kOut, [](auto* out) { return out != nullptr; });
    if (wants_rows)
      launch(op, ctx, backward_looped_kernel<B, W, Y, N, Anywhere>,
             {.blocks = p.rows * p.sections, .threads = kLoopThreads}, p);
    if (wants_sums) {
      int64_t tiles = ceil_div(packs + N + p.cols % N, kColumnThreads);
      int64_t chunk = std::max<int64_t>(32, ceil_div(p.rows, 256));
      parts = ceil_div(p.rows, chunk);
      p.partials = ctx.scratch_of<float>(parts * pitch);
      launch(op, ctx, column_sums_kernel<B, W, Y, N, Anywhere>,
             {.blocks = parts * tiles * p.sections, .threads = kColumnThreads}, p, chunk, tiles);
    }
  }
  if (wants_sums) sum_partials(op, ctx, p.partials, parts, outs);
}

}  // namespace norm_detail

// Ladder: the shapes for rows that lie in packs. `outs`: the B::kSums gradients by column, each of sections * cols numbers; without
// data where not wanted.
template <class Ladder, class B, class W, class Y>
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
  packs ? norm_detail::run_backward<false, kPack, Ladder>(op, ctx, p, wants_sums, outs)
        : norm_detail::run_backward<true, kPack, norm_detail::AnywhereLadder<B::kSums>>(op, ctx, p,
                                                                                        wants_sums, outs);
}

}  // namespace tigon::cuda
