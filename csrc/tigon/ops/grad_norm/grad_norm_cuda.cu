// In the CUDA backend of the gradient norm each CTA sums the squares of one chunk of one gradient, and one
// CTA sums the chunks. In that of scale each CTA scales one chunk of one tensor of the list.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/tensor_list.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/grad_norm/grad_norm.h"
#include "tigon/ops/grad_norm/grad_norm_math.inc"
#include "tigon/ops/grad_norm/scale.h"

namespace tigon::cuda {
namespace {

using namespace grad_norm_detail;

constexpr const char *kOp = "grad_norm", *kScale = "scale";
constexpr int kThreads = 256, kFinishThreads = 1024, kVecsInFlight = 4;

// Sums the squares of n elements from p, which may begin anywhere: edge elements, one per thread, and
// vectors.
template <class T>
__device__ __forceinline__ double squares(const T* p, int n) {
  constexpr int N = 16 / sizeof(T);
  const int thread = int(threadIdx.x);
  const VectorSplit<N, T> split(p, n);
  const int vecs = split.vecs, at = split.edge(thread);
  const float edge = at >= 0 ? widen(p[at]) : 0.0f;
  double total = double(edge * edge);
  const T* aligned = p + split.head;
#pragma unroll 1
  for (int first = thread; first < vecs; first += kThreads * kVecsInFlight) {
    Vec<T, N> x[kVecsInFlight];
#pragma unroll
    for (int h = 0; h < kVecsInFlight; ++h)
      x[h] = load_predicated<T, N>(first + h * kThreads < vecs, aligned + int64_t(first + h * kThreads) * N);
    // At most 32 squares are added in fp32.
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < kVecsInFlight; ++h) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum = fmaf(x[h][k], x[h][k], sum);
    }
    total += double(sum);
  }
  return total;
}

__global__ void __launch_bounds__(kThreads, 6)
    squares_kernel(const unsigned char* table, int count, double* partials,
                   const __grid_constant__ SmallTable block) {
  const auto* entries = reinterpret_cast<const VectorEntry*>(table != nullptr ? table : block.bytes);
  const Vector g = vector_chunk(entries, count, kNormChunk);
  const int n = int(g.size);
  double sum[1];
  switch (g.dtype) {
    case DType::bf16: sum[0] = squares(static_cast<const __nv_bfloat16*>(g.data), n); break;
    case DType::f16: sum[0] = squares(static_cast<const __half*>(g.data), n); break;
    default: sum[0] = squares(static_cast<const float*>(g.data), n);
  }
  __shared__ double slots[kThreads / 32];
  sum_block<kThreads>(sum, slots);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum[0];
}

__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const double* partials, int count, const float* grad_scale, float max_norm, double* total,
                  float* norm, float* factor) {
  griddepcontrol_wait();
  double sum[1] = {0.0};
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += kFinishThreads) sum[0] += partials[i];
  __shared__ double slots[kFinishThreads / 32];
  sum_block<kFinishThreads>(sum, slots);
  if (threadIdx.x == 0) finish_norm(sum[0], grad_scale, max_norm, total, norm, factor);
}

constexpr int64_t kScaleChunk = 16384;

template <class T>
__device__ __forceinline__ void scale_chunk(T* p, int n, float factor) {
  constexpr int N = 16 / sizeof(T);
  const int thread = int(threadIdx.x);
  const VectorSplit<N, T> split(p, n);
  if (const int at = split.edge(thread); at >= 0) {
    Vec<T, 1> edge = load_stream<T, 1>(p + at);
    edge.set({mul(edge[0], factor)});
    store(p + at, edge);
  }
  T* aligned = p + split.head;
#pragma unroll 1
  for (int first = thread; first < split.vecs; first += kThreads * kVecsInFlight) {
    Vec<T, N> x[kVecsInFlight];
#pragma unroll
    for (int h = 0; h < kVecsInFlight; ++h)
      x[h] = load_predicated<T, N>(first + h * kThreads < split.vecs, aligned + (first + h * kThreads) * N);
#pragma unroll
    for (int h = 0; h < kVecsInFlight; ++h) {
      float y[N];
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] = mul(x[h][k], factor);
      x[h].set(y);
      store_predicated<T, N>(first + h * kThreads < split.vecs, aligned + (first + h * kThreads) * N, x[h]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 6)
    scale_kernel(const unsigned char* table, int count, const float* by,
                 const __grid_constant__ SmallTable block) {
  const float factor = *by;
  if (factor == 1.0f) return;
  const auto* entries = reinterpret_cast<const VectorEntry*>(table != nullptr ? table : block.bytes);
  const Vector x = vector_chunk(entries, count, kScaleChunk);
  const int n = int(x.size);
  switch (x.dtype) {
    case DType::bf16: return scale_chunk(static_cast<__nv_bfloat16*>(x.data), n, factor);
    case DType::f16: return scale_chunk(static_cast<__half*>(x.data), n, factor);
    default: return scale_chunk(static_cast<float*>(x.data), n, factor);
  }
}

}  // namespace

void grad_norm(Context& ctx, const GradNorm& a) {
  const size_t n = a.grads.size();
  TableWriter table(kOp, ctx, n * sizeof(VectorEntry));
  const int64_t chunks = append_vectors(kOp, "grads", table, a.grads, kNormChunk);
  auto* partials = ctx.scratch_of<double>(chunks);
  table.finish([&](const unsigned char* at, const SmallTable& block) {
    launch(kOp, ctx, squares_kernel, {.blocks = chunks, .threads = kThreads}, at, int(n), partials, block);
  });
  launch(kOp, ctx, finish_kernel, {.threads = kFinishThreads, .pdl = true}, partials, int(chunks),
         a.grad_scale.as<float>(), a.max_norm, a.total.as<double>(), a.norm.as<float>(),
         a.factor.as<float>());
}

void scale(Context& ctx, const Scale& a) {
  const size_t n = a.tensors.size();
  TableWriter table(kScale, ctx, n * sizeof(VectorEntry));
  const int64_t chunks = append_vectors(kScale, "tensors", table, a.tensors, kScaleChunk);
  table.finish([&](const unsigned char* at, const SmallTable& block) {
    launch(kScale, ctx, scale_kernel, {.blocks = chunks, .threads = kThreads}, at, int(n),
           a.factor.as<float>(), block);
  });
}

}  // namespace tigon::cuda
