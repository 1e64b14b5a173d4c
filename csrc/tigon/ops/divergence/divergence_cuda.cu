// The CUDA backend of divergence moves 3b bytes per element with the gradient, and 2b without (b = element
// size). The memory-bound budget per 16-bit column (H200) is 48 instructions, 6.0 of them ex2 or lg2; twice
// that in 32 bits. The variants use about: registers KL 26 and 2; kl 30 and 4; tma TVD 32 and 4, JSD 40 and
// 5; in 32 bits 24 more (JSD 50) for precise exponentials on the FMA units. The first variant that holds the
// rows runs:
//   registers  keeps the exponentials of a row pair, relative to the maxima of their warp, in the registers
//              of a CTA, in 32 bits also of a cluster (sm_90), until the gradient is stored; none is computed
//              twice. Meanwhile the next rows are copied to shared memory, and each thread reads its own
//              copies. There is one reduction per row for the KLs, two for the others. Student and teacher
//              have the same offset; the gradient may have another, and is then stored by elements.
//   kl         takes KLs of longer rows in 16 bits (sm_90): rows stay in shared memory (divergence_kl.cuh).
//   tma        takes jsd and tvd of longer rows in 16 bits (sm_90), with three rows in flight
//              (divergence_tma.cuh). JSD is bound by its arithmetic.
//   looped     takes still longer rows, and rows of mixed offsets, whose teacher is read by elements: a CTA
//              per row, three passes.
#include <algorithm>

#include "tigon/base/dispatch.h"
#include "tigon/ops/divergence/divergence_kl.cuh"
#include "tigon/ops/divergence/divergence_tma.cuh"

namespace tigon::cuda {
namespace {

// Counts the threads of a CTA, the columns of a thread, the rows in shared memory, and the CTAs per SM.
template <int Threads, int Pairs, int Stages, int MinBlocks>
struct RegisterShape {
  static constexpr int threads = Threads, pairs = Pairs, stages = Stages, min_blocks = MinBlocks;
  static constexpr int64_t columns = int64_t(Threads) * Pairs;
  template <class T>
  static constexpr size_t shared = size_t(columns) * Stages * 2 * sizeof(T);
};

// Holds what a thread has of a row: its vectors of student and teacher in shared memory, and their
// exponentials; later q and g, for reverse_kl at once.
template <DivergenceKind K, class T, class Shape>
struct RegisterRow {
  static constexpr int N = AlignedRow<T>::N, kThreads = Shape::threads, kVecsPerThread = Shape::pairs / N;
  const DivergenceParams<T>& p;
  const Scaling<T>& scaling;
  // The indices are [vector of a thread][student, teacher][thread], from this thread on.
  uint4* vecs;
  AlignedRow<const T> x;
  float s[kVecsPerThread][N], t[kVecsPerThread][N];
  Sums own = {0.0f, 0.0f, 0.0f, 0.0f};
  Totals<T> totals = {};

  __device__ __forceinline__ uint4* at(int h, int side) const { return vecs + (h * 2 + side) * kThreads; }
  // Masks the vectors at the ends of the row, and computes the maxima of the warp.
  __device__ __forceinline__ void find_references() {
    uint32_t top_s = kMinusInf<T>, top_t = top_s;
#pragma unroll
    for (int h = 0; h < kVecsPerThread; ++h) {
      const int k = h * kThreads + int(threadIdx.x);
      uint4 a = ld_shared(at(h, 0)), b = ld_shared(at(h, 1));
      if (!x.is_full(k)) {
        *at(h, 0) = a = mask_columns<T>(x, k, a);
        *at(h, 1) = b = mask_columns<T>(x, k, b);
      }
      top_s = max_words<T>(top_s, max_words<T>(a)), top_t = max_words<T>(top_t, max_words<T>(b));
    }
    if (p.log_probs) return;
    own.ref_s = extreme_of_lanes<Max, 32>(max_of_word<T>(top_s));
    own.ref_t = extreme_of_lanes<Max, 32>(max_of_word<T>(top_t));
  }
  // Computes their sums over the warp, and the terms of a KL.
  __device__ __forceinline__ void add_exponentials() {
    const float from_s = finite_max(own.ref_s), from_t = finite_max(own.ref_t);
#pragma unroll
    for (int h = 0; h < kVecsPerThread; ++h) {
      unpack<T>(ld_shared(at(h, 0)), s[h]);
      unpack<T>(ld_shared(at(h, 1)), t[h]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float u = s[h][j] - from_s, v = t[h][j] - from_t;
        s[h][j] = scaling.power(u), t[h][j] = scaling.power(v);
        own.sum_s += s[h][j], own.sum_t += t[h][j];
        if constexpr (kKl<K>) {
          float term, g;
          // Terms are in units of logits instead of bits.
          terms_of<K, T>(s[h][j], t[h][j], u - v, p.beta, term, g);
          totals.terms += term;
          if constexpr (K == DivergenceKind::reverse_kl) t[h][j] = g;
        }
      }
    }
    own.sum_s = warp_sum(own.sum_s), own.sum_t = warp_sum(own.sum_t);
    if constexpr (kKl<K>) totals.terms = warp_sum(totals.terms);
  }
  // Computes totals of the warp, for what is not a KL.
  __device__ __forceinline__ void add_classes(const RowPair& row, float part_s, float part_t) {
    // This is log2 q - log2 p. In 32 bits it comes from the distances to the maxima, so that no large number
    // is rounded.
    const float log2_offset = fma(row.ref_t - row.ref_s, p.slope, row.log2_quotient);
    auto difference = [&](float x, float y) {
      return sizeof(T) == 4 ? fma((x - row.ref_s) - (y - row.ref_t), p.slope, row.log2_quotient)
                            : fma(x - y, p.slope, log2_offset);
    };
#pragma unroll
    for (int h = 0; h < kVecsPerThread; ++h) {
      float v[N], w[N];
      if constexpr (K == DivergenceKind::jsd) {
        unpack<T>(ld_shared(at(h, 0)), v);
        unpack<T>(ld_shared(at(h, 1)), w);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = K == DivergenceKind::jsd ? difference(v[j], w[j]) : 0.0f;
        add_class<K, T>(s[h][j], t[h][j], part_s, part_t, d, p.beta, totals);
      }
    }
    if constexpr (sizeof(T) == 4) {
      totals.center = totals.weight > 0.0f ? totals.g / totals.weight : 0.0f, totals.g = 0.0f;
#pragma unroll
      for (int h = 0; h < kVecsPerThread; ++h)
#pragma unroll
        for (int j = 0; j < N; ++j) totals.g = fma(s[h][j], t[h][j] - totals.center, totals.g);
    } else if constexpr (K == DivergenceKind::jsd) {
      totals.g *= part_s, totals.terms *= part_t;
    }
    all_reduce_lanes(totals);
  }
  __device__ __forceinline__ void store_gradient(T* out, const RowPair& row, float part_s, float part_t,
                                                 float gain, float sum_g, [[maybe_unused]] float center) {
    const AlignedRow<T> to = aligned_row_like(out, x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
    // The exponentials of a KL are not divided yet; the terms of reverse_kl are in logits, relative
    // to the warp's references.
    float gain_s = gain * part_s, gain_t = gain * part_t;
    if constexpr (K == DivergenceKind::reverse_kl) {
      if (p.log_probs) sum_g /= p.slope;
      sum_g -= shift_of(own, row.ref_s, row.ref_t);
      gain_s *= p.slope;
    }
#pragma unroll
    for (int h = 0; h < kVecsPerThread; ++h) {
      const int k = h * kThreads + int(threadIdx.x);
      if (k >= x.vecs) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if constexpr (K == DivergenceKind::forward_kl) {
          const float q = p.log_probs ? 0.0f : __fmul_rn(s[h][j], gain_s);
          s[h][j] = q - __fmul_rn(t[h][j], gain_t);
        } else if constexpr (K == DivergenceKind::reverse_kl ||
                             (K == DivergenceKind::tvd && sizeof(T) == 2)) {
          s[h][j] =
              fast::divergence_gradient(t[h][j], s[h][j], sum_g, K == DivergenceKind::tvd ? gain : gain_s);
        } else if constexpr (sizeof(T) == 2) {
          s[h][j] *= fma(t[h][j], gain_s, -sum_g * gain_s);
        } else {
          s[h][j] *= ((t[h][j] - center) - sum_g) * gain;
        }
      }
      store_vec(to, k, s[h], aligned);
    }
  }
};

template <DivergenceKind K, class T, class Shape, bool kCluster>
__global__ __launch_bounds__(Shape::threads, Shape::min_blocks) void register_kernel(
    const __grid_constant__ DivergenceParams<T> p) {
  constexpr int N = AlignedRow<T>::N, kThreads = Shape::threads, kVecsPerThread = Shape::pairs / N,
                kStages = Shape::stages;
  __shared__ ReduceStorage<T, kThreads / 32 * (kCluster ? kMaxCluster : 1)> storage;
  // The indices are [stage][vector of a thread][student, teacher][thread].
  extern __shared__ uint4 smem_vecs[];
  const int tid = int(threadIdx.x);
  const unsigned blocks = kCluster ? cluster_size() : 1, rank = kCluster ? cluster_rank() : 0;
  const int messages = int(blocks) * kThreads / 32;
  if constexpr (kCluster) {
    if (tid == 0) mbarrier_init(&storage.barrier[0]), mbarrier_init(&storage.barrier[1]);
    cluster_arrive();
    cluster_wait();
  }
  // The CTA has the columns [first, first + n) of every row that it takes.
  const int first = kCluster ? min(int(rank) * p.slice, p.cols) : 0;
  const int n = kCluster ? min(p.slice, p.cols - first) : p.cols;
  const int64_t step = gridDim.x / blocks;
  auto student_of = [&](int64_t r) {
    return AlignedRow<const T>(p.student + r * p.student_stride + first, n);
  };
  auto vecs_of = [&](int stage) { return smem_vecs + stage * kVecsPerThread * 2 * kThreads + tid; };
  auto fetch_row = [&](int64_t r, int stage) {
    const AlignedRow<const T> x = student_of(r);
    const T* from_s = x.base + int64_t(tid) * N;
    const T* from_t = p.teacher + r * p.teacher_stride + first - x.lead + int64_t(tid) * N;
    const uint32_t to = cast_smem_ptr_to_uint(vecs_of(stage));
    // Counts bytes from the thread's first vector on.
    const int left = (n - x.column(tid)) * int(sizeof(T));
#pragma unroll
    for (int h = 0; h < kVecsPerThread; ++h) {
      const int bytes = left - h * kThreads * 16;
      if (bytes > 0) {
        cp_async_partial(to + h * 2 * kThreads * 16, from_s + h * kThreads * N, bytes);
        cp_async_partial(to + (h * 2 + 1) * kThreads * 16, from_t + h * kThreads * N, bytes);
      }
    }
  };
  const Scaling<T> scaling(p);
  // Holds the current row and the next ones: in a cluster only rows that are not ignored, in a single CTA
  // any. Whether the row to be copied next is ignored was requested one row earlier.
  int64_t row_at[kStages];
  MaskedRowScanner<> scanner;
#pragma unroll
  for (int i = 0; i < kStages; ++i)
    row_at[i] =
        kCluster ? scanner.next(p, i == 0 ? int(blockIdx.x / blocks) : int(step) - 1) : blockIdx.x + i * step;
  auto to_fetch = [&](int64_t r) { return r < p.rows && (kCluster || !p.ignored(r)); };
  int phase = 0, stage = 0;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (to_fetch(row_at[i])) fetch_row(row_at[i], i);
    cp_async_commit_group();
  }
  if constexpr (kCluster)
    zero_ignored_rows(p, (int(blockIdx.x) * kThreads + tid) / 32, int(gridDim.x) * kThreads / 32);
  bool counts = to_fetch(row_at[kStages - 1]);
  int64_t next = row_at[kStages - 1] + step;
  auto advance = [&] {
#pragma unroll
    for (int i = 1; i < kStages; ++i) row_at[i - 1] = row_at[i];
    row_at[kStages - 1] = next;
    if constexpr (kCluster) counts = next < p.rows;
    next += step;
  };
  for (; row_at[0] < p.rows; advance()) {
    const int64_t r = row_at[0];
    // This is the stage of the previous row.
    const int previous = stage == 0 ? kStages - 1 : stage - 1;
    if (counts) fetch_row(row_at[kStages - 1], previous);
    cp_async_commit_group();
    if constexpr (!kCluster) counts = to_fetch(next);
    T* out = p.dstudent + r * p.dstudent_stride + first;
    const int here = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (!kCluster && p.ignored(r)) {
      if (p.dstudent != nullptr)
        for (int c = tid; c < n; c += kThreads) out[c] = narrow<T>(0.0f);
      if (tid == 0) p.loss[r] = 0.0f;
      continue;
    }
    const float scale = p.scale_of(r);
    RegisterRow<K, T, Shape> thread{p, scaling, vecs_of(here), student_of(r)};
    cp_async_wait_group<kStages - 1>();
    thread.find_references();
    thread.add_exponentials();
    const RowPair row = all_reduce_sums<K, kCluster>(
        storage, phase++, messages, thread.own, thread.totals, scaling, p.log_probs,
        [&] { return kCluster ? scanner.next(p, int(step) - 1) : 0; });
    if constexpr (kCluster) next = row.next;
    const float part_s = scaling.power(thread.own.ref_s - row.ref_s) * row.part_s;
    const float part_t = scaling.power(thread.own.ref_t - row.ref_t) * row.part_t;
    const float gain = p.factor * p.inv_temperature * scale * fast::divergence_unit<K>(p.beta);
    float loss, sum_g, center = 0.0f;
    if constexpr (kKl<K>) {
      const float mean =
          fma(row.mean, p.slope, K == DivergenceKind::reverse_kl ? row.log2_quotient : -row.log2_quotient);
      loss = fast::divergence_loss<K>(mean, 0.0f, p.beta);
      sum_g = row.mean;
    } else {
      thread.add_classes(row, part_s, part_t);
      const Totals<T> all = all_reduce_totals<kCluster>(storage, phase++, messages, thread.totals);
      loss = fast::divergence_loss<K>(all.terms, sum_of(all), p.beta);
      sum_g = all.g, center = center_of(all);
    }
    if (tid == 0 && rank == 0) p.loss[r] = loss * p.factor;
    if (p.dstudent == nullptr) continue;
    if (p.log_probs) sum_g = fast::divergence_own_share<K>(), center = 0.0f;
    thread.store_gradient(out, row, part_s, part_t, gain, sum_g, center);
  }
  cp_async_wait_group<0>();
  // A CTA must not exit while others may write to its shared memory.
  if constexpr (kCluster) {
    cluster_arrive();
    cluster_wait();
  }
}

// Reads vector k of a row in the vectors of `like`, by elements if it is partial or not aligned.
template <class T, int N>
__device__ __forceinline__ void read_vec(const AlignedRow<const T>& row, const AlignedRow<const T>& like,
                                         int k, float (&x)[N]) {
  const int c = like.column(k);
  const T* from = row.base + (row.lead + c);
  const Vec<T, N> vec = like.is_full(k) && row.lead == like.lead
                            ? load_stream<T, N>(from)
                            : load_elements<T, N>(from, [&](int j) { return like.has(c + j); }, kMinusInf<T>);
  unpack<T>(reinterpret_cast<const uint4&>(vec), x);
}

// Adds exponentials to a sum. The reference grows to their maximum.
template <class T, int N>
__device__ __forceinline__ void add_exponentials(float& reference, float& sum, const float (&x)[N],
                                                 const Scaling<T>& scaling) {
  float top = x[0];
#pragma unroll
  for (int j = 1; j < N; ++j) top = fmaxf(top, x[j]);
  if (top > reference) {
    if (sum != 0.0f) sum *= scaling.power(reference - top);
    reference = top;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sum += scaling.power(x[j] - finite_max(reference));
}

template <DivergenceKind K, class T>
__global__ __launch_bounds__(kLoopThreads) void looped_kernel(const __grid_constant__ DivergenceParams<T> p) {
  constexpr int N = AlignedRow<T>::N, kMessages = kLoopThreads / 32;
  __shared__ ReduceStorage<T, kMessages> storage;
  const int tid = int(threadIdx.x);
  const Scaling<T> scaling(p);
  int phase = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    T* out = p.dstudent + r * p.dstudent_stride;
    if (p.ignored(r)) {
      if (p.dstudent != nullptr)
        for (int c = tid; c < p.cols; c += kLoopThreads) out[c] = narrow<T>(0.0f);
      if (tid == 0) p.loss[r] = 0.0f;
      continue;
    }
    const AlignedRow<const T> x(p.student + r * p.student_stride, p.cols),
        y(p.teacher + r * p.teacher_stride, p.cols);
    RowPair row;
    float v[N], w[N];
    auto read = [&](int k) { read_vec(x, x, k, v), read_vec(y, x, k, w); };
    if (!p.log_probs) {
      Sums own = {-INFINITY, 0.0f, -INFINITY, 0.0f};
      for (int k = tid; k < x.vecs; k += kLoopThreads) {
        read(k);
        add_exponentials(own.ref_s, own.sum_s, v, scaling);
        add_exponentials(own.ref_t, own.sum_t, w, scaling);
      }
      all_reduce_lanes(own, scaling);
      row = all_reduce_sums<DivergenceKind::jsd, false>(storage, phase++, kMessages, own, Totals<T>{},
                                                        scaling, false, [] { return 0; });
    }
    auto terms = [&](float s, float t, float& q, float& term, float& g) {
      q = __fmul_rn(scaling.power(s - row.ref_s), row.part_s);
      const float other = __fmul_rn(scaling.power(t - row.ref_t), row.part_t);
      const float d = fma((s - row.ref_s) - (t - row.ref_t), p.slope, row.log2_quotient);
      terms_of<K, T>(q, other, d, p.beta, term, g);
    };
    Totals<T> totals = {};
    for (int k = tid; k < x.vecs; k += kLoopThreads) {
      read(k);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float q, term, g;
        terms(v[j], w[j], q, term, g);
        totals.terms += term, totals.g += g;
      }
    }
    all_reduce_lanes(totals);
    totals = all_reduce_totals<false>(storage, phase++, kMessages, totals);
    if (tid == 0) p.loss[r] = fast::divergence_loss<K>(totals.terms, totals.g, p.beta) * p.factor;
    if (p.dstudent == nullptr) continue;
    const float gain = p.factor * p.inv_temperature * p.scale_of(r) * fast::divergence_unit<K>(p.beta);
    const float sum_g = p.log_probs ? fast::divergence_own_share<K>() : totals.g;
    const AlignedRow<T> to = aligned_row_like(out, x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
    for (int k = tid; k < x.vecs; k += kLoopThreads) {
      read(k);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float q, term, g;
        terms(v[j], w[j], q, term, g);
        v[j] = fast::divergence_gradient(g, q, sum_g, gain);
      }
      store_vec(to, k, v, aligned);
    }
  }
}

// Returns false if no such cluster fits on the device.
template <DivergenceKind K, class T, class Shape, bool kCluster>
bool launch_registers(Context& ctx, DivergenceParams<T> p, int cluster) {
  static OccupancyCache occupancy;
  p.slice = slice_of(p.cols, cluster);
  return launch_resident(ctx, occupancy, &register_kernel<K, T, Shape, kCluster>, Shape::threads,
                         Shape::template shared<T>, cluster, p.rows, p);
}

template <class Shape, class T>
bool fits(const DivergenceParams<T>& p, int cluster) {
  const int64_t columns = cluster == 1 ? p.cols : slice_of(p.cols, cluster);
  return columns + (p.aligned ? 0 : AlignedRow<T>::N - 1) <= Shape::columns;
}

// The first variant that holds the rows runs.
template <DivergenceKind K, class T>
void launch_rows(Context& ctx, const DivergenceParams<T>& p, bool same_offset) {
  // fp16 is rare, so short rows take the shape of longer ones.
  constexpr bool kPrecise = sizeof(T) == 4, kIsHalf = std::is_same_v<T, __half>;
  using Short = RegisterShape<64, 16, 2, 8>;
  // There are two rows per SM: one computes while the other waits.
  using Half = RegisterShape<256, kPrecise ? 16 : 32, 3, 2>;
  if (same_offset) {
    if constexpr (!kIsHalf) {
      if (fits<Short>(p, 1)) return void(launch_registers<K, T, Short, false>(ctx, p, 1));
      // 32 bits take the kernel of clusters, in which a CTA without a cluster is a cluster of its own.
      if (fits<Half>(p, 1)) return void(launch_registers<K, T, Half, kPrecise>(ctx, p, 1));
    }
  }
  if (same_offset && device_facts().capability >= 90) {
    if constexpr (kPrecise) {
      using Whole = RegisterShape<512, 24, 2, 1>;
      for (int cluster : {2, 4, 8, 16})
        if (fits<Half>(p, cluster) && launch_registers<K, T, Half, true>(ctx, p, cluster)) return;
      for (int cluster : {4, 8, 16})
        if (fits<Whole>(p, cluster) && launch_registers<K, T, Whole, true>(ctx, p, cluster)) return;
    } else if constexpr (kKl<K>) {
      for (int cluster : {1, 2, 4, 8, 16})
        if (launch_kl<K, T, KlShape<23>>(ctx, p, cluster)) return;
    } else {
      for (int cluster : {1, 2, 4, 8, 16}) {
        if constexpr (!kIsHalf)
          if (launch_tma<K, T, PairShape<16, 2, 4, 48>>(ctx, p, cluster)) return;
        if ((kIsHalf || cluster == 8) && launch_tma<K, T, PairShape<20, 2, 4, 40>>(ctx, p, cluster)) return;
      }
    }
  }
  launch(kOp, ctx, looped_kernel<K, T>,
         {.blocks = std::min<int64_t>(p.rows, int64_t(device_facts().sms) * 2), .threads = kLoopThreads}, p);
}

}  // namespace

void divergence_rows(Context& ctx, const DivergenceRows& a) {
  TIGON_CHECK(kOp, a.student.cols < (int64_t(1) << 30), "student must have fewer than 2^30 columns, got ",
              a.student.cols);
  dispatch_float(kOp, "student", a.student.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int64_t N = AlignedRow<T>::N;
    const double slope = 1.4426950408889634 / double(a.temperature);
    DivergenceParams<T> p = {.student = a.student.row<T>(0),
                             .teacher = a.teacher.row<T>(0),
                             .dstudent = a.dstudent.row<T>(0),
                             .labels = a.labels.as<int64_t>(),
                             .scale = a.scale.as<float>(),
                             .loss = a.loss.as<float>(),
                             .rows = a.student.rows,
                             .student_stride = a.student.stride,
                             .teacher_stride = a.teacher.stride,
                             .dstudent_stride = a.dstudent.stride,
                             .scale_step = a.scale.size == 1 ? 0 : 1,
                             .ignore_index = a.ignore_index,
                             .cols = int(a.student.cols),
                             .slice = 0,
                             .beta = a.beta,
                             .slope = float(slope),
                             .slope_low = float(slope - double(float(slope))),
                             .factor = a.factor,
                             .inv_temperature = 1.0f / a.temperature,
                             .log_probs = a.log_probs,
                             .aligned = false};
    p.aligned = uintptr_t(a.student.data) % 16 == 0 && (p.rows == 1 || p.student_stride % N == 0);
    const bool same_offset = same_row_offsets<T>(a.student, a.teacher);
    with_kind(a.kind, [&]<DivergenceKind K>() { launch_rows<K>(ctx, p, same_offset); });
  });
}

}  // namespace tigon::cuda
