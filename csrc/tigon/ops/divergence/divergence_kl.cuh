// Computes the KL of rows too long for the registers of a CTA, in 16 bits. The rows stay in shared memory and
// their exponentials are computed twice, so an SM holds 49152 columns, four times as many as its registers
// would hold as exponentials. Shared memory is a ring of stages with one chunk each: a vector per consumer
// thread and side. Consumer threads copy and read their own vectors and never synchronise with each other. A
// reducer warp combines their sums, within the CTA and then with the reducer warps of the cluster's other
// CTAs. Meanwhile the consumers sum what has arrived of the next row, then store the gradient. A chunk that
// has been read for the last time is refilled from a later row. Ignored rows are zeroed first by all CTAs;
// the others are distributed in turn.
#pragma once

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/ops/divergence/divergence_reduce.cuh"

namespace tigon::cuda {
namespace {

template <int Warps>
struct KlStorage {
  Sums sums[2][Warps], cluster_sums[2][kMaxCluster];
  float terms[2][Warps];
  PlainTotals cluster_terms[2][kMaxCluster];
  float4 row[2][2];
  uint64_t warp_barrier[2], cluster_barrier[2], result_barrier[2];
};

// Combines the sums of the lanes.
template <DivergenceKind K, class T>
__device__ __forceinline__ void all_reduce_lanes(Sums& m, float& terms, const Scaling<T>& scaling) {
  const float top_s = extreme_of_lanes<Max, 32>(m.ref_s), top_t = extreme_of_lanes<Max, 32>(m.ref_t);
  const float s = scaling.power(m.ref_s - finite_max(top_s)), t = scaling.power(m.ref_t - finite_max(top_t));
  const float weight = K == DivergenceKind::reverse_kl ? s : t;
  const float sum = K == DivergenceKind::reverse_kl ? m.sum_s : -m.sum_t;
  const float shift_bytes = fma(sum, shift_of(m, top_s, top_t), terms);
  terms = warp_sum(weight != 0.0f ? weight * shift_bytes : 0.0f);
  m = {top_s, warp_sum(m.sum_s * s), top_t, warp_sum(m.sum_t * t)};
}

// Runs the reducer warp, for this row and all that follow.
template <DivergenceKind K, class T, int Warps>
__device__ __forceinline__ void reduce_rows(const DivergenceParams<T>& p, KlStorage<Warps>& storage,
                                            MaskedRowScanner<> scanner, int row, int row1, int row2) {
  const int lane = int(threadIdx.x) % 32;
  const unsigned blocks = cluster_size(), rank = cluster_rank();
  const int skip = int(gridDim.x / blocks) - 1;
  const Scaling<T> scaling(p);
  const Sums none = {-INFINITY, 0.0f, -INFINITY, 0.0f};
  for (int iteration = 0, row3 = scanner.next(p, skip); row < int(p.rows);
       row = row1, row1 = row2, row2 = row3, row3 = scanner.next(p, skip), ++iteration) {
    const float scale = p.scale_of(row);
    const int parity = iteration & 1, phase = iteration >> 1 & 1;
    mbarrier_wait_parity<false>(&storage.warp_barrier[parity], phase);
    Sums m = lane < Warps ? storage.sums[parity][lane] : none;
    float terms = lane < Warps ? storage.terms[parity][lane] : 0.0f;
    all_reduce_lanes<K>(m, terms, scaling);
    if (blocks > 1) {
      if (lane == 0)
        mbarrier_arrive_expect_tx(&storage.cluster_barrier[parity],
                                  int(blocks) * int(sizeof(Sums) + sizeof(PlainTotals)));
      __syncwarp();
      if (lane < int(blocks)) {
        st_async(&storage.cluster_sums[parity][rank], unsigned(lane), m, &storage.cluster_barrier[parity]);
        st_async(&storage.cluster_terms[parity][rank], unsigned(lane), PlainTotals{terms, 0.0f},
                 &storage.cluster_barrier[parity]);
      }
      mbarrier_wait_parity(&storage.cluster_barrier[parity], phase);
      m = lane < int(blocks) ? storage.cluster_sums[parity][lane] : none;
      terms = lane < int(blocks) ? storage.cluster_terms[parity][lane].terms : 0.0f;
      all_reduce_lanes<K>(m, terms, scaling);
    }
    m.ref_s = finite_max(m.ref_s), m.ref_t = finite_max(m.ref_t);
    if (p.log_probs) m.sum_s = m.sum_t = 1.0f;
    const float part_s = __frcp_rn(m.sum_s), part_t = __frcp_rn(m.sum_t);
    const float mean = terms * (K == DivergenceKind::reverse_kl ? part_s : part_t);
    if (lane == 0) {
      storage.row[parity][0] = make_float4(m.ref_s, m.ref_t, part_s, part_t);
      storage.row[parity][1] = make_float4(mean, scale, __int_as_float(row3), 0.0f);
      mbarrier_arrive(&storage.result_barrier[parity]);
      if (rank == 0) {
        const float quotient = ::log2f(m.sum_t / m.sum_s);
        const float bits = fma(mean, p.slope, K == DivergenceKind::reverse_kl ? quotient : -quotient);
        p.loss[row] = fast::divergence_loss<K>(bits, 0.0f, p.beta) * p.factor;
      }
    }
  }
}

template <int Warps>
struct KlShape {
  static constexpr int warps = Warps, consumers = Warps * 32, threads = consumers + 32;
  // 3 KB remain for KlStorage.
  static constexpr int stages = 229376 / (consumers * 32);
  static constexpr size_t shared = size_t(stages) * consumers * 32;
};

// Runs a consumer thread. `chunks` counts its vectors of a row; `stages` is from chunks + 2 to 3 chunks.
template <DivergenceKind K, class T, class Shape>
struct KlConsumer {
  static_assert(kKl<K> && sizeof(T) == 2);
  static constexpr int N = AlignedRow<T>::N, kConsumers = Shape::consumers;
  static constexpr uint32_t kStageBytes = kConsumers * 32;
  // A larger sum of exponentials shows that its reference was far below the maximum.
  static constexpr float kTooLarge = 1e18f;
  const DivergenceParams<T>& p;
  KlStorage<Shape::warps>& storage;
  // The CTA has columns [first, first + n).
  int chunks, stages, first, n;
  // The rows in flight, in turn.
  int r0, r1, r2, r3;
  uint32_t own_stage, end_stage;
  // The first early_chunks chunks of a row are summed before the previous row's reduction is collected.
  int early_chunks;
  uint32_t sums_stage = own_stage, last_stage = own_stage;
  // The next chunk to copy is chunk ahead_chunk of row r<ahead_row>. These are the ends of the row's columns.
  const char *end_s = nullptr, *end_t = nullptr;
  // `left` counts bytes from the consumer's vector on.
  int left = 0, ahead_row = 0, ahead_chunk = 0, published = 0, collected = 0;
  Sums own = {};
  float terms = 0.0f, ref_s = 0.0f, ref_t = 0.0f;
  Scaling<T> scaling{p};

  __device__ __forceinline__ int vec(int chunk) const { return chunk * kConsumers + int(threadIdx.x); }
  __device__ __forceinline__ AlignedRow<const T> student_of(int64_t r) const {
    return AlignedRow<const T>(p.student + r * p.student_stride + first, n);
  }
  __device__ __forceinline__ void advance(uint32_t& stage) const {
    stage += kStageBytes;
    if (stage == end_stage) stage = own_stage;
  }
  __device__ __forceinline__ void fetch_chunk(uint32_t to) {
    if (ahead_chunk == 0) {
      const int r = ahead_row == 0 ? r0 : ahead_row == 1 ? r1 : ahead_row == 2 ? r2 : r3;
      left = 0;
      if (r < int(p.rows)) {
        const AlignedRow<const T> x = student_of(r);
        end_s = reinterpret_cast<const char*>(x.base + x.lead + n);
        end_t = reinterpret_cast<const char*>(p.teacher + int64_t(r) * p.teacher_stride + first + n);
        left = (n - x.column(int(threadIdx.x))) * int(sizeof(T));
      }
    }
    if (left >= 16) {
      cp_async(to, end_s - left);
      cp_async(to + kConsumers * 16, end_t - left);
    } else if (left > 0) {
      cp_async_partial(to, end_s - left, left);
      cp_async_partial(to + kConsumers * 16, end_t - left, left);
    }
    cp_async_commit_group();
    left -= kConsumers * 16;
    if (++ahead_chunk == chunks) ahead_chunk = 0, ++ahead_row;
  }
  // Takes as references the maxima of `count` chunks from a stage on. One chunk suffices unless the sums turn
  // out too large.
  __device__ __forceinline__ void find_references(const AlignedRow<const T>& x, uint32_t stage, int count) {
    uint32_t top_s = kMinusInf<T>, top_t = top_s;
    for (int h = 0; h < count; ++h, advance(stage)) {
      const int k = vec(h);
      if (k >= x.vecs) continue;
      uint4 a = ld_shared(stage), b = ld_shared(stage + kConsumers * 16);
      if (!x.is_full(k)) a = mask_columns<T>(x, k, a), b = mask_columns<T>(x, k, b);
      top_s = max_words<T>(top_s, max_words<T>(a)), top_t = max_words<T>(top_t, max_words<T>(b));
    }
    own = {0.0f, 0.0f, 0.0f, 0.0f}, terms = 0.0f;
    if (!p.log_probs)
      own.ref_s = extreme_of_lanes<Max, 32>(max_of_word<T>(top_s)),
      own.ref_t = extreme_of_lanes<Max, 32>(max_of_word<T>(top_t));
    ref_s = finite_max(own.ref_s), ref_t = finite_max(own.ref_t);
  }
  // With kGuardZero 0 log 0 is 0.
  template <bool kGuardZero>
  __device__ __forceinline__ void add_chunks(const AlignedRow<const T>& x, uint32_t& stage, int from,
                                             int to) {
#pragma unroll 1
    for (int h = from; h < to; ++h, advance(stage)) {
      const int k = vec(h);
      if (k >= x.vecs) continue;
      uint4 a = ld_shared(stage), b = ld_shared(stage + kConsumers * 16);
      if (!x.is_full(k)) {
        st_shared(stage, a = mask_columns<T>(x, k, a));
        st_shared(stage + kConsumers * 16, b = mask_columns<T>(x, k, b));
      }
      float s[N], t[N];
      unpack<T>(a, s);
      unpack<T>(b, t);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float u = s[j] - ref_s, v = t[j] - ref_t, d = K == DivergenceKind::reverse_kl ? u - v : v - u;
        const float q = scaling.power(u), other = scaling.power(v);
        own.sum_s += q, own.sum_t += other;
        const float weight = K == DivergenceKind::reverse_kl ? q : other;
        terms = fma(weight, kGuardZero && weight <= 0.0f ? 0.0f : d, terms);
      }
    }
  }
  __device__ __forceinline__ void begin_sums(int r) {
    const AlignedRow<const T> x = student_of(r);
    cp_async_wait_group(stages - chunks - early_chunks);
    find_references(x, sums_stage, 1);
    add_chunks<false>(x, sums_stage, 0, early_chunks);
  }
  __device__ __forceinline__ void end_sums(int r) {
    const AlignedRow<const T> x = student_of(r);
    cp_async_wait_group(stages - chunks);
    add_chunks<false>(x, sums_stage, early_chunks, chunks);
    const bool out_of_range = !(own.sum_s < kTooLarge && own.sum_t < kTooLarge && terms == terms) ||
                              own.ref_s == -INFINITY || own.ref_t == -INFINITY;
    if (__any_sync(kAllLanes, out_of_range)) {
      uint32_t stage = sums_stage - uint32_t(chunks) * kStageBytes;
      if (int(stage - own_stage) < 0) stage += uint32_t(stages) * kStageBytes;
      find_references(x, stage, chunks);
      add_chunks<true>(x, stage, 0, chunks);
    }
    own.sum_s = warp_sum(own.sum_s), own.sum_t = warp_sum(own.sum_t), terms = warp_sum(terms);
    if (threadIdx.x % 32 == 0) {
      storage.sums[published & 1][threadIdx.x / 32] = own;
      storage.terms[published & 1][threadIdx.x / 32] = terms;
      mbarrier_arrive(&storage.warp_barrier[published & 1]);
    }
    ++published;
  }
  // Stores the gradient of row r0, and refills the stages that it leaves. r3 comes with the row's results.
  __device__ __forceinline__ void store_gradient() {
    mbarrier_wait_parity<false>(&storage.result_barrier[collected & 1], collected >> 1 & 1);
    const float4 a = storage.row[collected & 1][0], b = storage.row[collected & 1][1];
    ++collected;
    r3 = __float_as_int(b.z);
    const AlignedRow<const T> x = student_of(r0);
    const AlignedRow<T> to = aligned_row_like(p.dstudent + int64_t(r0) * p.dstudent_stride + first, x);
    const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
    const int stored_vecs = p.dstudent != nullptr ? x.vecs : 0;
    const float gain =
        p.factor * p.inv_temperature * b.y * (K == DivergenceKind::reverse_kl ? p.inv_temperature : 1.0f);
    Powers power_s(p.slope, a.x);
    const Powers power_t(p.slope, a.y);
    // The quotient of teacher's and student's units is exactly 1 if the rows are equal.
    const float gain_s = gain * a.z * power_s.rest, ratio = (a.w * power_t.rest) / (a.z * power_s.rest);
    // The gradient has no q.
    if (K == DivergenceKind::forward_kl && p.log_probs) power_s.start = INFINITY;
    const float from = (a.x - a.y) + (p.log_probs ? -1.0f : b.x);
#pragma unroll 1
    for (int h = 0; h < chunks; ++h, advance(last_stage)) {
      const int k = vec(h);
      const uint4 words = ld_shared(last_stage), others = ld_shared(last_stage + kConsumers * 16);
      fetch_chunk(last_stage);
      if (k >= stored_vecs) continue;
      float s[N], t[N];
      unpack<T>(words, s);
      unpack<T>(others, t);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float q = power_s(s[j]);
        if constexpr (K == DivergenceKind::forward_kl)
          s[j] = fma(-power_t(t[j]), ratio, q) * gain_s;
        else
          s[j] = q <= 0.0f ? 0.0f : q * gain_s * ((s[j] - t[j]) - from);
      }
      store_vec(to, k, s, aligned);
    }
  }
  __device__ __forceinline__ void run() {
    const int rows = int(p.rows), warp = int(threadIdx.x) / 32;
    for (uint32_t stage = own_stage; stage != end_stage; stage += kStageBytes) fetch_chunk(stage);
    zero_ignored_rows(p, int(blockIdx.x) * Shape::warps + warp, int(gridDim.x) * Shape::warps);
    if (r0 < rows) begin_sums(r0), end_sums(r0);
    while (r0 < rows) {
      if (r1 < rows) begin_sums(r1);
      store_gradient();
      r0 = r1, r1 = r2, r2 = r3, --ahead_row;
      if (r0 < rows) end_sums(r0);
    }
    cp_async_wait_group<0>();
  }
};

template <DivergenceKind K, class T, class Shape>
__global__ __launch_bounds__(Shape::threads, 1) void kl_kernel(const __grid_constant__ DivergenceParams<T> p,
                                                               const int chunks, const int stages) {
  constexpr int kWarps = Shape::warps;
  __shared__ KlStorage<kWarps> storage;
  // The indices are [stage][student, teacher][consumer].
  extern __shared__ uint4 smem_vecs[];
  const int tid = int(threadIdx.x);
  const unsigned blocks = cluster_size(), rank = cluster_rank();
  if (tid == 0) {
    for (int i = 0; i < 2; ++i)
      mbarrier_init(&storage.warp_barrier[i], kWarps), mbarrier_init(&storage.result_barrier[i]),
          mbarrier_init(&storage.cluster_barrier[i]);
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  MaskedRowScanner<> scanner;
  const int r0 = scanner.next(p, int(blockIdx.x / blocks)), skip = int(gridDim.x / blocks) - 1;
  const int r1 = scanner.next(p, skip), r2 = scanner.next(p, skip);
  if (tid / 32 == kWarps) {
    reduce_rows<K>(p, storage, scanner, r0, r1, r2);
  } else {
    const int first = min(int(rank) * p.slice, p.cols);
    uint32_t own_stage = cast_smem_ptr_to_uint(smem_vecs + tid);
    keep_in_register(own_stage);
    KlConsumer<K, T, Shape>{.p = p,
                            .storage = storage,
                            .chunks = chunks,
                            .stages = stages,
                            .first = first,
                            .n = min(p.slice, p.cols - first),
                            .r0 = r0,
                            .r1 = r1,
                            .r2 = r2,
                            .r3 = int(p.rows),
                            .own_stage = own_stage,
                            .end_stage = own_stage + uint32_t(stages) * Shape::consumers * 32,
                            .early_chunks = max(1, min(chunks, stages - chunks - 1))}
        .run();
  }
  __syncwarp();
  // A CTA must not exit while others may write to its shared memory.
  cluster_arrive();
  cluster_wait();
}

// Returns false if a row does not fit or no such cluster fits on the device.
template <DivergenceKind K, class T, class Shape>
bool launch_kl(Context& ctx, DivergenceParams<T> p, int cluster) {
  static OccupancyCache occupancy;
  p.slice = slice_of(p.cols, cluster);
  const int64_t columns = p.slice + (p.aligned ? 0 : AlignedRow<T>::N - 1);
  const int chunks = int(ceil_div(columns, Shape::consumers * AlignedRow<T>::N));
  const int stages = std::min(Shape::stages, 3 * chunks);
  if (stages < chunks + 2) return false;
  return launch_resident(ctx, occupancy, &kl_kernel<K, T, Shape>, Shape::threads, Shape::shared, cluster,
                         p.rows, p, chunks, stages);
}

}  // namespace
}  // namespace tigon::cuda
