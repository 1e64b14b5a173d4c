// Defines the norm of qk_norm_rope, and its CUDA kernels for rows of any length and alignment.
#pragma once

#include <type_traits>

#include "tigon/ops/rope/qk_norm_rope.h"
#include "tigon/ops/rope/rope_heads.cuh"

namespace tigon::cuda::rope_kernels {

#include "tigon/ops/rope/qk_norm_rope_math.inc"

constexpr int kWarps = kThreads / 32;

struct Norm {
  // Null means absent.
  const void *q_weight, *k_weight;
  bool f32_weight, round_h, round_n;
  float eps, offset, inv_cols;

  Norm(const QkNorm& a, DType x, int64_t cols)
      : q_weight(a.q_weight.data),
        k_weight(a.k_weight.data),
        f32_weight(a.any_weight() && a.any_weight().dtype == DType::f32),
        round_h(a.rounding == Rounding::llama),
        round_n(a.result(x) == x),
        eps(a.eps),
        offset(a.offset),
        inv_cols(1.0f / float(cols)) {}

  // True if n = h * weight of two 16-bit numbers is computed in 16 bits: the multiplication rounds once, so
  // 16-bit arithmetic gives bitwise equal results. This serves bf16; fp16 is rare.
  bool packed() const { return round_h && round_n && !f32_weight && offset == 0.0f; }

  __device__ __forceinline__ const void* weight(bool second) const { return second ? k_weight : q_weight; }

  // Returns the weights of N columns in their own type; ones if there are no weights.
  template <class X, int N>
  __device__ __forceinline__ Vec<X, N> weight_vec(bool second, int column) const {
    const X* from = static_cast<const X*>(weight(second));
    Vec<X, N> r;
    float ones[2] = {1.0f, 1.0f};
    Vec<X, 2> one;
    one.set(ones);
    const uint32_t word = reinterpret_cast<const uint32_t&>(one);
    reinterpret_cast<uint4&>(r) = ld_global_predicated(from != nullptr, from + column, word);
    return r;
  }

  // Returns offset + weight of N columns; 1 without weights, which changes nothing.
  template <class X, int N>
  __device__ __forceinline__ void factors(bool second, int column, float* f) const {
    const void* from = weight(second);
    if (from == nullptr) {
#pragma unroll
      for (int n = 0; n < N; ++n) f[n] = 1.0f;
    } else if (f32_weight) {
      auto vec = load<float, N>(static_cast<const float*>(from) + column);
#pragma unroll
      for (int n = 0; n < N; ++n) f[n] = offset + vec[n];
    } else {
      auto vec = load<X, N>(static_cast<const X*>(from) + column);
#pragma unroll
      for (int n = 0; n < N; ++n) f[n] = offset + vec[n];
    }
  }

  template <class X>
  __device__ __forceinline__ float rstd(float squares) const {
    const float variance = fma(squares, inv_cols, eps);
    return sizeof(X) == 2 ? rsqrtf(variance) : 1.0f / sqrtf(variance);
  }

  // Computes the columns of a normalized row from h.
  template <class X, int N>
  __device__ __forceinline__ void normalise(float (&h)[N], const float (&f)[N]) const {
    if (round_h) round_all<X>(h);
#pragma unroll
    for (int n = 0; n < N; ++n) h[n] *= f[n];
    if (round_n) round_all<X>(h);
  }
};

template <int N>
__device__ __forceinline__ Vec<__nv_bfloat16, N> product(Vec<__nv_bfloat16, N> a,
                                                         const Vec<__nv_bfloat16, N>& b) {
  using Two = __nv_bfloat162;
#pragma unroll
  for (int n = 0; n < N / 2; ++n)
    reinterpret_cast<Two*>(a.v)[n] =
        __hmul2_rn(reinterpret_cast<const Two*>(a.v)[n], reinterpret_cast<const Two*>(b.v)[n]);
  return a;
}

// All-reduces R sums over the lanes of a row.
template <int R>
__device__ __forceinline__ void sum_row(float (&v)[R], int width) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1)
    if (step < width)
#pragma unroll
      for (int i = 0; i < R; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], step);
}

// Returns the sum of a[n] * b[n]: each vector by itself, then both.
template <int N>
__device__ __forceinline__ float dot(const float (&a)[N], const float (&b)[N]) {
  float sums[2] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) sums[n / (N / 2)] = fma(a[n], b[n], sums[n / (N / 2)]);
  return sums[0] + sums[1];
}

struct QkNormRopeForward {
  HeadTensors q, k;
  Units units;
  Tables tables;
  Shape shape;
  Norm norm;
};

// Holds x and its gradient. HeadTensors holds dy and dx.
struct Input {
  const void* x;
  int64_t batch, head, token;

  explicit Input(const RopeHeads& x)
      : x(x.data), batch(x.batch_stride), head(x.head_stride), token(x.token_stride) {}
  template <class X>
  __device__ __forceinline__ const X* at(const Unit& u) const {
    return static_cast<const X*>(x) + u.batch * batch + u.token * token + int(u.group) * head;
  }
};

struct QkNormRopeBackward {
  HeadTensors q, k;
  Input q_x, k_x;
  Units q_units, k_units;
  Tables tables;
  Shape shape;
  Norm norm;
  // [CTAs, 2, cols]; may be null.
  float* partials;
};

// Writes the CTA's row of the partials: the sums of its warps, in order.
__device__ __forceinline__ void reduce_block_sums(const QkNormRopeBackward& p, int second,
                                                  const float* sums) {
  const int cols = p.shape.cols;
  __syncthreads();
  if (p.partials != nullptr) {
    for (int i = threadIdx.x; i < cols; i += kThreads) {
      float sum = sums[i];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += sums[w * cols + i];
      p.partials[(int64_t(blockIdx.x) * 2 + second) * cols + i] = p.norm.weight(second) ? sum : 0.0f;
    }
  }
  __syncthreads();
}

// These kernels take rows of any length up to the limit, of any alignment: each row has a warp, and goes
// through shared memory.

// Calls pair(first column, second column, c, s) for a lane's pairs of a row, with cos and sin as
// rotate() takes them, then rest(column) for columns that are not rotated.
template <class X, class PairFn, class RestFn>
__device__ __forceinline__ void for_each_pair(const Tables& tables, const Shape& shape, const Unit& unit,
                                              PairFn&& pair, RestFn&& rest) {
  const int half = shape.rotated / 2, lane = int(threadIdx.x) % 32;
  for (int i = lane; i < half; i += 32) {
    float c[2], s[2];
    tables.read<X, Pairs::halves, 1>(unit.batch, unit.token, tables.coord(i), c, s);
    const int first = shape.start + (tables.halves ? i : 2 * i);
    pair(first, first + (tables.halves ? half : 1), c, s);
  }
  for (int i = lane; i < shape.cols - shape.rotated; i += 32) rest(i < shape.start ? i : i + shape.rotated);
}

template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    forward_rows_kernel(const __grid_constant__ QkNormRopeForward p, uint64_t units) {
  extern __shared__ float sums[];
  griddepcontrol_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cols = p.shape.cols;
  const uint64_t index = uint64_t(blockIdx.x) * kWarps + warp;
  if (index >= units) return;
  Unit unit = p.units.at64(index);
  const HeadTensors& tensors = tensors_of(p, unit);
  const bool second = &tensors == &p.k;
  const X* x = x_of<X>(tensors, unit);
  Y* y = y_of<Y>(tensors, unit);
  float* n = sums + warp * cols;
  float squares[1] = {};
  for (int i = lane; i < cols; i += 32) squares[0] = fma(widen(x[i]), widen(x[i]), squares[0]);
  sum_row(squares, 32);
  const float rstd = p.norm.template rstd<X>(squares[0]);
  for (int i = lane; i < cols; i += 32) {
    float f[1], h[1] = {widen(x[i]) * rstd};
    p.norm.template factors<X, 1>(second, i, f);
    p.norm.template normalise<X>(h, f);
    n[i] = h[0];
  }
  __syncwarp();
  for_each_pair<X>(
      p.tables, p.shape, unit,
      [&](int first, int other, const float (&c)[2], const float (&s)[2]) {
        float v[2] = {n[first], n[other]};
        rotate<Pairs::halves, 1>(v, c, s);
        y[first] = narrow<Y>(v[0]), y[other] = narrow<Y>(v[1]);
      },
      [&](int column) { y[column] = narrow<Y>(n[column]); });
}

template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    backward_rows_kernel(const __grid_constant__ QkNormRopeBackward p, uint64_t q_units, uint64_t k_units) {
  // [2 kWarps, cols]: first gradients of the normalized rows, then dweight.
  extern __shared__ float sums[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, cols = p.shape.cols;
  float *g = sums + warp * cols, *dw = g + kWarps * cols;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int second = 0; second < 2; ++second) {
    const HeadTensors& tensors = second ? p.k : p.q;
    const Input& input = second ? p.k_x : p.q_x;
    const Units& units = second ? p.k_units : p.q_units;
    for (int i = lane; i < cols; i += 32) dw[i] = 0.0f;
    for (uint64_t row = uint64_t(blockIdx.x) * kWarps + warp; row < (second ? k_units : q_units);
         row += uint64_t(gridDim.x) * kWarps) {
      const Unit unit = units.at64(row);
      const X* x = input.template at<X>(unit);
      const Y* dy = x_of<Y>(tensors, unit);
      X* dx = y_of<X>(tensors, unit);
      for_each_pair<X>(
          p.tables, p.shape, unit,
          [&](int first, int other, const float (&c)[2], const float (&s)[2]) {
            float v[2] = {widen(dy[first]), widen(dy[other])};
            rotate<Pairs::halves, 1>(v, c, s);
            g[first] = v[0], g[other] = v[1];
          },
          [&](int column) { g[column] = widen(dy[column]); });
      __syncwarp();
      // Sums squares, and products with the gradient.
      float total[2] = {};
      for (int i = lane; i < cols; i += 32) {
        float f[1];
        p.norm.template factors<X, 1>(second, i, f);
        total[0] = fma(widen(x[i]), widen(x[i]), total[0]);
        total[1] = fma(g[i] * f[0], widen(x[i]), total[1]);
      }
      sum_row(total, 32);
      const float rstd = p.norm.template rstd<X>(total[0]), mean = total[1] * rstd * p.norm.inv_cols;
      for (int i = lane; i < cols; i += 32) {
        float h = widen(x[i]) * rstd, f[1];
        p.norm.template factors<X, 1>(second, i, f);
        dw[i] = fma(g[i], p.norm.round_h ? round_to<X>(h) : h, dw[i]);
        dx[i] = narrow<X>(qk_norm_dx(g[i] * f[0], h, mean, rstd));
      }
      __syncwarp();
    }
    reduce_block_sums(p, second, sums + kWarps * cols);
  }
}

}  // namespace tigon::cuda::rope_kernels
