// Takes long rows of jsd and tvd in 16 bits (sm_90). A row passes through the shared memory of a CTA or a
// cluster (tma_pipeline.cuh): its maxima and the sums of its exponentials are found there, then, with both
// softmaxes known, the terms of its classes, which the consumers hold in registers until the row's sums over
// classes are known. No warp waits for a reduction of its own row. A reducer warp combines the consumers'
// sums, within the CTA and then with the reducer warps of the cluster's other CTAs. Meanwhile the consumers
// process other rows: the classes of one row, the exponentials of the row after the next, the gradient of the
// first. Two further warps zero the gradients of ignored rows.
#pragma once

#include "tigon/base/cuda/tma_pipeline.cuh"
#include "tigon/ops/divergence/divergence_reduce.cuh"

namespace tigon::cuda {
namespace {

// HeldVecs counts the vectors whose classes a consumer thread holds. The consumers take over registers of the
// other four warps, which keep ProducerRegisters each.
template <int ConsumerWarps, int VecsPerThread, int HeldVecs, int ProducerRegisters>
struct PairShape : TmaPipelineShape<ConsumerWarps, VecsPerThread, 2> {
  static constexpr int held_vecs = HeldVecs, threads = ConsumerWarps * 32 + 128;
  static constexpr int producer_registers = ProducerRegisters,
                       consumer_registers = (65536 / threads / 8 * 8 * threads - 128 * producer_registers) /
                                            (ConsumerWarps * 32) / 8 * 8;
};

// Sums over a row's classes: terms, g, and q as computed. The mean slope is relative to the latter sum, so
// that equal slopes differ from their mean by rounding only.
struct alignas(16) ClassSums {
  float terms, g, q, unused;
  __device__ __forceinline__ ClassSums merged() const {
    return {warp_sum(terms), warp_sum(g), warp_sum(q), 0.0f};
  }
};

// Holds the softmaxes of a row pair: references, the student's probability of 2^0, the teacher's relative to
// it, and log2 q - log2 p of logits equally far from their references.
struct alignas(16) Softmaxes {
  float ref_s, ref_t, unit, ratio, log2_offset;
};

template <class Shape>
struct TmaStorage {
  Sums sums[2][Shape::consumer_warps], cluster_sums[2][kMaxCluster];
  ClassSums classes[2][Shape::consumer_warps], cluster_classes[2][kMaxCluster];
  Softmaxes softmax[2];
  float2 slope[2];
  uint64_t sums_barrier[2], sums_cluster_barrier[2], softmax_barrier[2], classes_barrier[2],
      classes_cluster_barrier[2], slope_barrier[2];
  TmaPipeline<Shape> pipeline;

  // One thread calls it.
  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&sums_barrier[i], Shape::consumer_warps), mbarrier_init(&sums_cluster_barrier[i]),
          mbarrier_init(&softmax_barrier[i]);
      mbarrier_init(&classes_barrier[i], Shape::consumer_warps), mbarrier_init(&classes_cluster_barrier[i]);
      mbarrier_init(&slope_barrier[i]);
    }
    pipeline.init();
  }
};

// Counts the phases of a double-buffered message.
struct PhaseCounter {
  int count = 0;
  __device__ __forceinline__ int buffer() const { return count & 1; }
  __device__ __forceinline__ int phase() const { return count >> 1 & 1; }
};

// Runs the reducer warp.
template <DivergenceKind K, class T, class Shape>
struct Reducer {
  const DivergenceParams<T>& p;
  TmaStorage<Shape>& storage;
  const int lane, blocks, rank;
  PhaseCounter sums_phase, classes_phase;

  struct Pending {
    int row;
    float gain;
  };
  __device__ Reducer(const DivergenceParams<T>& p, TmaStorage<Shape>& storage)
      : p(p),
        storage(storage),
        lane(int(threadIdx.x) % 32),
        blocks(int(cluster_size())),
        rank(int(cluster_rank())) {}

  // Reduces what the consumer warps published, then over the CTAs of the cluster; merge(v) reduces
  // over lanes.
  template <class V, class Merge>
  __device__ __forceinline__ V all_reduce(const V* own, V* cta_values, uint64_t* warp_barrier,
                                          uint64_t* cluster_barrier, const PhaseCounter& counter,
                                          const V& none, const Merge& merge) {
    mbarrier_wait_parity<false>(warp_barrier, counter.phase());
    V v = merge(lane < Shape::consumer_warps ? own[lane] : none);
    if (blocks == 1) return v;
    if (lane == 0) mbarrier_arrive_expect_tx(cluster_barrier, blocks * int(sizeof(V)));
    __syncwarp();
    if (lane < blocks) st_async(&cta_values[rank], unsigned(lane), v, cluster_barrier);
    mbarrier_wait_parity(cluster_barrier, counter.phase());
    return merge(lane < blocks ? cta_values[lane] : none);
  }
  __device__ __forceinline__ Pending sums(int row) {
    const int i = sums_phase.buffer();
    const float scale = p.scale_of(row);
    const Scaling<T> scaling(p);
    Sums m = all_reduce(storage.sums[i], storage.cluster_sums[i], &storage.sums_barrier[i],
                        &storage.sums_cluster_barrier[i], sums_phase, Sums{-INFINITY, 0.0f, -INFINITY, 0.0f},
                        [&](Sums v) {
                          all_reduce_lanes(v, scaling);
                          return v;
                        });
    ++sums_phase.count;
    m.ref_s = finite_max(m.ref_s), m.ref_t = finite_max(m.ref_t);
    if (p.log_probs) m.sum_s = m.sum_t = 1.0f;
    const Softmaxes softmax = {m.ref_s, m.ref_t, 1.0f / m.sum_s, m.sum_s / m.sum_t,
                               fma(m.ref_t - m.ref_s, p.slope, ::log2f(m.sum_t / m.sum_s))};
    if (lane == 0) {
      storage.softmax[i] = softmax;
      mbarrier_arrive(&storage.softmax_barrier[i]);
    }
    return {row, p.factor * p.inv_temperature * scale * softmax.unit * fast::divergence_unit<K>(p.beta)};
  }
  __device__ __forceinline__ void classes(const Pending& row) {
    const int i = classes_phase.buffer();
    ClassSums all = all_reduce(storage.classes[i], storage.cluster_classes[i], &storage.classes_barrier[i],
                               &storage.classes_cluster_barrier[i], classes_phase, ClassSums{},
                               [](const ClassSums& v) { return v.merged(); });
    ++classes_phase.count;
    // A NaN in the teacher's row is in no g.
    if (!(all.terms == all.terms)) all.g = all.terms;
    if (lane == 0) {
      storage.slope[i] = make_float2(row.gain, p.log_probs ? fast::divergence_own_share<K>() : all.g / all.q);
      mbarrier_arrive(&storage.slope_barrier[i]);
      if (rank == 0) p.loss[row.row] = fast::divergence_loss<K>(all.terms, all.g, p.beta) * p.factor;
    }
  }
  // Takes the rows in the consumers' order.
  __device__ void run() {
    MaskedRowScheduler scheduler(p, int(blockIdx.x) / blocks, int(gridDim.x) / blocks);
    const int rows = scheduler.end();
    int next = scheduler();
    auto sums_of_next = [&] {
      const int row = next;
      if (row >= rows) return Pending{rows, 0.0f};
      next = scheduler();
      return sums(row);
    };
    Pending row = sums_of_next(), following = sums_of_next();
    while (row.row < rows) {
      classes(row);
      row = following, following = sums_of_next();
    }
  }
};

// Describes a CTA's columns of the rows that it takes.
template <class T>
struct Slice {
  const DivergenceParams<T>& p;
  int first, n;
  __device__ explicit Slice(const DivergenceParams<T>& p) : p(p) {
    first = min(int(cluster_rank()) * p.slice, p.cols), n = min(p.slice, p.cols - first);
  }
  __device__ __forceinline__ AlignedRow<const T> student(int64_t r) const {
    return AlignedRow<const T>(p.student + r * p.student_stride + first, n);
  }
  __device__ __forceinline__ AlignedRow<const T> teacher(int64_t r) const {
    return AlignedRow<const T>(p.teacher + r * p.teacher_stride + first, n);
  }
};

// Returns max(x, a large negative number), so that differences of logarithms stay finite. NaN propagates.
template <class T>
__device__ __forceinline__ uint4 above_minus_inf(uint4 w) {
  auto limit = [](uint32_t& x) {
    if constexpr (std::is_same_v<T, __half>)
      x = max_NaN_f16x2(x, 0xfbfffbffu);
    else
      x = max_NaN_bf16x2(x, 0xf149f149u);  // -1e30
  };
  limit(w.x), limit(w.y), limit(w.z), limit(w.w);
  return w;
}

template <DivergenceKind K, class T, class Shape>
struct Consumer {
  using State = PipelineState<Shape>;
  static constexpr int N = AlignedRow<T>::N, kVecs = Shape::vecs_per_thread, kHeldVecs = Shape::held_vecs;
  const DivergenceParams<T>& p;
  TmaStorage<Shape>& storage;
  uint4* smem;
  const int chunks;
  const Slice<T> slice;
  // `head` is of the pass for exponentials, `tail` of the pass for classes.
  State head, tail;
  PhaseCounter sums_phase, softmax_phase, classes_phase, slope_phase;
  // Hold the student's probability of every held class, and its slope (for tvd: g).
  float q_of[kHeldVecs][N], g_of[kHeldVecs][N];

  __device__ __forceinline__ Consumer(const DivergenceParams<T>& p, TmaStorage<Shape>& storage, uint4* smem,
                                      int chunks)
      : p(p), storage(storage), smem(smem), chunks(chunks), slice(p) {}
  __device__ __forceinline__ uint4& words(const State& at, int tensor, int i) const {
    return *TmaPipeline<Shape>::vec(smem, at, tensor, i);
  }
  __device__ __forceinline__ static int vec_of(int h, int i) {
    return h * Shape::chunk + i * Shape::consumers + int(threadIdx.x);
  }
  // True if all vectors of chunk h are full.
  __device__ __forceinline__ static bool is_full(const AlignedRow<const T>& x, int h) {
    return (h > 0 || x.lead == 0) && (h + 1) * Shape::chunk * N - x.lead <= x.cols;
  }
  __device__ __forceinline__ static bool is_first_lane() { return threadIdx.x % 32 == 0; }
  __device__ __forceinline__ static int warp() { return int(threadIdx.x) / 32; }

  // Sets columns of a chunk outside the row to -inf, and loads the partial last vector, which the
  // bulk copy leaves out.
  __device__ __forceinline__ void trim(int r, const AlignedRow<const T>& x, int h, const State& at) {
#pragma unroll 1
    for (int i = 0; i < kVecs; ++i) {
      const int k = vec_of(h, i);
      if (k >= x.vecs) {
        constexpr uint32_t none = kMinusInf<T>;
        words(at, 0, i) = words(at, 1, i) = make_uint4(none, none, none, none);
      } else if (!x.is_full(k)) {
        words(at, 0, i) = load_vec(x, k), words(at, 1, i) = load_vec(slice.teacher(r), k);
      }
    }
  }
  // Computes the sums of exponentials of row r, relative to the warp's maxima.
  __device__ __forceinline__ void sums(int r) {
    const AlignedRow<const T> x = slice.student(r);
    uint32_t top_s = kMinusInf<T>, top_t = top_s;
    State at = head;
#pragma unroll 1
    for (int h = 0; h < chunks; ++h, at.advance()) {
      storage.pipeline.consumer_wait(at);
      if (!is_full(x, h)) trim(r, x, h, at);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        top_s = max_words<T>(top_s, max_words<T>(words(at, 0, i)));
        top_t = max_words<T>(top_t, max_words<T>(words(at, 1, i)));
      }
    }
    Sums own = {0.0f, 0.0f, 0.0f, 0.0f};
    if (!p.log_probs)
      own.ref_s = extreme_of_lanes<Max, 32>(max_of_word<T>(top_s)),
      own.ref_t = extreme_of_lanes<Max, 32>(max_of_word<T>(top_t));
    const Powers power_s(p.slope, finite_max(own.ref_s)), power_t(p.slope, finite_max(own.ref_t));
#pragma unroll 1
    for (int h = 0; h < chunks; ++h, head.advance()) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        float s[N], t[N];
        unpack<T>(words(head, 0, i), s);
        unpack<T>(words(head, 1, i), t);
#pragma unroll
        for (int j = 0; j < N; ++j) own.sum_s += power_s(s[j]), own.sum_t += power_t(t[j]);
      }
    }
    own.sum_s = warp_sum(own.sum_s * power_s.rest), own.sum_t = warp_sum(own.sum_t * power_t.rest);
    const int buffer = sums_phase.buffer();
    if (is_first_lane()) {
      storage.sums[buffer][warp()] = own;
      mbarrier_arrive(&storage.sums_barrier[buffer]);
    }
    ++sums_phase.count;
  }

  // Adds a class and replaces its logits by the student's probability and its slope (for tvd: g).
  template <bool Half>
  __device__ __forceinline__ void add_class(float& q, float& g, const Softmaxes& m, ClassSums& all) const {
    const float slope = p.slope, x = q, y = g;
    if constexpr (K == DivergenceKind::tvd) {
      q = exp2_approx((x - m.ref_s) * slope);
      const float e = fma(-exp2_approx((y - m.ref_t) * slope), m.ratio, q);
      g = e == 0.0f ? 0.0f : copysignf(q, e);
      all.terms += fabsf(e), all.g += g;
    } else {
      // Holds the larger probability, and by their quotient the smaller one: log m = log bigger + log
      // weights, as in divergence_slope.
      const float d = fma(x - y, slope, m.log2_offset);
      // True if the teacher's probability is the larger one.
      const bool teacher = d < 0.0f;
      float below = x - m.ref_s;
      if (teacher) below = y - m.ref_t;
      float bigger = exp2_approx(below * slope);
      if (teacher) bigger *= m.ratio;
      const float r = exp2_approx(-fabsf(d)), smaller = bigger * r;
      float log_weights;
      if constexpr (Half) {
        log_weights = fast::log2_mean_with_one(r);
      } else {
        const float rest = 1.0f - r;
        float weights = fma(-p.beta, rest, 1.0f);
        if (teacher) weights = fma(p.beta, rest, r);
        log_weights = fast::log2(weights);
      }
      const float low = -fabsf(d) - log_weights;
      q = teacher ? smaller : bigger, g = teacher ? low : -log_weights;
      all.g = fma(q, g, all.g);
      // Adds the terms of both sides.
      all.terms = fma(smaller, low, fma(bigger, -log_weights, all.terms));
    }
    all.q += q;
  }
  // Half means that beta is one half.
  template <bool Half>
  __device__ __forceinline__ void classes() {
    int buffer = softmax_phase.buffer();
    mbarrier_wait_parity<false>(&storage.softmax_barrier[buffer], softmax_phase.phase());
    ++softmax_phase.count;
    const Softmaxes m = storage.softmax[buffer];
    ClassSums all = {};
#pragma unroll
    for (int h = 0; h < kHeldVecs / kVecs; ++h) {
      if (h > 0 && h >= chunks) continue;
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        float (&q)[N] = q_of[h * kVecs + i];
        float (&g)[N] = g_of[h * kVecs + i];
        uint4 s = words(tail, 0, i), t = words(tail, 1, i);
        if (i + 1 == kVecs) storage.pipeline.consumer_release(tail);
        if constexpr (K == DivergenceKind::jsd) s = above_minus_inf<T>(s), t = above_minus_inf<T>(t);
        unpack<T>(s, q);
        unpack<T>(t, g);
#pragma unroll
        for (int j = 0; j < N; ++j) add_class<Half>(q[j], g[j], m, all);
      }
      tail.advance();
    }
    if constexpr (K == DivergenceKind::jsd) all.terms -= all.g;
    all = ClassSums{all.terms * m.unit, all.g * m.unit, all.q * m.unit, 0.0f}.merged();
    buffer = classes_phase.buffer();
    if (is_first_lane()) {
      storage.classes[buffer][warp()] = all;
      mbarrier_arrive(&storage.classes_barrier[buffer]);
    }
    ++classes_phase.count;
  }
  __device__ __forceinline__ void gradients(int r) {
    const int buffer = slope_phase.buffer();
    mbarrier_wait_parity<false>(&storage.slope_barrier[buffer], slope_phase.phase());
    ++slope_phase.count;
    if (p.dstudent == nullptr) return;
    const float gain = storage.slope[buffer].x, mean = storage.slope[buffer].y;
    const AlignedRow<const T> x = slice.student(r);
    const AlignedRow<T> to = aligned_row_like(p.gradient(r) + slice.first, x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
#pragma unroll
    for (int h = 0; h < kHeldVecs / kVecs; ++h) {
      if (h > 0 && h >= chunks) continue;
      const bool all_full = aligned && is_full(x, h);
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        const float (&q)[N] = q_of[h * kVecs + i];
        const float (&g)[N] = g_of[h * kVecs + i];
        const int k = vec_of(h, i);
        float v[N];
#pragma unroll
        for (int j = 0; j < N; ++j)
          v[j] = K == DivergenceKind::jsd ? (g[j] - mean) * (q[j] * gain) : fma(-q[j], mean, g[j]) * gain;
        if (all_full) {
          Vec<T, N> vec;
          vec.set(v);
          store_v4(to.base + int64_t(k) * N, vec);
        } else if (k < to.vecs) {
          store_vec(to, k, v, aligned);
        }
      }
    }
  }
  __device__ __forceinline__ void run() {
    const int rows = int(p.rows);
    const bool half = K == DivergenceKind::tvd || p.beta == 0.5f;
    for (int row = -1, next = -1, later = -1; row < rows; row = next, next = later) {
      if (row >= 0) half ? classes<true>() : classes<false>();
      if (later < rows && (later = storage.pipeline.consumer_wait(head)) < rows) sums(later);
      if (row >= 0) gradients(row);
    }
  }
};

// `chunks` counts those of a row.
template <DivergenceKind K, class T, class Shape>
__global__ __launch_bounds__(Shape::threads, 1) void tma_kernel(const __grid_constant__ DivergenceParams<T> p,
                                                                int chunks) {
#if __CUDA_ARCH__ >= 900
  __shared__ TmaStorage<Shape> storage;
  extern __shared__ uint4 smem[];
  const int warp = int(threadIdx.x) / 32 - Shape::consumer_warps;
  if (threadIdx.x == 0) storage.init();
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (warp < 0) {
    setmaxnreg_inc<Shape::consumer_registers>();
    Consumer<K, T, Shape>(p, storage, smem, chunks).run();
  } else {
    setmaxnreg_dec<Shape::producer_registers>();
    if (warp == 0) {
      Reducer<K, T, Shape>(p, storage).run();
    } else if (warp == 1) {
      const int blocks = int(cluster_size());
      const Slice<T> slice(p);
      storage.pipeline.produce(
          smem, chunks, MaskedRowScheduler(p, int(blockIdx.x) / blocks, int(gridDim.x) / blocks),
          [&](int r, int tensor) { return (tensor == 0 ? slice.student(r) : slice.teacher(r)).base; },
          [&](int r) {
            const AlignedRow<const T> x = slice.student(r);
            return (x.lead + x.cols) / AlignedRow<T>::N;
          });
    } else {
      zero_ignored_rows(p, int(blockIdx.x) * 2 + warp - 2, int(gridDim.x) * 2);
    }
  }
  __syncwarp();
  // A CTA must not exit while others may write to its shared memory.
  cluster_arrive();
  cluster_wait();
#endif
}

// Returns false if a row does not fit or no such cluster fits on the device.
template <DivergenceKind K, class T, class Shape>
bool launch_tma(Context& ctx, DivergenceParams<T> p, int cluster) {
  static OccupancyCache occupancy;
  p.slice = slice_of(p.cols, cluster);
  const int64_t columns = p.slice + (p.aligned ? 0 : AlignedRow<T>::N - 1);
  const int chunks = int(ceil_div(columns, Shape::chunk * AlignedRow<T>::N));
  // Three rows are in flight, the last one in part.
  if (chunks * Shape::vecs_per_thread > Shape::held_vecs || Shape::stages < 2 * chunks + 1) return false;
  return launch_resident(ctx, occupancy, &tma_kernel<K, T, Shape>, Shape::threads, Shape::shared, cluster,
                         p.rows, p, chunks);
}

}  // namespace
}  // namespace tigon::cuda
