// The CUDA kernels of distillation share this: arguments, loads and stores, and the statistics of a row.
#pragma once

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/divergence/divergence_terms.cuh"

namespace tigon::cuda {

// Describes a matrix of logits or gradients by its dtype. `vectors` says that every row begins at a whole
// vector.
struct DistillationCells {
  void* data;
  int64_t stride;
  DType dtype;
  bool vectors;

  template <class T>
  __device__ T* at(int64_t r, int c) const {
    return static_cast<T*>(data) + r * stride + c;
  }
};
struct DistillationLogits {
  DistillationCells logits;
  const float* bias;
  float inner, softcap, top;
};
struct DistillationParams {
  DistillationLogits student, teacher;
  DistillationCells gradient;
  const int64_t* labels;
  const float* scale;
  float *loss, *soft, *hard, *entropy;
  int64_t rows, scale_step, ignore_index;
  int cols;
  float beta, factor, soft_weight, hard_weight, temperature, gain;
  bool has_hard;

  __device__ bool ignored(int64_t r) const { return labels != nullptr && labels[r] == ignore_index; }
  __device__ void write(int64_t r, float soft_loss, float hard_loss, float of_entropy) const {
    loss[r] = soft_weight * soft_loss + (has_hard ? hard_weight * hard_loss : 0.0f);
    if (soft != nullptr) soft[r] = soft_loss;
    if (hard != nullptr) hard[r] = hard_loss;
    if (entropy != nullptr) entropy[r] = of_entropy;
  }
};

// Takes rows of z = slope * logit on both sides, into 16 bits. Returns false, with nothing launched, if no
// variant fits.
bool distillation_plain(Context& ctx, DivergenceKind kind, const DistillationParams& p);

namespace {

#include "tigon/base/softcap_math.inc"

using Cells = DistillationCells;
using Side = DistillationLogits;
constexpr const char* kOp = "distillation";
constexpr int kLoopThreads = 1024, N = 4;  // columns of a vector
constexpr float kLn2 = 0.693147181f;

template <class T>
__device__ __forceinline__ void load_cells(const T* p, bool vectors, int left, float (&x)[N]) {
  if (vectors && left >= N) {
    const Vec<T, N> v = load_stream<T, N>(p);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = v[j];
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = j < left ? widen(p[j]) : -INFINITY;
  }
}
// Loads the logits of columns [c, c + N).
__device__ __forceinline__ void load_logits(const Cells& m, int64_t r, int c, int cols, float (&x)[N]) {
  const int left = cols - c;
  if (m.dtype == DType::f32)
    load_cells(m.at<const float>(r, c), m.vectors, left, x);
  else if (m.dtype == DType::bf16)
    load_cells(m.at<const __nv_bfloat16>(r, c), m.vectors, left, x);
  else
    load_cells(m.at<const __half>(r, c), m.vectors, left, x);
}
// Returns z of a logit in column c.
__device__ __forceinline__ float z_of(const Side& side, float x, int c) {
  if (side.bias != nullptr) x += __ldg(side.bias + c);
  x *= side.inner;
  return side.softcap > 0.0f ? softcap_bend(x, side.softcap) * side.top : x;
}
__device__ __forceinline__ void z_of(const Side& side, int c, int cols, float (&x)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = c + j < cols ? z_of(side, x[j], c + j) : -INFINITY;
}
// Returns 1 - tanh^2 from z.
__device__ __forceinline__ float slope_of(const Side& side, float z) {
  if (side.softcap == 0.0f) return 1.0f;
  const float t = z / side.top;
  return fma(-t, t, 1.0f);
}

template <class T>
__device__ __forceinline__ void store_cells(T* p, bool vectors, int left, const float (&x)[N]) {
  if (vectors && left >= N) {
    Vec<T, N> v;
    v.set(x);
    store(p, v);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < left) p[j] = narrow<T>(x[j]);
  }
}
// G is float, or any 16-bit type.
template <class G>
__device__ __forceinline__ void store_gradient(const DistillationParams& p, int64_t r, int c,
                                               const float (&x)[N]) {
  const Cells& m = p.gradient;
  const int left = p.cols - c;
  if constexpr (sizeof(G) == 4)
    store_cells(m.at<float>(r, c), m.vectors, left, x);
  else if (m.dtype == DType::bf16)
    store_cells(m.at<__nv_bfloat16>(r, c), m.vectors, left, x);
  else
    store_cells(m.at<__half>(r, c), m.vectors, left, x);
}

// Holds maxima and sums of exponentials of both sides.
template <class G>
struct alignas(16) PairPeak {
  OnlineSoftmax<G> s, t;
  __device__ static PairPeak identity() {
    return {OnlineSoftmax<G>::identity(), OnlineSoftmax<G>::identity()};
  }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    s.template all_reduce_lanes<Width>(), t.template all_reduce_lanes<Width>();
  }
};
template <class G>
__device__ __forceinline__ void add(OnlineSoftmax<G>& a, const float (&z)[N]) {
  const float top = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
  if (top > a.m) {
    if (a.s != 0.0f) a.s *= exp_minus_max<G>(a.m, top);
    a.m = top;
  }
  const float from = finite_max(a.m);
  float e[N];
#pragma unroll
  for (int j = 0; j < N; ++j) e[j] = exp_minus_max<G>(z[j], from);
  a.s += (e[0] + e[1]) + (e[2] + e[3]);
}

// Holds what the classes of a row share.
struct RowFacts {
  float ref_s, ref_t, part_s, part_t, log2_quotient;
  // The hard loss uses the label's column, and how far its h is below the maximum.
  int label = -1;
  float label_gap = 0.0f, label_slope = 0.0f;
};
template <class G>
__device__ __forceinline__ RowFacts row_facts(const PairPeak<G>& peak) {
  // Log-sums are about as exact as their difference, 0 for equal rows.
  return {.ref_s = finite_max(peak.s.m),
          .ref_t = finite_max(peak.t.m),
          .part_s = __frcp_rn(peak.s.s),
          .part_t = __frcp_rn(peak.t.s),
          .log2_quotient = ::log2f(peak.t.s / peak.s.s)};
}
// A label outside the row makes the gap NaN.
__device__ __forceinline__ void find_label(const DistillationParams& p, int64_t r, RowFacts& row) {
  if (!p.has_hard) return;
  const int64_t label = p.labels[r];
  row.label = label >= 0 && label < p.cols ? int(label) : -1;
  row.label_gap = CUDART_NAN_F;
  if (row.label < 0) return;
  const float z = z_of(p.student, *p.student.logits.at<const float>(r, row.label), row.label);
  row.label_gap = (row.ref_s - z) * p.temperature;
  row.label_slope = slope_of(p.student, z);
}

// Sums terms, g, q (z - m), and e^h without the label's.
using Totals = SumArray<4>;
enum Total { kTerms, kG, kHeat, kOthers };

// Adds a class with z of both sides to the totals. Sets q, g and e^h as the gradient needs them.
template <DivergenceKind K, class G>
__device__ __forceinline__ void add_class(const DistillationParams& p, const RowFacts& row, float z_s,
                                          float z_t, int c, Totals& totals, float& q, float& g, float& h) {
  const float u = z_s - row.ref_s, v = z_t - row.ref_t;
  q = __fmul_rn(exp_minus_max<G>(u, 0.0f), row.part_s);
  const float other = __fmul_rn(exp_minus_max<G>(v, 0.0f), row.part_t);
  float term;
  terms_of<K, G>(q, other, fma(u - v, kLog2e, row.log2_quotient), p.beta, term, g);
  totals.s[kTerms] += term, totals.s[kG] += g;
  totals.s[kHeat] = fma(q, fmaxf(u, -1e4f), totals.s[kHeat]);
  h = exp_minus_max<G>(u * p.temperature, 0.0f);
  totals.s[kOthers] += c == row.label ? 0.0f : h;
}

// The gradient of a class is q' sum_g + g' soft + h' hard, where h' in the label's column is the sum of the
// others'.
struct Gains {
  float sum_g, soft, hard, label;
};
template <DivergenceKind K>
__device__ __forceinline__ Gains finish_row(const DistillationParams& p, int64_t r, const RowFacts& row,
                                            Totals totals, float sum_s, bool writes) {
  const float terms = totals.s[kTerms];
  // A NaN in the teacher's row is in no g.
  const float sum_g = terms == terms ? totals.s[kG] : terms;
  const float others = totals.s[kOthers], at_label = exp(-row.label_gap), part = 1.0f / (others + at_label);
  if (writes) {
    const float soft = fast::divergence_loss<K>(terms, sum_g, p.beta) * p.factor;
    const float hard = !p.has_hard ? 0.0f : row.label_gap + ::log1pf(others + ::expm1f(-row.label_gap));
    p.write(r, soft, hard, kLn2 * ::log2f(sum_s) - totals.s[kHeat]);
  }
  const float gain = (p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f) * p.gain;
  const float hard = p.hard_weight * p.temperature * gain;
  return {sum_g, p.soft_weight * p.factor * gain * fast::divergence_unit<K>(p.beta), hard * part,
          -hard * part * others};
}
__device__ __forceinline__ float gradient_of(const Gains& gains, float q, float g, float h) {
  return fma(h, gains.hard, fast::divergence_gradient(g, q, gains.sum_g, gains.soft));
}

template <class G>
__device__ void zero_row(const DistillationParams& p, int64_t r, int first, int step) {
  const float zeros[N] = {};
  if (p.gradient.data != nullptr)
    for (int c = first; c < p.cols; c += step) store_gradient<G>(p, r, c, zeros);
}

}  // namespace
}  // namespace tigon::cuda
