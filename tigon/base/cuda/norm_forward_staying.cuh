// Forward of the norm family for rows that begin anywhere: blocks that stay, whose next row waits in registers. What they do to a row:
// norm_row.cuh.
#pragma once

#include <algorithm>
#include <utility>

#include "tigon/base/cuda/norm_row.cuh"

namespace tigon::cuda {
namespace norm_detail {

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

// The element that a thread has beside whole packs, of which `head` come before and which are `whole` elements; none: cols.
template <int N, class Team>
__device__ __forceinline__ int single_column(const Team& team, int head, int whole, int cols) {
  int column = cols;
  if (const int t = team.thread; team.rank == 0 && t < 2 * N)
    column = t < N ? (t < head ? t : cols) : min(cols, head + whole + t - N);
  return column;
}
// `before`: the first column of the section that the row is.
template <class F, class W, class Y>
__device__ __forceinline__ void load_single_params(const NormForward<F, W, Y>& p, int64_t before,
                                                   Single<F, W, Y>& single) {
#pragma unroll
  for (int k = 0; k < F::kParams; ++k) single.param[k].v[0] = param_of(p, k, before + single.column);
}

// keep(i, k, pack) for the packs of several vectors of `size` that a thread has, i < Held: the first one begins at `begin`,
// the next ones `pitch` elements behind. What is not there is `absent`. Many words are on their way at a time.
template <int Held, bool Unrolled = false, class W, int K, class There, class Keep>
__device__ __forceinline__ void shifted_packs(const W* const (&vectors)[K], const float (&absent)[K],
                                              int64_t begin, int64_t size, int pitch, There&& there,
                                              Keep&& keep) {
  constexpr int N = 16 / int(sizeof(W)), kTogether = std::min(Held, 4 / K);
  static_assert(Held % kTogether == 0 && K <= 4);
  using Words = StayingWords<W, kTogether, true>;
#pragma unroll(Unrolled ? Held : 1)
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

// A block a row that begins anywhere, and all of whose inputs lie as it does: whole packs, and the elements before and behind, one a
// thread. Parameters are shifted on their way.
template <class F, class W, class Y, class Shape>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_odd_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X)), kHeld = Shape::held;
  using OfRow = ForwardRow<F, W, Y, N, Lying::packs, int>;
  using OfSingle = ForwardRow<F, W, Y, 1, Lying::packs, int>;
  using Words = StayingWords<W, kHeld, true>;
  static_assert(Shape::threads == 0 && sizeof(W) == sizeof(X) && !kSpans<F>);
  __shared__ __align__(16) float slots[2][OfRow::kStatistics * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  using Tile = RowTile<Shape, N>;
  const Place place(p.sections, 1);
  const int cols = int(p.cols), thread = threadIdx.x, pitch = int(blockDim.x) * N;
  const OfSingle single_row(p, place, place.first);
  const int head = elements_before_packs<N>(single_row.written(), cols);
  const int whole = (cols - head) / N * N;
  const OfRow row(p, place, place.first, head, whole);
  Pack<X, N> in[kHeld][F::kIn];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) row.load(Tile::column(i), in[i]);
  Single<F, W, Y> single;
  single.column = thread < N ? (thread < head ? thread : cols)
                             : (thread < 2 * N ? min(cols, head + whole + thread - N) : cols);
  single.row = &single_row;
  single_row.load(single.column, single.in);
  const int64_t begin = single_row.before + head + Tile::column(0);
  auto words = [&]<size_t... K>(std::index_sequence<K...>) {
    return Several<Words, F::kParams>{
        {Words(p.param[K] + begin, p.param[K] + p.sections * p.cols, 0, pitch)...}};
  }(std::make_index_sequence<F::kParams>{});
  float middle[kHeld], mean, rstd;
  int turn = 0;
  row.statistics(
      in, [](int i) { return Tile::column(i); }, [&](auto& sums) { reduce_row<Sum, 0>(sums, slots[turn++]); },
      single, middle, mean, rstd);
  if (thread == 0) row.save_statistics(mean, rstd);
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
#pragma unroll
    for (int k = 0; k < F::kParams; ++k)
      words.of[k].load(i, p.param[k] != nullptr && row.lie.has(Tile::column(i)));
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!row.lie.has(Tile::column(i))) continue;
    Pack<W, N> w[F::kParams];
#pragma unroll
    for (int k = 0; k < F::kParams; ++k)
      w[k] = p.param[k] ? words.of[k].pack(i, true) : filled<W, N>(p.absent[k]);
    if constexpr (kHeld > (F::kCentred ? 4 : 2)) row.renew(in[i]);
    row.write(Tile::column(i), in[i], w, middle[i], rstd);
  }
  if (single.is()) {
    load_single_params(p, single_row.before, single);
    single_row.write(single.column, single.in, single.param, mean, rstd);
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
  const int head = elements_before_packs<N>(single_row.written(), cols);
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
  single.column = single_column<N>(team, head, whole, cols);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) load(i, row.live);
  single_row.load(single.column, single.next);
  if (single.column < cols) load_single_params(p, single_row.before, single);
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

}  // namespace norm_detail
}  // namespace tigon::cuda
