// Backward of the norm family: the gradients of rows and, in the same launch, the sums over rows that are the gradients of
// weight and bias.
//
// The formula: norm_backward_looped.cuh.
//
// Persistent blocks: block b takes row groups b, b + grid, ... of one section. The sums by column are kept in registers over all
// rows of a thread, added over the row groups of the block and over the blocks (sum_partials) in fixed order.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_backward_looped.cuh"
#include "tigon/base/cuda/norm_forward.cuh"
#include "tigon/base/cuda/staged_rows.cuh"

namespace tigon::cuda {

// How the backward keeps its bytes in flight. Direct: several blocks a multiprocessor, whose loads overlap. Staged (staged_rows.cuh):
// no register waits for the rows of the next turns. Weights lie in shared memory.
template <int Threads, int Held, int Rows, int MinBlocks>
struct Direct : RowShape<Threads, Held, Rows, MinBlocks> {
  static constexpr int stages = 0;
};

// By the length of the row in packs. Short: blocks a multiprocessor of the shorter rows, so their registers.
template <int Short, class... Longer>
using BackwardLadder = RowShapes<Direct<8, 2, 32, Short>, Direct<32, 2, 8, Short>, Longer...>;

namespace norm_detail {

// Gradients wider than x take more registers.
template <class X, class Y, class Shape>
constexpr int backward_blocks = sizeof(Y) > sizeof(X) && Shape::min_blocks > 1 ? Shape::min_blocks * 3 / 4
                                                                               : Shape::min_blocks;
// Column sums that a block adds up.
template <class Shape>
constexpr int backward_parts = Shape::threads > 0 && Shape::threads < 32 ? Shape::block / 32 : Shape::rows;

// Of every op, where rows begin anywhere, and the blocks of a cluster, of rows that are too long for one.
template <Lying How>
using UnalignedLadder = std::conditional_t<How == Lying::alike,
                                           RowShapes<Staged<2, 32, 4, 4, 3>, StagedBlock<2, 2, 320, 2>,
                                                     StagedBlock<2, 2, 512>, StagedBlock<2, 4, 512>>,
                                           RowShapes<StagedBlock<2, 4, 512>>>;
using BackwardCluster = StagedBlock<2, 4, 512>;

// Nothing is ever added to the weight.
template <class B>
constexpr bool kPlainWeight = requires { typename B::PlainWeight; };

// What a thread holds of rows beside whole packs: an element before or behind them, its column sums, or nothing.
template <class B, class Y>
struct BackwardSingle {
  int column = 0;  // of the section
  bool is = false;
  float weight = 0.0f, sums[B::kSums] = {};
  typename B::Element next[B::kIn] = {};  // of the next row; nothing waits for it
  Y next_dy = {};
};

// Where threads leave their column sums, and where those of the block go.
template <class B, class Shape, int N, bool Singles, class Column, class Single>
__device__ __forceinline__ void add_up(float (&sums)[B::kSums][Shape::held][N], Column&& column, int head,
                                       int whole, int cols, const Single& single, float* shared, float* out,
                                       int64_t out_pitch) {
  constexpr int kParts = backward_parts<Shape>;
  auto leave = [&](float* to, int k) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) {
      if (column(i) >= whole) continue;
      if constexpr (Singles) {
#pragma unroll
        for (int j = 0; j < N; ++j) to[head + column(i) + j] = sums[k][i][j];
      } else {
        store(to + column(i), *reinterpret_cast<Pack<float, N>*>(sums[k][i]));
      }
    }
    if (Singles && single.is) to[single.column] = single.sums[k];
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

// Rows that begin anywhere: whole packs, where what is written has them, and the elements before and behind, one a thread. The host's
// `step` brings a thread to rows that are written as its first one is, so it keeps its columns.
template <class B, class W, class Y, int N, class Shape, Lying How, bool Clustered>
__global__
__launch_bounds__(Shape::block, backward_blocks<typename B::Element, Y, Shape>) void backward_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kHeld = Shape::held, kPair = N % 2 == 0 ? 2 : 1, kMeans = B::kCentred ? 2 : 1;
  constexpr bool kStaged = Shape::stages > 0, kSingles = How != Lying::packs;
  static_assert(kStaged || !kSingles);
  using Sums = SumsOf<kMeans>;
  __shared__ std::conditional_t<Clustered, Exchange<Sums>, float[2][kMeans * 32]> slots;
  extern __shared__ __align__(
      16) unsigned char shared[];           // weights and stages, then the column sums of the groups
  if (p.partials) let_next_kernel_start();  // the sum over the blocks
  int blocks = 1, rank = 0;
  if constexpr (Clustered) {
    blocks = int(cluster_size()), rank = int(cluster_rank());
    slots.init();
    cluster_arrive();
  }
  const Place place(p.sections, Shape::rows, blockIdx.x / unsigned(blocks));
  const int cols = int(p.cols), block = Shape::threads ? Shape::block : blockDim.x;
  const int64_t before = int64_t(place.section) * cols;
  const int64_t step = int64_t(gridDim.x / unsigned(p.sections * blocks)) * Shape::rows;
  const int64_t first = place.first + (Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads);
  const float offset = p.weight ? p.f.offset : 0.0f, inverse = 1.0f / float(cols);
  int head = 0;
  if constexpr (kSingles) {
    const X* written = p.out[0] ? p.out[0] + first * p.out_stride[0] : p.in[0] + first * p.in_stride[0];
    head = min(cols, int((0 - reinterpret_cast<uintptr_t>(written + before) / sizeof(X)) % N));
  }
  const int whole = kSingles ? (cols - head) / N * N : cols;
  const int64_t begin = before + head;
  auto in_row = [&](int k, int64_t row) { return p.in[k] + row * p.in_stride[k] + begin; };
  auto dy_row = [&](int64_t row) { return p.dy + row * p.dy_stride + begin; };
  auto out_row = [&](int k, int64_t row) { return p.out[k] + row * p.out_stride[k] + begin; };
  auto pack_of = [&](int i) {
    return RowTile<Shape, 1>::thread() + thread_stride<Shape>() * (i * blocks + rank);
  };
  auto column = [&](int i) { return pack_of(i) * N; };

  // What a thread leaves in shared memory it alone reads: no barrier.
  auto weight_slot = [&](int i) { return reinterpret_cast<Pack<W, N>*>(shared) + i * block + threadIdx.x; };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    Pack<W, N> w = filled<W, N>(1.0f);
    if (p.weight && column(i) < whole) {
      const W* from = p.weight + begin + column(i);
      if constexpr (!kSingles) {
        w = cuda::load<W, N>(from);
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) w.v[j] = from[j];
      }
    }
    *weight_slot(i) = w;
  }
  auto weights = [&](int i, float (&w)[N]) {
    Pack<W, N> pack = *weight_slot(i);
#pragma unroll
    for (int j = 0; j < N; ++j) w[j] = kPlainWeight<B> ? pack[j] : offset + pack[j];
  };
  auto has = [&](int k, int64_t row) { return row < p.rows && (k == 0 || p.in[k]); };

  BackwardSingle<B, Y> single;
  auto load_single = [&](int64_t row) {
    if (!single.is) return;
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      if (has(k, row)) single.next[k] = in_row(k, row)[single.column - head];
    if (row < p.rows) single.next_dy = dy_row(row)[single.column - head];
  };
  if constexpr (kSingles) {
    const int t = RowTile<Shape, 1>::thread();
    single.column = t < N ? t : head + whole + t - N;
    single.is = rank == 0 && (t < N ? t < head : single.column < cols);
    single.weight = single.is && p.weight ? offset + widen(p.weight[before + single.column]) : 1.0f;
    load_single(first);
  }

  Pack<X, N> in[kHeld][B::kIn];
  Pack<Y, N> dy[kHeld];
  using StagedIn = StagedRows<X, N, Shape, How == Lying::apart>;
  using StagedDy = StagedRows<Y, N, Shape, How == Lying::apart>;
  const int threads = block / Shape::rows, group = Shape::rows == 1 ? 0 : threadIdx.x / threads;
  const int of_row = B::kIn * StagedIn::words(threads) + StagedDy::words(threads);
  uint4* words = reinterpret_cast<uint4*>(weight_slot(kHeld) - threadIdx.x) + group * of_row;
  auto rows_of = [&](int k) {
    return StagedIn(in_row(k, first), step * p.in_stride[k], pack_of(0), threads * blocks,
                    k == 0 || p.in[k] ? whole / N : 0, p.end[k], words + k * StagedIn::words(threads),
                    Shape::rows * of_row);
  };
  auto staged_in = [&]<size_t... K>(std::index_sequence<K...>) {
    return Several<StagedIn, B::kIn>{{rows_of(int(K))...}};
  }(std::make_index_sequence<B::kIn>{});
  StagedDy staged_dy(dy_row(first), step * p.dy_stride, pack_of(0), threads * blocks, whole / N, p.dy_end,
                     words + B::kIn * StagedIn::words(threads), Shape::rows * of_row);
  auto start = [&](int stage, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) staged_in.of[k].copy(stage, row < p.rows);
    staged_dy.copy(stage, row < p.rows);
    copies_commit();
  };
  auto load = [&](int i, int64_t row) {
    const bool there = column(i) < whole;
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      in[i][k] = load_where<X, N>(there && has(k, row), in_row(k, row) + column(i));
    dy[i] = load_where<Y, N>(there && row < p.rows, dy_row(row) + column(i));
  };
  // Before a pack is worked on, both times.
  auto fetch = [&](int i, int from) {
    if constexpr (kStaged) {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) in[i][k] = staged_in.of[k].pack(from, i);
      dy[i] = staged_dy.pack(from, i);
    } else {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) in[i][k] = again(in[i][k], p.zero);
      dy[i] = again(dy[i], p.zero);
    }
  };

  bool wants_rows = false;
#pragma unroll
  for (int k = 0; k < B::kOut; ++k) wants_rows = wants_rows || p.out[k] != nullptr;
  float sums[B::kSums][kHeld][N] = {}, rstd = 0.0f, mean = 0.0f;
  auto load_statistics = [&](int64_t row) {
    rstd = row < p.rows ? p.rstd[row * p.sections + place.section] : 0.0f;
    if constexpr (B::kCentred) mean = row < p.rows ? p.mean[row * p.sections + place.section] : 0.0f;
  };
  int from = 0, to = Shape::stages - 1, parity = 0;
  if constexpr (kStaged) {
#pragma unroll
    for (int s = 0; s < Shape::stages - 1; ++s) start(s, first + s * step);
    load_statistics(first);
  }
  if constexpr (Clustered) cluster_wait();
#pragma unroll 1
  for (int64_t base = place.first, row = first; base < p.rows; base += step, row += step, ++parity) {
    if constexpr (!kStaged) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) load(i, row);
      load_statistics(row);
    }
    const float now_rstd = rstd, now_mean = mean;
    if constexpr (kStaged) {
      load_statistics(row + step);
      // The next turn's words take the place of the last one's. Apart, other threads have read those until they came here.
      auto start_next = [&] { start(to, row + (Shape::stages - 1) * step); };
      if constexpr (How != Lying::apart) start_next();
      copies_wait<Shape::stages - (How != Lying::apart ? 1 : 2)>();
      if constexpr (How == Lying::apart) {
        sync_row<Shape>();
        start_next();
      }
      to = to + 1 == Shape::stages ? 0 : to + 1;
    }
    auto normalised = [&](const float (&x)[B::kIn]) {
      float v = p.f.value(x);
      if constexpr (B::kCentred) v -= now_mean;
      return v * now_rstd;
    };
    float means[kMeans] = {};
    // The means take in h and the gradient of h * weight, the column sums what `h` is rounded to.
    auto add_means = [&](float h, float d, float w) {
      means[0] = fma(d * w, h, means[0]);
      if constexpr (B::kCentred) means[1] = fma(d, w, means[1]);
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (kStaged && Shape::rows > 1 && row >= p.rows) break;  // what is staged is another row's
      if constexpr (kStaged) fetch(i, from);
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
            add_means(h[k], d[k], w[j + k]);
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
    float single_in[B::kIn] = {}, single_dy = 0.0f;
    if constexpr (kSingles) {
      if (single.is && row < p.rows) {
#pragma unroll
        for (int k = 0; k < B::kIn; ++k) single_in[k] = widen(single.next[k]);
        single_dy = widen(single.next_dy);
        load_single(row + step);
        float h = normalised(single_in), d = p.f.upstream(single_dy, single_in);
        add_means(h, d, single.weight);
        if (p.f.round_h) h = round_to<X>(h);
        single.sums[0] = fma(d, h, single.sums[0]);
        if constexpr (B::kSums > 1) single.sums[1] += d;
      }
    }
    if (wants_rows) {
      if constexpr (Clustered) {
        Sums all = {};
#pragma unroll
        for (int k = 0; k < kMeans; ++k) all.s[k] = means[k];
        all = merge_row<0, true>(all, slots, parity);
#pragma unroll
        for (int k = 0; k < kMeans; ++k) means[k] = all.s[k];
      } else {
        reduce_row<Sum, Shape::threads>(means, slots[parity & 1]);
      }
#pragma unroll
      for (int k = 0; k < kMeans; ++k) means[k] *= inverse;
      // g as it went into the means.
      auto results = [&](const float (&x)[B::kIn], float dy, float w, float (&out)[B::kOut]) {
        float h = normalised(x), g = __fmul_rn(p.f.upstream(dy, x), w);
        if constexpr (B::kCentred) g -= means[1];
        p.f.results(norm_gradient(g, h, means[0], now_rstd), dy, h, w, x, out);
      };
      __syncwarp();  // weights are read again, not kept
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (row >= p.rows || column(i) >= whole) continue;
        fetch(i, from);
        float w[N], result[B::kOut][N];
        weights(i, w);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          float x[B::kIn], out[B::kOut];
          element(in[i], j, x);
          results(x, dy[i][j], w[j], out);
#pragma unroll
          for (int k = 0; k < B::kOut; ++k) result[k][j] = out[k];
        }
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) {
          if (B::kOut > 1 && p.out[k] == nullptr) continue;
          Pack<X, N> out;
          out.set(result[k]);
          if constexpr (sizeof(X) * N % 16 == 0)
            store_whole(out_row(k, row) + column(i), out);
          else
            store(out_row(k, row) + column(i), out);
        }
      }
      if constexpr (kSingles) {
        if (single.is && row < p.rows) {
          float out[B::kOut];
          results(single_in, single_dy, single.weight, out);
#pragma unroll
          for (int k = 0; k < B::kOut; ++k)
            if (p.out[k]) out_row(k, row)[single.column - head] = narrow<X>(out[k]);
        }
      }
    }
    from = from + 1 == Shape::stages ? 0 : from + 1;
  }
  if constexpr (kStaged) copies_wait<0>();
  if constexpr (Clustered) cluster_arrive(), cluster_wait();
  if (p.partials == nullptr) return;
  const int64_t pitch = int64_t(p.sections) * cols;
  float* out = p.partials + (place.first / Shape::rows) * B::kSums * pitch + before;
  add_up<B, Shape, N, kSingles>(sums, column, head, whole, cols, single, reinterpret_cast<float*>(shared),
                                out, pitch);
}

// One launch for all: the parts of the column sums, or 0 where no shape holds a row.
// `period`: of the rows that lie alike.
template <Lying How, int N, class Shapes, class B, class W, class Y>
int64_t run_held_backward(const char* op, Context& ctx, NormBackward<B, W, Y>& p, bool wants_sums,
                          int64_t period) {
  using X = typename B::Element;
  constexpr bool kApart = How == Lying::apart;
  auto shared_of = [&]<class Shape>(Type<Shape>, int threads) {
    const int of_row = threads / Shape::rows;
    size_t words = size_t(threads) * Shape::held * sizeof(Pack<W, N>) / 16;
    if constexpr (Shape::stages > 0)
      words += size_t(Shape::stages) * Shape::rows *
               (B::kIn * StagedRows<X, N, Shape, kApart>::words(of_row) +
                StagedRows<Y, N, Shape, kApart>::words(of_row));
    const size_t sums =
        Shape::rows == 1 ? 0 : sizeof(float) * size_t(p.cols) * backward_parts<Shape> * B::kSums;
    return std::max(words * 16, sums);
  };
  auto run = [&](auto* kernel, int64_t parts, Grid grid) {
    if (wants_sums) p.partials = ctx.scratch_of<float>(parts * B::kSums * p.cols * p.sections);
    launch(op, ctx, kernel, grid, p);
    return parts;
  };
  int64_t parts = 0;
  const int64_t packs = std::max<int64_t>(1, p.cols / N) + kApart;
  Shapes::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    auto kernel = backward_kernel<B, W, Y, N, Shape, How, false>;
    const int threads = block_threads<Shape>(packs);
    const size_t shared = shared_of(Type<Shape>{}, threads);
    static std::atomic<int> known[33];
    const int64_t blocks =
        persistent_blocks<Shape>(op, kernel, threads, shared, p.rows, p.sections, period, known);
    if (blocks == 0) return false;
    parts = run(kernel, blocks, {.blocks = blocks * p.sections, .threads = threads, .shared = shared});
    return true;
  });
  if constexpr (How == Lying::alike) {
    if (parts > 0 || p.sections > 1) return parts;
    using Shape = BackwardCluster;
    static ClusterRoom clusters;
    auto kernel = backward_kernel<B, W, Y, N, Shape, How, true>;
    auto shared = [&](int threads) { return shared_of(Type<Shape>{}, threads); };
    // The more a thread has to do for its elements, the more it needs other blocks beside it.
    const Cluster c =
        best_cluster<Shape>(op, clusters, kernel, packs, p.rows, period, B::kCentred ? 96 : 192, shared);
    if (c.blocks > 0)
      parts = run(kernel, c.clusters,
                  {.blocks = c.clusters * c.blocks,
                   .threads = c.threads,
                   .shared = shared(c.threads),
                   .cluster = c.blocks});
  }
  return parts;
}

// Rows of any length, in two launches: the parts of the column sums.
template <int N, class B, class W, class Y>
int64_t run_looped_backward(const char* op, Context& ctx, NormBackward<B, W, Y>& p, bool wants_sums) {
  if (std::any_of(p.out, p.out + B::kOut, [](auto* out) { return out != nullptr; }))
    launch(op, ctx, backward_looped_kernel<B, W, Y, N>,
           {.blocks = p.rows * p.sections, .threads = kLoopThreads}, p);
  if (!wants_sums) return 0;
  const int64_t tiles = ceil_div(ceil_div(p.cols, N), kColumnThreads);
  const int64_t chunk = std::max<int64_t>(32, ceil_div(p.rows, 256)), parts = ceil_div(p.rows, chunk);
  p.partials = ctx.scratch_of<float>(parts * B::kSums * p.cols * p.sections);
  launch(op, ctx, column_sums_kernel<B, W, Y, N>,
         {.blocks = parts * tiles * p.sections, .threads = kColumnThreads}, p, chunk, tiles);
  return parts;
}

}  // namespace norm_detail

// Ladder: the shapes for rows that lie in packs. `outs`: the B::kSums gradients by column, each of sections * cols numbers; without
// data where not wanted.
template <class Ladder, class B, class W, class Y>
void norm_backward(const char* op, Context& ctx, NormBackward<B, W, Y> p,
                   std::initializer_list<Vector> outs) {
  using namespace norm_detail;
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
               p.cols % kPack == 0 && aligned(p.weight);
  for (int k = 0; k < B::kIn; ++k)
    packs = packs && (!p.in[k] || packs_align(p.in[k], p.in_stride[k], p.cols, sizeof(X)));
  for (int k = 0; k < B::kOut; ++k)
    packs = packs && (!p.out[k] || packs_align(p.out[k], p.out_stride[k], p.cols, sizeof(X)));
  p.dy_end = end_of_rows(p.dy, p.dy_stride, p.rows, p.sections * p.cols);
  for (int k = 0; k < B::kIn; ++k)
    if (p.in[k]) p.end[k] = end_of_rows(p.in[k], p.in_stride[k], p.rows, p.sections * p.cols);
  // In the packs of what is written.
  const X* written = p.out[0] ? p.out[0] : p.in[0];
  const int64_t stride = p.out[0] ? p.out_stride[0] : p.in_stride[0];
  auto lies = [&](const auto* of, int64_t of_stride) {
    return !of || rows_alike<X>(written, stride, of, of_stride, p.rows);
  };
  bool stores = true, alike = lies(p.dy, p.dy_stride);
  for (int k = 0; k < B::kIn; ++k) alike = alike && lies(p.in[k], p.in_stride[k]);
  for (int k = 0; k < B::kOut; ++k) stores = stores && lies(p.out[k], p.out_stride[k]);
  int64_t parts = 0;
  const int64_t period = packs ? 1 : kPack;
  if (packs) parts = run_held_backward<Lying::packs, kPack, Ladder>(op, ctx, p, wants_sums, period);
  if constexpr (kOneType<B, W, Y>)
    if (parts == 0 && stores && alike)  // or in packs, but too long for a block
      parts = run_held_backward<Lying::alike, kPack, UnalignedLadder<Lying::alike>>(op, ctx, p, wants_sums,
                                                                                    period);
  if (parts == 0 && stores)
    parts =
        run_held_backward<Lying::apart, kPack, UnalignedLadder<Lying::apart>>(op, ctx, p, wants_sums, period);
  if (parts == 0) parts = run_looped_backward<kPack>(op, ctx, p, wants_sums);
  if (wants_sums) sum_partials(op, ctx, p.partials, parts, outs);
}

}  // namespace tigon::cuda
