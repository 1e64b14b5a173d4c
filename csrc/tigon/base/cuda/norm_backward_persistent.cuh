// Backward of the norm family for rows of any alignment, for rows too long for a CTA, and with
// lookahead: the first pass runs a row ahead of the second.
#pragma once

#include "tigon/base/cuda/cp_async_pipeline.cuh"
#include "tigon/base/cuda/norm_backward_looped.cuh"
#include "tigon/base/cuda/norm_forward.cuh"

namespace tigon::cuda {
namespace norm_detail {

// Gradients wider than x take more registers.
template <class X, class Y, class Shape>
constexpr int backward_blocks = sizeof(Y) > sizeof(X) && Shape::min_blocks > 1 ? Shape::min_blocks * 3 / 4
                                                                               : Shape::min_blocks;
// Rows of column sums in shared memory that a CTA adds up.
template <class Shape>
constexpr int backward_parts =
    Shape::threads_per_row > 0 && Shape::threads_per_row < 32 ? Shape::max_threads / 32
                                                              : Shape::rows_per_block;

// The weight has no offset.
template <class B>
constexpr bool kPlainWeight = std::is_base_of_v<NoNormScalars, B>;

// The statistics of a row.
struct Statistics {
  float rstd = 0.0f, mean = 0.0f;
};
// The edge element of a thread: one column before or after the full vectors, its inputs and column
// sums; or none.
template <class B>
struct EdgeInputs {
  float in[B::kIn] = {}, dy = 0.0f;
};
template <class B, class Y>
struct BackwardEdge {
  // Column of the group.
  int column = 0;
  bool valid = false;
  float weight = 0.0f, sums[B::kSums] = {};
  EdgeInputs<B> row;
  // Of the next row, loaded one iteration ahead.
  typename B::Element next[B::kIn] = {};
  Y next_dy = {};

  __device__ __forceinline__ void take_next() {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) row.in[k] = widen(next[k]);
    row.dy = widen(next_dy);
  }
};

// Adds the column sums of the CTA's threads and writes them to the partials.
template <class B, class Shape, int N, bool HasEdges, class Column, class EdgeElement>
__device__ __forceinline__ void reduce_column_sums(float (&sums)[B::kSums][Shape::vecs_per_thread][N],
                                                   Column&& column, int head, int whole, int cols,
                                                   const EdgeElement& edge, float* shared, float* out,
                                                   int64_t out_pitch) {
  constexpr int kParts = backward_parts<Shape>;
  auto store_sums = [&](float* to, int k) {
#pragma unroll
    for (int i = 0; i < Shape::vecs_per_thread; ++i) {
      if (column(i) >= whole) continue;
      if constexpr (HasEdges) {
#pragma unroll
        for (int j = 0; j < N; ++j) to[head + column(i) + j] = sums[k][i][j];
      } else {
        store(to + column(i), *reinterpret_cast<Vec<float, N>*>(sums[k][i]));
      }
    }
    if (HasEdges && edge.valid) to[edge.column] = edge.sums[k];
  };
  if constexpr (Shape::rows_per_block == 1 && HasEdges) {
    // Vectors are not aligned in `out`: they are ordered in shared memory first, so that a warp
    // stores consecutive elements.
    const int block = blockDim.x * N;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < B::kSums; ++k)
#pragma unroll
      for (int i = 0; i < Shape::vecs_per_thread; ++i)
        store(shared + (k * Shape::vecs_per_thread + i) * block + threadIdx.x * N,
              *reinterpret_cast<Vec<float, N>*>(sums[k][i]));
    __syncthreads();
#pragma unroll
    for (int k = 0; k < B::kSums; ++k) {
#pragma unroll 1
      for (int i = 0; i < Shape::vecs_per_thread; ++i) {
        const int first = column(i) - int(threadIdx.x) * N, end = min(block, whole - first);
        for (int c = threadIdx.x; c < end; c += blockDim.x)
          out[k * out_pitch + head + first + c] = shared[(k * Shape::vecs_per_thread + i) * block + c];
      }
      if (edge.valid) out[k * out_pitch + edge.column] = edge.sums[k];
    }
  } else if constexpr (Shape::rows_per_block == 1) {
#pragma unroll
    for (int k = 0; k < B::kSums; ++k) store_sums(out + k * out_pitch, k);
  } else {
    // Rows that share a warp are added by shuffles first.
    constexpr bool kRowsShareWarp = Shape::threads_per_row < 32;
    if constexpr (kRowsShareWarp) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k)
#pragma unroll
        for (int i = 0; i < Shape::vecs_per_thread; ++i)
#pragma unroll
          for (int j = 0; j < N; ++j)
#pragma unroll
            for (int m = Shape::threads_per_row; m < 32; m <<= 1)
              sums[k][i][j] += __shfl_xor_sync(0xffffffffu, sums[k][i][j], m);
    }
    const int part = kRowsShareWarp ? threadIdx.x / 32 : threadIdx.x / Shape::threads_per_row;
    __syncthreads();
    if (!kRowsShareWarp || threadIdx.x % 32 < Shape::threads_per_row) {
#pragma unroll
      for (int k = 0; k < B::kSums; ++k) store_sums(shared + (k * kParts + part) * cols, k);
    }
    __syncthreads();
    for (int k = 0; k < B::kSums; ++k)
      for (int c = threadIdx.x; c < cols; c += Shape::max_threads) {
        const float* mine = shared + k * kParts * cols + c;
        float total = mine[0];
        for (int g = 1; g < kParts; ++g) total += mine[g * cols];
        out[k * out_pitch + c] = total;
      }
  }
}

// Rows of any alignment: full vectors of the output, and the edge elements, at most one per thread.
// All rows of a worker have the same output offset, so that a thread keeps its columns.
template <class B, class W, class Y, int N, class Shape, RowAlignment kAlignment, bool kCluster>
__global__ __launch_bounds__(
    Shape::max_threads,
    backward_blocks<typename B::Element, Y,
                    Shape>) void backward_persistent_kernel(const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kVecsPerThread = Shape::vecs_per_thread, kPair = N % 2 == 0 ? 2 : 1,
                kMeans = B::kSubtractMean ? 2 : 1, kLookahead = Shape::lookahead;
  constexpr bool kPipelined = Shape::stages > 0, kHasEdges = kAlignment != RowAlignment::vectorized;
  static_assert(kPipelined || !kHasEdges);
  using Sums = SumArray<kMeans>;
  __shared__ ReduceStorage<Sums, kLookahead == 0 ? 2 : 4> storage;
  // Weights and pipeline stages, then the column sums.
  extern __shared__ __align__(16) unsigned char shared[];
  // The next kernel sums the partials.
  if (p.partials) griddepcontrol_launch_dependents();
  RowReducer<Shape, kCluster, false, Sums, kLookahead == 0 ? 2 : 4> reducer(storage);
  const BlockCoord coord(p.groups, Shape::rows_per_block, blockIdx.x / unsigned(reducer.blocks));
  const int cols = int(p.cols), block = Shape::threads_per_row ? Shape::max_threads : blockDim.x;
  const int64_t col_offset = int64_t(coord.group) * cols;
  const int row_in_block = Shape::rows_per_block == 1 ? 0 : threadIdx.x / Shape::threads_per_row;
  const float offset = p.weight ? p.f.offset : 0.0f, inv_cols = 1.0f / float(cols);
  auto column = [&](int i) { return reducer.vec_index(i) * N; };
  // Each thread reads only the weights it wrote itself, so no barrier is needed.
  auto weight_slot = [&](int i) { return reinterpret_cast<Vec<W, N>*>(shared) + i * block + threadIdx.x; };
  auto weights = [&](int i, float (&w)[N]) {
    Vec<W, N> vec = *weight_slot(i);
#pragma unroll
    for (int j = 0; j < N; ++j) w[j] = kPlainWeight<B> ? vec[j] : offset + vec[j];
  };
  bool wants_rows = false;
#pragma unroll
  for (int k = 0; k < B::kOut; ++k) wants_rows = wants_rows || p.out[k] != nullptr;

  const int64_t worker = coord.first + row_in_block;
  const RowRange range =
      kHasEdges && Shape::rows_per_block == 1
          ? row_range_of(p.row_schedule, p.rows, worker)
          : RowRange{worker, p.rows, int(gridDim.x / unsigned(p.groups)) * Shape::rows_per_block};
  int head = 0;
  if constexpr (kHasEdges) {
    const X* written =
        p.out[0] ? p.out[0] + range.first * p.out_stride[0] : p.in[0] + range.first * p.in_stride[0];
    head = elements_to_alignment<N>(written + col_offset, cols);
  }
  const int whole = kHasEdges ? (cols - head) / N * N : cols;
  const int64_t begin = col_offset + head;
  auto in_row = [&](int k, int64_t row) { return p.in[k] + row * p.in_stride[k] + begin; };
  auto dy_row = [&](int64_t row) { return p.dy + row * p.dy_stride + begin; };
  auto out_row = [&](int k, int64_t row) { return p.out[k] + row * p.out_stride[k] + begin; };
  auto has = [&](int k, int64_t row) { return row < range.end && (k == 0 || p.in[k]); };

  auto in_bounds = [&](int i) { return column(i) < whole; };
  if constexpr (kHasEdges && sizeof(W) == sizeof(X)) {
    load_shifted_vecs<kVecsPerThread>({p.weight}, {1.0f}, begin + column(0), p.groups * p.cols,
                                      reducer.threads * reducer.blocks * N, in_bounds,
                                      [&](int i, int, const Vec<W, N>& w) { *weight_slot(i) = w; });
  } else {
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      Vec<W, N> w = fill_vec<W, N>(1.0f);
      if (p.weight && in_bounds(i)) {
        const W* from = p.weight + begin + column(i);
        if constexpr (!kHasEdges) {
          w = cuda::load<W, N>(from);
        } else {
#pragma unroll
          for (int j = 0; j < N; ++j) w.v[j] = from[j];
        }
      }
      *weight_slot(i) = w;
    }
  }
  BackwardEdge<B, Y> edge;
  auto load_edge = [&](int64_t row) {
    if (!edge.valid) return;
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      if (has(k, row)) edge.next[k] = in_row(k, row)[edge.column - head];
    if (row < range.end) edge.next_dy = dy_row(row)[edge.column - head];
  };
  if constexpr (kHasEdges) {
    edge.column = reducer.thread < N ? reducer.thread : head + whole + reducer.thread - N;
    edge.valid = reducer.rank == 0 && (reducer.thread < N ? reducer.thread < head : edge.column < cols);
    edge.weight = edge.valid && p.weight ? offset + widen(p.weight[col_offset + edge.column]) : 1.0f;
    load_edge(range.first);
  }

  Vec<X, N> in[kVecsPerThread][B::kIn];
  Vec<Y, N> dy[kVecsPerThread];
  using InPipeline = CpAsyncPipeline<X, N, Shape, kAlignment == RowAlignment::mixed_offset>;
  using DyPipeline = CpAsyncPipeline<Y, N, Shape, kAlignment == RowAlignment::mixed_offset>;
  const int of_row = B::kIn * InPipeline::words(reducer.threads) + DyPipeline::words(reducer.threads);
  uint4* words = reinterpret_cast<uint4*>(weight_slot(kVecsPerThread) - threadIdx.x) + row_in_block * of_row;
  auto pipeline_of = [&](int k) {
    return InPipeline(in_row(k, range.first), range.step * p.in_stride[k], reducer.vec_index(0),
                      reducer.threads * reducer.blocks, k == 0 || p.in[k] ? whole / N : 0, p.end[k],
                      words + k * InPipeline::words(reducer.threads), Shape::rows_per_block * of_row);
  };
  auto in_pipeline = [&]<size_t... K>(std::index_sequence<K...>) {
    return Array<InPipeline, B::kIn>{{pipeline_of(int(K))...}};
  }(std::make_index_sequence<B::kIn>{});
  DyPipeline dy_pipeline(dy_row(range.first), range.step * p.dy_stride, reducer.vec_index(0),
                         reducer.threads * reducer.blocks, whole / N, p.dy_end,
                         words + B::kIn * InPipeline::words(reducer.threads), Shape::rows_per_block * of_row);
  auto start = [&](int stage, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) in_pipeline.data[k].copy(stage, row < range.end);
    dy_pipeline.copy(stage, row < range.end);
    cp_async_commit_group();
  };
  auto load = [&](int i, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      in[i][k] = load_predicated<X, N>(in_bounds(i) && has(k, row), in_row(k, row) + column(i));
    dy[i] = load_predicated<Y, N>(in_bounds(i) && row < range.end, dy_row(row) + column(i));
  };
  // Called before a vector is used, in both passes.
  auto fetch = [&](int i, int read_stage) {
    if constexpr (kPipelined) {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) in[i][k] = in_pipeline.data[k].vec(read_stage, i);
      dy[i] = dy_pipeline.vec(read_stage, i);
    } else {
#pragma unroll
      for (int k = 0; k < B::kIn; ++k) in[i][k] = hide_from_compiler(in[i][k], p.opaque_zero);
      dy[i] = hide_from_compiler(dy[i], p.opaque_zero);
    }
  };

  auto statistics_of = [&](int64_t row) {
    Statistics s;
    if (row < range.end) {
      s.rstd = p.rstd[row * p.groups + coord.group];
      if constexpr (B::kSubtractMean) s.mean = p.mean[row * p.groups + coord.group];
    }
    return s;
  };
  auto normalized = [&](const Statistics& of, const float (&x)[B::kIn]) {
    float v = p.f.value(x);
    if constexpr (B::kSubtractMean) v -= of.mean;
    return v * of.rstd;
  };
  float sums[B::kSums][kVecsPerThread][N] = {};
  // The means of a row, and its contribution to the column sums.
  auto first_pass = [&](int64_t row, const Statistics& of, int read_stage, float (&means)[kMeans]) {
    // The means use the unrounded h, the column sums h as it was rounded in the forward.
    auto add_means = [&](float h, float d, float w) {
      means[0] = fma(d * w, h, means[0]);
      if constexpr (B::kSubtractMean) means[1] = fma(d, w, means[1]);
    };
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (kPipelined && Shape::rows_per_block > 1 && row >= range.end)
        // The stage holds another row.
        break;
      if constexpr (kPipelined) fetch(i, read_stage);
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
            h[k] = normalized(of, x);
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
    if constexpr (kHasEdges) {
      if (edge.valid && row < range.end) {
        edge.take_next();
        load_edge(row + range.step);
        float h = normalized(of, edge.row.in), d = p.f.upstream(edge.row.dy, edge.row.in);
        add_means(h, d, edge.weight);
        if (p.f.round_h) h = round_to<X>(h);
        edge.sums[0] = fma(d, h, edge.sums[0]);
        if constexpr (B::kSums > 1) edge.sums[1] += d;
      }
    }
  };
  // The gradients of a row. `edge_inputs`: the row's edge element.
  auto second_pass = [&](int64_t row, const Statistics& of, int read_stage, float (&means)[kMeans],
                         const EdgeInputs<B>& edge_inputs) {
#pragma unroll
    for (int k = 0; k < kMeans; ++k) means[k] *= inv_cols;
    // g is formed exactly as in the means.
    auto results = [&](const float (&x)[B::kIn], float dy, float w, float (&out)[B::kOut]) {
      float h = normalized(of, x), g = __fmul_rn(p.f.upstream(dy, x), w);
      if constexpr (B::kSubtractMean) g -= means[1];
      p.f.results(norm_gradient(g, h, means[0], of.rstd), dy, h, w, x, out);
    };
    // The compiler reloads the weights instead of keeping them in registers.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (row >= range.end || !in_bounds(i)) continue;
      fetch(i, read_stage);
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
        Vec<X, N> out;
        out.set(result[k]);
        if constexpr (sizeof(X) * N % 16 == 0)
          store_v4(out_row(k, row) + column(i), out);
        else
          store(out_row(k, row) + column(i), out);
      }
    }
    if constexpr (kHasEdges) {
      if (edge.valid && row < range.end) {
        float out[B::kOut];
        results(edge_inputs.in, edge_inputs.dy, edge.weight, out);
#pragma unroll
        for (int k = 0; k < B::kOut; ++k)
          if (p.out[k]) out_row(k, row)[edge.column - head] = narrow<X>(out[k]);
      }
    }
  };

  // An iteration runs the first pass over a row, and the second pass over the same row or, with
  // lookahead, over the row before it, so that a reduction has an iteration to complete.
  int read_stage = 0, write_stage = Shape::stages - 1 - kLookahead;
  auto next_stage = [](int stage) { return stage + 1 == Shape::stages ? 0 : stage + 1; };
  Statistics current, next;
  if constexpr (kPipelined) {
#pragma unroll
    for (int s = 0; s < Shape::stages - 1 - kLookahead; ++s) start(s, range.first + s * range.step);
    next = statistics_of(range.first);
  }
  reducer.wait_for_cluster();
  int64_t row = range.first - kLookahead * range.step;
#pragma unroll 1
  for (; row - row_in_block < range.end; row += range.step) {
    const int64_t ahead_row = row + kLookahead * range.step;
    const Statistics previous = current;
    const EdgeInputs<B> previous_edge = edge.row;
    float means[kMeans] = {};
    if constexpr (!kPipelined) {
#pragma unroll
      for (int i = 0; i < kVecsPerThread; ++i) load(i, ahead_row);
      current = statistics_of(ahead_row);
    } else {
      current = next;
      next = statistics_of(ahead_row + range.step);
      // The stage of the previous iteration is overwritten. With mixed offsets other threads have
      // read it too, so the copies start after a barrier.
      auto start_next = [&] { start(write_stage, row + (Shape::stages - 1) * range.step); };
      if constexpr (kAlignment != RowAlignment::mixed_offset) start_next();
      cp_async_wait_group<Shape::stages - (kAlignment != RowAlignment::mixed_offset ? 1 : 2) - kLookahead>();
      if constexpr (kAlignment == RowAlignment::mixed_offset) {
        sync_row<Shape>();
        start_next();
      }
      write_stage = next_stage(write_stage);
    }
    if constexpr (kLookahead == 0) {
      first_pass(row, current, read_stage, means);
      if (wants_rows) {
        reducer.all_reduce(means);
        second_pass(row, current, read_stage, means, edge.row);
      }
    } else {
      const bool first = row < range.first, has_next = ahead_row < range.end;
      if (has_next) {
        first_pass(ahead_row, current, first ? read_stage : next_stage(read_stage), means);
        if (wants_rows) reducer.publish(means);
      }
      if (first) continue;
      if (wants_rows) {
        reducer.collect(reducer.phase - 1 - int(has_next), means);
        second_pass(row, previous, read_stage, means, previous_edge);
      }
    }
    read_stage = next_stage(read_stage);
  }
  if constexpr (kPipelined) cp_async_wait_group<0>();
  if constexpr (kCluster) cluster_arrive();
  reducer.wait_for_cluster();
  if (p.partials == nullptr) return;
  const int64_t pitch = int64_t(p.groups) * cols;
  float* out = p.partials + coord.first / Shape::rows_per_block * B::kSums * pitch + col_offset;
  reduce_column_sums<B, Shape, N, kHasEdges>(sums, column, head, whole, cols, edge,
                                             reinterpret_cast<float*>(shared), out, pitch);
}

}  // namespace norm_detail
}  // namespace tigon::cuda
