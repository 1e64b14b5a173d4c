// The CUDA kernels of divergence share this: arguments, exponentials of a row, the reductions over its
// threads, and launches of persistent CTAs and clusters.
#pragma once

#include <algorithm>

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/tma_pipeline.cuh"
#include "tigon/ops/divergence/divergence_terms.cuh"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "divergence";
constexpr int kMaxCluster = 16, kLoopThreads = 1024;
template <DivergenceKind K>
constexpr bool kKl = K == DivergenceKind::forward_kl || K == DivergenceKind::reverse_kl;

template <class T>
struct DivergenceParams {
  const T *student, *teacher;
  // These three may be null; dstudent may be student.
  T* dstudent;
  const int64_t* labels;
  const float* scale;
  float* loss;
  int64_t rows, student_stride, teacher_stride, dstudent_stride, scale_step, ignore_index;
  // `slice` counts the columns of a CTA of a cluster.
  int cols, slice;
  // slope + slope_low is log2(e) / temperature, and inv_temperature 1 / temperature.
  float beta, slope, slope_low, factor, inv_temperature;
  // `aligned` says that every row begins at a 16-byte boundary.
  bool log_probs, aligned;

  __device__ bool ignored(int64_t r) const { return labels != nullptr && labels[r] == ignore_index; }
  __device__ T* gradient(int64_t r) const {
    return dstudent != nullptr ? dstudent + r * dstudent_stride : nullptr;
  }
  __device__ void write_ignored(int64_t r) const { loss[r] = 0.0f; }
  __device__ float scale_of(int64_t r) const { return scale != nullptr ? scale[r * scale_step] : 1.0f; }
};

// Holds the statistics that a warp publishes: its references and the sums of its exponentials.
struct alignas(16) Sums {
  float ref_s, sum_s, ref_t, sum_t;
};
// Holds two more sums: of terms and of g. For a KL only terms, from undivided exponentials relative to the
// warp's references.
struct alignas(8) PlainTotals {
  float terms, g;
};
// In 32 bits g is the sum of q (slope - center), and weight the sum of q: if one class has nearly all
// probability, its slope nearly equals the row's mean slope, and their difference must not be lost in the
// rounding of q.
struct alignas(16) CenteredTotals {
  float terms, g, center, weight;
};
template <class T>
using Totals = std::conditional_t<sizeof(T) == 4, CenteredTotals, PlainTotals>;

__device__ __forceinline__ void combine(PlainTotals& a, const PlainTotals& b) {
  a.terms += b.terms, a.g += b.g;
}
// Takes the center of the heavier one.
__device__ __forceinline__ void combine(CenteredTotals& a, const CenteredTotals& b) {
  const float center = b.weight > a.weight ? b.center : a.center;
  a.g = fma(a.weight, a.center - center, a.g) + fma(b.weight, b.center - center, b.g);
  a.terms += b.terms, a.weight += b.weight, a.center = center;
}

// Holds the statistics of a row pair: references, factors of the exponentials, for a KL the mean of its
// terms, and log2 of the quotient of the sums, teacher's by student's (exactly 0 for equal rows).
struct RowPair {
  float ref_s = 0.0f, ref_t = 0.0f, part_s = 1.0f, part_t = 1.0f, mean = 0.0f, log2_quotient = 0.0f;
  // Holds the row that comes next.
  int next = 0;
};

__device__ __forceinline__ float center_of(const PlainTotals&) { return 0.0f; }
__device__ __forceinline__ float center_of(const CenteredTotals& t) { return t.center; }
__device__ __forceinline__ float sum_of(const PlainTotals& t) { return t.g; }
__device__ __forceinline__ float sum_of(const CenteredTotals& t) { return fma(t.center, t.weight, t.g); }

// Returns the value that exponents are relative to: 0 if all elements so far are -inf. NaN and +inf
// propagate.
__device__ __forceinline__ float finite_max(float reference) {
  return reference == -INFINITY ? 0.0f : reference;
}

// Computes exponentials relative to a reference, the maximum of a row or a part: exactly 1 at the maximum, so
// that the loss is 0 if all probability is in one class.
template <class T>
struct Scaling {
  float slope, slope_low;
  static constexpr bool kPrecise = sizeof(T) == 4;

  __device__ explicit Scaling(const DivergenceParams<T>& p) : slope(p.slope), slope_low(p.slope_low) {}
  // Returns the exponential of a distance to the reference.
  __device__ __forceinline__ float power(float u) const {
    if constexpr (kPrecise)
      return exp2_precise(u, slope, slope_low);
    else
      return exp2_approx(u * slope);
  }
};
// Computes exponentials relative to a reference in one instruction less than Scaling. `rest` is the factor
// that the rounding of reference * slope leaves in all of them. Very large references use a smaller product,
// whose rounding error is small; compared with them, their neighbours are negligible.
struct Powers {
  float slope, start, rest;
  __device__ Powers(float slope_, float reference) : slope(slope_) {
    constexpr float kLarge = 0x1p20f;
    if (fabsf(reference * slope) > kLarge) slope = kLarge / fabsf(reference);
    start = reference * slope, rest = exp2_approx(-fma(reference, slope, -start));
  }
  __device__ __forceinline__ float operator()(float x) const { return exp2_approx(fma(x, slope, -start)); }
};
// Returns the change of student's minus teacher's reference from a part's references to larger ones.
__device__ __forceinline__ float shift_of(const Sums& part, float ref_s, float ref_t) {
  return (finite_max(part.ref_s) - finite_max(ref_s)) - (finite_max(part.ref_t) - finite_max(ref_t));
}

// Adds a class of jsd or tvd to the totals and replaces its exponentials by q and its slope. In 16
// bits jsd leaves q and the totals undivided, and tvd replaces the slope by g.
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

// Adds distant lanes first.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Holds the shared memory of the reductions: the warps of a row publish to the first warp of each of its
// CTAs, which reduces and publishes to its CTA. It is double-buffered, since a CTA may be one reduction ahead
// of another.
template <class T, int Messages>
struct ReduceStorage {
  Sums sums[2][Messages];
  Totals<T> totals[2][Messages];
  uint64_t barrier[2];
  float4 row[2];
  Totals<T> all;
};

// A CTA that is launched without a cluster must not use st.async.
template <bool kCluster>
__device__ __forceinline__ bool is_clustered() {
  return kCluster && cluster_size() > 1;
}

// Publishes a warp's values (the same in all lanes) to all CTAs of the row.
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
// The first warp calls it before it reads what was published.
template <bool kCluster, class T, int Messages>
__device__ __forceinline__ void wait_published(ReduceStorage<T, Messages>& x, int phase) {
  if (is_clustered<kCluster>()) mbarrier_wait_parity(&x.barrier[phase & 1], phase >> 1 & 1);
}

// Combines the lanes' sums relative to the largest references.
template <class T>
__device__ __forceinline__ void all_reduce_lanes(Sums& m, const Scaling<T>& scaling) {
  const float top_s = extreme_of_lanes<Max, 32>(m.ref_s), top_t = extreme_of_lanes<Max, 32>(m.ref_t);
  m.sum_s = warp_sum(m.sum_s * scaling.power(m.ref_s - finite_max(top_s)));
  m.sum_t = warp_sum(m.sum_t * scaling.power(m.ref_t - finite_max(top_t)));
  m.ref_s = top_s, m.ref_t = top_t;
}
__device__ __forceinline__ void all_reduce_lanes(PlainTotals& t) { t = {warp_sum(t.terms), warp_sum(t.g)}; }
__device__ __forceinline__ void all_reduce_lanes(CenteredTotals& t) {
  // With a NaN this is 0, as is everything else then.
  const unsigned heaviest = __ballot_sync(kAllLanes, t.weight == extreme_of_lanes<Max, 32>(t.weight));
  const float center = __shfl_sync(kAllLanes, t.center, __ffs(int(heaviest)) - 1);
  t = {warp_sum(t.terms), warp_sum(fma(t.weight, t.center - center, t.g)), center, warp_sum(t.weight)};
}

// All-reduces the softmax statistics of a row, for a KL also its terms. next() is called by the
// first warp while it waits.
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
    all.ref_s = finite_max(extreme_of_lanes<Max, 32>(all.ref_s)),
    all.ref_t = finite_max(extreme_of_lanes<Max, 32>(all.ref_t));
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

// All-reduces the totals of a row.
template <bool kCluster, class T, int Messages>
__device__ __forceinline__ Totals<T> all_reduce_totals(ReduceStorage<T, Messages>& x, int phase, int messages,
                                                       const Totals<T>& own) {
  publish<kCluster, false, true>(x, phase, Sums{}, own);
  if (threadIdx.x < 32) {
    wait_published<kCluster>(x, phase);
    Totals<T> all = {};
    for (int i = int(threadIdx.x); i < messages; i += 32) combine(all, x.totals[phase & 1][i]);
    all_reduce_lanes(all);
    // A NaN in the teacher's row is in no g.
    if (!(all.terms == all.terms)) all.g = all.terms;
    if (threadIdx.x == 0) x.all = all;
  }
  __syncthreads();
  return x.all;
}

// Sets columns of a vector outside the row to -inf.
template <class T>
__device__ __forceinline__ uint4 mask_columns(const AlignedRow<const T>& row, int k, const uint4& words) {
  constexpr int N = AlignedRow<T>::N;
  Vec<T, N> vec = reinterpret_cast<const Vec<T, N>&>(words);
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (!row.has(row.column(k) + j)) vec.v[j] = narrow<T>(-INFINITY);
  return reinterpret_cast<const uint4&>(vec);
}

// Writes zeros to the gradients of ignored rows, distributed over warps.
template <class T>
__device__ __forceinline__ void zero_ignored_rows(const DivergenceParams<T>& p, int warp, int warps) {
  for (ZeroMaskedRows<DivergenceParams<T>> zeroing(p, warp, warps); zeroing.step();) {
  }
}

// Returns the columns of a CTA of a cluster: a multiple of 64, so that slices have the row's offset.
int slice_of(int64_t cols, int cluster) { return int(ceil_div(ceil_div(cols, cluster), 64) * 64); }

// Returns false if no such cluster fits on the device.
template <class Kernel, class... Arguments>
bool launch_resident(Context& ctx, OccupancyCache& occupancy, Kernel kernel, int threads, size_t shared,
                     int cluster, int64_t rows, const Arguments&... arguments) {
  const int64_t resident = occupancy.max_active(kOp, kernel, cluster, threads, shared);
  if (resident == 0) return false;
  launch(kOp, ctx, kernel,
         {.blocks = std::min(rows, resident) * cluster,
          .threads = threads,
          .shared = shared,
          .cluster = cluster},
         arguments...);
  return true;
}

}  // namespace
}  // namespace tigon::cuda
