// The CUDA backend of qk_norm_rope moves 2b bytes per element forward and 3b backward (b = element size), and
// also CTAs * 2D * 4 bytes of dweight partials through L2. Tables and weights are read from L1 and L2. An
// element takes about 12 instructions forward and 18 backward; the memory-bound budget is 28 and 42 (bf16).
#include <algorithm>
#include <type_traits>

#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/rope/qk_norm_rope_cuda.cuh"
#include "tigon/ops/rope/rope_pipeline.cuh"

namespace tigon::cuda {
namespace {

using namespace rope_kernels;

constexpr const char* kOp = "qk_norm_rope";

// Counts the pipeline stages, and the CTAs per SM, which bound the registers.
constexpr int kStages = 3;
template <class X, bool Packed>
constexpr int kMinBlocks = sizeof(X) == 4 ? 3
                           : Packed       ? 5
                                          : 4;
template <class X>
using ForwardStages = CpAsyncStages<2 * kWordsOf<X>, kStages>;

constexpr int kStagesBackward = 3, kMinBlocksBackward = 3;
template <class X, class Y>
using BackwardStages = CpAsyncStages<2 * (kWordsOf<X> + kWordsOf<Y>), kStagesBackward>;

// Packed stands for Norm::packed.
template <Pairs P, bool Packed, class X, class Y>
__global__ void __launch_bounds__(kThreads, kMinBlocks<X, Packed>)
    forward_kernel(const __grid_constant__ QkNormRopeForward p) {
  constexpr int N = kVecColumns;
  const PairCoord coord(p.shape);
  const TableCoord at = p.tables.template coord<P, N>(coord.lane);
  const int lanes = int(p.shape.lanes.divisor);
  const ForwardStages<X> stages;
  if (!coord.in_row) stages.clear();
  Source<X> source;
  auto begin = [&](uint32_t index) {
    const bool live = coord.in_row && index < p.units.count;
    Unit unit = p.units[live ? index : 0];
    const HeadTensors& tensors = tensors_of(p, unit);
    source = {x_of<X>(tensors, unit) + coord.first, tensors.groups * tensors.x_head};
    return tensors.range(unit, live);
  };
  auto copy = [&](int stage, bool wanted) {
    if (wanted) source.copy(stages, stage, 0, coord.vec_stride());
    source.row += source.step;
  };
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const uint32_t stride = gridDim.x * p.shape.rows;
  uint32_t base = blockIdx.x * p.shape.rows;
  RowPrefetcher<kStages, decltype(begin), decltype(copy)> prefetcher(base + coord.row, stride, begin, copy);
#pragma unroll 1
  for (; base < p.units.count; base += stride) {
    const bool live = coord.in_row && base + coord.row < p.units.count;
    Unit unit = p.units[live ? base + coord.row : 0];
    const HeadTensors& tensors = tensors_of(p, unit);
    const bool second = &tensors == &p.k;
    float c[2 * N], s[2 * N], f[2 * N];
    Vec<X, N> weights[2];
    if (live) {
      if constexpr (Packed) {
        weights[0] = p.norm.template weight_vec<X, N>(second, coord.first);
        weights[1] = p.norm.template weight_vec<X, N>(second, coord.second);
      } else {
        p.norm.template factors<X, N>(second, coord.first, f);
        p.norm.template factors<X, N>(second, coord.second, f + N);
      }
      if (coord.is_rotated) p.tables.template read<X, P, N>(unit.batch, unit.token, at, c, s);
    }
    Y* row = y_of<Y>(tensors, unit) + coord.first;
    const int64_t step = tensors.groups * tensors.y_head;
    HeadRange range = tensors.range(unit, live);
    do {
      float v[2 * N];
      stages.template read<X>(prefetcher.next_stage(), 0, v);
      float total[1] = {dot(v, v)};
      sum_row(total, lanes);
      if (range.has()) {
        const float rstd = p.norm.template rstd<X>(total[0]);
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) v[n] *= rstd;
        if constexpr (Packed) {
          widen_vecs(product(narrow_vec<X, N>(v, 0), weights[0]), product(narrow_vec<X, N>(v, 1), weights[1]),
                     v);
        } else {
          p.norm.template normalise<X>(v, f);
        }
        if (coord.is_rotated) rotate<P, N>(v, c, s);
        store(row, narrow_vec<Y, N>(v, 0));
        store(row + coord.vec_stride(), narrow_vec<Y, N>(v, 1));
      }
      row += step, range.next += range.step;
    } while (range.any());
  }
}

// Processes all units of q, then those of k. dweight is summed in registers over all rows of a thread, over
// the rows of a warp by a tree, then over the warps in order.
template <Pairs P, class X, class Y>
__global__ void __launch_bounds__(kThreads, kMinBlocksBackward)
    backward_kernel(const __grid_constant__ QkNormRopeBackward p) {
  // dy lies at kDy in a stage.
  constexpr int N = kVecColumns, kDy = 2 * kWordsOf<X>;
  // Holds pipeline stages, then weights, and at the end sums [kWarps, cols].
  extern __shared__ uint4 shared[];
  const PairCoord coord(p.shape);
  const TableCoord at = p.tables.template coord<P, N>(coord.lane);
  const int cols = p.shape.cols, lanes = int(p.shape.lanes.divisor);
  const BackwardStages<X, Y> stages;
  if (!coord.in_row) stages.clear();
  float4* factors = reinterpret_cast<float4*>(shared + BackwardStages<X, Y>::kBytes / 16) + threadIdx.x;
  auto weighted = [&](const float (&g)[2 * N], float (&gf)[2 * N]) {
#pragma unroll
    for (int n = 0; n < 2 * N; n += 4) {
      const float4 f = factors[n / 4 * kThreads];
      gf[n] = g[n] * f.x, gf[n + 1] = g[n + 1] * f.y, gf[n + 2] = g[n + 2] * f.z, gf[n + 3] = g[n + 3] * f.w;
    }
  };
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const uint32_t stride = gridDim.x * p.shape.rows;
  uint32_t base = blockIdx.x * p.shape.rows;
#pragma unroll 1
  for (int second = 0; second < 2; ++second) {
    const HeadTensors& tensors = second ? p.k : p.q;
    const Input& input = second ? p.k_x : p.q_x;
    const Units& units = second ? p.k_units : p.q_units;
    float dw[2 * N] = {};
    {
      float f[2 * N] = {};
      if (coord.in_row) {
        p.norm.template factors<X, N>(second, coord.first, f);
        p.norm.template factors<X, N>(second, coord.second, f + N);
      }
#pragma unroll
      for (int n = 0; n < 2 * N; n += 4)
        factors[n / 4 * kThreads] = make_float4(f[n], f[n + 1], f[n + 2], f[n + 3]);
    }
    Source<X> x_source{nullptr, tensors.groups * input.head};
    Source<Y> dy_source{nullptr, tensors.groups * tensors.x_head};
    const int64_t step = tensors.groups * tensors.y_head;
    auto begin = [&](uint32_t index) {
      const bool live = coord.in_row && index < units.count;
      const Unit unit = units[live ? index : 0];
      x_source.row = input.template at<X>(unit) + coord.first;
      dy_source.row = x_of<Y>(tensors, unit) + coord.first;
      return tensors.range(unit, live);
    };
    auto copy = [&](int stage, bool wanted) {
      if (wanted)
        x_source.copy(stages, stage, 0, coord.vec_stride()),
            dy_source.copy(stages, stage, kDy, coord.vec_stride());
      x_source.row += x_source.step, dy_source.row += dy_source.step;
    };
    RowPrefetcher<kStagesBackward, decltype(begin), decltype(copy)> prefetcher(base + coord.row, stride,
                                                                               begin, copy);
#pragma unroll 1
    for (; base < units.count; base += stride) {
      const bool live = coord.in_row && base + coord.row < units.count;
      const Unit unit = units[live ? base + coord.row : 0];
      float c[2 * N], s[2 * N];
      if (live && coord.is_rotated) p.tables.template read<X, P, N>(unit.batch, unit.token, at, c, s);
      X* row = y_of<X>(tensors, unit) + coord.first;
      HeadRange range = tensors.range(unit, live);
      do {
        const int stage = prefetcher.next_stage();
        // g is the gradient of the normalized row.
        float x[2 * N], g[2 * N], gf[2 * N];
        stages.template read<X>(stage, 0, x);
        stages.template read<Y>(stage, kDy, g);
        if (coord.is_rotated) rotate<P, N>(g, c, s);
        weighted(g, gf);
        float total[2] = {dot(x, x), dot(gf, x)};
        sum_row(total, lanes);
        if (range.has()) {
          const float rstd = p.norm.template rstd<X>(total[0]), mean = total[1] * rstd * p.norm.inv_cols;
#pragma unroll
          for (int n = 0; n < 2 * N; ++n) {
            x[n] *= rstd;
            gf[n] = qk_norm_dx(gf[n], x[n], mean, rstd);
          }
          store(row, narrow_vec<X, N>(gf, 0));
          store(row + coord.vec_stride(), narrow_vec<X, N>(gf, 1));
          if (p.norm.round_h) round_all<X>(x);
#pragma unroll
          for (int n = 0; n < 2 * N; ++n) dw[n] = fma(g[n], x[n], dw[n]);
        }
        row += step, range.next += range.step;
      } while (range.any());
    }
    cp_async_wait_group<0>();
    // The units of k follow without a gap.
    base -= (units.count + p.shape.rows - 1) / p.shape.rows * p.shape.rows;
    if (p.partials == nullptr) continue;
#pragma unroll
    for (int n = 0; n < 2 * N; ++n)
      for (int m = lanes; m < 32; m <<= 1) dw[n] += __shfl_xor_sync(0xffffffffu, dw[n], m);
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
    if (int(threadIdx.x % 32) < lanes && coord.in_row) {
      float* own = sums + threadIdx.x / 32 * cols;
#pragma unroll
      for (int n = 0; n < N; ++n) own[coord.first + n] = dw[n], own[coord.second + n] = dw[N + n];
    }
    reduce_block_sums(p, second, sums);
  }
}

// Calls fn(Type<X>, Type<Y>); y has x's type or f32.
template <class Fn>
void with_types(DType x, DType y, Fn&& fn) {
  dispatch_float(kOp, "q", x, [&](auto type) {
    using X = typename DeviceType<typename decltype(type)::type>::type;
    if (x == y) return fn(Type<X>{}, Type<X>{});
    if constexpr (sizeof(X) == 2) fn(Type<X>{}, Type<float>{});
  });
}

bool rows_fit(const Rope& a, const RopeHeads& x, const QkNorm& norm) {
  auto aligned = [](const Vector& w) { return reinterpret_cast<uintptr_t>(w.data) % 16 == 0; };
  return vecs_fit(a, x, kColumns) && x.cols <= 32 * kColumns && aligned(norm.q_weight) &&
         aligned(norm.k_weight);
}

QkNormRopeForward forward_of(const QkNormRopeFwd& a, const RopeHeads& x, int heads_per_unit) {
  HeadTensors q(a.rope.q, a.rope.q_out, heads_per_unit), k(a.rope.k, a.rope.k_out, heads_per_unit);
  return {.q = q,
          .k = k,
          .units = Units(x, q.groups + k.groups),
          .tables = Tables(a.rope, false, pairs_of(a.rope)),
          .shape = Shape(a.rope, x, lanes_of(x, kColumns)),
          .norm = Norm(a.norm, x.dtype, x.cols)};
}

QkNormRopeBackward backward_of(const QkNormRopeBwd& a, const RopeHeads& x, int heads_per_unit) {
  HeadTensors q(a.rope.q, a.rope.q_out, heads_per_unit), k(a.rope.k, a.rope.k_out, heads_per_unit);
  return {.q = q,
          .k = k,
          .q_x = Input(a.q),
          .k_x = Input(a.k),
          .q_units = Units(a.q, q.groups),
          .k_units = Units(a.k, k.groups),
          .tables = Tables(a.rope, true, pairs_of(a.rope)),
          .shape = Shape(a.rope, x, lanes_of(x, kColumns)),
          .norm = Norm(a.norm, x.dtype, x.cols),
          .partials = nullptr};
}

template <auto* kernel, class X>
void run_forward(Context& ctx, const QkNormRopeForward& p) {
  launch_persistent<kernel>(kOp, ctx, ForwardStages<X>::kBytes, ceil_div(p.units.count, p.shape.rows), p);
}

// Calls fn(blocks), which launches the kernel, and then sums the dweight partials of its CTAs.
template <class Fn>
void sum_weights(Context& ctx, QkNormRopeBackward& p, int64_t blocks, const Matrix& dweight, Fn&& fn) {
  if (dweight.data != nullptr) p.partials = ctx.scratch_of<float>(blocks * 2 * p.shape.cols);
  fn(blocks);
  if (dweight.data != nullptr)
    sum_partials(kOp, ctx, p.partials, blocks,
                 {Vector{.data = dweight.data, .dtype = dweight.dtype, .size = 2 * dweight.cols}});
}

template <auto* kernel, class CpAsyncStages>
void run_backward(Context& ctx, QkNormRopeBackward p, const Matrix& dweight) {
  const int64_t tiles = ceil_div(p.q_units.count, p.shape.rows) + ceil_div(p.k_units.count, p.shape.rows);
  const size_t shared = std::max(CpAsyncStages::kBytes + kThreads * kColumns * sizeof(float),
                                 sizeof(float) * kWarps * size_t(p.shape.cols));
  sum_weights(ctx, p, resident_blocks<kernel>(kOp, shared, tiles), dweight, [&](int64_t blocks) {
    launch(kOp, ctx, kernel, {.blocks = blocks, .threads = kThreads, .shared = shared, .pdl = true}, p);
  });
}

}  // namespace

void qk_norm_rope_fwd(Context& ctx, const QkNormRopeFwd& a) {
  const RopeHeads& x = a.rope.q.empty() ? a.rope.k : a.rope.q;
  const RopeHeads& y = a.rope.q.empty() ? a.rope.k_out : a.rope.q_out;
  const bool halves = pairs_of(a.rope) == Pairs::halves;
  with_types(x.dtype, y.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    if (!rows_fit(a.rope, x, a.norm)) {
      const QkNormRopeForward p = forward_of(a, x, 1);
      const int64_t rows = x.batch * x.tokens * (p.q.groups + p.k.groups);
      return launch(kOp, ctx, forward_rows_kernel<X, Y>,
                    {.blocks = ceil_div(rows, kWarps),
                     .threads = kThreads,
                     .shared = kWarps * size_t(x.cols) * sizeof(float),
                     .pdl = true},
                    p, uint64_t(rows));
    }
    constexpr bool kPacks = std::is_same_v<X, __nv_bfloat16> && std::is_same_v<X, Y>;
    const bool packed = kPacks && Norm(a.norm, x.dtype, x.cols).packed();
    // There are few heads per unit also if all sequences share a token's row of the tables, which is then in
    // cache.
    const bool tables_in_cache =
        a.rope.positions.data == nullptr && a.rope.cos.axes == 1 && a.rope.cos.batch == 1;
    const int heads_per_unit =
        packed && tables_in_cache
            ? kFewHeads
            : heads_per_unit_of(x, a.rope.q.heads + a.rope.k.heads, lanes_of(x, kColumns),
                                packed ? kMinBlocks<X, true> : kMinBlocks<X, false>);
    const QkNormRopeForward p = forward_of(a, x, heads_per_unit);
    if constexpr (kPacks)
      if (packed)
        return halves ? run_forward<forward_kernel<Pairs::halves, true, X, Y>, X>(ctx, p)
                      : run_forward<forward_kernel<Pairs::neighbours, true, X, Y>, X>(ctx, p);
    halves ? run_forward<forward_kernel<Pairs::halves, false, X, Y>, X>(ctx, p)
           : run_forward<forward_kernel<Pairs::neighbours, false, X, Y>, X>(ctx, p);
  });
}

void qk_norm_rope_bwd(Context& ctx, const QkNormRopeBwd& a) {
  const RopeHeads& x = a.q.empty() ? a.k : a.q;
  const RopeHeads& dy = a.q.empty() ? a.rope.k : a.rope.q;
  if (x.empty()) {
    TIGON_CUDA_CHECK(kOp,
                     cudaMemsetAsync(a.dweight.data, 0, size_of(a.dweight.dtype) * size_t(2 * a.dweight.cols),
                                     static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  const bool halves = pairs_of(a.rope) == Pairs::halves;
  with_types(x.dtype, dy.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    using CpAsyncStages = BackwardStages<X, Y>;
    if (!rows_fit(a.rope, x, a.norm) || !heads_align(a.q) || !heads_align(a.k)) {
      QkNormRopeBackward p = backward_of(a, x, 1);
      const int64_t q_rows = a.q.batch * a.q.tokens * a.q.heads, k_rows = a.k.batch * a.k.tokens * a.k.heads;
      const int64_t blocks =
          std::min<int64_t>(ceil_div(std::max(q_rows, k_rows), kWarps), device_facts().sms * 4);
      return sum_weights(ctx, p, blocks, a.dweight, [&](int64_t) {
        launch(kOp, ctx, backward_rows_kernel<X, Y>,
               {.blocks = blocks,
                .threads = kThreads,
                .shared = 2 * kWarps * size_t(x.cols) * sizeof(float),
                .pdl = true},
               p, uint64_t(q_rows), uint64_t(k_rows));
      });
    }
    const int heads_per_unit =
        heads_per_unit_of(x, a.q.heads + a.k.heads, lanes_of(x, kColumns), kMinBlocksBackward);
    const QkNormRopeBackward p = backward_of(a, x, heads_per_unit);
    halves ? run_backward<backward_kernel<Pairs::halves, X, Y>, CpAsyncStages>(ctx, p, a.dweight)
           : run_backward<backward_kernel<Pairs::neighbours, X, Y>, CpAsyncStages>(ctx, p, a.dweight);
  });
}

}  // namespace tigon::cuda
