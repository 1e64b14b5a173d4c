// CUDA side of the fused linear cross-entropy: only what the GEMM provider and cross_entropy's row kernel do not do.
//
// finish: reads the gradient (f32 dweight: 4 bytes, 16-bit dhidden: 2), writes the parameter's dtype; 1 instruction an element.
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_math.inc"

constexpr const char* kOp = "linear_cross_entropy";
constexpr int kThreads = 256, kUnroll = 4;

// Elements [block * kThreads * N * kUnroll, ...): every thread has kUnroll packs in flight.
template <class In, class Out, int N>
__global__ __launch_bounds__(kThreads) void finish_kernel(const In* in, const float* dloss, const float* scale, Out* out,
                                                          int64_t n) {
  float factor = *dloss * (scale ? *scale : 1.0f);
  int64_t first = (int64_t(blockIdx.x) * kThreads * kUnroll + threadIdx.x) * N;
  Pack<In, N> packs[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    int64_t i = first + int64_t(u) * kThreads * N;
    if (i + N <= n) packs[u] = load_stream<In, N>(in + i);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    int64_t i = first + int64_t(u) * kThreads * N;
    if (i + N <= n) {
      Pack<Out, N> r;
#pragma unroll
      for (int j = 0; j < N; ++j) r.set(j, linear_cross_entropy_finished(packs[u][j], factor));
      store(out + i, r);
    } else {
      for (int64_t t = i; t < n && t < i + N; ++t) out[t] = narrow<Out>(linear_cross_entropy_finished(widen(in[t]), factor));
    }
  }
}

template <class T>
__global__ void ones_kernel(T* out, int64_t n) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = narrow<T>(1.0f);
}

}  // namespace

void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a) {
  constexpr int kPack = 8;
  int64_t n = a.in.rows * a.in.cols;
  dispatch_float(kOp, "gradient", a.in.dtype, [&](auto ti) {
    using In = typename DeviceType<typename decltype(ti)::type>::type;
    dispatch_float(kOp, "result", a.out.dtype, [&](auto to) {
      using Out = typename DeviceType<typename decltype(to)::type>::type;
      // Both are fresh allocations: 16-byte aligned.
      launch(kOp, ctx, finish_kernel<In, Out, kPack>,
             {.blocks = ceil_div(n, int64_t(kThreads) * kPack * kUnroll), .threads = kThreads}, a.in.row<In>(0),
             a.dloss.as<float>(), a.scale.as<float>(), a.out.row<Out>(0), n);
    });
  });
}

void linear_cross_entropy_ones(Context& ctx, Vector out) {
  dispatch_float(kOp, "ones", out.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    launch(kOp, ctx, ones_kernel<T>, {.blocks = ceil_div(out.size, kThreads), .threads = kThreads}, out.as<T>(), out.size);
  });
}

}  // namespace tigon::cuda
