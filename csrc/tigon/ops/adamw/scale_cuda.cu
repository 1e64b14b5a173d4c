// CUDA backend of scale: a CTA scales one chunk of one tensor of the list.
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/tensor_list.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/adamw/scale.h"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "scale";
constexpr int kThreads = 256, kVecsInFlight = 4;
constexpr int64_t kChunk = 16384;

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

template <size_t Bytes>
__global__ void __launch_bounds__(kThreads, 6)
    scale_kernel(const unsigned char* table, int count, const float* by,
                 const __grid_constant__ TableBlock<Bytes> block) {
  const float factor = *by;
  if (factor == 1.0f) return;
  const auto* entries = reinterpret_cast<const VectorEntry*>(table != nullptr ? table : block.bytes);
  const Vector x = vector_chunk(entries, count, kChunk);
  const int n = int(x.size);
  switch (x.dtype) {
    case DType::bf16: return scale_chunk(static_cast<__nv_bfloat16*>(x.data), n, factor);
    case DType::f16: return scale_chunk(static_cast<__half*>(x.data), n, factor);
    default: return scale_chunk(static_cast<float*>(x.data), n, factor);
  }
}

}  // namespace

void scale(Context& ctx, const Scale& a) {
  const size_t n = a.tensors.size();
  TableWriter table(kOp, ctx, n * sizeof(VectorEntry));
  const int64_t chunks = append_vectors(kOp, "tensors", table, a.tensors, kChunk);
  table.finish([&](const unsigned char* at, const auto& block) {
    launch(kOp, ctx, scale_kernel<sizeof(block)>, {.blocks = chunks, .threads = kThreads}, at, int(n),
           a.factor.as<float>(), block);
  });
}

}  // namespace tigon::cuda
