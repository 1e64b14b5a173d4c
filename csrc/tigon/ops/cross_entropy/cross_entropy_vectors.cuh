// The two passes over a vector of a row with any options: statistics, gradient.
#pragma once

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/ops/cross_entropy/cross_entropy_params.cuh"

namespace tigon::cuda {
namespace {

template <class T>
using Params = CrossEntropyParams<T>;

// Statistics of a part of a row: maximum; sum of e^(z - m) without the label's column, which is
// added at the end so that p - 1 and log p are accurate where the label has nearly all probability;
// with General also sums of w (reference - z), w, and e^(z - m) (z - m) without the label's column.
struct Sums {
  float m, s, smoothing_sum, weight, entropy_sum;
};
__device__ __forceinline__ Sums identity() { return {-INFINITY, 0.0f, 0.0f, 0.0f, 0.0f}; }

template <bool General>
__device__ __forceinline__ void rescale(Sums& a, float m) {  // m > a.m
  float d = a.m - m, f = exp2_approx(d * kLog2e);
  if constexpr (General) a.entropy_sum = f * fma(fmaxf(d, -1e30f), a.s, a.entropy_sum);
  a.s *= f;
  a.m = m;
}
template <bool General>
__device__ __forceinline__ Sums combine(Sums a, Sums b) {
  float m = fmaxf(a.m, b.m);
  if (a.m != m) rescale<General>(a, m);
  if (b.m != m) rescale<General>(b, m);
  a.s += b.s;
  if constexpr (General)
    a.smoothing_sum += b.smoothing_sum, a.weight += b.weight, a.entropy_sum += b.entropy_sum;
  return a;
}

template <bool General, class T>
__device__ __forceinline__ void z_of_vec(const Params<T>& p, const AlignedRow<const T>& row, int k,
                                         const uint4& words, float (&z)[AlignedRow<T>::N],
                                         float* slopes = nullptr) {
  constexpr int N = AlignedRow<T>::N;
  unpack<T>(words, z);
  if constexpr (General) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int c = row.column(k) + j;
      z[j] = row.has(c) ? z_of(p, z[j], c, slopes ? slopes + j : nullptr) : -INFINITY;
    }
  }
}

__device__ __forceinline__ float weight_at(const float* class_weight, int c) {
  return class_weight != nullptr ? __ldg(class_weight + c) : 1.0f;
}

// First pass over a vector. `target`: the label's column, or -1; `reference`: of smoothing_sum.
template <bool General, class T>
__device__ __forceinline__ void accumulate(const Params<T>& p, const AlignedRow<const T>& row, int k,
                                           const uint4& words, int target, float reference, Sums& a) {
  constexpr int N = AlignedRow<T>::N;
  float z[N], e[N];
  z_of_vec<General>(p, row, k, words, z);
  float top = z[0];
#pragma unroll
  for (int j = 1; j < N; ++j) top = fmaxf(top, z[j]);
  if (top > a.m) rescale<General>(a, top);
  float m = a.m == -INFINITY ? 0.0f : a.m;  // -inf alone adds nothing; NaN propagates
#pragma unroll
  for (int j = 0; j < N; ++j) e[j] = exp2_approx((z[j] - m) * kLog2e);
  if (int at = target - row.column(k); unsigned(at) < unsigned(N) && target >= 0) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (at == j) e[j] = 0.0f;
  }
  if constexpr (General) {
    if (p.entropy != nullptr || p.entropy_scale != nullptr)
#pragma unroll
      for (int j = 0; j < N; ++j) a.entropy_sum = fma(e[j], fmaxf(z[j] - m, -1e30f), a.entropy_sum);
    if (p.label_smoothing > 0.0f) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        int c = row.column(k) + j;
        if (!row.has(c)) continue;
        float w = weight_at(p.class_weight, c);
        a.smoothing_sum = fma(w, reference - z[j], a.smoothing_sum);
        a.weight += w;
      }
    }
  }
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) e[j] += e[j + step];
  a.s += e[0];
}

// What the second pass needs: the gradient is
//   factor * slope * (e * share - smoothing_push * w)                   in other columns,
//   factor * slope * (e * rest_share - others * target_share - smoothing_push * w)  in the label's,
//   plus slope * e * (entropy_slope * (z - m) + entropy_bias) for the entropy.
struct RowGradient {
  float m, share, smoothing_push, factor;
  float others, target_share, rest_share;
  float entropy_slope, entropy_bias;
  int target;  // column, or -1
};

// Second pass over a vector: stores its gradient, by elements where the offsets differ.
template <bool General, class T, class D>
__device__ __forceinline__ void write_gradient(const Params<T>& p, const AlignedRow<const T>& row,
                                               const AlignedRow<D>& out, int k, const uint4& words,
                                               const RowGradient& g) {
  constexpr int N = AlignedRow<T>::N;
  float z[N], slopes[N];
#pragma unroll
  for (int j = 0; j < N; ++j) slopes[j] = 1.0f;
  z_of_vec<General>(p, row, k, words, z, slopes);
  int first = row.column(k), at = g.target - first;
  Vec<D, N> r;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float e = exp2_approx((z[j] - g.m) * kLog2e), v, target_push = 0.0f;
    if constexpr (General) {
      float smoothing_push = g.smoothing_push;
      if (smoothing_push != 0.0f && p.class_weight != nullptr)
        smoothing_push *= row.has(first + j) ? __ldg(p.class_weight + first + j) : 0.0f;
      v = cross_entropy_dz(e, g.share, smoothing_push);
      target_push = smoothing_push;
    } else {
      v = e * (g.share * g.factor);
    }
    if (at == j)
      // p - 1 is minus the share of the other columns; it is rounded to storage once.
      v = fma(-g.others, g.target_share, cross_entropy_dz(e, g.rest_share, target_push)) *
          (g.factor * slopes[j]);
    else if constexpr (General)
      v *= g.factor * slopes[j];
    if constexpr (General)  // below -200 e is 0: classes at -inf add nothing
      if (p.entropy_scale != nullptr)
        v += slopes[j] * e * fma(g.entropy_slope, fmaxf(z[j] - g.m, -200.0f), g.entropy_bias);
    r.set(j, v);
  }
  D* to = out.base + int64_t(out.lead) + first;
  if (row.is_full(k) && reinterpret_cast<uintptr_t>(to) % sizeof(r) == 0) {
    store(to, r);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (row.has(first + j)) to[j] = r.v[j];
  }
}

// Writes zeros to vectors [first, end) of a row.
template <class T>
__device__ __forceinline__ void clear(const AlignedRow<T>& out, int first, int end) {
  constexpr int N = AlignedRow<T>::N;
  for (int k = first + threadIdx.x; k < end; k += blockDim.x) {
    if (out.is_full(k)) {
      *reinterpret_cast<uint4*>(out.base + int64_t(k) * N) = make_uint4(0, 0, 0, 0);
    } else {
      for (int j = 0; j < N; ++j)
        if (out.has(out.column(k) + j)) out.base[int64_t(k) * N + j] = narrow<T>(0.0f);
    }
  }
}

}  // namespace
}  // namespace tigon::cuda
