// Takes rows of distillation without bias and softcap into 16 bits. A row pair is in the registers of a CTA
// or, on sm_90, of a cluster, whose CTAs have a slice each: it is read once, as aligned vectors. Two CTAs
// share an SM, so that one computes while the other waits for a reduction; meanwhile the next row of a CTA
// comes to L2. At temperature 1 the exponentials of the hard loss are those of the divergence, and its
// gradient is the student's probabilities' share.
#include <algorithm>

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_config.h"
#include "tigon/ops/divergence/distillation_rows.cuh"

namespace tigon::cuda {
namespace {

// Stands for 16 bits, which take approximate exponentials.
using G = __nv_bfloat16;
// Slices are whole 128-byte lines of either side.
constexpr int kSliceVecs = 16;

// Holds the columns [begin, end) of a row that a CTA of kThreads threads has.
template <int kThreads>
struct Slice {
  int begin, end;
  __device__ __forceinline__ int column(int i) const { return begin + (int(threadIdx.x) + kThreads * i) * N; }
};

// A vector that is read to its end is within its row's stride, which is a multiple of it.
template <class T, int kVecs, int kThreads>
__device__ __forceinline__ void load_slice(const Side& side, int64_t r, const Slice<kThreads>& slice,
                                           float (&z)[kVecs][N]) {
  const T* row = side.logits.at<const T>(r, slice.column(0));
  const int left = slice.end - slice.column(0);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    Vec<T, N> v;
#pragma unroll
    for (int j = 0; j < N; ++j) v.v[j] = narrow<T>(-INFINITY);
    if (i * kThreads * N < left) v = load_stream<T, N>(row + i * kThreads * N);
#pragma unroll
    for (int j = 0; j < N; ++j) z[i][j] = v[j];
  }
  const bool partial = slice.end % N != 0;
  if (side.inner == 1.0f && !partial) return;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) z[i][j] = i * kThreads * N + j < left ? z[i][j] * side.inner : -INFINITY;
}
template <int kThreads>
__device__ __forceinline__ void prefetch_slice(const Cells& m, int64_t r, const Slice<kThreads>& slice) {
  const int size = m.dtype == DType::f32 ? 4 : 2, bytes = (slice.end - slice.begin) * size / 16 * 16;
  if (bytes > 0)
    cp_async_bulk_prefetch_L2(static_cast<const char*>(m.data) + (r * m.stride + slice.begin) * size, bytes);
}

// A CTA without a cluster is a cluster of its own.
template <DivergenceKind K, class Config>
__global__ __launch_bounds__(Config::value.max_threads, Config::value.min_blocks_per_sm) void plain_kernel(
    const __grid_constant__ DistillationParams p, int slice_columns) {
  constexpr int kVecs = Config::value.vecs_per_thread, kThreads = Config::value.max_threads;
  __shared__ ReduceStorage<PairPeak<G>> peaks;
  __shared__ ReduceStorage<SumArray<3>> sums;
  peaks.init(), sums.init();
  cluster_arrive();
  cluster_wait();
  const int blocks = int(cluster_size()), rank = int(cluster_rank());
  const Slice<kThreads> slice = {min(rank * slice_columns, p.cols), min((rank + 1) * slice_columns, p.cols)};
  const bool first = threadIdx.x == 0 && rank == 0;
  const int64_t step = gridDim.x / unsigned(blocks);
  int phase = 0;
#pragma unroll 1
  for (int64_t r = blockIdx.x / unsigned(blocks); r < p.rows; r += step) {
    if (threadIdx.x == 0 && r + step < p.rows) {
      prefetch_slice(p.student.logits, r + step, slice);
      prefetch_slice(p.teacher.logits, r + step, slice);
    }
    if (p.ignored(r)) {
      const float zeros[N] = {};
      for (int c = slice.column(0); p.gradient.data != nullptr && c < slice.end; c += kThreads * N)
        store_gradient<G>(p, r, c, zeros);
      if (first) p.write(r, 0.0f, 0.0f, 0.0f);
      continue;
    }
    float s[kVecs][N], t[kVecs][N];
    load_slice<float>(p.student, r, slice, s);
    if (p.teacher.logits.dtype == DType::f32)
      load_slice<float>(p.teacher, r, slice, t);
    else if (p.teacher.logits.dtype == DType::bf16)
      load_slice<__nv_bfloat16>(p.teacher, r, slice, t);
    else
      load_slice<__half>(p.teacher, r, slice, t);

    PairPeak<G> peak = PairPeak<G>::identity();
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) peak.s.m = fmaxf(peak.s.m, s[i][j]), peak.t.m = fmaxf(peak.t.m, t[i][j]);
    const float from_s = finite_max(peak.s.m), from_t = finite_max(peak.t.m);
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) {
        peak.s.s += exp_minus_max<G>(s[i][j], from_s);
        peak.t.s += exp_minus_max<G>(t[i][j], from_t);
      }
    // The student's sum leaves out the label's class, which is added at the end: p - 1 and log p are accurate
    // if the label has nearly all probability.
    int label = -1;
    float label_z = -INFINITY;
    if (p.has_hard) {
      const int64_t given = p.labels[r];
      const bool right = given >= 0 && given < p.cols;
      label = right ? int(given) : -1;
      label_z = right ? *p.student.logits.at<const float>(r, label) * p.student.inner : CUDART_NAN_F;
      if (const int k = (label - slice.begin) / N;
          label >= slice.begin && label < slice.end && k % kThreads == int(threadIdx.x)) {
        peak.s.s = 0.0f;
#pragma unroll
        for (int i = 0; i < kVecs; ++i)
#pragma unroll
          for (int j = 0; j < N; ++j)
            peak.s.s += slice.column(i) + j == label ? 0.0f : exp_minus_max<G>(s[i][j], from_s);
      }
    }
    peak = all_reduce_row<0, true>(peak, peaks, phase);
    const float others = peak.s.s, gap = finite_max(peak.s.m) - label_z;
    if (p.has_hard) peak.s.s += exp(-gap);
    const RowFacts row = row_facts(peak);

    SumArray<3> totals = {};
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float u = s[i][j] - row.ref_s, v = t[i][j] - row.ref_t;
        const float q = __fmul_rn(exp_minus_max<G>(u, 0.0f), row.part_s);
        const float other = __fmul_rn(exp_minus_max<G>(v, 0.0f), row.part_t);
        float term;
        terms_of<K, G>(q, other, fma(u - v, kLog2e, row.log2_quotient), p.beta, term, t[i][j]);
        totals.s[kTerms] += term, totals.s[kG] += t[i][j];
        totals.s[kHeat] = fma(q, fmaxf(u, -1e4f), totals.s[kHeat]);
        s[i][j] = q;
      }
    totals = all_reduce_row<0, true>(totals, sums, phase++);
    const float terms = totals.s[kTerms];
    // A NaN in the teacher's row is in no g.
    const float sum_g = terms == terms ? totals.s[kG] : terms;
    if (first)
      p.write(r, fast::divergence_loss<K>(terms, sum_g, p.beta) * p.factor,
              p.has_hard ? gap + ::log1pf(others + ::expm1f(-gap)) : 0.0f,
              kLn2 * ::log2f(peak.s.s) - totals.s[kHeat]);
    if (p.gradient.data == nullptr) continue;
    // The gradient is (g - q sum_g) soft + q hard, less hard in the label's column.
    const float gain = (p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f) * p.gain;
    const float soft = p.soft_weight * p.factor * gain * fast::divergence_unit<K>(p.beta);
    const float hard = p.has_hard ? p.hard_weight * gain : 0.0f, share = fma(-sum_g, soft, hard);
    const float label_hard = label < 0 ? 0.0f : -hard * others * row.part_s;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int c = slice.column(i);
      if (c >= slice.end) break;
      float x[N];
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = fma(s[i][j], share, t[i][j] * soft);
      if (unsigned(label - c) < unsigned(N) && label >= 0) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (c + j == label) x[j] = fast::divergence_gradient(t[i][j], s[i][j], sum_g, soft) + label_hard;
      }
      store_gradient<G>(p, r, c, x);
    }
  }
  // A CTA must not exit while others may write to its shared memory.
  cluster_arrive();
  cluster_wait();
}

template <DivergenceKind K, class Config>
bool launch_plain(Context& ctx, const DistillationParams& p) {
  static OccupancyCache occupancy;
  auto* kernel = &plain_kernel<K, Config>;
  const int64_t vecs = ceil_div(p.cols, N);
  int64_t clusters = 0, columns = 0;
  int cluster = 0;
  // Takes the smallest cluster that holds a row: its CTAs use most of their threads' columns.
  for (int blocks : {1, 2, 4, 8, 16}) {
    if (clusters > 0) break;
    const int64_t slice = blocks == 1 ? vecs : ceil_div(ceil_div(vecs, blocks), kSliceVecs) * kSliceVecs;
    if (slice > int64_t(Config::value.vecs_per_thread) * Config::value.max_threads) continue;
    clusters = occupancy.max_active(kOp, kernel, blocks, Config::value.max_threads);
    cluster = blocks, columns = slice * N;
  }
  if (clusters == 0) return false;
  launch(kOp, ctx, kernel,
         {.blocks = std::min(p.rows, clusters) * cluster,
          .threads = Config::value.max_threads,
          .cluster = cluster},
         p, int(columns));
  return true;
}

template <DivergenceKind K>
bool launch_kind(Context& ctx, const DistillationParams& p) {
  // Half is for two CTAs per SM; then one is tried.
  using Half = ConfigType<RowConfig{.vecs_per_thread = 8, .max_threads = 256, .min_blocks_per_sm = 2}>;
  using More = ConfigType<RowConfig{.vecs_per_thread = 10, .max_threads = 256, .min_blocks_per_sm = 2}>;
  using Whole = ConfigType<RowConfig{.vecs_per_thread = 8, .max_threads = 512}>;
  return launch_plain<K, Half>(ctx, p) || launch_plain<K, More>(ctx, p) || launch_plain<K, Whole>(ctx, p);
}

}  // namespace

bool distillation_plain(Context& ctx, DivergenceKind kind, const DistillationParams& p) {
  const bool options = p.student.bias != nullptr || p.teacher.bias != nullptr || p.student.softcap > 0.0f ||
                       p.teacher.softcap > 0.0f || (p.has_hard && p.temperature != 1.0f);
  const bool vectors = p.student.logits.vectors && p.teacher.logits.vectors;
  if (options || !vectors) return false;
  bool done = false;
  with_kind(kind, [&]<DivergenceKind K>() { done = launch_kind<K>(ctx, p); });
  return done;
}

}  // namespace tigon::cuda
