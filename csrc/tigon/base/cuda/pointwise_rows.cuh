// Runs a pointwise op (elementwise.cuh) over rows of bf16 whose results are wanted in float8 too. A CTA has a
// row: it computes the results, keeps them in shared memory until the largest element is known, and then
// writes their bytes. The bytes are those of fp8_quantize, with factors by column.
#pragma once

#include "tigon/base/cuda/e4m3.cuh"
#include "tigon/base/cuda/elementwise.cuh"

namespace tigon::cuda {

template <class F>
struct PointwiseRows {
  Pointwise<F> call;
  RowBytes bytes[F::kOut];
};

namespace pointwise_detail {

constexpr int kRowThreads = 512, kRowVecs = 2;  // vectors of each input that a thread has in flight

template <class F>
struct RowsParams {
  F f;
  const __nv_bfloat16* in[F::kIn];
  int64_t in_stride[F::kIn];
  __nv_bfloat16* out[F::kOut];
  int64_t out_stride[F::kOut];
  ByteRows bytes[F::kOut];
  int cols;
};

template <class F>
__global__ __launch_bounds__(kRowThreads, 2) void rows_kernel(const __grid_constant__ RowsParams<F> p) {
  constexpr int N = 8;
  using Values = Vec<__nv_bfloat16, N>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint32_t slots[F::kOut][32];
  auto held = [&](int o, int c) -> Values& {
    return reinterpret_cast<Values*>(shared)[(o * p.cols + c) / N];
  };
  const int64_t r = blockIdx.x;
  const int step = int(blockDim.x) * N;
  uint32_t largest[F::kOut] = {};
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int first = int(threadIdx.x) * N; first < p.cols; first += kRowVecs * step) {
    Values x[kRowVecs][F::kIn];
#pragma unroll
    for (int h = 0; h < kRowVecs; ++h)
#pragma unroll
      for (int i = 0; i < F::kIn; ++i)
        x[h][i] = load_predicated<__nv_bfloat16, N>(first + h * step < p.cols,
                                                    p.in[i] + r * p.in_stride[i] + first + h * step);
#pragma unroll
    for (int h = 0; h < kRowVecs; ++h) {
      const int c = first + h * step;
      if (c >= p.cols) break;
      Values y[F::kOut];
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        float out[2][F::kOut];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float in[F::kIn];
#pragma unroll
          for (int i = 0; i < F::kIn; ++i) in[i] = x[h][i][n + k];
          p.f(in, out[k]);
        }
#pragma unroll
        for (int o = 0; o < F::kOut; ++o)
          reinterpret_cast<__nv_bfloat162*>(y[o].v)[n / 2] = __floats2bfloat162_rn(out[0][o], out[1][o]);
      }
#pragma unroll
      for (int o = 0; o < F::kOut; ++o) {
        store(p.out[o] + r * p.out_stride[o] + c, y[o]);
        const bool has_factors = p.bytes[o].factors != nullptr;
        const Vec<float, N> f = load_predicated<float, N>(has_factors, p.bytes[o].factors + c);
        float v[N];
#pragma unroll
        for (int n = 0; n < N; ++n) v[n] = has_factors ? y[o][n] * f.v[n] : y[o][n];
        // Powers of two keep the digits of a bfloat16, and its exponents are those of fp32.
        y[o].set(v);
        raise_with_infinity(largest[o], y[o]);
        held(o, c) = y[o];
      }
    }
  }
  bool infinite[F::kOut];
  float inverse[F::kOut];
#pragma unroll
  for (int o = 0; o < F::kOut; ++o) {
    infinite[o] = is_infinite(largest[o]);
    if (infinite[o]) {
      largest[o] = 0;
      for (int c = int(threadIdx.x) * N; c < p.cols; c += step)
        for (int n = 0; n < N; ++n) raise_e4m3(largest[o], held(o, c)[n]);
    }
    inverse[o] = finish_e4m3(p.bytes[o], r, largest[o], slots[o]);
  }
#pragma unroll
  for (int o = 0; o < F::kOut; ++o)
    for (int c = int(threadIdx.x) * N; c < p.cols; c += step)
      store_e4m3(p.bytes[o].q + r * p.bytes[o].stride + c, held(o, c), inverse[o], infinite[o]);
}

}  // namespace pointwise_detail

// Returns false, and has done nothing, if the rows are none of aligned vectors of bf16, or longer than a CTA
// holds.
template <class F>
bool pointwise_rows(const char* op, Context& ctx, const PointwiseRows<F>& a) {
  using namespace pointwise_detail;
  const Matrix& x = a.call.in[0];
  const int64_t vecs = x.cols / 8, shared = F::kOut * x.cols * 2;
  RowsParams<F> p{.f = a.call.f, .cols = int(x.cols)};
  bool fits = x.dtype == DType::bf16 && rows_vectorizable(a.call) &&
              shared + int64_t(sizeof(uint32_t)) * 32 * F::kOut <= device_facts().shared_per_block;
  for (int i = 0; i < F::kIn; ++i)
    p.in[i] = a.call.in[i].template row<__nv_bfloat16>(0), p.in_stride[i] = a.call.in[i].stride;
  for (int o = 0; o < F::kOut; ++o) {
    p.out[o] = a.call.out[o].template row<__nv_bfloat16>(0), p.out_stride[o] = a.call.out[o].stride;
    p.bytes[o] = byte_rows(a.bytes[o]);
    fits = fits && p.bytes[o].takes_vectors() && reinterpret_cast<uintptr_t>(p.bytes[o].factors) % 16 == 0;
  }
  if (!fits) return false;
  const int threads = int(std::clamp<int64_t>(ceil_div(vecs, 2 * kRowVecs * 32) * 32, 32, kRowThreads));
  static OccupancyCache occupancy;
  if (occupancy.max_active(op, rows_kernel<F>, 1, threads, size_t(shared)) == 0) return false;
  launch(op, ctx, rows_kernel<F>,
         {.blocks = x.rows, .threads = threads, .shared = size_t(shared), .pdl = true}, p);
  return *a.bytes[0].written = true;
}

}  // namespace tigon::cuda
