// What the CUDA kernels of divergence share: their arguments, a row's exponentials, and how the threads of a row bring their sums
// together.
#pragma once

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/tma_pipeline.cuh"
#include "tigon/ops/divergence/divergence.h"

namespace tigon::cuda {
namespace {

// The formulas with the approximate instructions, for rows of 16 bits, and with functions exact to an ulp, for 32.
namespace fast {
// For x <= 1, without the mean error that lg2.approx was seen to have beside 1 (H200: 0.9 * 2^-24, exactly 0 at 1 alone): a
// sum of many would show it.
TIGON_FN float log2(float x) {
  return fma(__saturatef(fma(x, -16777216.0f, 16777216.0f)), -5.96e-8f, log2_approx(x));
}
// log2 of (1 + r) / 2, r from 0 to 1. Half a step of the sum less takes the place of that correction: rounding to the nearest even
// step makes exactly 1 of r = 1 nevertheless, and what is left of the mean error is a fifth.
TIGON_FN float log2_mean_with_one(float r) { return log2_approx(fma(0.5f, r, 0.5f - 0x1p-25f)); }
#include "tigon/ops/divergence/divergence_math.inc"
}  // namespace fast
namespace precise {
TIGON_FN float exp2_neg(float t) { return exp2_precise(t, 1.0f, 0.0f); }
TIGON_FN float log2(float x) { return ::log2f(x); }
#include "tigon/ops/divergence/divergence_math.inc"
}  // namespace precise

constexpr const char* kOp = "divergence";
constexpr int kMaxCluster = 16, kLoopThreads = 1024;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kMaxLog = 1e30f;  // a logarithm where a class is excluded

template <DivergenceKind K>
constexpr bool kKl = K == DivergenceKind::forward_kl || K == DivergenceKind::reverse_kl;

template <class T>
struct Params {
  const T *student, *teacher;
  T* dstudent;            // may be null, or student
  const int64_t* labels;  // may be null
  const float* scale;     // may be null
  float* loss;
  int64_t rows, student_stride, teacher_stride, dstudent_stride, scale_step, ignore_index;
  int cols, slice;  // slice: columns of a block of a cluster
  float beta, slope, slope_low, factor,
      inv_temperature;      // slope: log2 e / temperature, and what its rounding left; 1 / temperature
  bool log_probs, aligned;  // aligned: every row begins at a boundary of 16 bytes

  __device__ bool ignored(int64_t r) const { return labels != nullptr && labels[r] == ignore_index; }
  __device__ T* gradient(int64_t r) const {
    return dstudent != nullptr ? dstudent + r * dstudent_stride : nullptr;
  }
  __device__ void write_ignored(int64_t r) const { loss[r] = 0.0f; }
  __device__ float scale_of(int64_t r) const { return scale != nullptr ? scale[r * scale_step] : 1.0f; }
};

// What a warp knows of its columns, for the others: its references and the sums of its exponentials.
struct alignas(16) Sums {
  float ref_s, sum_s, ref_t, sum_t;
};
// Two more sums: of terms and of g; of a KL the terms alone, of undivided exponentials against the warp's references.
struct alignas(8) PlainTotals {
  float terms, g;
};
// In 32 bits g is a sum of q (slope - center), weight that of q: where one class has nearly all weight, its slope and the row's mean
// of slopes are nearly one number, and what is left of them is no larger than the rounding of q.
struct alignas(16) CenteredTotals {
  float terms, g, center, weight;
};
template <class T>
using Totals = std::conditional_t<sizeof(T) == 4, CenteredTotals, PlainTotals>;

__device__ __forceinline__ void combine(PlainTotals& a, const PlainTotals& b) {
  a.terms += b.terms, a.g += b.g;
}
// The center of the heavier one.
__device__ __forceinline__ void combine(CenteredTotals& a, const CenteredTotals& b) {
  const float center = b.weight > a.weight ? b.center : a.center;
  a.g = fma(a.weight, a.center - center, a.g) + fma(b.weight, b.center - center, b.g);
  a.terms += b.terms, a.weight += b.weight, a.center = center;
}

// A row pair: references, what exponentials are multiplied with, of a KL the mean of its terms, log2 of the quotient of the sums,
// teacher's by student's (of equal rows 0 exactly).
struct RowPair {
  float ref_s = 0.0f, ref_t = 0.0f, part_s = 1.0f, part_t = 1.0f, mean = 0.0f, log2_quotient = 0.0f;
  int next = 0;  // a row to come
};

__device__ __forceinline__ float center_of(const PlainTotals&) { return 0.0f; }
__device__ __forceinline__ float center_of(const CenteredTotals& t) { return t.center; }
__device__ __forceinline__ float sum_of(const PlainTotals& t) { return t.g; }
__device__ __forceinline__ float sum_of(const CenteredTotals& t) { return fma(t.center, t.weight, t.g); }

// Nothing but -inf so far: exponentials are taken from 0. NaN and +inf survive.
__device__ __forceinline__ float finite_max(float reference) {
  return reference == -INFINITY ? 0.0f : reference;
}

// Exponentials of a row against a reference, its maximum or its part's: 1 exactly at the maximum, so that nothing is left where
// all weight is in one class.
template <class T>
struct Scaling {
  float slope, slope_low;
  static constexpr bool kPrecise = sizeof(T) == 4;

  __device__ explicit Scaling(const Params<T>& p) : slope(p.slope), slope_low(p.slope_low) {}
  // Of a distance from the reference.
  __device__ __forceinline__ float power(float u) const {
    if constexpr (kPrecise)
      return exp2_precise(u, slope, slope_low);
    else
      return exp2_approx(u * slope);
  }
};
// Exponentials against a reference, in one instruction less than Scaling's; `rest` is what the rounding of the reference's product has
// left in all of them. Of a reference so large that its neighbours are nothing beside it a smaller product does, whose rounding is no
// large number.
struct Powers {
  float slope, start, rest;
  __device__ Powers(float slope_, float reference) : slope(slope_) {
    constexpr float kLarge = 0x1p20f;
    if (fabsf(reference * slope) > kLarge) slope = kLarge / fabsf(reference);
    start = reference * slope, rest = exp2_approx(-fma(reference, slope, -start));
  }
  __device__ __forceinline__ float operator()(float x) const { return exp2_approx(fma(x, slope, -start)); }
};
// From the references of a part to larger ones, student's less teacher's.
__device__ __forceinline__ float shift_of(const Sums& part, float ref_s, float ref_t) {
  return (finite_max(part.ref_s) - finite_max(ref_s)) - (finite_max(part.ref_t) - finite_max(ref_t));
}

template <DivergenceKind K, class T>
__device__ __forceinline__ void terms_of(float q, float p, float d, float beta, float& term, float& g) {
  float r = 0.0f;
  if constexpr (K == DivergenceKind::jsd) d = fminf(fmaxf(d, -kMaxLog), kMaxLog);
  if constexpr (sizeof(T) == 4) {
    if constexpr (K == DivergenceKind::jsd) r = precise::exp2_neg(-fabsf(d));
    precise::divergence_terms<K>(q, p, d, r, beta, term, g);
  } else {
    if constexpr (K == DivergenceKind::jsd) r = exp2_approx(-fabsf(d));
    fast::divergence_terms<K>(q, p, d, r, beta, term, g);
  }
}

// A class of jsd or tvd to the totals: its exponentials become q and its slope. In 16 bits jsd leaves q undivided, and so the totals,
// and tvd makes of the slope g.
template <DivergenceKind K, class T>
__device__ __forceinline__ void add_class(float& s, float& t, float part_s, float part_t, float d, float beta,
                                          Totals<T>& totals) {
  if constexpr (K == DivergenceKind::tvd && sizeof(T) == 2) {
    s = __fmul_rn(s, part_s);
    const float e = s - __fmul_rn(t, part_t);
    t = e == 0.0f ? 0.0f : copysignf(s, e);
    totals.terms += fabsf(e), totals.g += t;
  } else {
    if constexpr (K == DivergenceKind::jsd) d = fminf(fmaxf(d, -kMaxLog), kMaxLog);
    float term, slope;
    if constexpr (sizeof(T) == 4) {
      const float r = K == DivergenceKind::jsd ? precise::exp2_neg(-fabsf(d)) : 0.0f;
      s = __fmul_rn(s, part_s);
      precise::divergence_slope<K>(s, __fmul_rn(t, part_t), d, r, beta, term, slope);
      totals.weight += s;
    } else {
      fast::divergence_slope<K>(s, t, d, exp2_approx(-fabsf(d)), beta, term, slope);
    }
    totals.terms += term, totals.g = fma(s, slope, totals.g), t = slope;
  }
}

__device__ __forceinline__ float warp_max(float x) {  // floats in the order of integers
  int i = __float_as_int(x);
  i ^= (i >> 31) & 0x7fffffff;
  i = __reduce_max_sync(kAllLanes, i);
  i ^= (i >> 31) & 0x7fffffff;
  return __int_as_float(i);
}
// Lanes far apart first.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// What a row's warps tell the first warp of each of its blocks, which sums up and tells its block. Exchanges take turns with
// the memory: a block may be one ahead of another.
template <class T, int Messages>
struct ReduceStorage {
  Sums sums[2][Messages];
  Totals<T> totals[2][Messages];
  uint64_t barrier[2];
  float4 row[2];
  Totals<T> all;
};

// A block that is launched alone may not put anything the way that clusters do.
template <bool kCluster>
__device__ __forceinline__ bool is_clustered() {
  return kCluster && cluster_size() > 1;
}

// Every warp's message (the same in all lanes) to all blocks of the row.
template <bool kCluster, bool WithSums, bool WithTotals, class T, int Messages>
__device__ __forceinline__ void publish(ReduceStorage<T, Messages>& x, int phase, const Sums& sums,
                                        const Totals<T>& totals) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, warps = int(blockDim.x) / 32;
  const int parity = phase & 1;
  if (is_clustered<kCluster>()) {
    constexpr int kBytes = (WithSums ? int(sizeof(Sums)) : 0) + (WithTotals ? int(sizeof(totals)) : 0);
    const int blocks = int(cluster_size()), at = int(cluster_rank()) * warps + warp;
    uint64_t* barrier = &x.barrier[parity];
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, blocks * warps * kBytes);
    __syncwarp();
    if (lane < blocks) {
      if constexpr (WithSums) st_async(&x.sums[parity][at], unsigned(lane), sums, barrier);
      if constexpr (WithTotals) st_async(&x.totals[parity][at], unsigned(lane), totals, barrier);
    }
  } else {
    if (lane == 0) {
      if constexpr (WithSums) x.sums[parity][warp] = sums;
      if constexpr (WithTotals) x.totals[parity][warp] = totals;
    }
    __syncthreads();
  }
}
// The first warp, before it reads what was told.
template <bool kCluster, class T, int Messages>
__device__ __forceinline__ void wait_published(ReduceStorage<T, Messages>& x, int phase) {
  if (is_clustered<kCluster>()) mbarrier_wait_parity(&x.barrier[phase & 1], phase >> 1 & 1);
}

// Lanes' sums into one against the largest references.
template <class T>
__device__ __forceinline__ void all_reduce_lanes(Sums& m, const Scaling<T>& scaling) {
  const float top_s = warp_max(m.ref_s), top_t = warp_max(m.ref_t);
  m.sum_s = warp_sum(m.sum_s * scaling.power(m.ref_s - finite_max(top_s)));
  m.sum_t = warp_sum(m.sum_t * scaling.power(m.ref_t - finite_max(top_t)));
  m.ref_s = top_s, m.ref_t = top_t;
}
__device__ __forceinline__ void all_reduce_lanes(PlainTotals& t) { t = {warp_sum(t.terms), warp_sum(t.g)}; }
__device__ __forceinline__ void all_reduce_lanes(CenteredTotals& t) {
  const unsigned heaviest =
      __ballot_sync(kAllLanes, t.weight == warp_max(t.weight));  // 0 with a NaN, as all is then
  const float center = __shfl_sync(kAllLanes, t.center, __ffs(int(heaviest)) - 1);
  t = {warp_sum(t.terms), warp_sum(fma(t.weight, t.center - center, t.g)), center, warp_sum(t.weight)};
}

// The row's softmaxes, the same in every thread; `terms`: of a KL; `next()`: asked by the first warp while it waits.
template <DivergenceKind K, bool kCluster, class T, int Messages, class Next>
__device__ __forceinline__ RowPair all_reduce_sums(ReduceStorage<T, Messages>& x, int phase, int messages,
                                                   const Sums& own, const Totals<T>& totals,
                                                   const Scaling<T>& scaling, bool log_probs,
                                                   const Next& next) {
  publish<kCluster, true, kKl<K>>(x, phase, own, totals);
  if (threadIdx.x < 32) {
    const int row = next();
    wait_published<kCluster>(x, phase);
    const int lane = int(threadIdx.x);
    const Sums* sums = x.sums[phase & 1];
    Sums all = {-INFINITY, 0.0f, -INFINITY, 0.0f};
    float terms = 0.0f;
    for (int i = lane; i < messages; i += 32)
      all.ref_s = fmaxf(all.ref_s, sums[i].ref_s), all.ref_t = fmaxf(all.ref_t, sums[i].ref_t);
    all.ref_s = finite_max(warp_max(all.ref_s)), all.ref_t = finite_max(warp_max(all.ref_t));
    for (int i = lane; i < messages; i += 32) {
      const Sums m = sums[i];
      const float s = scaling.power(m.ref_s - all.ref_s), t = scaling.power(m.ref_t - all.ref_t);
      all.sum_s = fma(m.sum_s, s, all.sum_s), all.sum_t = fma(m.sum_t, t, all.sum_t);
      if constexpr (kKl<K>) {
        const float weight = K == DivergenceKind::reverse_kl ? s : t;
        const float sum = K == DivergenceKind::reverse_kl ? m.sum_s : -m.sum_t;
        const float shift_bytes = fma(sum, shift_of(m, all.ref_s, all.ref_t), x.totals[phase & 1][i].terms);
        if (weight != 0.0f) terms = fma(weight, shift_bytes, terms);
      }
    }
    all.sum_s = warp_sum(all.sum_s), all.sum_t = warp_sum(all.sum_t);
    if constexpr (kKl<K>) terms = warp_sum(terms);
    if (log_probs) all.sum_s = all.sum_t = 1.0f;
    const float part_s = __frcp_rn(all.sum_s), part_t = __frcp_rn(all.sum_t);
    const float quotient = K == DivergenceKind::tvd ? 0.0f : ::log2f(all.sum_t / all.sum_s);
    if (lane == 0) {
      x.row[0] = make_float4(all.ref_s, all.ref_t, part_s, part_t);
      x.row[1] = make_float4(terms * (K == DivergenceKind::reverse_kl ? part_s : part_t), quotient,
                             __int_as_float(row), 0.0f);
    }
  }
  __syncthreads();
  const float4 a = x.row[0], b = x.row[1];
  return {a.x, a.y, a.z, a.w, b.x, b.y, __float_as_int(b.z)};
}

// The row's totals, the same in every thread.
template <bool kCluster, class T, int Messages>
__device__ __forceinline__ Totals<T> all_reduce_totals(ReduceStorage<T, Messages>& x, int phase, int messages,
                                                       const Totals<T>& own) {
  publish<kCluster, false, true>(x, phase, Sums{}, own);
  if (threadIdx.x < 32) {
    wait_published<kCluster>(x, phase);
    Totals<T> all = {};
    for (int i = int(threadIdx.x); i < messages; i += 32) combine(all, x.totals[phase & 1][i]);
    all_reduce_lanes(all);
    if (!(all.terms == all.terms)) all.g = all.terms;  // NaN in the teacher's row is in no g
    if (threadIdx.x == 0) x.all = all;
  }
  __syncthreads();
  return x.all;
}

// -inf in the columns of a pack that the row does not have.
template <class T>
__device__ __forceinline__ uint4 mask_columns(const AlignedRow<const T>& row, int k, const uint4& words) {
  constexpr int N = AlignedRow<T>::N;
  Vec<T, N> vec = reinterpret_cast<const Vec<T, N>&>(words);
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (!row.has(row.column(k) + j)) vec.v[j] = narrow<T>(-INFINITY);
  return reinterpret_cast<const uint4&>(vec);
}

// Zeros in the gradients of rows that do not count, every so many of them by a warp.
template <class T>
__device__ __forceinline__ void zero_ignored_rows(const Params<T>& p, int warp, int warps) {
  for (ZeroMaskedRows<Params<T>> zeroing(p, warp, warps); zeroing.step();) {
  }
}

}  // namespace
}  // namespace tigon::cuda
