// The CUDA backend of distillation moves 8 bytes per element (6 if the teacher's logits have 16 bits), and
// those of the gradient. The first variant that fits runs:
//   plain      takes rows without options into 16 bits: distillation_plain_cuda.cu.
//   registers  holds a row pair in the registers of a CTA or, on sm_90, of a cluster: read once. First come
//              the maxima and sums of exponentials, then the sums of terms, with q and g in place of the
//              logits, then the gradient. CTAs are persistent.
//   looped     takes longer rows: three sweeps by one CTA.
// Exponentials and logarithms are approximate (relative error about 1e-6) if the gradient is rounded to 16
// bits.
#include <algorithm>

#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/ops/divergence/distillation_rows.cuh"

namespace tigon::cuda {
namespace {

struct RowThreads {
  int blocks = int(cluster_size()), rank = int(cluster_rank());
  // Returns the first column of the i-th vector of this thread. The CTAs of a cluster take vectors in turn.
  __device__ __forceinline__ int column(int i) const {
    return (int(threadIdx.x) + int(blockDim.x) * (i * blocks + rank)) * N;
  }
};

// A thread has 16 columns in registers, three values each.
constexpr RowConfig kRegisterConfig = {.vecs_per_thread = 4, .max_threads = 640};

// A CTA without a cluster is a cluster of its own.
template <DivergenceKind K, class G>
__global__ __launch_bounds__(kRegisterConfig.max_threads) void register_kernel(
    const __grid_constant__ DistillationParams p) {
  constexpr int kVecs = kRegisterConfig.vecs_per_thread;
  __shared__ ReduceStorage<PairPeak<G>> peaks;
  __shared__ ReduceStorage<Totals> sums;
  peaks.init(), sums.init();
  cluster_arrive();
  cluster_wait();
  const RowThreads threads;
  const bool first = threadIdx.x == 0 && threads.rank == 0;
  int phase = 0;
  for (int64_t r = blockIdx.x / unsigned(threads.blocks); r < p.rows;
       r += gridDim.x / unsigned(threads.blocks)) {
    if (p.ignored(r)) {
      zero_row<G>(p, r, threads.column(0), int(blockDim.x) * threads.blocks * N);
      if (first) p.write(r, 0.0f, 0.0f, 0.0f);
      continue;
    }
    float s[kVecs][N], t[kVecs][N], h[kVecs][N];
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
    peak = all_reduce_row<0, true>(peak, peaks, phase);
    RowFacts row = row_facts(peak);
    find_label(p, r, row);
    Totals totals = {};
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float q, g, e;
        add_class<K, G>(p, row, s[i][j], t[i][j], threads.column(i) + j, totals, q, g, e);
        const float slope = slope_of(p.student, s[i][j]);
        s[i][j] = q * slope, t[i][j] = g * slope, h[i][j] = e * slope;
      }
    }
    totals = all_reduce_row<0, true>(totals, sums, phase++);
    const Gains gains = finish_row<K>(p, r, row, totals, peak.s.s, first);
    if (p.gradient.data == nullptr) continue;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int c = threads.column(i);
      if (c >= p.cols) break;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float q = s[i][j];
        s[i][j] = gradient_of(gains, q, t[i][j], h[i][j]);
        if (c + j == row.label)
          s[i][j] = fma(gains.label, row.label_slope, gradient_of(gains, q, t[i][j], 0.0f));
        if (p.has_hard && row.label < 0) s[i][j] = CUDART_NAN_F;
      }
      store_gradient<G>(p, r, c, s[i]);
    }
  }
  // A CTA must not exit while others may write to its shared memory.
  cluster_arrive();
  cluster_wait();
}

template <DivergenceKind K, class G>
__global__ __launch_bounds__(kLoopThreads) void looped_kernel(const __grid_constant__ DistillationParams p) {
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
    find_label(p, r, row);
    Totals totals = {}, again = {};
    for (int c = begin; c < p.cols; c += step) {
      load_z(c);
#pragma unroll
      for (int j = 0; j < N; ++j) add_class<K, G>(p, row, s[j], t[j], c + j, totals, q[j], g[j], h[j]);
    }
    totals = all_reduce_row<0, false>(totals, sums, phase++);
    const Gains gains = finish_row<K>(p, r, row, totals, peak.s.s, threadIdx.x == 0);
    if (p.gradient.data == nullptr) continue;
    for (int c = begin; c < p.cols; c += step) {
      load_z(c);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        add_class<K, G>(p, row, s[j], t[j], c + j, again, q[j], g[j], h[j]);
        const float slope = slope_of(p.student, s[j]);
        const bool here = c + j == row.label;
        s[j] = slope * ((here ? gains.label : 0.0f) + gradient_of(gains, q[j], g[j], here ? 0.0f : h[j]));
        if (p.has_hard && row.label < 0) s[j] = CUDART_NAN_F;
      }
      store_gradient<G>(p, r, c, s);
    }
  }
}

// Launches one cluster (or CTA) per row, as many as are resident. Returns false if none fits.
template <DivergenceKind K, class G>
bool launch_registers(Context& ctx, const DistillationParams& p, int64_t vecs, bool clusters) {
  static OccupancyCache occupancy;
  auto* kernel = &register_kernel<K, G>;
  // A CTA of a cluster has some hundred threads, so that a reduction is not most of its work.
  constexpr int kMinThreads = 192;
  const ClusterShape shape =
      clusters ? max_occupancy_cluster(kOp, occupancy, entry_of(kernel), kRegisterConfig, vecs, kMinThreads,
                                       no_shared)
               : fit_cluster(kOp, occupancy, entry_of(kernel), kRegisterConfig, vecs, 1, 1, no_shared);
  if (shape.blocks == 0) return false;
  launch(kOp, ctx, kernel,
         {.blocks = std::min(p.rows, shape.clusters) * shape.blocks,
          .threads = shape.threads,
          .cluster = shape.blocks},
         p);
  return true;
}

template <DivergenceKind K, class G>
void launch_rows(Context& ctx, const DistillationParams& p) {
  const int64_t vecs = ceil_div(p.cols, N);
  // Up to this length one CTA is enough.
  constexpr int64_t kShort = 2048;
  if (vecs <= kShort && launch_registers<K, G>(ctx, p, vecs, false)) return;
  if (launch_registers<K, G>(ctx, p, vecs, true) || launch_registers<K, G>(ctx, p, vecs, false)) return;
  launch(kOp, ctx, looped_kernel<K, G>,
         {.blocks = std::min<int64_t>(p.rows, int64_t(device_facts().sms) * 2), .threads = kLoopThreads}, p);
}

template <DivergenceKind K>
void launch_kind(Context& ctx, const DistillationParams& p) {
  if (p.gradient.dtype == DType::f32) return launch_rows<K, float>(ctx, p);
  if (!distillation_plain(ctx, K, p)) launch_rows<K, __nv_bfloat16>(ctx, p);
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
  DistillationParams p = {.student = side_of(a.student, a.student_side),
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
                          .gain = a.student_side.gain(),
                          .has_hard = a.has_hard()};
  with_kind(a.kind, [&]<DivergenceKind K>() { launch_kind<K>(ctx, p); });
}

}  // namespace tigon::cuda
