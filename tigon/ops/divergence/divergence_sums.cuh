// What the CUDA kernels of divergence share: their arguments, a row's exponentials, and how the threads of a row bring their sums
// together.
#pragma once

#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/ops/divergence/divergence.h"

namespace tigon::cuda {
namespace {

// The formulas with the approximate instructions, for rows of 16 bits, and with functions exact to an ulp, for 32.
namespace rough {
TIGON_FN float log2(float x) { return log2_approx(x); }
#include "tigon/ops/divergence/divergence_math.inc"
}  // namespace rough
namespace fine {
TIGON_FN float exp2_neg(float t) { return exp2_fine(t, 1.0f, 0.0f); }
TIGON_FN float log2(float x) { return ::log2f(x); }
#include "tigon/ops/divergence/divergence_math.inc"
}  // namespace fine

constexpr const char* kOp = "divergence";
constexpr int kMaxCluster = 16, kSweepThreads = 1024;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kFar = 1e30f;  // a logarithm where a class is excluded

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
      inverse;              // slope: log2 e / temperature, and what its rounding left; 1 / temperature
  bool log_probs, aligned;  // aligned: every row begins at a boundary of 16 bytes

  __device__ bool ignored(int64_t r) const { return labels != nullptr && labels[r] == ignore_index; }
  __device__ float scale_of(int64_t r) const { return scale != nullptr ? scale[r * scale_step] : 1.0f; }
};

// What a warp knows of its columns, for the others: its references and the sums of its exponentials.
struct alignas(16) Sums {
  float ref_s, sum_s, ref_t, sum_t;
};
// Two more sums: of terms and of g; of a KL the terms alone, of undivided exponentials against the warp's references.
struct alignas(8) Totals {
  float terms, g;
};

// A row pair: references, what exponentials are multiplied with, of a KL the mean of its terms, log2 of the quotient of the sums,
// teacher's by student's (of equal rows 0 exactly).
struct RowPair {
  float ref_s = 0.0f, ref_t = 0.0f, part_s = 1.0f, part_t = 1.0f, mean = 0.0f, log2_quotient = 0.0f;
};

// Nothing but -inf so far: exponentials are taken from 0. NaN and +inf survive.
__device__ __forceinline__ float finite(float reference) { return reference == -INFINITY ? 0.0f : reference; }

// Exponentials of a row against a reference, its maximum or its part's. 16 bits: the reference is one of exponents, the
// products are exact in the multiply-add. 32 bits: a reference of logits, so that no product of two large numbers is
// subtracted from another.
template <class T>
struct Scaling {
  float slope, slope_low;
  static constexpr bool kFine = sizeof(T) == 4;

  __device__ explicit Scaling(const Params<T>& p) : slope(p.slope), slope_low(p.slope_low) {}
  __device__ __forceinline__ float reference(float top) const { return kFine ? top : top * slope; }
  // The distance from the reference, its power, its logarithm in base 2.
  __device__ __forceinline__ float from(float x, float reference) const {
    return kFine ? x - reference : fma(x, slope, -reference);
  }
  __device__ __forceinline__ float power(float u) const {
    if constexpr (kFine)
      return exp2_fine(u, slope, slope_low);
    else
      return exp2_approx(u);
  }
  __device__ __forceinline__ float bits(float u) const { return kFine ? u * slope : u; }
  // Bits between the references of a part and larger ones, student's less teacher's.
  __device__ __forceinline__ float shift(const Sums& part, float ref_s, float ref_t) const {
    return bits((finite(part.ref_s) - finite(ref_s)) - (finite(part.ref_t) - finite(ref_t)));
  }
};
template <DivergenceKind K, class T>
__device__ __forceinline__ void terms_of(float q, float p, float d, float beta, float& term, float& g) {
  float r = 0.0f;
  if constexpr (K == DivergenceKind::jsd) d = fminf(fmaxf(d, -kFar), kFar);
  if constexpr (sizeof(T) == 4) {
    if constexpr (K == DivergenceKind::jsd) r = fine::exp2_neg(-fabsf(d));
    fine::divergence_terms<K>(q, p, d, r, beta, term, g);
  } else {
    if constexpr (K == DivergenceKind::jsd) r = exp2_approx(-fabsf(d));
    rough::divergence_terms<K>(q, p, d, r, beta, term, g);
  }
}

__device__ __forceinline__ float max_lanes(float x) {  // floats in the order of integers
  int i = __float_as_int(x);
  i ^= (i >> 31) & 0x7fffffff;
  i = __reduce_max_sync(kAllLanes, i);
  i ^= (i >> 31) & 0x7fffffff;
  return __int_as_float(i);
}
__device__ __forceinline__ float sum_lanes(float x) { return reduce_lanes<Sum, 32>(x); }

// Words from shared memory, read where it stands: the compiler would hold them in registers from the first time on.
__device__ __forceinline__ uint4 load_shared(const uint4* from) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(shared_address(from))
               : "memory");
  return w;
}

// What a row's warps tell each other: to the first warp of their block, which tells the other blocks' first warps, sums up and
// tells its block. Blocks take turns with their memory: one may be one exchange ahead of another.
template <int Warps>
struct Exchange {
  Sums sums[Warps], block_sums[2][kMaxCluster];
  Totals totals[Warps], block_totals[2][kMaxCluster];
  uint64_t arrival[2];
  float4 row[2];
  Totals all;
};

// Lanes' sums into one against the largest references; of a KL its terms with them.
template <DivergenceKind K, class T>
__device__ __forceinline__ void merge_lanes(Sums& m, float& terms, const Scaling<T>& scaling) {
  const float top_s = max_lanes(m.ref_s), top_t = max_lanes(m.ref_t);
  const float s = scaling.power(m.ref_s - finite(top_s)), t = scaling.power(m.ref_t - finite(top_t));
  if constexpr (kKl<K>) {
    const float weight = K == DivergenceKind::reverse_kl ? s : t;
    const float shift = scaling.shift(m, top_s, top_t);
    const float moved =
        K == DivergenceKind::reverse_kl ? fma(m.sum_s, shift, terms) : fma(-m.sum_t, shift, terms);
    terms = sum_lanes(weight == 0.0f ? 0.0f : weight * moved);
  }
  m = {top_s, sum_lanes(m.sum_s * s), top_t, sum_lanes(m.sum_t * t)};
}
__device__ __forceinline__ void merge_lanes(Totals& t) { t = {sum_lanes(t.terms), sum_lanes(t.g)}; }

// The other blocks' messages of this turn; returns when all have arrived. By the first warp.
template <bool WithSums, bool WithTotals, int Warps>
__device__ __forceinline__ void tell_blocks(Exchange<Warps>& x, int turn, const Sums& sums,
                                            const Totals& totals) {
  constexpr int kBytes = (WithSums ? int(sizeof(Sums)) : 0) + (WithTotals ? int(sizeof(Totals)) : 0);
  const unsigned blocks = cluster_size(), rank = cluster_rank(), lane = threadIdx.x;
  uint64_t* arrival = &x.arrival[turn & 1];
  if (lane == 0) arrival_expect(arrival, int(blocks) * kBytes);
  __syncwarp();
  if (lane < blocks) {
    if constexpr (WithSums) put_arriving(&x.block_sums[turn & 1][rank], lane, sums, arrival);
    if constexpr (WithTotals) put_arriving(&x.block_totals[turn & 1][rank], lane, totals, arrival);
  }
  arrival_wait(arrival, turn >> 1 & 1);
}

// The row's softmaxes from its warps' sums (every lane has the warp's), the same in every thread.
template <DivergenceKind K, bool Cluster, class T, int Warps>
__device__ __forceinline__ RowPair meet_sums(Exchange<Warps>& x, int turn, const Sums& own, float terms,
                                             const Scaling<T>& scaling, bool log_probs) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const Sums none = {-INFINITY, 0.0f, -INFINITY, 0.0f};
  if (lane == 0) {
    x.sums[warp] = own;
    if constexpr (kKl<K>) x.totals[warp].terms = terms;
  }
  __syncthreads();
  if (warp == 0) {
    Sums m = lane < Warps ? x.sums[lane] : none;
    Totals t = {0.0f, 0.0f};
    if constexpr (kKl<K>) t.terms = lane < Warps ? x.totals[lane].terms : 0.0f;
    merge_lanes<K>(m, t.terms, scaling);
    if constexpr (Cluster) {
      tell_blocks<true, kKl<K>>(x, turn, m, t);
      const bool there = unsigned(lane) < cluster_size();
      m = there ? x.block_sums[turn & 1][lane] : none;
      if constexpr (kKl<K>) t.terms = there ? x.block_totals[turn & 1][lane].terms : 0.0f;
      merge_lanes<K>(m, t.terms, scaling);
    }
    if (log_probs) m.sum_s = m.sum_t = 1.0f;
    if (lane == 0) {
      const float of = K == DivergenceKind::reverse_kl ? m.sum_s : m.sum_t;
      x.row[0] = make_float4(finite(m.ref_s), finite(m.ref_t), 1.0f / m.sum_s, 1.0f / m.sum_t);
      x.row[1] = make_float4(t.terms / of, ::log2f(m.sum_t / m.sum_s), 0.0f, 0.0f);
    }
  }
  __syncthreads();
  const float4 a = x.row[0], b = x.row[1];
  return {a.x, a.y, a.z, a.w, b.x, b.y};
}
template <bool Cluster, int Warps>
__device__ __forceinline__ Totals meet_totals(Exchange<Warps>& x, int turn, const Totals& own) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const Totals none = {0.0f, 0.0f};
  if (lane == 0) x.totals[warp] = own;
  __syncthreads();
  if (warp == 0) {
    Totals t = lane < Warps ? x.totals[lane] : none;
    merge_lanes(t);
    if constexpr (Cluster) {
      tell_blocks<false, true>(x, turn, Sums{}, t);
      t = unsigned(lane) < cluster_size() ? x.block_totals[turn & 1][lane] : none;
      merge_lanes(t);
    }
    if (!(t.terms == t.terms)) t.g = t.terms;  // NaN in the teacher's row is in no g
    if (lane == 0) x.all = t;
  }
  __syncthreads();
  return x.all;
}

}  // namespace
}  // namespace tigon::cuda
