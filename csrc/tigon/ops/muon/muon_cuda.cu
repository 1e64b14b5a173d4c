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
constexpr int kThreads = 256, kChunk = 16384;

// w = f(x, y), which may update x; w is stored where it is there.
struct Entry {
  void* x;
  const void* y;
  void* w;
};
struct Streams {
  DType x, y, w;
  int64_t size;  // of a matrix
  int64_t matrices;
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

// Elements [begin, end) in vectors of N; the thread's sum of squares of w.
template <int N, class F>
__device__ __forceinline__ float walk(const Entry& e, const Streams& s, const F& f, int64_t begin,
                                      int64_t end) {
  float squares = 0.0f;
#pragma unroll 1
  for (int64_t i = begin + int64_t(threadIdx.x) * N; i < end; i += kThreads * N) {
    float x[N], y[N], w[N];
    load_as<N>(e.x, s.x, i, x);
    load_as<N>(e.y, s.y, i, y);
#pragma unroll
    for (int k = 0; k < N; ++k) w[k] = f(x[k], y[k]), squares = fma(w[k], w[k], squares);
    store_as<N>(e.x, s.x, i, x);
    if (e.w != nullptr) store_as<N>(e.w, s.w, i, w);
  }
  return squares;
}

template <class Pass, size_t Bytes>
__global__ void __launch_bounds__(kThreads)
    muon_kernel(const unsigned char* table, const Streams s, const Pass pass, double* squares,
                const __grid_constant__ TableBlock<Bytes> block) {
  constexpr int N = 8;
  const int64_t chunks = muon_chunks(s.size), matrix = blockIdx.x / chunks;
  const Entry e = reinterpret_cast<const Entry*>(table != nullptr ? table : block.bytes)[matrix / s.matrices];
  const int64_t first = blockIdx.x % chunks * kChunk, begin = matrix % s.matrices * s.size + first,
                end = begin + min(int64_t(kChunk), s.size - first);
  auto misaligned = [&](const void* p, DType t) {
    return (reinterpret_cast<uintptr_t>(p) + begin * size_of(t)) % 16 != 0;
  };
  const auto f = pass.bind();
  int64_t vectors = begin;  // their end
  if (!misaligned(e.x, s.x) && !misaligned(e.y, s.y) && !(e.w != nullptr && misaligned(e.w, s.w)))
    vectors += (end - begin) / N * N;
  double total[1] = {double(walk<N>(e, s, f, begin, vectors))};
  total[0] += double(walk<1>(e, s, f, vectors, end));
  if (squares == nullptr) return;
  __shared__ double slots[kThreads / 32];
  sum_block<kThreads>(total, slots);
  if (threadIdx.x == 0) squares[blockIdx.x] = total[0];
}

struct Momentum {
  float weight, momentum;
  bool nesterov;
  __device__ const Momentum& bind() const { return *this; }
  __device__ float operator()(float& m, float g) const {
    return muon_direction(m, g, weight, momentum, nesterov);
  }
};
struct Update {
  const float* lr_on_device;
  double lr, ratio, weight_decay;
  __device__ auto bind() const {
    const double now = lr_on_device != nullptr ? double(*lr_on_device) : lr;
    const auto decay = float(-now * weight_decay), rate = float(-now * ratio);
    return [=](float& p, float u) { return muon_step(p, u, decay, rate); };
  }
};

// entry(i): the i-th of the table.
template <class Pass, class EntryOf>
void run(Context& ctx, size_t tensors, const Streams& s, const Pass& pass, double* squares,
         const EntryOf& entry) {
  const int64_t chunks = int64_t(tensors) * s.matrices * muon_chunks(s.size);
  TIGON_CHECK(kOp, chunks <= INT32_MAX, "tensors must have fewer than 2^45 elements in all");
  TableWriter table(kOp, ctx, tensors * sizeof(Entry));
  for (size_t i = 0; i < tensors; ++i) table.append(entry(i));
  table.finish([&](const unsigned char* at, const auto& block) {
    launch(kOp, ctx, muon_kernel<Pass, sizeof(block)>, {.blocks = chunks, .threads = kThreads}, at, s, pass,
           squares, block);
  });
}

}  // namespace

void muon_momentum(Context& ctx, const MuonMomentum& a) {
  const int64_t size = a.grads[0].size, bytes = size * int64_t(size_of(a.updates.dtype));
  const Streams s{a.momenta[0].dtype, a.grads[0].dtype, a.updates.dtype, size / a.matrices, a.matrices};
  const Momentum pass{float(1.0 - a.momentum), float(a.momentum), a.nesterov};
  run(ctx, a.grads.size(), s, pass, a.squares.as<double>(), [&](size_t i) {
    return Entry{a.momenta[i].data, a.grads[i].data, a.updates.as<char>() + int64_t(i) * bytes};
  });
}

void muon_update(Context& ctx, const MuonUpdate& a) {
  const Streams s{a.params[0].dtype, a.updates[0].dtype, DType::f32, a.params[0].size, 1};
  run(ctx, a.params.size(), s, Update{a.lr_on_device, a.lr, a.ratio, a.weight_decay}, nullptr,
      [&](size_t i) { return Entry{a.params[i].data, a.updates[i].data, nullptr}; });
}

}  // namespace tigon::cuda
