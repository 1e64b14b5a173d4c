// Backward of the norm family: the gradients of rows and, in the same launch, the sums over rows that are the gradients of
// weight and bias.
//
// The formula: norm_backward_looped.cuh.
//
// Persistent blocks: each takes its share of the rows of one section. The sums by column are kept in registers over all
// rows of a thread, added over the row groups of the block and over the blocks (sum_partials) in fixed order.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_backward_staying.cuh"

namespace tigon::cuda {

// How the backward keeps its bytes in flight. Direct: several blocks a multiprocessor, whose loads overlap. Staged (staged_rows.cuh):
// no register waits for the rows of the next turns. Weights lie in shared memory.
template <int Threads, int Held, int Rows, int MinBlocks>
struct Direct : RowShape<Threads, Held, Rows, MinBlocks> {
  static constexpr int stages = 0, lead = 0;
};

// By the length of the row in packs. Short: blocks a multiprocessor of the shorter rows, so their registers.
template <int Short, class... Longer>
using BackwardLadder = RowShapes<Direct<8, 2, 32, Short>, Direct<32, 2, 8, Short>, Longer...>;

namespace norm_detail {

// Of every op, where rows begin anywhere, and the blocks of a cluster, of rows that are too long for one: with a lead where there is
// room, since a cluster's threads tell each other slowly. A lead of a row also pays where a thread has much to do.
template <Lying How, class B>
struct UnalignedLadder {
  // One sum of one input, of 2 bytes: such rows have clusters of few blocks of 128 to 160 threads, three at a time on a multiprocessor
  // (4096 x 12289 95 us, by one block 100; 3072 x 16391 96 and 104; 5000 x 10241 108 and 99).
  static constexpr bool kFewBlocks = B::kIn == 1 && !B::kCentred && sizeof(typename B::Element) == 2;
  static constexpr int64_t kFew = 1536, kThree = 1920, kFour = 2048;  // packs
  using Block = StagedBlock<B::kIn == 1 ? 3 : 2, 4, 512>;
  using Shapes = RowShapes<Staged<2, 32, 4, 4, 3>, StagedBlock<2, 2, 320, 2>, StagedBlock<2, 2, 512>,
                           std::conditional_t<kFewBlocks, UpTo<kFew - 1, Block>, Block>>;
};
template <class B>
struct UnalignedLadder<Lying::apart, B> {
  using Shapes =
      std::conditional_t<B::kCentred, RowShapes<StagedBlock<3, 4, 512, 1, 1>, StagedBlock<2, 4, 512>>,
                         RowShapes<StagedBlock<2, 4, 512>>>;
};
template <class B>
using BackwardCluster = std::conditional_t<B::kIn == 1, StagedBlock<3, 4, 512, 1, 1>, StagedBlock<2, 4, 512>>;

// Rows that lie in packs. The passes are those of backward_staying_kernel, in a kernel of their own: as one with it they took 5 to 14 %
// longer.
template <class B, class W, class Y, int N, class Shape>
__global__
__launch_bounds__(Shape::block, backward_blocks<typename B::Element, Y, Shape>) void backward_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kHeld = Shape::held, kPair = N % 2 == 0 ? 2 : 1, kMeans = B::kCentred ? 2 : 1;
  constexpr bool kStaged = Shape::stages > 0;
  __shared__ __align__(16) float slots[2][kMeans * 32];
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
  auto pack_of = [&](int i) { return RowTile<Shape, 1>::thread() + thread_stride<Shape>() * i; };
  auto column = [&](int i) { return pack_of(i) * N; };

  // What a thread leaves in shared memory it alone reads: no barrier.
  auto weight_slot = [&](int i) { return reinterpret_cast<Pack<W, N>*>(shared) + i * block + threadIdx.x; };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    Pack<W, N> w = filled<W, N>(1.0f);
    if (p.weight && column(i) < cols) w = cuda::load<W, N>(p.weight + before + column(i));
    *weight_slot(i) = w;
  }
  auto weights = [&](int i, float (&w)[N]) {
    Pack<W, N> pack = *weight_slot(i);
#pragma unroll
    for (int j = 0; j < N; ++j) w[j] = kPlainWeight<B> ? pack[j] : offset + pack[j];
  };
  auto has = [&](int k, int64_t row) { return row < p.rows && (k == 0 || p.in[k]); };

  Pack<X, N> in[kHeld][B::kIn];
  Pack<Y, N> dy[kHeld];
  using StagedIn = StagedRows<X, N, Shape, false>;
  using StagedDy = StagedRows<Y, N, Shape, false>;
  const int threads = block / Shape::rows, group = Shape::rows == 1 ? 0 : threadIdx.x / threads;
  const int of_row = B::kIn * StagedIn::words(threads) + StagedDy::words(threads);
  uint4* words = reinterpret_cast<uint4*>(weight_slot(kHeld) - threadIdx.x) + group * of_row;
  auto rows_of = [&](int k) {
    return StagedIn(in_row(k, first), step * p.in_stride[k], pack_of(0), threads,
                    k == 0 || p.in[k] ? cols / N : 0, p.end[k], words + k * StagedIn::words(threads),
                    Shape::rows * of_row);
  };
  auto staged_in = [&]<size_t... K>(std::index_sequence<K...>) {
    return Several<StagedIn, B::kIn>{{rows_of(int(K))...}};
  }(std::make_index_sequence<B::kIn>{});
  StagedDy staged_dy(dy_row(first), step * p.dy_stride, pack_of(0), threads, cols / N, p.dy_end,
                     words + B::kIn * StagedIn::words(threads), Shape::rows * of_row);
  auto start = [&](int stage, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) staged_in.of[k].copy(stage, row < p.rows);
    staged_dy.copy(stage, row < p.rows);
    copies_commit();
  };
  auto load = [&](int i, int64_t row) {
    const bool there = column(i) < cols;
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
      start(to, row + (Shape::stages - 1) * step);  // in place of the last turn's
      copies_wait<Shape::stages - 1>();
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
    if (wants_rows) {
      reduce_row<Sum, Shape::threads>(means, slots[parity & 1]);
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
        if (row >= p.rows || column(i) >= cols) continue;
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
    }
    from = from + 1 == Shape::stages ? 0 : from + 1;
  }
  if constexpr (kStaged) copies_wait<0>();
  if (p.partials == nullptr) return;
  const int64_t pitch = int64_t(p.sections) * cols;
  float* out = p.partials + (place.first / Shape::rows) * B::kSums * pitch + before;
  add_up<B, Shape, N, false>(sums, column, 0, cols, cols, BackwardSingle<B, Y>{},
                             reinterpret_cast<float*>(shared), out, pitch);
}

template <class B, class W, class Y, int N, class Shape, Lying How>
auto backward_kernel_of() {
  if constexpr (How == Lying::packs && Shape::lead == 0)
    return backward_kernel<B, W, Y, N, Shape>;
  else
    return backward_staying_kernel<B, W, Y, N, Shape, How, false>;
}

// Every block leaves a row of column sums, so few rows do without a second block a multiprocessor: as many as have equally much to do.
// 256 x 4096, us: RMSNorm 10.6 (12.3 with 256 blocks), LayerNorm 11.8 (14.3).
inline int64_t enough_blocks(int64_t rows, int sections, int64_t period) {
  const int64_t turns = ceil_div(rows * sections, device_facts().sms);
  return turns > 8 ? INT64_MAX : ceil_div(ceil_div(rows, turns), period) * period;
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
    const size_t sums = Shape::rows > 1       ? size_t(p.cols) * backward_parts<Shape>
                        : How == Lying::packs ? 0
                                              : size_t(threads) * Shape::held * N;
    return std::max(words * 16, sizeof(float) * sums * B::kSums);
  };
  auto run = [&](auto* kernel, const Shares& stay, Grid grid) {
    p.shares = stay;
    grid.blocks = int64_t(stay.workers) * p.sections * grid.cluster;
    if (wants_sums) p.partials = ctx.scratch_of<float>(stay.workers * B::kSums * p.cols * p.sections);
    launch(op, ctx, kernel, grid, p);
    return int64_t(stay.workers);
  };
  int64_t parts = 0;
  const int64_t packs = std::max<int64_t>(1, p.cols / N) + kApart;
  Shapes::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    auto kernel = backward_kernel_of<B, W, Y, N, Shape, How>();
    const int threads = block_threads<Shape>(packs);
    const size_t shared = shared_of(Type<Shape>{}, threads);
    static ClusterRoom room;
    const int64_t most =
        wants_sums && Shape::rows == 1 ? enough_blocks(p.rows, p.sections, period) : INT64_MAX;
    const Shares stay =
        persistent_blocks<Shape>(op, room, kernel, threads, shared, p.rows, p.sections, period, most);
    if (stay.workers == 0) return false;
    parts = run(kernel, stay, {.threads = threads, .shared = shared});
    return true;
  });
  if constexpr (How == Lying::alike) {
    if (parts > 0 || p.sections > 1) return parts;
    using Shape = BackwardCluster<B>;
    static ClusterRoom clusters;
    auto kernel = backward_staying_kernel<B, W, Y, N, Shape, How, true>;
    auto shared = [&](int threads) { return shared_of(Type<Shape>{}, threads); };
    // The more a thread has to do for its elements, the more it needs other blocks beside it.
    using Ladder = UnalignedLadder<How, B>;
    const Cluster c =
        Ladder::kFewBlocks && packs <= Ladder::kFour
            ? cluster_of<Shape>(op, clusters, kernel, packs, packs <= Ladder::kThree ? 3 : 4, 1, shared)
            : best_cluster<Shape>(op, clusters, kernel, packs, B::kCentred ? 96 : 192, shared);
    if (c.blocks > 0)
      parts = run(kernel, shares(p.rows, c.clusters, period),
                  {.threads = c.threads, .shared = shared(c.threads), .cluster = c.blocks});
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
  int64_t parts = 0, period = rows_period<Y>(p.dy_stride);
  for (int k = 0; k < B::kIn; ++k)
    if (p.in[k]) period = std::max(period, rows_period<X>(p.in_stride[k]));
  for (int k = 0; k < B::kOut; ++k)
    if (p.out[k]) period = std::max(period, rows_period<X>(p.out_stride[k]));
  if (packs) parts = run_held_backward<Lying::packs, kPack, Ladder>(op, ctx, p, wants_sums, period);
  if constexpr (kOneType<B, W, Y>)
    if (parts == 0 && stores && alike)  // or in packs, but too long for a block
      parts = run_held_backward<Lying::alike, kPack, typename UnalignedLadder<Lying::alike, B>::Shapes>(
          op, ctx, p, wants_sums, period);
  if (parts == 0 && stores)
    parts = run_held_backward<Lying::apart, kPack, typename UnalignedLadder<Lying::apart, B>::Shapes>(
        op, ctx, p, wants_sums, period);
  if (parts == 0) parts = run_looped_backward<kPack>(op, ctx, p, wants_sums);
  if (wants_sums) sum_partials(op, ctx, p.partials, parts, outs);
}

}  // namespace tigon::cuda
