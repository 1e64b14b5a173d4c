// Implements the CUDA side of the loss head: what neither the GEMM provider nor the losses' row kernels do.
// finish: reads the gradient (f32 dweight: 4 bytes, 16-bit dhidden: 2) and writes the parameter's dtype.
// compact: one CTA, 8 bytes read twice and 8 written per row; the list keeps the order of the rows. move,
// results, factors: one read and one write.
#include "tigon/base/cuda/each.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/loss_head/engine.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/loss_head/loss_head_math.inc"

constexpr const char* kOp = "linear_head";
constexpr int kThreads = 256, kUnroll = 4;

// Handles elements from block * kThreads * N * kUnroll on: every thread has kUnroll vectors in flight.
template <class In, class Out, int N>
__global__ __launch_bounds__(kThreads) void finish_kernel(const In* in, const float* dloss,
                                                          const float* scale, Out* out, int64_t n) {
  float factor = *dloss * (scale ? *scale : 1.0f);
  int64_t first = (int64_t(blockIdx.x) * kThreads * kUnroll + threadIdx.x) * N;
  Vec<In, N> vecs[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    int64_t i = first + int64_t(u) * kThreads * N;
    if (i + N <= n) vecs[u] = load_stream<In, N>(in + i);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    int64_t i = first + int64_t(u) * kThreads * N;
    if (i + N <= n) {
      Vec<Out, N> r;
#pragma unroll
      for (int j = 0; j < N; ++j) r.set(j, loss_head_finished(vecs[u][j], factor));
      store(out + i, r);
    } else {
      for (int64_t t = i; t < n && t < i + N; ++t)
        out[t] = narrow<Out>(loss_head_finished(widen(in[t]), factor));
    }
  }
}

// Each warp counts a run of rows, the CTA adds the counts, then each warp visits its run again and
// writes.
constexpr int kCompactThreads = 1024, kCompactWarps = kCompactThreads / 32;

struct CompactParams {
  const int64_t* target;
  int64_t *index, *labels, *position;
  float* fault;
  int64_t rows, wanted, ignore_index;
};
__global__ __launch_bounds__(kCompactThreads) void compact_kernel(const CompactParams p) {
  __shared__ int64_t counts[kCompactWarps];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // A warp takes whole groups of 32 rows.
  int64_t run = (p.rows + kCompactThreads - 1) / kCompactThreads * 32;
  int64_t first = warp * run, end = min(p.rows, first + run);
  auto counts_at = [&](int64_t r) { return r < end && p.target[r] != p.ignore_index; };
  int64_t mine = 0;
#pragma unroll 4
  for (int64_t r = first + lane; r < end; r += 32) mine += counts_at(r);
  for (int step = 16; step > 0; step >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, step);
  if (lane == 0) counts[warp] = mine;
  __syncthreads();
  int64_t before = 0, total = 0;
  for (int w = 0; w < kCompactWarps; ++w) {
    if (w < warp) before += counts[w];
    total += counts[w];
  }
  bool right = total == p.wanted;
  int64_t wrong = loss_head_wrong_label(p.ignore_index);
  if (threadIdx.x == 0) *p.fault = right ? 0.0f : NAN;
  for (int64_t group = first; group < end; group += 32) {
    int64_t r = group + lane;
    bool here = counts_at(r);
    unsigned mask = __ballot_sync(0xffffffffu, here);
    int64_t place = before + __popc(mask & ((1u << lane) - 1u));
    if (here && place < p.wanted) p.index[place] = r, p.labels[place] = right ? p.target[r] : wrong;
    if (r < end) p.position[r] = here ? place : -1;
    before += __popc(mask);
  }
  for (int64_t i = total + threadIdx.x; i < p.wanted; i += kCompactThreads)
    p.index[i] = 0, p.labels[i] = wrong;
}

// Lists pairs side by side, with the rows of every answer in order.
struct PairRow {
  LossHeadPairs a;
  __device__ void operator()(int64_t row) const {
    const int64_t answer = row / a.tokens, pair = answer % a.pairs, side = answer / a.pairs;
    const int64_t place = (2 * pair + side) * a.tokens + row % a.tokens;
    a.position.as<int64_t>()[row] = place, a.index.as<int64_t>()[place] = row;
    a.labels.as<int64_t>()[place] = a.target.as<int64_t>()[row];
  }
};

// Moves a row per CTA, in pieces of type T; strides and cols count pieces.
template <class T>
__global__ __launch_bounds__(kThreads) void move_kernel(const T* __restrict__ from, T* __restrict__ to,
                                                        const int64_t* index, int64_t from_stride,
                                                        int64_t to_stride, int64_t from_cols, int64_t to_cols,
                                                        bool scatter) {
  int64_t i = blockIdx.x, r = index != nullptr ? index[i] : i;
  from += (scatter ? i : r) * from_stride;
  to += (scatter ? r : i) * to_stride;
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < to_cols; c += kThreads) to[c] = c < from_cols ? from[c] : T{};
}

template <class T>
__global__ __launch_bounds__(kThreads) void move_scaled_kernel(const T* from, T* to, const int64_t* index,
                                                               const float* factor, int64_t from_stride,
                                                               int64_t to_stride, int64_t cols,
                                                               bool scatter) {
  int64_t i = blockIdx.x, r = index != nullptr ? index[i] : i;
  float f = factor[i];
  from += (scatter ? i : r) * from_stride;
  to += (scatter ? r : i) * to_stride;
  for (int64_t c = threadIdx.x; c < cols; c += kThreads) to[c] = narrow<T>(widen(from[c]) * f);
}

template <class T>
void move_rows(Context& ctx, const LossHeadMove& a) {
  int64_t pieces = int64_t(sizeof(T) / size_of(a.from.dtype));
  launch(kOp, ctx, move_kernel<T>, {.blocks = a.rows(), .threads = kThreads},
         static_cast<const T*>(a.from.data), static_cast<T*>(a.to.data), a.index.as<int64_t>(),
         a.from.stride / pieces, a.to.stride / pieces, a.from.cols / pieces, a.to.cols / pieces, a.scatter);
}

template <class T>
struct One {
  T* out;
  __device__ void operator()(int64_t i) const { out[i] = narrow<T>(1.0f); }
};

}  // namespace

void loss_head_finish(Context& ctx, const LossHeadFinish& a) {
  constexpr int kVecSize = 8;
  int64_t n = a.in.rows * a.in.cols;
  dispatch_float(kOp, "gradient", a.in.dtype, [&](auto ti) {
    using In = typename DeviceType<typename decltype(ti)::type>::type;
    dispatch_float(kOp, "result", a.out.dtype, [&](auto to) {
      using Out = typename DeviceType<typename decltype(to)::type>::type;
      // Both are fresh allocations, so they are 16-byte aligned.
      launch(kOp, ctx, finish_kernel<In, Out, kVecSize>,
             {.blocks = ceil_div(n, int64_t(kThreads) * kVecSize * kUnroll), .threads = kThreads},
             a.in.row<In>(0), a.dloss.as<float>(), a.scale.as<float>(), a.out.row<Out>(0), n);
    });
  });
}

void loss_head_ones(Context& ctx, Vector out) {
  dispatch_float(kOp, "ones", out.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    for_each(kOp, ctx, out.size, One<T>{out.as<T>()});
  });
}

void loss_head_zero(Context& ctx, const Matrix& out) {
  size_t width = size_of(out.dtype) * size_t(out.cols), pitch = size_of(out.dtype) * size_t(out.stride),
         rows = size_t(out.rows);
  auto stream = static_cast<cudaStream_t>(ctx.stream());
  if (width == pitch) width *= rows, rows = 1;
  TIGON_CUDA_CHECK(kOp, rows == 1 ? cudaMemsetAsync(out.data, 0, width, stream)
                                  : cudaMemset2DAsync(out.data, pitch, 0, width, rows, stream));
}

void loss_head_compact(Context& ctx, const LossHeadCompact& a) {
  CompactParams p = {
      a.target.as<int64_t>(), a.index.as<int64_t>(), a.labels.as<int64_t>(), a.position.as<int64_t>(),
      a.fault.as<float>(),    a.target.size,         a.index.size,           a.ignore_index};
  launch(kOp, ctx, compact_kernel, {.blocks = 1, .threads = kCompactThreads}, p);
}

void loss_head_shift(Context& ctx, const LossHeadShifted& a) {
  for_each(kOp, ctx, a.out.size, ShiftedLabel{a});
}
void loss_head_factors(Context& ctx, const LossHeadFactors& a) {
  for_each(kOp, ctx, a.out.size, RowFactor{a});
}
void loss_head_results(Context& ctx, const LossHeadResults& a) {
  for_each(kOp, ctx, a.target.size, RowResults{a});
}
void loss_head_pairs(Context& ctx, const LossHeadPairs& a) {
  for_each("linear_preference", ctx, a.target.size, PairRow{a});
}

void loss_head_move(Context& ctx, const LossHeadMove& a) {
  if (a.factor) {
    dispatch_float(kOp, "rows", a.from.dtype, [&](auto t) {
      using T = typename DeviceType<typename decltype(t)::type>::type;
      launch(kOp, ctx, move_scaled_kernel<T>, {.blocks = a.factor.size, .threads = kThreads},
             a.from.row<T>(0), a.to.row<T>(0), a.index.as<int64_t>(), a.factor.as<float>(), a.from.stride,
             a.to.stride, a.from.cols, a.scatter);
    });
    return;
  }
  size_t size = size_of(a.from.dtype);
  uintptr_t ends = reinterpret_cast<uintptr_t>(a.from.data) | reinterpret_cast<uintptr_t>(a.to.data);
  if ((ends | size_t(a.from.stride | a.to.stride | a.from.cols | a.to.cols) * size) % 16 == 0)
    return move_rows<uint4>(ctx, a);
  if (size == 8) return move_rows<uint64_t>(ctx, a);
  if (size == 4) return move_rows<uint32_t>(ctx, a);
  move_rows<uint16_t>(ctx, a);
}

}  // namespace tigon::cuda
