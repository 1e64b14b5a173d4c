// This backward of the norm family handles rows of any length and alignment in two launches, over a formula B
// (norm_math.inc). The kernels that hold rows in registers are in norm_backward.cuh.
#pragma once

#include "tigon/base/cuda/norm_backward_row.cuh"

namespace tigon::cuda {

namespace norm_detail {

// Loads the inputs of N elements, all at once.
template <class B, class W, class Y, int N, class RowView>
__device__ __forceinline__ void load_rows(const NormBackward<B, W, Y>& p, const RowView& view, int64_t row,
                                          int64_t col_offset, int64_t c,
                                          Vec<typename B::Element, N> (&in)[B::kIn], Vec<Y, N>& dy) {
  auto in_row = [&](int k) { return p.in[k] + row * p.in_stride[k] + col_offset; };
  const Y* dy_row = p.dy + row * p.dy_stride + col_offset;
#pragma unroll
  for (int k = 0; k < B::kIn; ++k) in[k] = view.load(k == 0 || p.in[k], in_row(k), c);
  dy = view.load(true, dy_row, c);
}

// Rows that no register shape holds take two kernels: one for the gradients of rows (two passes), and one for
// the sums by column over chunks of rows.
template <class B, class W, class Y, int N>
__global__ __launch_bounds__(kLoopThreads, kLoopBlocks) void backward_looped_kernel(
    const __grid_constant__ NormBackward<B, W, Y> p) {
  using X = typename B::Element;
  constexpr int kMeans = B::kSubtractMean ? 2 : 1;
  __shared__ __align__(16) float slots[kMeans * 32];
  const BlockCoord coord(p.groups, 1);
  const int64_t row = row_of_group(p, coord.group, coord.first), column = column_of_group(p, coord.group),
                param_offset = int64_t(coord.group) * p.cols;
  const float rstd = p.rstd[statistics_of_group(p, coord.group, coord.first)];
  const float mean = B::kSubtractMean ? p.mean[statistics_of_group(p, coord.group, coord.first)] : 0.0f;
  const float offset = p.weight ? p.f.offset : 0.0f;
  auto out_row = [&](int k) { return p.out[k] + row * p.out_stride[k] + column; };
  const RowView<N, kLoopThreads, int64_t> view{p.cols};
  // Calls fn(element, inputs, dy, h, weight, g) for each element, then done(first column).
  auto for_each_vec = [&](auto&& fn, auto&& done) {
    for (int64_t c = threadIdx.x; view.has(c); c += kLoopThreads * N) {
      Vec<X, N> in[B::kIn];
      Vec<Y, N> dy;
      load_rows(p, view, row, column, c, in, dy);
      Vec<W, N> weight;
      if constexpr (kMakesWeights<B>) {
        float made[N];
        p.f.weights(coord.group, c, made, kLoopThreads);
        weight.set(made);
      } else {
        const W* vector = p.weight ? p.weight + param_offset : nullptr;
        weight = view.load_vector(vector, c);
        if (!vector) weight = fill_vec<W, N>(1.0f);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float x[B::kIn], w = offset + weight[j];
        element(in, j, x);
        float v = p.f.value(x), h = (B::kSubtractMean ? v - mean : v) * rstd;
        // The product is rounded once, so that the gradient of a row that equals its own mean is 0.
        fn(j, x, dy[j], h, w, __fmul_rn(p.f.upstream(dy[j], x), w));
      }
      done(c);
    }
  };
  float means[kMeans] = {};
  for_each_vec(
      [&](int, const float (&)[B::kIn], float, float h, float, float g) {
        means[0] = fma(g, h, means[0]);
        if constexpr (B::kSubtractMean) means[1] += g;
      },
      [](int64_t) {});
  reduce_row<Sum, kLoopThreads>(means, slots);
#pragma unroll
  for (int k = 0; k < kMeans; ++k) means[k] /= float(p.cols);
  float results[B::kOut][N];
  for_each_vec(
      [&](int j, const float (&x)[B::kIn], float dy, float h, float w, float g) {
        float out[B::kOut];
        if constexpr (B::kSubtractMean) g -= means[1];
        p.f.results(norm_gradient(g, h, means[0], rstd), dy, h, w, x, out);
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) results[k][j] = out[k];
      },
      [&](int64_t c) {
#pragma unroll
        for (int k = 0; k < B::kOut; ++k) {
          Vec<X, N> vec;
          vec.set(results[k]);
          if (p.out[k]) view.store(out_row(k), c, vec);
        }
      });
}

constexpr int kColumnThreads = 256;

template <class B, class W, class Y, int N>
__global__ __launch_bounds__(kColumnThreads,
                             4) void column_sums_kernel(const __grid_constant__ NormBackward<B, W, Y> p,
                                                        int64_t chunk, int64_t tiles) {
  using X = typename B::Element;
  const int64_t part = int64_t(blockIdx.x) / (tiles * p.groups),
                group = int64_t(blockIdx.x) / tiles % p.groups;
  const int64_t col_offset = group * p.cols, pitch = p.cols * p.groups, column = column_of_group(p, group);
  griddepcontrol_launch_dependents();
  const RowView<N, kColumnThreads, int64_t> view{p.cols};
  const int64_t c = int64_t(blockIdx.x) % tiles * (kColumnThreads * N) + threadIdx.x;
  if (!view.has(c)) return;
  const int64_t end = min((part + 1) * chunk, p.rows);
  float sums[B::kSums][N] = {};
#pragma unroll 1
  for (int64_t row = part * chunk; row < end; ++row) {
    Vec<X, N> in[B::kIn];
    Vec<Y, N> dy;
    load_rows(p, view, row_of_group(p, group, row), column, c, in, dy);
    const float rstd = p.rstd[statistics_of_group(p, group, row)];
    const float mean = B::kSubtractMean ? p.mean[statistics_of_group(p, group, row)] : 0.0f;
    float h[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[B::kIn];
      element(in, j, x);
      h[j] = (B::kSubtractMean ? p.f.value(x) - mean : p.f.value(x)) * rstd;
    }
    if (p.f.round_h) round_all<X>(h);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float x[B::kIn];
      element(in, j, x);
      float d = p.f.upstream(dy[j], x);
      sums[0][j] = fma(d, h[j], sums[0][j]);
      if constexpr (B::kSums > 1) sums[1][j] += d;
    }
  }
#pragma unroll
  for (int k = 0; k < B::kSums; ++k)
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (view.has(c, j))
        p.partials[(part * B::kSums + k) * pitch + col_offset + c + j * kColumnThreads] = sums[k][j];
}

}  // namespace norm_detail
}  // namespace tigon::cuda
