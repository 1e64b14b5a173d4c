// Forward of the norm family for rows too long for a block that lie alike: clusters that stay, whose rows pass through shared memory.
// What they do to a row: norm_row.cuh.
#pragma once

#include "tigon/base/cuda/norm_forward_staying.cuh"
#include "tigon/base/cuda/staged_rows.cuh"

namespace tigon::cuda {
namespace norm_detail {

// A turn is a pass over each of some rows: the first over one, the last, which writes, over the one that is as many turns behind as there
// are statistics to be told and heard; between them, where the mean is subtracted, the one that takes in the differences. So nothing waits
// for what threads tell each other, and no register for a row. A thread reads what it copied itself: one barrier a turn, for the sums.
// (x and residual in registers took a third longer: registers that find no room lie in the first-level cache, which every wait for other
// blocks empties.)
template <class F, class W, class Y, class Shape>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_staged_kernel(
    const __grid_constant__ NormForward<F, W, Y> p) {
  using X = typename F::Element;
  constexpr int N = 16 / int(sizeof(X)), kHeld = Shape::held, kParams = F::kParams;
  using OfRow = ForwardRow<F, W, Y, N, Lying::packs, unsigned>;
  using OfSingle = ForwardRow<F, W, Y, 1, Lying::packs, int>;
  constexpr int kStatistics = OfRow::kStatistics;
  constexpr int kDepth = F::kCentred ? 2 : 1, kAhead = Shape::stages - 1 - kDepth;
  constexpr int kTurns = 4, kSums = kStatistics + F::kCentred;
  static_assert(kAhead > 0 && Shape::rows == 1 && kOneType<F, W, Y>);
  using Sums = SumsOf<kSums>;
  using Rows = StagedRows<X, N, Shape, false>;
  __shared__ Exchange<Sums, kTurns> exchange;
  extern __shared__ __align__(16) unsigned char shared[];
  Team<Shape, true, false, Sums, kTurns> team(exchange);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Place place(p.sections, 1, blockIdx.x / unsigned(team.blocks));
  const int cols = int(p.cols), apart = team.threads * team.blocks;
  const RowRun run = run_of(p.shares, p.rows, place.first);
  const int count = run.count();
  OfSingle single_row(p, place, run.first);
  const int head = elements_before_packs<N>(single_row.written(), cols);
  const int whole = (cols - head) / N * N;
  OfRow row(p, place, run.first, head, whole);
  auto column = [&](int i) { return team.pack(i) * N; };
  auto there = [&](int i) { return column(i) < whole; };

  uint4* words = reinterpret_cast<uint4*>(shared);
  auto rows_of = [&](int k) {
    return Rows(row.in(k), run.step * p.in_stride[k], team.pack(0), apart, whole / N, p.end[k],
                words + k * Rows::words(team.threads), F::kIn * Rows::words(team.threads));
  };
  auto rows = [&]<size_t... K>(std::index_sequence<K...>) {
    return Several<Rows, F::kIn>{{rows_of(int(K))...}};
  }(std::make_index_sequence<F::kIn>{});
  // What a thread has beside whole packs: an element before or behind them, or none.
  Single<F, W, Y> single;
  single.column = single_column<N>(team, head, whole, cols);
  single.row = &single_row;
  OfSingle single_next = single_row, single_last = single_row;
  typename OfSingle::Inputs single_of[kDepth + 1];  // of this turn's rows
  auto start = [&](int stage, int turn) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) rows.of[k].copy(stage, turn < count);
    copies_commit();
  };
#pragma unroll
  for (int s = 0; s < kAhead; ++s) start(s, s);
  single_next.live = count > 0;
  single_next.load(single.column, single.next);

  Pack<W, N> params[kHeld][kParams];
  const int64_t begin = single_row.before + head + column(0);
  if constexpr (!kSpans<F>) {
    shifted_packs<kHeld, true>(p.param, p.absent, begin, p.sections * p.cols, apart * N, there,
                               [&](int i, int k, const Pack<W, N>& w) { params[i][k] = w; });
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int k = 0; k < kParams; ++k) {
        if (!there(i)) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) params[i][k].v[j] = param_of(p, k, begin + i * apart * N + j);
      }
  }
  if (single.column < cols) load_single_params(p, single_row.before, single);

  auto fetch = [&](int stage, int i, auto& in) {
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) in[k] = rows.of[k].pack(stage, i);
  };
  using Inputs = typename OfRow::Inputs;
  OfRow first_row = row;
  // The sum of the values, or the one statistic of what is not centred.
  auto first_pass = [&](int stage) {
    float of[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      Inputs in;
      fetch(stage, i, in);
      if constexpr (F::kKeeps) {
        first_row.merge(in);
        rows.of[0].put(stage, i, in[0]);
        store_where(there(i), first_row.kept() + column(i), in[0]);
      }
      if constexpr (F::kCentred) {
        of[i] = first_row.sum_of(in);
      } else {
        float of_pack[kStatistics];
        first_row.statistics_of(column(i), in, 0.0f, of_pack);
        of[i] = of_pack[0];
      }
    }
    single.keep();
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) single_of[0][k] = single.in[k];
    if constexpr (F::kCentred) return single.sum() + reduce_pairs<Sum>(of);
    float s[kStatistics] = {};
    single.add_to_statistics(0.0f, s);
    return s[0] + reduce_pairs<Sum>(of);
  };
  // The statistics about the mean.
  auto middle_pass = [&](int stage, float mean, float (&sums)[kStatistics]) {
    float of[kStatistics][kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      Inputs in;
      fetch(stage, i, in);
      float of_pack[kStatistics];
      row.statistics_of(column(i), in, there(i) ? mean : 0.0f, of_pack);
#pragma unroll
      for (int k = 0; k < kStatistics; ++k) of[k][i] = of_pack[k];
    }
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) sums[k] = 0.0f;
    single_row.add_to_statistics(single.column, single_of[1], single.is() ? mean : 0.0f, sums);
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) sums[k] += reduce_pairs<Sum>(of[k]);
  };
  auto last_pass = [&](int stage, float mean, float rstd) {
    if (team.thread + team.rank == 0) row.save_statistics(mean, rstd);
    if (single.is()) single_last.write(single.column, single_of[kDepth], single.param, mean, rstd);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      Inputs in;
      fetch(stage, i, in);
      row.write(column(i), in, params[i], mean, rstd);
    }
  };
  auto after = [](int stage) { return stage + 1 == Shape::stages ? 0 : stage + 1; };
  auto before = [](int stage, int by) { return stage < by ? stage + Shape::stages - by : stage - by; };

  int stage = 0, to = kAhead;
  float mean = 0.0f;  // of the row of the middle pass, then of the last one
  team.meet();
#pragma unroll 1
  for (int t = 0; t < count + kDepth; ++t) {
    start(to, t + kAhead);
    to = after(to);
    copies_wait<kAhead>();
#pragma unroll
    for (int d = kDepth; d > 0; --d)
#pragma unroll
      for (int k = 0; k < F::kIn; ++k) single_of[d][k] = single_of[d - 1][k];
#pragma unroll
    for (int k = 0; k < F::kIn; ++k) single.in[k] = single.next[k];
    single_next.advance(run.step, t + 1 < count);
    single_next.load(single.column, single.next);
    float sums[kSums] = {}, of_row[kStatistics] = {}, last_mean = mean;
    if constexpr (F::kCentred) {
      if (t > 0) {  // of the last turn: the sum of one row, the statistics of the one before it
        float heard[kSums], of_middle[kStatistics];
        team.hear(team.turn - 1, heard);
        mean = row.mean_of(heard[0]);
        middle_pass(before(stage, 1), mean, of_middle);
#pragma unroll
        for (int k = 0; k < kStatistics; ++k) of_row[k] = heard[k + 1], sums[k + 1] = of_middle[k];
      }
      if (t < count) sums[0] = first_pass(stage);
      if (t + 1 < count + kDepth) team.tell(sums);
    } else {
      if (t < count) {
        sums[0] = first_pass(stage);
        team.tell(sums);
      }
      if (t > 0) team.hear(team.turn - 1 - int(t < count), of_row);
    }
    if constexpr (F::kKeeps) first_row.advance(run.step, true), single_row.advance(run.step, true);
    if (t >= kDepth) {
      const float rstd = row.finish_statistics(of_row, last_mean);
      last_pass(before(stage, kDepth), last_mean, rstd);
      row.advance(run.step, true);
      single_last.advance(run.step, true);
    }
    stage = after(stage);
  }
  copies_wait<0>();
  cluster_arrive();
  team.meet();
}

}  // namespace norm_detail
}  // namespace tigon::cuda
