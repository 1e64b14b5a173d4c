// CUDA backend of distillation.
//
// Bytes per element: 8 and what the gradient has; 4 and what it has for a teacher's logits of 16 bits 2 less.
//
// Variants
//   registers  A row pair lies in the registers of a CTA or, on sm_90, of a cluster: read once. First
//              the maxima and sums of exponentials, then the sums of terms, with q and g in the place
//              of the logits, then the gradient. Persistent.
//   looped     Longer rows: three sweeps by one CTA.
// Exponentials and logarithms are approximate (relative error about 1e-6) where the gradient is
// rounded to 16 bits.
#include <algorithm>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/divergence/distillation.h"
#include "tigon/ops/divergence/divergence_terms.cuh"

namespace tigon::cuda {
namespace {

#include "tigon/base/softcap_math.inc"

constexpr const char* kOp = "distillation";
constexpr int kLoopThreads = 1024, N = 4;  // columns of a vector
constexpr float kLn2 = 0.693147181f;

// A matrix of logits or gradients, by its dtype; `vectors`: every row begins at a whole vector.
struct Cells {
  void* data;
  int64_t stride;
  DType dtype;
  bool vectors;

  template <class T>
  __device__ T* at(int64_t r, int c) const {
    return static_cast<T*>(data) + r * stride + c;
  }
};
struct Side {
  Cells logits;
  const float* bias;
  float inner, softcap, top;
};
struct Params {
  Side student, teacher;
  Cells gradient;
  const int64_t* labels;
  const float* scale;
  float *loss, *soft, *hard, *entropy;
  int64_t rows, scale_step, ignore_index;
  int cols;
  float beta, factor, soft_weight, hard_weight, temperature, gain;

  __device__ bool ignored(int64_t r) const { return labels != nullptr && labels[r] == ignore_index; }
  __device__ void write(int64_t r, float soft_loss, float hard_loss, float of_entropy) const {
    loss[r] = soft_weight * soft_loss + (hard_weight != 0.0f ? hard_weight * hard_loss : 0.0f);
    if (soft != nullptr) soft[r] = soft_loss;
    if (hard != nullptr) hard[r] = hard_loss;
    if (entropy != nullptr) entropy[r] = of_entropy;
  }
};

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
// The logits of columns [c, c + N).
__device__ __forceinline__ void load_logits(const Cells& m, int64_t r, int c, int cols, float (&x)[N]) {
  const int left = cols - c;
  if (m.dtype == DType::f32)
    load_cells(m.at<const float>(r, c), m.vectors, left, x);
  else if (m.dtype == DType::bf16)
    load_cells(m.at<const __nv_bfloat16>(r, c), m.vectors, left, x);
  else
    load_cells(m.at<const __half>(r, c), m.vectors, left, x);
}
// z of a logit in column c.
__device__ __forceinline__ float z_of(const Side& side, float x, int c) {
  if (side.bias != nullptr) x += __ldg(side.bias + c);
  x *= side.inner;
  return side.softcap > 0.0f ? softcap_bend(x, side.softcap) * side.top : x;
}
__device__ __forceinline__ void z_of(const Side& side, int c, int cols, float (&x)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = c + j < cols ? z_of(side, x[j], c + j) : -INFINITY;
}
// 1 - tanh^2 from z.
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
// G: float, or any 16-bit type.
template <class G>
__device__ __forceinline__ void store_gradient(const Params& p, int64_t r, int c, const float (&x)[N]) {
  const Cells& m = p.gradient;
  const int left = p.cols - c;
  if constexpr (sizeof(G) == 4)
    store_cells(m.at<float>(r, c), m.vectors, left, x);
  else if (m.dtype == DType::bf16)
    store_cells(m.at<__nv_bfloat16>(r, c), m.vectors, left, x);
  else
    store_cells(m.at<__half>(r, c), m.vectors, left, x);
}

// Maxima and sums of exponentials of both sides.
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

// What the classes of a row have in common.
struct RowFacts {
  float ref_s, ref_t, part_s, part_t, log2_quotient;
  // Of the hard loss: the label's column, how far its h is below the maximum.
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
__device__ __forceinline__ void find_label(const Params& p, int64_t r, RowFacts& row) {
  const int64_t label = p.labels[r];
  row.label = label >= 0 && label < p.cols ? int(label) : -1;
  row.label_gap = CUDART_NAN_F;
  if (row.label < 0) return;
  const float z = z_of(p.student, *p.student.logits.at<const float>(r, row.label), row.label);
  row.label_gap = (row.ref_s - z) * p.temperature;
  row.label_slope = slope_of(p.student, z);
}

// The sums of terms, g, q (z - m), and e^h without the label's.
using Totals = SumArray<4>;
enum Total { kTerms, kG, kHeat, kOthers };

// A class with z of both sides: adds to the totals; q, g and e^h as the gradient needs them.
template <DivergenceKind K, class G, bool kHard>
__device__ __forceinline__ void add_class(const Params& p, const RowFacts& row, float z_s, float z_t, int c,
                                          Totals& totals, float& q, float& g, float& h) {
  const float u = z_s - row.ref_s, v = z_t - row.ref_t;
  q = __fmul_rn(exp_minus_max<G>(u, 0.0f), row.part_s);
  const float other = __fmul_rn(exp_minus_max<G>(v, 0.0f), row.part_t);
  float term;
  terms_of<K, G>(q, other, fma(u - v, kLog2e, row.log2_quotient), p.beta, term, g);
  totals.s[kTerms] += term, totals.s[kG] += g;
  totals.s[kHeat] = fma(q, fmaxf(u, -1e4f), totals.s[kHeat]);
  if constexpr (kHard) {
    h = exp_minus_max<G>(u * p.temperature, 0.0f);
    totals.s[kOthers] += c == row.label ? 0.0f : h;
  }
}

// The gradient of a class is q' sum_g + g' soft + h' hard, in the label's column h' being the others'.
struct Gains {
  float sum_g, soft, hard, label;
};
template <DivergenceKind K>
__device__ __forceinline__ Gains finish_row(const Params& p, int64_t r, const RowFacts& row, Totals totals,
                                            float sum_s, bool writes) {
  const float terms = totals.s[kTerms];
  // A NaN in the teacher's row is in no g.
  const float sum_g = terms == terms ? totals.s[kG] : terms;
  const float others = totals.s[kOthers], at_label = exp(-row.label_gap), part = 1.0f / (others + at_label);
  if (writes) {
    const float soft = fast::divergence_loss<K>(terms, sum_g, p.beta) * p.factor;
    const float hard =
        p.labels == nullptr ? 0.0f : row.label_gap + ::log1pf(others + ::expm1f(-row.label_gap));
    p.write(r, soft, hard, kLn2 * ::log2f(sum_s) - totals.s[kHeat]);
  }
  const float gain = (p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f) * p.gain;
  const float hard = p.hard_weight * p.temperature * gain;
  return {sum_g, p.soft_weight * p.factor * gain * fast::divergence_unit<K>(p.beta), hard * part,
          -hard * part * others};
}
template <bool kHard>
__device__ __forceinline__ float gradient_of(const Gains& gains, float q, float g, float h) {
  const float soft = fast::divergence_gradient(g, q, gains.sum_g, gains.soft);
  return kHard ? fma(h, gains.hard, soft) : soft;
}

template <bool kCluster>
struct RowThreads {
  int blocks = kCluster ? int(cluster_size()) : 1, rank = kCluster ? int(cluster_rank()) : 0;
  // The first column of the i-th vector of this thread. The CTAs of a cluster take vectors in turn.
  __device__ __forceinline__ int column(int i) const {
    return (int(threadIdx.x) + int(blockDim.x) * (i * blocks + rank)) * N;
  }
};

template <class G>
__device__ void zero_row(const Params& p, int64_t r, int first, int step) {
  const float zeros[N] = {};
  if (p.gradient.data != nullptr)
    for (int c = first; c < p.cols; c += step) store_gradient<G>(p, r, c, zeros);
}

// Vectors of a row in a thread's registers; of the hard loss's there are three values a column.
template <bool kHard>
constexpr RowConfig kRegisterConfig = {.vecs_per_thread = kHard ? 4 : 8, .max_threads = 640};

template <DivergenceKind K, class G, bool kHard, bool kCluster>
__global__ __launch_bounds__(kRegisterConfig<kHard>.max_threads) void register_kernel(
    const __grid_constant__ Params p) {
  constexpr int kVecs = kRegisterConfig<kHard>.vecs_per_thread;
  __shared__ ReduceStorage<PairPeak<G>> peaks;
  __shared__ ReduceStorage<Totals> sums;
  if constexpr (kCluster) {
    peaks.init(), sums.init();
    cluster_arrive();
    cluster_wait();
  }
  const RowThreads<kCluster> threads;
  const bool first = threadIdx.x == 0 && threads.rank == 0;
  int phase = 0;
  for (int64_t r = blockIdx.x / unsigned(threads.blocks); r < p.rows;
       r += gridDim.x / unsigned(threads.blocks)) {
    if (p.ignored(r)) {
      zero_row<G>(p, r, threads.column(0), int(blockDim.x) * threads.blocks * N);
      if (first) p.write(r, 0.0f, 0.0f, 0.0f);
      continue;
    }
    float s[kVecs][N], t[kVecs][N], h[kHard ? kVecs : 1][N];
#pragma unroll
    for (int i = 0; i < kVecs; ++i) load_logits(p.student.logits, r, threads.column(i), p.cols, s[i]);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) load_logits(p.teacher.logits, r, threads.column(i), p.cols, t[i]);
    PairPeak<G> peak = PairPeak<G>::identity();
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      z_of(p.student, threads.column(i), p.cols, s[i]);
      z_of(p.teacher, threads.column(i), p.cols, t[i]);
      add(peak.s, s[i]), add(peak.t, t[i]);
    }
    peak = all_reduce_row<0, kCluster>(peak, peaks, phase);
    RowFacts row = row_facts(peak);
    if constexpr (kHard) find_label(p, r, row);
    Totals totals = {};
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float q, g, e;
        add_class<K, G, kHard>(p, row, s[i][j], t[i][j], threads.column(i) + j, totals, q, g, e);
        const float slope = slope_of(p.student, s[i][j]);
        s[i][j] = q * slope, t[i][j] = g * slope;
        if constexpr (kHard) h[i][j] = e * slope;
      }
    }
    totals = all_reduce_row<0, kCluster>(totals, sums, phase++);
    const Gains gains = finish_row<K>(p, r, row, totals, peak.s.s, first);
    if (p.gradient.data == nullptr) continue;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int c = threads.column(i);
      if (c >= p.cols) break;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float x = s[i][j];
        s[i][j] = gradient_of<kHard>(gains, x, t[i][j], kHard ? h[i][j] : 0.0f);
        if (kHard && c + j == row.label)
          s[i][j] = fma(gains.label, row.label_slope, gradient_of<false>(gains, x, t[i][j], 0.0f));
        if (kHard && row.label < 0) s[i][j] = CUDART_NAN_F;
      }
      store_gradient<G>(p, r, c, s[i]);
    }
  }
  // A CTA must not exit while others may write to its shared memory.
  if constexpr (kCluster) {
    cluster_arrive();
    cluster_wait();
  }
}

template <DivergenceKind K, class G, bool kHard>
__global__ __launch_bounds__(kLoopThreads) void looped_kernel(const __grid_constant__ Params p) {
  __shared__ ReduceStorage<PairPeak<G>> peaks;
  __shared__ ReduceStorage<Totals> sums;
  const int begin = int(threadIdx.x) * N, step = kLoopThreads * N;
  int phase = 0;
  float s[N], t[N], q[N], g[N], h[N];
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    if (p.ignored(r)) {
      zero_row<G>(p, r, begin, step);
      if (threadIdx.x == 0) p.write(r, 0.0f, 0.0f, 0.0f);
      continue;
    }
    auto load_z = [&](int c) {
      load_logits(p.student.logits, r, c, p.cols, s), load_logits(p.teacher.logits, r, c, p.cols, t);
      z_of(p.student, c, p.cols, s), z_of(p.teacher, c, p.cols, t);
    };
    PairPeak<G> peak = PairPeak<G>::identity();
    for (int c = begin; c < p.cols; c += step) {
      load_z(c);
      add(peak.s, s), add(peak.t, t);
    }
    peak = all_reduce_row<0, false>(peak, peaks, phase);
    RowFacts row = row_facts(peak);
    if constexpr (kHard) find_label(p, r, row);
    Totals totals = {}, again = {};
    for (int c = begin; c < p.cols; c += step) {
      load_z(c);
#pragma unroll
      for (int j = 0; j < N; ++j) add_class<K, G, kHard>(p, row, s[j], t[j], c + j, totals, q[j], g[j], h[j]);
    }
    totals = all_reduce_row<0, false>(totals, sums, phase++);
    const Gains gains = finish_row<K>(p, r, row, totals, peak.s.s, threadIdx.x == 0);
    if (p.gradient.data == nullptr) continue;
    for (int c = begin; c < p.cols; c += step) {
      load_z(c);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        add_class<K, G, kHard>(p, row, s[j], t[j], c + j, again, q[j], g[j], h[j]);
        const float slope = slope_of(p.student, s[j]);
        s[j] = slope * gradient_of<kHard>(gains, q[j], g[j], h[j]);
        if (kHard && c + j == row.label)
          s[j] = slope * (gains.label + gradient_of<false>(gains, q[j], g[j], 0.0f));
        if (kHard && row.label < 0) s[j] = CUDART_NAN_F;
      }
      store_gradient<G>(p, r, c, s);
    }
  }
}

template <DivergenceKind K, class G, bool kHard, bool kCluster>
bool launch_registers(Context& ctx, const Params& p, int64_t vecs) {
  constexpr RowConfig kConfig = kRegisterConfig<kHard>;
  static OccupancyCache occupancy;
  auto* kernel = &register_kernel<K, G, kHard, kCluster>;
  auto no_shared = [](int) { return size_t(0); };
  // A CTA of a cluster has some hundred threads, so that a reduction is not most of its work.
  constexpr int kMinThreads = 192;
  ClusterShape shape =
      kCluster ? max_occupancy_cluster<kConfig>(kOp, occupancy, kernel, vecs, kMinThreads, no_shared)
               : fit_cluster<kConfig>(kOp, occupancy, kernel, vecs, 1, 1, no_shared);
  if (shape.blocks == 0) return false;
  launch(kOp, ctx, kernel,
         {.blocks = std::min(p.rows, shape.clusters) * shape.blocks,
          .threads = shape.threads,
          .cluster = shape.blocks},
         p);
  return true;
}

template <DivergenceKind K, class G, bool kHard>
void launch_rows(Context& ctx, const Params& p) {
  const int64_t vecs = ceil_div(p.cols, N);
  // Up to here one CTA is enough.
  constexpr int64_t kShort = 2048;
  if (vecs <= kShort && launch_registers<K, G, kHard, false>(ctx, p, vecs)) return;
  if (launch_registers<K, G, kHard, true>(ctx, p, vecs)) return;
  if (launch_registers<K, G, kHard, false>(ctx, p, vecs)) return;
  launch(kOp, ctx, looped_kernel<K, G, kHard>,
         {.blocks = std::min<int64_t>(p.rows, int64_t(device_facts().sms) * 2), .threads = kLoopThreads}, p);
}

template <DivergenceKind K>
void launch_kind(Context& ctx, const Params& p, bool hard) {
  const bool precise = p.gradient.dtype == DType::f32;
  if (precise) return hard ? launch_rows<K, float, true>(ctx, p) : launch_rows<K, float, false>(ctx, p);
  return hard ? launch_rows<K, __nv_bfloat16, true>(ctx, p) : launch_rows<K, __nv_bfloat16, false>(ctx, p);
}

Cells cells_of(const Matrix& m) {
  const int64_t bytes = N * int64_t(size_of(m.dtype));
  const bool vectors =
      reinterpret_cast<uintptr_t>(m.data) % uintptr_t(bytes) == 0 && (m.rows == 1 || m.stride % N == 0);
  return {m.data, m.stride, m.dtype, vectors};
}
Side side_of(const Matrix& logits, const DistillationSide& side) {
  return {cells_of(logits), side.bias.as<float>(), side.inner(), side.softcap, side.top()};
}

}  // namespace

void distillation_rows(Context& ctx, const DistillationRows& a) {
  TIGON_CHECK(kOp, a.student.cols < (int64_t(1) << 30), "student must have fewer than 2^30 columns, got ",
              a.student.cols);
  Params p = {.student = side_of(a.student, a.student_side),
              .teacher = side_of(a.teacher, a.teacher_side),
              .gradient = cells_of(a.dstudent),
              .labels = a.labels.as<int64_t>(),
              .scale = a.scale.as<float>(),
              .loss = a.loss.as<float>(),
              .soft = a.soft.as<float>(),
              .hard = a.hard.as<float>(),
              .entropy = a.entropy.as<float>(),
              .rows = a.student.rows,
              .scale_step = a.scale.size == 1 ? 0 : 1,
              .ignore_index = a.ignore_index,
              .cols = int(a.student.cols),
              .beta = a.beta,
              .factor = a.factor,
              .soft_weight = a.soft_weight,
              .hard_weight = a.hard_weight,
              .temperature = a.student_side.temperature,
              .gain = a.student_side.gain()};
  const bool hard = a.has_hard();
  switch (a.kind) {
    case DivergenceKind::forward_kl: return launch_kind<DivergenceKind::forward_kl>(ctx, p, hard);
    case DivergenceKind::reverse_kl: return launch_kind<DivergenceKind::reverse_kl>(ctx, p, hard);
    case DivergenceKind::jsd: return launch_kind<DivergenceKind::jsd>(ctx, p, hard);
    case DivergenceKind::tvd: return launch_kind<DivergenceKind::tvd>(ctx, p, hard);
  }
}

}  // namespace tigon::cuda
