// Forward of the norm family on the row engine (rows.cuh): the kernels, and which of them a matrix gets. What they do to a row:
// norm_row.cuh. In packs: a block a group of rows, held in registers. Rows that begin anywhere, or are too long for a block: blocks and
// clusters that stay. The rest is swept. The choice depends on the row's length and place alone: a row's bits do not depend on the batch.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/norm_row.cuh"
#include "tigon/base/dispatch.h"

namespace tigon::cuda {
namespace norm_detail {

// A block a group of rows that lie in packs.
template <class F, class W, class Y, int N, class Shape>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  using OfRow = ForwardRow<F, W, Y, N, Lying::packs, int>;
  // Parameters are on their way during the reduction where they find room in registers.
  constexpr int kParamBytes = Shape::held * N * int(sizeof(W)) * F::kParams * F::kIn;
  constexpr bool kEarly = kParamBytes <= (Shape::threads == 32 ? 128 : 64);
  __shared__ __align__(16) float slots[2][OfRow::kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  using Tile = RowTile<Shape, N>;
  const Place place(p.sections, Shape::rows);
  const int64_t group = Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads;
  const OfRow row(p, place, place.first + group);
  Pack<X, N> in[Shape::held][F::kIn];
  Pack<W, N> w[Shape::held][F::kParams];
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) row.load(Tile::column(i), in[i]);
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < Shape::held; ++i) row.load_params(Tile::column(i), w[i]);
  }
  float middle[Shape::held], mean, rstd;
  int turn = 0;
  row.statistics(
      in, [](int i) { return Tile::column(i); },
      [&](auto& sums) { reduce_row<Sum, Shape::threads, spread_of<Shape>>(sums, slots[turn++]); }, NoSingle{},
      middle, mean, rstd);
  if (!row.live) return;
  if (Tile::thread() == 0) row.save_statistics(mean, rstd);
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    // Several rows a block: without a branch.
    if (Shape::rows == 1 && !row.lie.has(Tile::column(i))) continue;
    if constexpr (!kEarly) row.load_params(Tile::column(i), w[i]);
    row.finish_params(Tile::column(i), w[i]);
    if constexpr (Shape::held > (F::kCentred ? 4 : 2)) row.renew(in[i]);
    row.write(Tile::column(i), in[i], w[i], middle[i], rstd);
  }
}

// The packs of a row that is read in those of another one. Apart: which lies otherwise, so that a pack is in two words.
template <class X, int Held, bool Apart>
class StayingWords {
  static constexpr int N = 16 / int(sizeof(X)), kWords = 1 + Apart;
  const X *next_, *end_;
  int64_t step_;
  int pitch_, off_;
  uint4 words_[Held][kWords];

 public:
  // `first`: the first whole pack of this thread; `pitch`: elements from one to the next, `step`: from row to row.
  __device__ __forceinline__ StayingWords(const X* first, const X* end, int64_t step, int pitch)
      : end_(end), step_(step), pitch_(pitch) {
    off_ = Apart ? int(reinterpret_cast<uintptr_t>(first) % 16 / sizeof(X)) : 0;
    next_ = first - off_;
  }
  __device__ __forceinline__ void load(int i, bool wanted) {
    const X* word = next_ + i * pitch_;
    words_[i][0] = load_where(wanted, word);
    if constexpr (Apart) words_[i][1] = load_where(wanted && off_ != 0 && word + 2 * N <= end_, word + N);
  }
  __device__ __forceinline__ void advance() { next_ += step_; }
  // Of what was loaded before the last advance().
  __device__ __forceinline__ Pack<X, N> pack(int i, bool wanted) const {
    if constexpr (!Apart) return reinterpret_cast<const Pack<X, N>&>(words_[i][0]);
    uint32_t w[8];
    reinterpret_cast<uint4&>(w[0]) = words_[i][0], reinterpret_cast<uint4&>(w[4]) = words_[i][kWords - 1];
    shift_words<X>(w, off_);
    Pack<X, N> r;
#pragma unroll
    for (int j = 0; j < 4; ++j) reinterpret_cast<uint32_t*>(&r)[j] = w[j];
    const X* word = next_ - step_ + i * pitch_;
    if (wanted && off_ != 0 && word + 2 * N > end_) {  // the last word of memory
#pragma unroll
      for (int j = 0; j < N; ++j) r.v[j] = word[off_ + j];
    }
    return r;
  }
};

// One parameter of a column.
template <class F, class W, class Y>
__device__ __forceinline__ W param_of(const NormForward<F, W, Y>& p, int k, int64_t column) {
  if (p.param[k] == nullptr) return narrow<W>(p.absent[k]);
  if constexpr (kSpans<F>)
    return p.param[k][column / p.span];
  else
    return p.param[k][column];
}

// keep(i, k, pack) for the packs of several vectors of `size` that a thread has, i < Held: the first one begins at `begin`,
// the next ones `pitch` elements behind. What is not there is `absent`. Many words are on their way at a time.
template <int Held, class W, int K, class There, class Keep>
__device__ __forceinline__ void shifted_packs(const W* const (&vectors)[K], const float (&absent)[K],
                                              int64_t begin, int64_t size, int pitch, There&& there,
                                              Keep&& keep) {
  constexpr int N = 16 / int(sizeof(W)), kTogether = std::min(Held, 4 / K);
  static_assert(Held % kTogether == 0 && K <= 4);
  using Words = StayingWords<W, kTogether, true>;
#pragma unroll 1
  for (int first = 0; first < Held; first += kTogether) {
    auto words = [&]<size_t... I>(std::index_sequence<I...>) {
      return Several<Words, K>{{Words(vectors[I] + begin + first * pitch, vectors[I] + size, 0, pitch)...}};
    }(std::make_index_sequence<K>{});
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < kTogether; ++i) words.of[k].load(i, vectors[k] != nullptr && there(first + i));
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        keep(first + i, k,
             vectors[k] && there(first + i) ? words.of[k].pack(i, true) : filled<W, N>(absent[k]));
  }
}

// Blocks that stay, for rows that begin anywhere: whole packs, where what is written has them, and the elements before and behind, one
// a thread. A worker's rows are written as its first one is, so that parameters can wait, shifted, in shared memory. What is read next is
// asked for as a row is written. Rows too long for a block have a cluster of them.
template <class F, class W, class Y, class Shape, Lying How, bool Clustered>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_staying_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X)), kHeld = Shape::held;
  using OfRow = ForwardRow<F, W, Y, N, Lying::packs, unsigned>;  // addresses take half the registers
  using OfSingle = ForwardRow<F, W, Y, 1, Lying::packs, int>;
  using Sums = SumsOf<OfRow::kStatistics>;
  using Words = StayingWords<X, kHeld, How == Lying::apart>;
  __shared__ Exchange<Sums> exchange;
  extern __shared__ __align__(16) unsigned char shared[];
  Team<Shape, Clustered, false, Sums> team(exchange);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, Shape::rows, blockIdx.x / unsigned(team.blocks));
  const int group = Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads;
  const RowRun run = run_of(p.shares, p.rows, place.first + group);
  const int cols = int(p.cols), pitch = team.threads * team.blocks * N;
  auto column = [&](int i) { return team.pack(i) * N; };
  auto param_slot = [&](int i, int k) {
    return reinterpret_cast<Pack<W, N>*>(shared) + (i * F::kParams + k) * blockDim.x + threadIdx.x;
  };
  OfSingle single_row(p, place, run.first);
  const int head = min(
      cols, int((0 - reinterpret_cast<uintptr_t>(single_row.written()) / sizeof(*single_row.written())) % N));
  const int whole = (cols - head) / N * N;
  OfRow row(p, place, run.first, head, whole);
  int left = run.count();
  single_row.live = row.live = left > 0;

  auto there = [&](int i) { return column(i) < whole; };
  const int64_t begin = single_row.before + head + column(0);
  if constexpr (sizeof(W) == sizeof(X) && !kSpans<F>) {
    shifted_packs<kHeld>(p.param, p.absent, begin, p.sections * p.cols, pitch, there,
                         [&](int i, int k, const Pack<W, N>& w) { *param_slot(i, k) = w; });
  } else {
#pragma unroll 1
    for (int i = 0; i < kHeld && there(i); ++i)
#pragma unroll
      for (int k = 0; k < F::kParams; ++k) {
        Pack<W, N> w;
#pragma unroll
        for (int j = 0; j < N; ++j) w.v[j] = param_of(p, k, begin + i * pitch + j);
        *param_slot(i, k) = w;
      }
  }
  auto words_of = [&](int k) {
    return Words(row.in(k) + column(0), p.end[k], run.step * p.in_stride[k], pitch);
  };
  auto words = [&]<size_t... K>(std::index_sequence<K...>) {
    return Several<Words, F::kIn>{{words_of(int(K))...}};
  }(std::make_index_sequence<F::kIn>{});
  auto load = [&](int i, bool live) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) words.of[k].load(i, live && there(i));
  };
  Single<F, W, Y> single;
  single.column = cols;
  if (const int t = team.thread; team.rank == 0 && t < 2 * N)
    single.column = t < N ? (t < head ? t : cols) : min(cols, head + whole + t - N);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) load(i, row.live);
  single_row.load(single.column, single.next);
  if (single.column < cols) {
#pragma unroll
    for (int k = 0; k < F::kParams; ++k)
      single.param[k].v[0] = param_of(p, k, single_row.before + single.column);
  }
  team.meet();
#pragma unroll 1
  for (; left > 0; --left) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) words.of[k].advance();
    Pack<X, N> in[kHeld][F::kIn];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) in[i][k] = words.of[k].pack(i, there(i));
    const auto now = row;
    const auto now_single = single_row;
    single.row = &now_single;
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) single.in[k] = single.next[k];
    float middle[kHeld], mean, rstd;
    now.statistics(in, column, [&](auto& sums) { team.merge(sums); }, single, middle, mean, rstd);
    row.advance(run.step, left > 1), single_row.advance(run.step, left > 1);
    single_row.load(single.column, single.next);
    if (team.thread + team.rank == 0) now.save_statistics(mean, rstd);
    if (single.is()) now_single.write(single.column, single.in, single.param, mean, rstd);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (there(i)) {
        Pack<W, N> w[F::kParams];
#pragma unroll
        for (int k = 0; k < F::kParams; ++k) w[k] = *param_slot(i, k);
        if constexpr (!F::kCentred || kHeld > 4) now.renew(in[i]);
        now.write(column(i), in[i], w, kHeld > 4 ? mean : middle[i], rstd);
      }
      load(i, row.live);
    }
  }
  if constexpr (Clustered) cluster_arrive();
  team.meet();
}

// Rows too long for registers, wherever they lie: a sweep for each statistic and one that writes, all but the first out of L2.
template <class F, class W, class Y>
__global__ __launch_bounds__(kLoopThreads, kLoopBlocks) void forward_looped_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = Row<X>::N;
  using OfRow = ForwardRow<F, W, Y, N, Lying::apart, int64_t>;
  __shared__ __align__(16) float slots[2][OfRow::kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, 1);
  const OfRow row(p, place, place.first);
  // fn(column, inputs)
  auto sweep = [&](bool first, auto&& fn) {
    for (int64_t c = int64_t(threadIdx.x) * N + row.lie.head; row.lie.has(c);
         c += int64_t(kLoopThreads) * N) {
      Pack<X, N> in[F::kIn] = {};
      if (F::kKeeps && !first) {
        const X* kept = row.kept();
        in[0] = row.lie.load(true, kept, c, false);
        row.lie.finish(true, kept, c, false, in[0]);
      } else {
        row.load(c, in);
        row.finish(c, in);
        row.keep(c, in);
      }
      fn(c, in);
    }
  };
  float mean = 0.0f, sums[OfRow::kStatistics] = {};
  if constexpr (F::kCentred) {
    sweep(true, [&](int64_t, const Pack<X, N>(&in)[F::kIn]) { mean += row.sum_of(in); });
    mean = row.mean_of(reduce_row<Sum, kLoopThreads>(mean, slots[0]));
  }
  sweep(!F::kCentred, [&](int64_t c, const auto& in) { row.add_to_statistics(c, in, mean, sums); });
  reduce_row<Sum, kLoopThreads>(sums, slots[1]);
  const float rstd = row.finish_statistics(sums, mean);
  if (threadIdx.x == 0) row.save_statistics(mean, rstd);
  sweep(false, [&](int64_t c, const Pack<X, N>(&in)[F::kIn]) {
    Pack<W, N> w[F::kParams];
    row.load_params(c, w);
    row.finish_params(c, w);
    row.write(c, in, w, mean, rstd);
  });
}

// Rows held in registers, by the length of the row in packs. Short rows take few threads: what is done once a row costs as much
// as its elements. Percent of a copy of the same size, 16384 rows, 2048 to 12288 columns: RMSNorm 98 to 99, LayerNorm 95 to 98.
template <int Rows, int Params, bool Keeps>
struct ForwardLadder {
  // Bounds on the registers: how many blocks there are beside what a thread can have on its way.
  using One = RowShapes<RowShape<4, 2>, RowShape<4, 4, 16, 8>, RowShape<16, 2, 8, 10>,
                        RowShape<32, 4, 4, Params == 1 ? 8 : 5>, RowBlock<4, 128, 6>, RowBlock<4, 256, 4>,
                        RowBlock<4, 384, 3>, RowBlock<8, 1024>>;
  using Short = RowShapes<RowShape<4, 2>, RowShape<8, 2>, RowShape<16, 2>, RowShape<32, 4>>;
  using Two = typename std::conditional_t<Keeps, typename Short::template with<RowBlock<2, 512>>,
                                          Short>::template with<RowBlock<4, 1024>>;
  using Shapes = std::conditional_t<Rows == 1, One, Two>;
};
// Rows that begin anywhere. Where types differ too, one path has to do.
template <Lying How>
using StayingLadder =
    std::conditional_t<How == Lying::alike, RowShapes<RowShape<32, 4, 4, 5>, RowBlock<4, 384, 2>>,
                       RowShapes<RowBlock<4, 384, 2>, RowBlock<4, 512, 2>>>;
template <int Rows>
using ForwardCluster = std::conditional_t<Rows == 1, RowBlock<8, 384, 2>, RowBlock<4, 512, 2>>;
template <class F, class W, class Y>
constexpr bool kOneType = std::is_same_v<W, typename F::Element> && std::is_same_v<Y, typename F::Element>;

// So many of a multiprocessor wait for what they read, one after the other. Two sums of a row do, and parameters that find no room in the
// registers: with twice the warps 256 x 4096 of LayerNorm takes 5.1 us instead of 5.8. One sum: no difference.
constexpr int kFewWarps = 16;

template <int N, class F, class W, class Y>
bool run_held_forward(const char* op, Context& ctx, const NormForward<F, W, Y>& p) {
  const int64_t packs = p.cols / N;
  auto run = [&]<class Shape>(Type<Shape>) {
    launch(op, ctx, forward_kernel<F, W, Y, N, Shape>,
           {.blocks = ceil_div(p.rows, Shape::rows) * p.sections,
            .threads = block_threads<Shape>(packs),
            .early = true},
           p);
  };
  return ForwardLadder<F::kIn, F::kParams, F::kKeeps>::Shapes::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (F::kCentred && Shape::threads == 0 && Shape::held == 4) {
      const int64_t warps = p.rows * p.sections * block_threads<Shape>(packs) / 32;
      if (warps <= kFewWarps * device_facts().sms) return run(Type<Spread<2, RowBlock<4, 512>>>{});
    }
    run(Type<Shape>{});
  });
}
// What a block of `threads` keeps of the parameters.
template <class Shape, class F, class W>
size_t param_bytes(int threads) {
  return size_t(threads) * Shape::held * F::kParams * Row<typename F::Element>::N * sizeof(W);
}
// By what one block holds, or by clusters of blocks. `period`: of the rows that lie alike.
template <Lying How, class F, class W, class Y>
bool run_staying_forward(const char* op, Context& ctx, NormForward<F, W, Y>& p, int64_t period) {
  constexpr int N = 16 / int(sizeof(typename F::Element));
  const int64_t packs = std::max<int64_t>(1, p.cols / N);
  const bool one = StayingLadder<How>::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    const int threads = block_threads<Shape>(packs);
    const size_t shared = param_bytes<Shape, F, W>(threads);
    const auto kernel = forward_staying_kernel<F, W, Y, Shape, How, false>;
    static ClusterRoom room;
    p.shares = persistent_blocks<Shape>(op, room, kernel, threads, shared, p.rows, p.sections, period);
    launch(op, ctx, kernel,
           {.blocks = int64_t(p.shares.workers) * p.sections,
            .threads = threads,
            .shared = shared,
            .early = true},
           p);
    return p.shares.workers > 0;
  });
  if (one || p.sections > 1) return one;
  using Shape = ForwardCluster<F::kIn>;
  static ClusterRoom clusters;
  const auto kernel = forward_staying_kernel<F, W, Y, Shape, How, true>;
  auto shared = [](int threads) { return param_bytes<Shape, F, W>(threads); };
  const Cluster c = best_cluster<Shape>(op, clusters, kernel, packs, 128, shared);
  if (c.blocks == 0) return false;
  p.shares = shares(p.rows, c.clusters, period);
  launch(op, ctx, kernel,
         {.blocks = int64_t(p.shares.workers) * c.blocks,
          .threads = c.threads,
          .shared = shared(c.threads),
          .early = true,
          .cluster = c.blocks},
         p);
  return true;
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace norm_detail

// fn(x type, weight type): the weight's is x's or float.
template <class Fn>
void with_weight_types(const char* op, DType x, const Vector& weight, Fn&& fn) {
  dispatch_float(op, "x", x, [&](auto t) {
    using X = typename DeviceType<typename decltype(t)::type>::type;
    if (!weight || weight.dtype == x) return fn(Type<X>{}, Type<X>{});
    fn(Type<X>{}, Type<float>{});
  });
}
// fn(x type, weight type, y type): y is x's type, or float where a float weight made it so.
template <class Fn>
void with_result_types(const char* op, DType x, const Vector& weight, DType y, Fn&& fn) {
  with_weight_types(op, x, weight, [&](auto tx, auto tw) {
    if (y == x) return fn(tx, tw, tx);
    fn(tx, Type<float>{}, Type<float>{});
  });
}

template <class F, class W, class Y>
void norm_forward(const char* op, Context& ctx, NormForward<F, W, Y> p) {
  using namespace norm_detail;
  using X = typename F::Element;
  p.inverse = 1.0f / float(p.cols);
  constexpr int kPack = 16 / sizeof(X);
  bool packs =
      packs_align(p.y, p.y_stride, p.cols, sizeof(Y)) && p.y_stride % kPack == 0 && p.cols % kPack == 0;
  for (int k = 0; k < F::kIn; ++k) packs = packs && packs_align(p.in[k], p.in_stride[k], p.cols, sizeof(X));
  for (int k = 0; k < F::kParams; ++k)
    packs = packs && (kSpans<F> ? p.span % kPack == 0 : aligned(p.param[k]));
  if (F::kKeeps) packs = packs && packs_align(p.kept, p.kept_stride, p.cols, sizeof(X));
  if (packs && run_held_forward<kPack>(op, ctx, p)) return;
  for (int k = 0; k < F::kIn; ++k)
    p.end[k] = end_of_rows(p.in[k], p.in_stride[k], p.rows, p.sections * p.cols);
  int64_t period = rows_period<Y>(p.y_stride);
  for (int k = 0; k < F::kIn; ++k) period = std::max(period, rows_period<X>(p.in_stride[k]));
  if (F::kKeeps) period = std::max(period, rows_period<X>(p.kept_stride));
  // In the packs of what is written.
  auto run = [&](const auto* written, int64_t stride) {
    if (F::kKeeps && !rows_alike<X>(written, stride, p.y, p.y_stride, p.rows)) return false;
    bool alike = kOneType<F, W, Y>;
    for (int k = 0; k < F::kIn; ++k)
      alike = alike && rows_alike<X>(written, stride, p.in[k], p.in_stride[k], p.rows);
    if constexpr (kOneType<F, W, Y>)
      if (alike) return run_staying_forward<Lying::alike>(op, ctx, p, period);
    return run_staying_forward<Lying::apart>(op, ctx, p, period);
  };
  if (F::kKeeps ? run(p.kept, p.kept_stride) : run(p.y, p.y_stride)) return;
  launch(op, ctx, forward_looped_kernel<F, W, Y>,
         {.blocks = p.rows * p.sections, .threads = kLoopThreads, .early = true}, p);
}

}  // namespace tigon::cuda
