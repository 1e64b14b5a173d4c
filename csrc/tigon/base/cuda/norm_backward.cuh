// Backward of the norm family: the gradients of rows and, in the same launch, the sums over rows
// that are the gradients of weight and bias. The formula is described in norm_backward_looped.cuh.
//
// Persistent CTAs process rows of one group each. A thread keeps its column sums in registers over
// all of its rows. They are then added over the rows of the CTA and, by sum_partials, over the
// CTAs, in fixed order.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_backward_persistent.cuh"

namespace tigon::cuda {

// Shapes without a pipeline: several CTAs per SM overlap their loads. Pipelined shapes
// (cp_async_pipeline.cuh) need no registers for loads in flight. Both keep weights in shared
// memory.
template <int Threads, int VecsPerThread, int RowsPerBlock, int MinBlocks>
struct Unpipelined : RowShape<Threads, VecsPerThread, RowsPerBlock, MinBlocks> {
  static constexpr int stages = 0, lookahead = 0;
};

// Shapes by row length in vectors. Short: CTAs per SM of the two shortest shapes, which bounds
// their registers.
template <int Short, class... Longer>
using BackwardShapeTable = ShapeList<Unpipelined<8, 2, 32, Short>, Unpipelined<32, 2, 8, Short>, Longer...>;

namespace norm_detail {

// Shapes of all ops for rows that are not vectorized. Lookahead hides the latency of the reduction,
// which is large in clusters and where a thread has much arithmetic.
template <RowAlignment kAlignment, class B>
struct UnalignedShapeTable {
  // One input of 16 bits and one sum: small clusters of three or four CTAs with 128 to 160 threads,
  // three of which share an SM, beat one large CTA.
  static constexpr bool kFewBlocks = B::kIn == 1 && !B::kSubtractMean && sizeof(typename B::Element) == 2;
  // In vectors.
  static constexpr int64_t kFew = 1536, kThree = 1920, kFour = 2048;
  using Block = PipelinedBlock<B::kIn == 1 ? 3 : 2, 4, 512>;
  using Shapes =
      ShapeList<PipelinedRows<2, 32, 4, 4, 3>, PipelinedBlock<2, 2, 320, 2>, PipelinedBlock<2, 2, 512>,
                std::conditional_t<kFewBlocks, UpToVecs<kFew - 1, Block>, Block>>;
};
template <class B>
struct UnalignedShapeTable<RowAlignment::mixed_offset, B> {
  using Shapes = std::conditional_t<B::kSubtractMean,
                                    ShapeList<PipelinedBlock<3, 4, 512, 1, 1>, PipelinedBlock<2, 4, 512>>,
                                    ShapeList<PipelinedBlock<2, 4, 512>>>;
};
template <class B>
using BackwardCluster =
    std::conditional_t<B::kIn == 1, PipelinedBlock<3, 4, 512, 1, 1>, PipelinedBlock<2, 4, 512>>;

// Vectorized rows. The passes are those of backward_persistent_kernel; sharing one kernel made
// vectorized rows slower.
template <class B, class W, class Y, int N, class Shape>
__global__
__launch_bounds__(Shape::max_threads, backward_blocks<typename B::Element, Y, Shape>) void backward_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kVecsPerThread = Shape::vecs_per_thread, kPair = N % 2 == 0 ? 2 : 1,
                kMeans = B::kSubtractMean ? 2 : 1;
  constexpr bool kPipelined = Shape::stages > 0;
  __shared__ __align__(16) float slots[2][kMeans * 32];
  // Weights and pipeline stages, then the column sums of the row groups.
  extern __shared__ __align__(16) unsigned char shared[];
  // The next kernel sums the partials.
  if (p.partials) griddepcontrol_launch_dependents();
  const BlockCoord coord(p.groups, Shape::rows_per_block);
  const int cols = int(p.cols), block = Shape::threads_per_row ? Shape::max_threads : blockDim.x;
  const int64_t col_offset = int64_t(coord.group) * cols;
  const int64_t step = int64_t(gridDim.x / unsigned(p.groups)) * Shape::rows_per_block;
  const int64_t first = coord.first + (Shape::rows_per_block == 1 ? 0 : threadIdx.x / Shape::threads_per_row);
  const float offset = p.weight ? p.f.offset : 0.0f, inv_cols = 1.0f / float(cols);
  auto in_row = [&](int k, int64_t row) { return p.in[k] + row * p.in_stride[k] + col_offset; };
  auto dy_row = [&](int64_t row) { return p.dy + row * p.dy_stride + col_offset; };
  auto out_row = [&](int k, int64_t row) { return p.out[k] + row * p.out_stride[k] + col_offset; };
  auto vec_of = [&](int i) { return RowTile<Shape, 1>::thread() + row_threads<Shape>() * i; };
  auto column = [&](int i) { return vec_of(i) * N; };

  // Each thread reads only the weights it wrote itself, so no barrier is needed.
  auto weight_slot = [&](int i) { return reinterpret_cast<Vec<W, N>*>(shared) + i * block + threadIdx.x; };
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) {
    Vec<W, N> w = fill_vec<W, N>(1.0f);
    if (p.weight && column(i) < cols) w = cuda::load<W, N>(p.weight + col_offset + column(i));
    *weight_slot(i) = w;
  }
  auto weights = [&](int i, float (&w)[N]) {
    Vec<W, N> vec = *weight_slot(i);
#pragma unroll
    for (int j = 0; j < N; ++j) w[j] = kPlainWeight<B> ? vec[j] : offset + vec[j];
  };
  auto has = [&](int k, int64_t row) { return row < p.rows && (k == 0 || p.in[k]); };

  Vec<X, N> in[kVecsPerThread][B::kIn];
  Vec<Y, N> dy[kVecsPerThread];
  using InPipeline = CpAsyncPipeline<X, N, Shape, false>;
  using DyPipeline = CpAsyncPipeline<Y, N, Shape, false>;
  const int threads = block / Shape::rows_per_block,
            row_in_block = Shape::rows_per_block == 1 ? 0 : threadIdx.x / threads;
  const int of_row = B::kIn * InPipeline::words(threads) + DyPipeline::words(threads);
  uint4* words = reinterpret_cast<uint4*>(weight_slot(kVecsPerThread) - threadIdx.x) + row_in_block * of_row;
  auto pipeline_of = [&](int k) {
    return InPipeline(in_row(k, first), step * p.in_stride[k], vec_of(0), threads,
                      k == 0 || p.in[k] ? cols / N : 0, p.end[k], words + k * InPipeline::words(threads),
                      Shape::rows_per_block * of_row);
  };
  auto in_pipeline = [&]<size_t... K>(std::index_sequence<K...>) {
    return Array<InPipeline, B::kIn>{{pipeline_of(int(K))...}};
  }(std::make_index_sequence<B::kIn>{});
  DyPipeline dy_pipeline(dy_row(first), step * p.dy_stride, vec_of(0), threads, cols / N, p.dy_end,
                         words + B::kIn * InPipeline::words(threads), Shape::rows_per_block * of_row);
  auto start = [&](int stage, int64_t row) {
#pragma unroll
    for (int k = 0; k < B::kIn; ++k) in_pipeline.data[k].copy(stage, row < p.rows);
    dy_pipeline.copy(stage, row < p.rows);
    cp_async_commit_group();
  };
  auto load = [&](int i, int64_t row) {
    const bool in_bounds = column(i) < cols;
#pragma unroll
    for (int k = 0; k < B::kIn; ++k)
      in[i][k] = load_predicated<X, N>(in_bounds && has(k, row), in_row(k, row) + column(i));
    dy[i] = load_predicated<Y, N>(in_bounds && row < p.rows, dy_row(row) + column(i));
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

  bool wants_rows = false;
#pragma unroll
  for (int k = 0; k < B::kOut; ++k) wants_rows = wants_rows || p.out[k] != nullptr;
  float sums[B::kSums][kVecsPerThread][N] = {}, rstd = 0.0f, mean = 0.0f;
  auto load_statistics = [&](int64_t row) {
    rstd = row < p.rows ? p.rstd[row * p.groups + coord.group] : 0.0f;
    if constexpr (B::kSubtractMean) mean = row < p.rows ? p.mean[row * p.groups + coord.group] : 0.0f;
  };
  int read_stage = 0, write_stage = Shape::stages - 1, parity = 0;
  if constexpr (kPipelined) {
#pragma unroll
    for (int s = 0; s < Shape::stages - 1; ++s) start(s, first + s * step);
    load_statistics(first);
  }
#pragma unroll 1
  for (int64_t base = coord.first, row = first; base < p.rows; base += step, row += step, ++parity) {
    if constexpr (!kPipelined) {
#pragma unroll
      for (int i = 0; i < kVecsPerThread; ++i) load(i, row);
      load_statistics(row);
    }
    const float now_rstd = rstd, now_mean = mean;
    if constexpr (kPipelined) {
      load_statistics(row + step);
      // Overwrites the stage of the previous iteration.
      start(write_stage, row + (Shape::stages - 1) * step);
      cp_async_wait_group<Shape::stages - 1>();
      write_stage = write_stage + 1 == Shape::stages ? 0 : write_stage + 1;
    }
    auto normalized = [&](const float (&x)[B::kIn]) {
      float v = p.f.value(x);
      if constexpr (B::kSubtractMean) v -= now_mean;
      return v * now_rstd;
    };
    float means[kMeans] = {};
    // The means use the unrounded h, the column sums h as it was rounded in the forward.
    auto add_means = [&](float h, float d, float w) {
      means[0] = fma(d * w, h, means[0]);
      if constexpr (B::kSubtractMean) means[1] = fma(d, w, means[1]);
    };
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      // The stage holds another row.
      if (kPipelined && Shape::rows_per_block > 1 && row >= p.rows) break;
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
            h[k] = normalized(x);
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
      reduce_row<Sum, Shape::threads_per_row>(means, slots[parity & 1]);
#pragma unroll
      for (int k = 0; k < kMeans; ++k) means[k] *= inv_cols;
      // g is formed exactly as in the means.
      auto results = [&](const float (&x)[B::kIn], float dy, float w, float (&out)[B::kOut]) {
        float h = normalized(x), g = __fmul_rn(p.f.upstream(dy, x), w);
        if constexpr (B::kSubtractMean) g -= means[1];
        p.f.results(norm_gradient(g, h, means[0], now_rstd), dy, h, w, x, out);
      };
      // The compiler reloads the weights instead of keeping them in registers.
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kVecsPerThread; ++i) {
        if (row >= p.rows || column(i) >= cols) continue;
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
    }
    read_stage = read_stage + 1 == Shape::stages ? 0 : read_stage + 1;
  }
  if constexpr (kPipelined) cp_async_wait_group<0>();
  if (p.partials == nullptr) return;
  const int64_t pitch = int64_t(p.groups) * cols;
  float* out = p.partials + (coord.first / Shape::rows_per_block) * B::kSums * pitch + col_offset;
  reduce_column_sums<B, Shape, N, false>(sums, column, 0, cols, cols, BackwardEdge<B, Y>{},
                                         reinterpret_cast<float*>(shared), out, pitch);
}

template <class B, class W, class Y, int N, class Shape, RowAlignment kAlignment>
auto backward_kernel_of() {
  if constexpr (kAlignment == RowAlignment::vectorized && Shape::lookahead == 0)
    return backward_kernel<B, W, Y, N, Shape>;
  else
    return backward_persistent_kernel<B, W, Y, N, Shape, kAlignment, false>;
}

// An upper bound on the CTAs: every CTA writes a row of partial sums, so with few rows one CTA per
// SM is enough, as many as have equal work.
inline int64_t enough_blocks(int64_t rows, int groups, int64_t period) {
  const int64_t rounds = ceil_div(rows * groups, device_facts().sms);
  return rounds > 8 ? INT64_MAX : ceil_div(ceil_div(rows, rounds), period) * period;
}

// Launches one kernel for everything. Returns the number of partial rows, or 0 where no shape holds
// a row. `period`: rows after which the offset repeats.
template <RowAlignment kAlignment, int N, class Shapes, class B, class W, class Y>
int64_t run_backward_in_registers(const char* op, Context& ctx, NormBackward<B, W, Y>& p, bool wants_sums,
                                  int64_t period) {
  using X = typename B::Element;
  constexpr bool kMixedOffset = kAlignment == RowAlignment::mixed_offset;
  auto shared_of = [&]<class Shape>(Type<Shape>, int threads) {
    const int of_row = threads / Shape::rows_per_block;
    size_t words = size_t(threads) * Shape::vecs_per_thread * sizeof(Vec<W, N>) / 16;
    if constexpr (Shape::stages > 0)
      words += size_t(Shape::stages) * Shape::rows_per_block *
               (B::kIn * CpAsyncPipeline<X, N, Shape, kMixedOffset>::words(of_row) +
                CpAsyncPipeline<Y, N, Shape, kMixedOffset>::words(of_row));
    const size_t sums = Shape::rows_per_block > 1 ? size_t(p.cols) * backward_parts<Shape>
                        : kAlignment == RowAlignment::vectorized
                            ? 0
                            : size_t(threads) * Shape::vecs_per_thread * N;
    return std::max(words * 16, sizeof(float) * sums * B::kSums);
  };
  auto run = [&](auto* kernel, const RowSchedule& schedule, LaunchConfig grid) {
    p.row_schedule = schedule;
    grid.blocks = int64_t(schedule.workers) * p.groups * grid.cluster;
    if (wants_sums) p.partials = ctx.scratch_of<float>(schedule.workers * B::kSums * p.cols * p.groups);
    launch(op, ctx, kernel, grid, p);
    return int64_t(schedule.workers);
  };
  int64_t parts = 0;
  const int64_t vecs = std::max<int64_t>(1, p.cols / N) + kMixedOffset;
  Shapes::dispatch(vecs, [&](auto shape) {
    using Shape = decltype(shape);
    auto kernel = backward_kernel_of<B, W, Y, N, Shape, kAlignment>();
    const int threads = block_threads<Shape>(vecs);
    const size_t shared = shared_of(Type<Shape>{}, threads);
    static OccupancyCache occupancy;
    const int64_t most =
        wants_sums && Shape::rows_per_block == 1 ? enough_blocks(p.rows, p.groups, period) : INT64_MAX;
    const RowSchedule schedule =
        persistent_schedule<Shape>(op, occupancy, kernel, threads, shared, p.rows, p.groups, period, most);
    if (schedule.workers == 0) return false;
    parts = run(kernel, schedule, {.threads = threads, .shared = shared});
    return true;
  });
  if constexpr (kAlignment == RowAlignment::same_offset) {
    if (parts > 0 || p.groups > 1) return parts;
    using Shape = BackwardCluster<B>;
    static OccupancyCache cluster_occupancy;
    auto kernel = backward_persistent_kernel<B, W, Y, N, Shape, kAlignment, true>;
    auto shared = [&](int threads) { return shared_of(Type<Shape>{}, threads); };
    // The more arithmetic a thread has, the more it needs other CTAs on the SM.
    using ShapeTable = UnalignedShapeTable<kAlignment, B>;
    const ClusterShape c = ShapeTable::kFewBlocks && vecs <= ShapeTable::kFour
                               ? fit_cluster<Shape>(op, cluster_occupancy, kernel, vecs,
                                                    vecs <= ShapeTable::kThree ? 3 : 4, 1, shared)
                               : max_occupancy_cluster<Shape>(op, cluster_occupancy, kernel, vecs,
                                                              B::kSubtractMean ? 96 : 192, shared);
    if (c.blocks > 0)
      parts = run(kernel, make_row_schedule(p.rows, c.clusters, period),
                  {.threads = c.threads, .shared = shared(c.threads), .cluster = c.blocks});
  }
  return parts;
}

// Rows of any length, in two launches. Returns the number of partial rows.
template <int N, class B, class W, class Y>
int64_t run_looped_backward(const char* op, Context& ctx, NormBackward<B, W, Y>& p, bool wants_sums) {
  if (std::any_of(p.out, p.out + B::kOut, [](auto* out) { return out != nullptr; }))
    launch(op, ctx, backward_looped_kernel<B, W, Y, N>,
           {.blocks = p.rows * p.groups, .threads = kLoopThreads}, p);
  if (!wants_sums) return 0;
  const int64_t tiles = ceil_div(ceil_div(p.cols, N), kColumnThreads);
  const int64_t chunk = std::max<int64_t>(32, ceil_div(p.rows, 256)), parts = ceil_div(p.rows, chunk);
  p.partials = ctx.scratch_of<float>(parts * B::kSums * p.cols * p.groups);
  launch(op, ctx, column_sums_kernel<B, W, Y, N>,
         {.blocks = parts * tiles * p.groups, .threads = kColumnThreads}, p, chunk, tiles);
  return parts;
}

}  // namespace norm_detail

// ShapeTable: the shapes of vectorized rows. `outs`: the B::kSums gradients by column, of groups *
// cols elements each; those without data are not wanted.
template <class ShapeTable, class B, class W, class Y>
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
  constexpr int kVecSize = 16 / sizeof(X);
  bool vectorized = is_vectorizable(p.dy, p.dy_stride, p.cols, sizeof(Y)) && p.dy_stride % kVecSize == 0 &&
                    p.cols % kVecSize == 0 && is_aligned(p.weight);
  for (int k = 0; k < B::kIn; ++k)
    vectorized = vectorized && (!p.in[k] || is_vectorizable(p.in[k], p.in_stride[k], p.cols, sizeof(X)));
  for (int k = 0; k < B::kOut; ++k)
    vectorized = vectorized && (!p.out[k] || is_vectorizable(p.out[k], p.out_stride[k], p.cols, sizeof(X)));
  p.dy_end = end_of_rows(p.dy, p.dy_stride, p.rows, p.groups * p.cols);
  for (int k = 0; k < B::kIn; ++k)
    if (p.in[k]) p.end[k] = end_of_rows(p.in[k], p.in_stride[k], p.rows, p.groups * p.cols);
  // Offsets are compared with those of the output.
  const X* written = p.out[0] ? p.out[0] : p.in[0];
  const int64_t stride = p.out[0] ? p.out_stride[0] : p.in_stride[0];
  auto matches_output = [&](const auto* of, int64_t of_stride) {
    return !of || same_row_offsets<X>(written, stride, of, of_stride, p.rows);
  };
  bool outputs_match = true, inputs_match = matches_output(p.dy, p.dy_stride);
  for (int k = 0; k < B::kIn; ++k) inputs_match = inputs_match && matches_output(p.in[k], p.in_stride[k]);
  for (int k = 0; k < B::kOut; ++k)
    outputs_match = outputs_match && matches_output(p.out[k], p.out_stride[k]);
  int64_t parts = 0, period = row_offset_period<Y>(p.dy_stride);
  for (int k = 0; k < B::kIn; ++k)
    if (p.in[k]) period = std::max(period, row_offset_period<X>(p.in_stride[k]));
  for (int k = 0; k < B::kOut; ++k)
    if (p.out[k]) period = std::max(period, row_offset_period<X>(p.out_stride[k]));
  if (vectorized)
    parts = run_backward_in_registers<RowAlignment::vectorized, kVecSize, ShapeTable>(op, ctx, p, wants_sums,
                                                                                      period);
  if constexpr (kSameType<B, W, Y>)
    // Vectorized rows too long for a CTA come here too.
    if (parts == 0 && outputs_match && inputs_match)
      parts = run_backward_in_registers<RowAlignment::same_offset, kVecSize,
                                        typename UnalignedShapeTable<RowAlignment::same_offset, B>::Shapes>(
          op, ctx, p, wants_sums, period);
  if (parts == 0 && outputs_match)
    parts = run_backward_in_registers<RowAlignment::mixed_offset, kVecSize,
                                      typename UnalignedShapeTable<RowAlignment::mixed_offset, B>::Shapes>(
        op, ctx, p, wants_sums, period);
  if (parts == 0) parts = run_looped_backward<kVecSize>(op, ctx, p, wants_sums);
  if (wants_sums) sum_partials(op, ctx, p.partials, parts, outs);
}

}  // namespace tigon::cuda
