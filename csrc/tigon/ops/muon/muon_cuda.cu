// In the CUDA backend of Muon's passes over elements, each CTA has one part of one matrix.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/tensor_list.cuh"
#include "tigon/base/cuda/values.cuh"
#include "tigon/ops/muon/muon_pass.h"

namespace tigon::cuda {
namespace {

using namespace muon_detail;
#include "tigon/ops/muon/muon_math.inc"

constexpr const char* kOp = "muon";
constexpr int kThreads = 256;

// Processes elements [begin, end) in vectors of N. Returns the thread's sum of squares of directions.
template <int N, class F>
__device__ __forceinline__ double walk(const Entry& e, bool updates, float factor, const F& f, int64_t begin,
                                       int64_t end) {
  const Values xs{e.x.data, e.x.dtype}, ys{e.y.data, e.y.dtype}, ws{e.w.data, e.w.dtype};
  float squares = 0.0f;
#pragma unroll 1
  for (int64_t i = begin + int64_t(threadIdx.x) * N; i < end; i += kThreads * N) {
    float x[N], y[N], u[N];
    xs.load(i, x), ys.load(i, y);
    if (updates) {
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] = f.next(x[k], y[k]);
      xs.store(i, x), xs.round(x);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) u[k] = f.direction(x[k], y[k]);
    ys.round(u);
#pragma unroll
    for (int k = 0; k < N; ++k) squares = fma(u[k], u[k], squares), u[k] = mul(u[k], factor);
    if (ws.data != nullptr) ws.store(i, u);
  }
  return double(squares);
}

template <class F>
__global__ void __launch_bounds__(kThreads)
    muon_kernel(const unsigned char* table, const Pass pass, F f, const __grid_constant__ SmallTable block) {
  constexpr int N = 8;
  const Part part(pass, blockIdx.x);
  const Entry e = reinterpret_cast<const Entry*>(table != nullptr ? table : block.bytes)[part.tensor];
  auto is_aligned = [&](const Vector& v) {
    return v.data == nullptr ||
           (reinterpret_cast<uintptr_t>(v.data) + part.begin * size_of(v.dtype)) % 16 == 0;
  };
  const bool aligned = is_aligned(e.x) && is_aligned(e.y) && is_aligned(e.w);
  const float factor = pass.factors != nullptr ? pass.factors[part.matrix] : 1.0f;
  const int64_t end = part.begin + part.size, middle = aligned ? end - part.size % N : part.begin;
  f.bind();
  double sum[1] = {walk<N>(e, pass.updates, factor, f, part.begin, middle) +
                   walk<1>(e, pass.updates, factor, f, middle, end)};
  if (pass.squares == nullptr) return;
  __shared__ double slots[kThreads / 32];
  sum_block<kThreads>(sum, slots);
  if (threadIdx.x == 0) pass.squares[blockIdx.x] = sum[0];
}

template <class F, class Args>
void run(Context& ctx, const Args& a) {
  const Pass pass = pass_of(a);
  TIGON_CHECK(kOp, pass.parts() <= INT32_MAX, "tensors must have fewer than 2^45 elements in all");
  TableWriter table(kOp, ctx, size_t(pass.tensors) * sizeof(Entry));
  for (int64_t i = 0; i < pass.tensors; ++i) table.append(entry_at(a, i));
  table.finish([&](const unsigned char* at, const SmallTable& block) {
    launch(kOp, ctx, muon_kernel<F>, {.blocks = pass.parts(), .threads = kThreads}, at, pass, F(a), block);
  });
}

}  // namespace

void muon_momentum(Context& ctx, const MuonMomentum& a) { run<Momentum>(ctx, a); }
void muon_update(Context& ctx, const MuonUpdate& a) { run<Update>(ctx, a); }

}  // namespace tigon::cuda
