// CUDA backend of Muon's passes over elements: a CTA has one chunk of one matrix.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/tensor_list.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/muon/muon.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/muon/muon_math.inc"

constexpr const char* kOp = "muon";
constexpr int kThreads = 256;

// w = factor * f(x, y), which may update x. Where w is absent it is not stored.
struct Entry {
  void* x;
  const void* y;
  void* w;
};
struct Streams {
  DType x, y, w;
  bool updates;      // x
  int64_t size;      // of a matrix
  int64_t matrices;  // of a tensor
  const float* factors;
  double* squares;  // of f; null: not wanted
};

template <int N>
__device__ __forceinline__ void load_as(const void* p, DType t, int64_t i, float (&x)[N]) {
  auto read = [&](auto* q) {
    const auto v = load_stream<std::remove_cvref_t<decltype(*q)>, N>(q + i);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = v[k];
  };
  if (t == DType::bf16) return read(static_cast<const __nv_bfloat16*>(p));
  if (t == DType::f16) return read(static_cast<const __half*>(p));
  read(static_cast<const float*>(p));
}
template <int N>
__device__ __forceinline__ void store_as(void* p, DType t, int64_t i, const float (&x)[N]) {
  auto write = [&](auto* q) {
    Vec<std::remove_reference_t<decltype(*q)>, N> v;
    v.set(x);
    store(q + i, v);
  };
  if (t == DType::bf16) return write(static_cast<__nv_bfloat16*>(p));
  if (t == DType::f16) return write(static_cast<__half*>(p));
  write(static_cast<float*>(p));
}

// Elements [begin, end) in vectors of N; the thread's sum of squares of f.
template <int N, class F>
__device__ __forceinline__ double walk(const Entry& e, const Streams& s, float factor, const F& f,
                                       int64_t begin, int64_t end) {
  float squares = 0.0f;
#pragma unroll 1
  for (int64_t i = begin + int64_t(threadIdx.x) * N; i < end; i += kThreads * N) {
    float x[N], y[N], w[N];
    load_as<N>(e.x, s.x, i, x);
    load_as<N>(e.y, s.y, i, y);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float u = f(x[k], y[k]);
      squares = fma(u, u, squares), w[k] = mul(u, factor);
    }
    if (s.updates) store_as<N>(e.x, s.x, i, x);
    if (e.w != nullptr) store_as<N>(e.w, s.w, i, w);
  }
  return double(squares);
}

// pass(): f.
template <class Pass, size_t Bytes>
__global__ void __launch_bounds__(kThreads)
    muon_kernel(const unsigned char* table, const Streams s, const Pass pass,
                const __grid_constant__ TableBlock<Bytes> block) {
  constexpr int N = 8;
  const int64_t chunks = muon_chunks(s.size), matrix = blockIdx.x / chunks;
  const Entry e = reinterpret_cast<const Entry*>(table != nullptr ? table : block.bytes)[matrix / s.matrices];
  const int64_t first = blockIdx.x % chunks * kMuonChunk, begin = matrix % s.matrices * s.size + first,
                end = begin + min(kMuonChunk, s.size - first);
  auto is_aligned = [&](const void* p, DType t) {
    return p == nullptr || (reinterpret_cast<uintptr_t>(p) + begin * size_of(t)) % 16 == 0;
  };
  const bool aligned = is_aligned(e.x, s.x) && is_aligned(e.y, s.y) && is_aligned(e.w, s.w);
  const int64_t middle = aligned ? begin + (end - begin) / N * N : begin;
  const float factor = s.factors != nullptr ? s.factors[matrix] : 1.0f;
  const auto f = pass();
  double sum[1] = {walk<N>(e, s, factor, f, begin, middle) + walk<1>(e, s, factor, f, middle, end)};
  if (s.squares == nullptr) return;
  __shared__ double slots[kThreads / 32];
  sum_block<kThreads>(sum, slots);
  if (threadIdx.x == 0) s.squares[blockIdx.x] = sum[0];
}

struct MomentumPass {
  Momentum f;
  __device__ Momentum operator()() const { return f; }
};
struct UpdatePass {
  const float* lr_on_device;
  double lr, ratio, weight_decay;
  __device__ Update operator()() const {
    return {lr_on_device != nullptr ? double(*lr_on_device) : lr, ratio, weight_decay};
  }
};

// entry(i): the i-th of the table.
template <class Pass, class EntryOf>
void run(Context& ctx, size_t tensors, const Streams& s, const Pass& pass, const EntryOf& entry) {
  const int64_t chunks = int64_t(tensors) * s.matrices * muon_chunks(s.size);
  TIGON_CHECK(kOp, chunks <= INT32_MAX, "tensors must have fewer than 2^45 elements in all");
  TableWriter table(kOp, ctx, tensors * sizeof(Entry));
  for (size_t i = 0; i < tensors; ++i) table.append(entry(i));
  table.finish([&](const unsigned char* at, const auto& block) {
    launch(kOp, ctx, muon_kernel<Pass, sizeof(block)>, {.blocks = chunks, .threads = kThreads}, at, s, pass,
           block);
  });
}

}  // namespace

void muon_momentum(Context& ctx, const MuonMomentum& a) {
  const int64_t size = a.grads[0].size, bytes = size * int64_t(size_of(a.updates.dtype));
  const Streams s{.x = a.momenta[0].dtype,
                  .y = a.grads[0].dtype,
                  .w = a.updates.dtype,
                  .updates = a.adds,
                  .size = size / a.matrices,
                  .matrices = a.matrices,
                  .factors = a.factors.as<float>(),
                  .squares = a.squares.as<double>()};
  run(ctx, a.grads.size(), s, MomentumPass{Momentum(a)}, [&](size_t i) {
    return Entry{a.momenta[i].data, a.grads[i].data,
                 a.updates ? a.updates.as<char>() + int64_t(i) * bytes : nullptr};
  });
}

void muon_update(Context& ctx, const MuonUpdate& a) {
  const Streams s{.x = a.params[0].dtype,
                  .y = a.updates[0].dtype,
                  .updates = true,
                  .size = a.params[0].size,
                  .matrices = 1};
  run(ctx, a.params.size(), s, UpdatePass{a.lr_on_device, a.lr, a.ratio, a.weight_decay},
      [&](size_t i) { return Entry{a.params[i].data, a.updates[i].data, nullptr}; });
}

}  // namespace tigon::cuda
