// Backward of the norm family for rows that begin anywhere, for rows too long for a block, and for a first pass that is a row ahead of
// the second.
#pragma once

#include "tigon/base/cuda/norm_backward_looped.cuh"
#include "tigon/base/cuda/norm_forward.cuh"
#include "tigon/base/cuda/staged_rows.cuh"

namespace tigon::cuda {
namespace norm_detail {

// Gradients wider than x take more registers.
template <class X, class Y, class Shape>
constexpr int backward_blocks = sizeof(Y) > sizeof(X) && Shape::min_blocks > 1 ? Shape::min_blocks * 3 / 4
                                                                               : Shape::min_blocks;
// Column sums that a block adds up.
template <class Shape>
constexpr int backward_parts = Shape::threads > 0 && Shape::threads < 32 ? Shape::block / 32 : Shape::rows;

// Nothing is ever added to the weight.
template <class B>
constexpr bool kPlainWeight = requires { typename B::PlainWeight; };

// Of a row.
struct Statistics {
  float rstd = 0.0f, mean = 0.0f;
};
// What a thread holds of rows beside whole packs: an element before or behind them, its column sums, or nothing.
template <class B>
struct BackwardElement {
  float in[B::kIn] = {}, dy = 0.0f;
};
template <class B, class Y>
struct BackwardSingle {
  int column = 0;  // of the section
  bool is = false;
  float weight = 0.0f, sums[B::kSums] = {};
  BackwardElement<B> row;
  typename B::Element next[B::kIn] = {};  // of the next row; nothing waits for it
  Y next_dy = {};

  __device__ __forceinline__ void take() {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) row.in[k] = widen(next[k]);
    row.dy = widen(next_dy);
  }
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
  if constexpr (Shape::rows == 1 && Singles) {
    // Packs lie across the words of `out`: in order first, so that a warp stores a line of it.
    const int block = blockDim.x * N;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < B::kSums; ++k)
#pragma unroll
      for (int i = 0; i < Shape::held; ++i)
        store(shared + (k * Shape::held + i) * block + threadIdx.x * N,
              *reinterpret_cast<Pack<float, N>*>(sums[k][i]));
    __syncthreads();
#pragma unroll
    for (int k = 0; k < B::kSums; ++k) {
#pragma unroll 1
      for (int i = 0; i < Shape::held; ++i) {
        const int first = column(i) - int(threadIdx.x) * N, end = min(block, whole - first);
        for (int c = threadIdx.x; c < end; c += blockDim.x)
          out[k * out_pitch + head + first + c] = shared[(k * Shape::held + i) * block + c];
      }
      if (single.is) out[k * out_pitch + single.column] = single.sums[k];
    }
  } else if constexpr (Shape::rows == 1) {
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

// Rows that begin anywhere: whole packs, where what is written has them, and the elements before and behind, one a thread. A worker's
// rows are written as its first one is, so a thread keeps its columns.
template <class B, class W, class Y, int N, class Shape, Lying How, bool Clustered>
__global__
__launch_bounds__(Shape::block, backward_blocks<typename B::Element, Y, Shape>) void backward_staying_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kHeld = Shape::held, kPair = N % 2 == 0 ? 2 : 1, kMeans = B::kCentred ? 2 : 1,
                kLead = Shape::lead;
  constexpr bool kStaged = Shape::stages > 0, kSingles = How != Lying::packs;
  static_assert(kStaged || !kSingles);
  using Sums = SumsOf<kMeans>;
  __shared__ Exchange<Sums, kLead == 0 ? 2 : 4> exchange;
  extern __shared__ __align__(16) unsigned char shared[];  // weights and stages, then the column sums
  if (p.partials) let_next_kernel_start();                 // the sum over the blocks
  Team<Shape, Clustered, false, Sums, kLead == 0 ? 2 : 4> team(exchange);
  const Place place(p.sections, Shape::rows, blockIdx.x / unsigned(team.blocks));
  const int cols = int(p.cols), block = Shape::threads ? Shape::block : blockDim.x;
  const int64_t before = int64_t(place.section) * cols;
  const int group = Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads;
  const float offset = p.weight ? p.f.offset : 0.0f, inverse = 1.0f / float(cols);
  auto column = [&](int i) { return team.pack(i) * N; };
  // What a thread leaves in shared memory it alone reads: no barrier.
  auto weight_slot = [&](int i) { return reinterpret_cast<Pack<W, N>*>(shared) + i * block + threadIdx.x; };
  auto weights = [&](int i, float (&w)[N]) {
    Pack<W, N> pack = *weight_slot(i);
#pragma unroll
    for (int j = 0; j < N; ++j) w[j] = kPlainWeight<B> ? pack[j] : offset + pack[j];
  };
  bool wants_rows = false;
#pragma unroll
  for (int k = 0; k < B::kOut; ++k) wants_rows = wants_rows || p.out[k] != nullptr;

  const int64_t worker = place.first + group;
  const RowRun run = kSingles && Shape::rows == 1
                         ? run_of(p.shares, p.rows, worker)
                         : RowRun{worker, p.rows, int(gridDim.x / unsigned(p.sections)) * Shape::rows};
  int head = 0;
  if constexpr (kSingles) {
    const X* written =
        p.out[0] ? p.out[0] + run.first * p.out_stride[0] : p.in[0] + run.first * p.in_stride[0];
    head = elements_before_packs<N>(written + before, cols);
  }
  const int whole = kSingles ? (cols - head) / N * N : cols;
  const int64_t begin = before + head;
  auto in_row = [&](int k, int64_t row) { return p.in[k] + row * p.in_stride[k] + begin; };
  auto dy_row = [&](int64_t row) { return p.dy + row * p.dy_stride + begin; };
  auto out_row = [&](int k, int64_t row) { return p.out[k] + row * p.out_stride[k] + begin; };
  auto has = [&](int k, int64_t row) { return row < run.end && (k == 0 || p.in[k]); };

  auto there = [&](int i) { return column(i) < whole; };
  if constexpr (kSingles && sizeof(W) == sizeof(X)) {
    shifted_packs<kHeld>({p.weight}, {1.0f}, begin + column(0), p.sections * p.cols,
                         team.threads * team.blocks * N, there,
                         [&](int i, int, const Pack<W, N>& w) { *weight_slot(i) = w; });
  } else {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      Pack<W, N> w = filled<W, N>(1.0f);
      if (p.weight && there(i)) {
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
  }
  BackwardSingle<B, Y> single;
  auto load_single = [&](int64_t row) {
    if (!single.is) return;
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      if (has(k, row)) single.next[k] = in_row(k, row)[single.column - head];
    if (row < run.end) single.next_dy = dy_row(row)[single.column - head];
  };
  if constexpr (kSingles) {
    single.column = team.thread < N ? team.thread : head + whole + team.thread - N;
    single.is = team.rank == 0 && (team.thread < N ? team.thread < head : single.column < cols);
    single.weight = single.is && p.weight ? offset + widen(p.weight[before + single.column]) : 1.0f;
    load_single(run.first);
  }

  Pack<X, N> in[kHeld][B::kIn];
  Pack<Y, N> dy[kHeld];
  using StagedIn = StagedRows<X, N, Shape, How == Lying::apart>;
  using StagedDy = StagedRows<Y, N, Shape, How == Lying::apart>;
  const int of_row = B::kIn * StagedIn::words(team.threads) + StagedDy::words(team.threads);
  uint4* words = reinterpret_cast<uint4*>(weight_slot(kHeld) - threadIdx.x) + group * of_row;
  auto rows_of = [&](int k) {
    return StagedIn(in_row(k, run.first), run.step * p.in_stride[k], team.pack(0), team.threads * team.blocks,
                    k == 0 || p.in[k] ? whole / N : 0, p.end[k], words + k * StagedIn::words(team.threads),
                    Shape::rows * of_row);
  };
  auto staged_in = [&]<size_t... K>(std::index_sequence<K...>) {
    return Several<StagedIn, B::kIn>{{rows_of(int(K))...}};
  }(std::make_index_sequence<B::kIn>{});
  StagedDy staged_dy(dy_row(run.first), run.step * p.dy_stride, team.pack(0), team.threads * team.blocks,
                     whole / N, p.dy_end, words + B::kIn * StagedIn::words(team.threads),
                     Shape::rows * of_row);
  auto start = [&](int stage, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) staged_in.of[k].copy(stage, row < run.end);
    staged_dy.copy(stage, row < run.end);
    copies_commit();
  };
  auto load = [&](int i, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      in[i][k] = load_where<X, N>(there(i) && has(k, row), in_row(k, row) + column(i));
    dy[i] = load_where<Y, N>(there(i) && row < run.end, dy_row(row) + column(i));
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

  auto statistics_of = [&](int64_t row) {
    Statistics s;
    if (row < run.end) {
      s.rstd = p.rstd[row * p.sections + place.section];
      if constexpr (B::kCentred) s.mean = p.mean[row * p.sections + place.section];
    }
    return s;
  };
  auto normalised = [&](const Statistics& of, const float (&x)[B::kIn]) {
    float v = p.f.value(x);
    if constexpr (B::kCentred) v -= of.mean;
    return v * of.rstd;
  };
  float sums[B::kSums][kHeld][N] = {};
  // Once over a row: the means, and what is added to the column sums.
  auto first_pass = [&](int64_t row, const Statistics& of, int from, float (&means)[kMeans]) {
    // The means take in h and the gradient of h * weight, the column sums what `h` is rounded to.
    auto add_means = [&](float h, float d, float w) {
      means[0] = fma(d * w, h, means[0]);
      if constexpr (B::kCentred) means[1] = fma(d, w, means[1]);
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (kStaged && Shape::rows > 1 && row >= run.end) break;  // what is staged is another row's
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
            h[k] = normalised(of, x);
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
    if constexpr (kSingles) {
      if (single.is && row < run.end) {
        single.take();
        load_single(row + run.step);
        float h = normalised(of, single.row.in), d = p.f.upstream(single.row.dy, single.row.in);
        add_means(h, d, single.weight);
        if (p.f.round_h) h = round_to<X>(h);
        single.sums[0] = fma(d, h, single.sums[0]);
        if constexpr (B::kSums > 1) single.sums[1] += d;
      }
    }
  };
  // And again: the gradients. `alone`: the row's single element.
  auto second_pass = [&](int64_t row, const Statistics& of, int from, float (&means)[kMeans],
                         const BackwardElement<B>& alone) {
#pragma unroll
    for (int k = 0; k < kMeans; ++k) means[k] *= inverse;
    // g as it went into the means.
    auto results = [&](const float (&x)[B::kIn], float dy, float w, float (&out)[B::kOut]) {
      float h = normalised(of, x), g = __fmul_rn(p.f.upstream(dy, x), w);
      if constexpr (B::kCentred) g -= means[1];
      p.f.results(norm_gradient(g, h, means[0], of.rstd), dy, h, w, x, out);
    };
    __syncwarp();  // weights are read again, not kept
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (row >= run.end || !there(i)) continue;
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
      if (single.is && row < run.end) {
        float out[B::kOut];
        results(alone.in, alone.dy, single.weight, out);
#pragma unroll
        for (int k = 0; k < B::kOut; ++k)
          if (p.out[k]) out_row(k, row)[single.column - head] = narrow<X>(out[k]);
      }
    }
  };

  // A turn: the first pass over a row, and the second over the same one or, with a lead, over the one before it: what its threads
  // tell each other has a turn to arrive.
  int from = 0, to = Shape::stages - 1 - kLead;
  auto after = [](int stage) { return stage + 1 == Shape::stages ? 0 : stage + 1; };
  Statistics now, next;
  if constexpr (kStaged) {
#pragma unroll
    for (int s = 0; s < Shape::stages - 1 - kLead; ++s) start(s, run.first + s * run.step);
    next = statistics_of(run.first);
  }
  team.meet();
  int64_t row = run.first - kLead * run.step;
#pragma unroll 1
  for (; row - group < run.end; row += run.step) {
    const int64_t ahead = row + kLead * run.step;
    const Statistics last = now;
    const BackwardElement<B> last_single = single.row;
    float means[kMeans] = {};
    if constexpr (!kStaged) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) load(i, ahead);
      now = statistics_of(ahead);
    } else {
      now = next;
      next = statistics_of(ahead + run.step);
      // The next turn's words take the place of the last one's. Apart, other threads have read those until they came here.
      auto start_next = [&] { start(to, row + (Shape::stages - 1) * run.step); };
      if constexpr (How != Lying::apart) start_next();
      copies_wait<Shape::stages - (How != Lying::apart ? 1 : 2) - kLead>();
      if constexpr (How == Lying::apart) {
        sync_row<Shape>();
        start_next();
      }
      to = after(to);
    }
    if constexpr (kLead == 0) {
      first_pass(row, now, from, means);
      if (wants_rows) {
        team.merge(means);
        second_pass(row, now, from, means, single.row);
      }
    } else {
      const bool first = row < run.first, goes_on = ahead < run.end;
      if (goes_on) {
        first_pass(ahead, now, first ? from : after(from), means);
        if (wants_rows) team.tell(means);
      }
      if (first) continue;
      if (wants_rows) {
        team.hear(team.turn - 1 - int(goes_on), means);
        second_pass(row, last, from, means, last_single);
      }
    }
    from = after(from);
  }
  if constexpr (kStaged) copies_wait<0>();
  if constexpr (Clustered) cluster_arrive();
  team.meet();
  if (p.partials == nullptr) return;
  const int64_t pitch = int64_t(p.sections) * cols;
  float* out = p.partials + place.first / Shape::rows * B::kSums * pitch + before;
  add_up<B, Shape, N, kSingles>(sums, column, head, whole, cols, single, reinterpret_cast<float*>(shared),
                                out, pitch);
}

}  // namespace norm_detail
}  // namespace tigon::cuda
