// KL of rows past a block's registers, in 16 bits. The words stay in shared memory and their exponentials are taken twice, so that a
// multiprocessor holds 49152 columns and a row needs a quarter of the blocks that would hold its exponentials.
//
// A ring of chunks, a pack of every worker for each side. Workers copy and read packs of their own and never meet: a warp of
// its own, the merger, brings their sums together, in the block and then with the mergers of the row's other blocks. While it does,
// the workers sum what is there of the next row; then they store the gradient, and a chunk that has been read for the
// last time makes room for one of a later row. Rows that do not count are cleared at first, all blocks at each; the others
// are dealt out in turn.
#pragma once

#include "tigon/base/cuda/async_copy.cuh"
#include "tigon/ops/divergence/divergence_launch.cuh"
#include "tigon/ops/divergence/divergence_sums.cuh"

namespace tigon::cuda {
namespace {

template <int Warps>
struct Mail {
  Sums sums[2][Warps], far_sums[2][kMaxCluster];
  float terms[2][Warps];
  PlainTotals far_terms[2][kMaxCluster];
  float4 row[2][2];
  uint64_t told[2], far[2], ready[2];
};

// Lanes' sums into one.
template <DivergenceKind K, class T>
__device__ __forceinline__ void merge_lanes(Sums& m, float& terms, const Scaling<T>& scaling) {
  const float top_s = max_lanes(m.ref_s), top_t = max_lanes(m.ref_t);
  const float s = scaling.power(m.ref_s - finite(top_s)), t = scaling.power(m.ref_t - finite(top_t));
  const float weight = K == DivergenceKind::reverse_kl ? s : t;
  const float sum = K == DivergenceKind::reverse_kl ? m.sum_s : -m.sum_t;
  const float moved = fma(sum, shift_of(m, top_s, top_t), terms);
  terms = sum_lanes(weight != 0.0f ? weight * moved : 0.0f);
  m = {top_s, sum_lanes(m.sum_s * s), top_t, sum_lanes(m.sum_t * t)};
}

// The merger's work, for this row and those that follow.
template <DivergenceKind K, class T, int Warps>
__device__ __forceinline__ void merge_rows(const Params<T>& p, Mail<Warps>& mail, Deal<> deal, int row,
                                           int row1, int row2) {
  const int lane = int(threadIdx.x) % 32;
  const unsigned blocks = cluster_size(), rank = cluster_rank();
  const int skip = int(gridDim.x / blocks) - 1;
  const Scaling<T> scaling(p);
  const Sums none = {-INFINITY, 0.0f, -INFINITY, 0.0f};
  for (int turn = 0, row3 = deal.next(p, skip); row < int(p.rows);
       row = row1, row1 = row2, row2 = row3, row3 = deal.next(p, skip), ++turn) {
    const float scale = p.scale_of(row);
    const int parity = turn & 1, phase = turn >> 1 & 1;
    arrival_wait<false>(&mail.told[parity], phase);
    Sums m = lane < Warps ? mail.sums[parity][lane] : none;
    float terms = lane < Warps ? mail.terms[parity][lane] : 0.0f;
    merge_lanes<K>(m, terms, scaling);
    if (blocks > 1) {
      if (lane == 0) arrival_expect(&mail.far[parity], int(blocks) * int(sizeof(Sums) + sizeof(PlainTotals)));
      __syncwarp();
      if (lane < int(blocks)) {
        put_arriving(&mail.far_sums[parity][rank], unsigned(lane), m, &mail.far[parity]);
        put_arriving(&mail.far_terms[parity][rank], unsigned(lane), PlainTotals{terms, 0.0f},
                     &mail.far[parity]);
      }
      arrival_wait(&mail.far[parity], phase);
      m = lane < int(blocks) ? mail.far_sums[parity][lane] : none;
      terms = lane < int(blocks) ? mail.far_terms[parity][lane].terms : 0.0f;
      merge_lanes<K>(m, terms, scaling);
    }
    m.ref_s = finite(m.ref_s), m.ref_t = finite(m.ref_t);
    if (p.log_probs) m.sum_s = m.sum_t = 1.0f;
    const float part_s = __frcp_rn(m.sum_s), part_t = __frcp_rn(m.sum_t);
    const float mean = terms * (K == DivergenceKind::reverse_kl ? part_s : part_t);
    if (lane == 0) {
      mail.row[parity][0] = make_float4(m.ref_s, m.ref_t, part_s, part_t);
      mail.row[parity][1] = make_float4(mean, scale, __int_as_float(row3), 0.0f);
      arrival_arrive(&mail.ready[parity]);
      if (rank == 0) {
        const float quotient = ::log2f(m.sum_t / m.sum_s);
        const float bits = fma(mean, p.slope, K == DivergenceKind::reverse_kl ? quotient : -quotient);
        p.loss[row] = rough::divergence_loss<K>(bits, 0.0f, p.beta) * p.factor;
      }
    }
  }
}

template <int Warps>
struct KlShape {
  static constexpr int warps = Warps, workers = Warps * 32, threads = workers + 32;
  static constexpr int slots = 229376 / (workers * 32);  // 3 KB are the mail's
  static constexpr size_t shared = size_t(slots) * workers * 32;
};

// `chunks`: packs of a worker for a row; `slots` of the ring: from chunks + 2 to 3 chunks.
template <DivergenceKind K, class T, class Shape>
__global__ __launch_bounds__(Shape::threads, 1) void kl_kernel(const __grid_constant__ Params<T> p,
                                                               const int chunks, const int slots) {
  static_assert(kKl<K> && sizeof(T) == 2);
  constexpr int N = Row<T>::N, kWorkers = Shape::workers, kWarps = Shape::warps;
  constexpr float kTooLarge = 1e18f;  // a sum of exponentials whose reference was no maximum
  __shared__ Mail<kWarps> mail;
  extern __shared__ uint4 staged[];  // [slot][student, teacher][worker]
  const int tid = int(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const unsigned blocks = cluster_size(), rank = cluster_rank();
  if (tid == 0) {
    for (int i = 0; i < 2; ++i)
      arrival_init(&mail.told[i], kWarps), arrival_init(&mail.ready[i]), arrival_init(&mail.far[i]);
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  Deal<> deal;
  int r0 = deal.next(p, int(blockIdx.x / blocks));
  const int skip = int(gridDim.x / blocks) - 1;
  int r1 = deal.next(p, skip), r2 = deal.next(p, skip), r3 = int(p.rows);
  if (warp == kWarps) {
    merge_rows<K>(p, mail, deal, r0, r1, r2);
  } else {
    const int rows = int(p.rows);
    const int first = min(int(rank) * p.slice, p.cols), n = min(p.slice, p.cols - first);
    auto student_of = [&](int64_t r) { return Row<const T>(p.student + r * p.student_stride + first, n); };
    uint32_t own_slot = shared_address(staged + tid);
    asm("" : "+r"(own_slot));  // an address in a register, not one that is worked out at every use

    // What is copied next: a chunk of r<ahead>.
    const char *end_s = nullptr, *end_t = nullptr;  // of the row's columns
    int left = 0, ahead = 0, ahead_chunk = 0;       // left: bytes from the worker's pack on
    auto fetch_chunk = [&](uint32_t to) {
      if (ahead_chunk == 0) {
        const int r = ahead == 0 ? r0 : ahead == 1 ? r1 : ahead == 2 ? r2 : r3;
        left = 0;
        if (r < rows) {
          const Row<const T> x = student_of(r);
          end_s = reinterpret_cast<const char*>(x.base + x.lead + n);
          end_t = reinterpret_cast<const char*>(p.teacher + int64_t(r) * p.teacher_stride + first + n);
          left = (n - x.column(tid)) * int(sizeof(T));
        }
      }
      if (left >= 16) {
        copy_async(to, end_s - left);
        copy_async(to + kWorkers * 16, end_t - left);
      } else if (left > 0) {
        copy_async_upto(to, end_s - left, left);
        copy_async_upto(to + kWorkers * 16, end_t - left, left);
      }
      copies_commit();
      left -= kWorkers * 16;
      if (++ahead_chunk == chunks) ahead_chunk = 0, ++ahead;
    };
    constexpr uint32_t kSlot = kWorkers * 32;
    const uint32_t end_slot = own_slot + uint32_t(slots) * kSlot;
    auto advance = [&](uint32_t& slot) {
      slot += kSlot;
      if (slot == end_slot) slot = own_slot;
    };
    for (uint32_t slot = own_slot; slot != end_slot; slot += kSlot) fetch_chunk(slot);
    clear_ignored(p, int(blockIdx.x) * kWarps + warp, int(gridDim.x) * kWarps);

    const Scaling<T> scaling(p);
    uint32_t sums_slot = own_slot, last_slot = own_slot;
    int told = 0, heard = 0;
    Sums own;
    float terms = 0.0f, ref_s = 0.0f, ref_t = 0.0f;
    // The maxima of chunks, from a slot on, as references: of the first alone, where the sums do not turn out too large.
    auto refer = [&](const Row<const T>& x, uint32_t slot, int count) {
      uint32_t top_s = kMinusInf<T>, top_t = top_s;
      for (int h = 0; h < count; ++h, advance(slot)) {
        const int k = h * kWorkers + tid;
        if (k >= x.packs) continue;
        uint4 a = load_shared(slot), b = load_shared(slot + kWorkers * 16);
        if (!x.whole(k)) a = only_columns<T>(x, k, a), b = only_columns<T>(x, k, b);
        top_s = max_words<T>(top_s, max_words<T>(a)), top_t = max_words<T>(top_t, max_words<T>(b));
      }
      own = {0.0f, 0.0f, 0.0f, 0.0f}, terms = 0.0f;
      if (!p.log_probs)
        own.ref_s = max_lanes(max_of_word<T>(top_s)), own.ref_t = max_lanes(max_of_word<T>(top_t));
      ref_s = finite(own.ref_s), ref_t = finite(own.ref_t);
    };
    // Careful: 0 log 0 is 0.
    auto add_chunks = [&](auto careful, const Row<const T>& x, uint32_t& slot, int from, int to) {
      constexpr bool kCareful = decltype(careful)::value;
#pragma unroll 1
      for (int h = from; h < to; ++h, advance(slot)) {
        const int k = h * kWorkers + tid;
        if (k >= x.packs) continue;
        uint4 a = load_shared(slot), b = load_shared(slot + kWorkers * 16);
        if (!x.whole(k)) {
          store_shared(slot, a = only_columns<T>(x, k, a));
          store_shared(slot + kWorkers * 16, b = only_columns<T>(x, k, b));
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
          terms = fma(weight, kCareful && weight <= 0.0f ? 0.0f : d, terms);
        }
      }
    };
    // The sums of a row, its first `early` chunks before what others say of the row before is asked for.
    const int early = max(1, min(chunks, slots - chunks - 1));
    auto begin_sums = [&](int r) {
      const Row<const T> x = student_of(r);
      copies_wait(slots - chunks - early);
      refer(x, sums_slot, 1);
      add_chunks(std::false_type{}, x, sums_slot, 0, early);
    };
    auto end_sums = [&](int r) {
      const Row<const T> x = student_of(r);
      copies_wait(slots - chunks);
      add_chunks(std::false_type{}, x, sums_slot, early, chunks);
      const bool far = !(own.sum_s < kTooLarge && own.sum_t < kTooLarge && terms == terms) ||
                       own.ref_s == -INFINITY || own.ref_t == -INFINITY;
      if (__any_sync(kAllLanes, far)) {
        uint32_t slot = sums_slot - uint32_t(chunks) * kSlot;
        if (int(slot - own_slot) < 0) slot += uint32_t(slots) * kSlot;
        refer(x, slot, chunks);
        add_chunks(std::true_type{}, x, slot, 0, chunks);
      }
      own.sum_s = sum_lanes(own.sum_s), own.sum_t = sum_lanes(own.sum_t), terms = sum_lanes(terms);
      if (lane == 0) {
        mail.sums[told & 1][warp] = own;
        mail.terms[told & 1][warp] = terms;
        arrival_arrive(&mail.told[told & 1]);
      }
      ++told;
    };
    if (r0 < rows) begin_sums(r0), end_sums(r0);
    while (r0 < rows) {
      if (r1 < rows) begin_sums(r1);
      arrival_wait<false>(&mail.ready[heard & 1], heard >> 1 & 1);
      const float4 a = mail.row[heard & 1][0], b = mail.row[heard & 1][1];
      ++heard;
      r3 = __float_as_int(b.z);
      const Row<const T> x = student_of(r0);
      const Row<T> to = row_like(p.dstudent + int64_t(r0) * p.dstudent_stride + first, x);
      const bool aligned = reinterpret_cast<uintptr_t>(to.base) % 16 == 0;
      const int stored = p.dstudent != nullptr ? x.packs : 0;
      const float gain = p.factor * p.inverse * b.y * (K == DivergenceKind::reverse_kl ? p.inverse : 1.0f);
      Powers power_s(p.slope, a.x);
      const Powers power_t(p.slope, a.y);
      // The teacher's unit by the student's: 1 exactly where the rows are equal.
      const float gain_s = gain * a.z * power_s.rest, ratio = (a.w * power_t.rest) / (a.z * power_s.rest);
      if (K == DivergenceKind::forward_kl && p.log_probs) power_s.start = INFINITY;  // no q in the gradient
      const float from = (a.x - a.y) + (p.log_probs ? -1.0f : b.x);
#pragma unroll 1
      for (int h = 0; h < chunks; ++h, advance(last_slot)) {
        const int k = h * kWorkers + tid;
        const uint4 words = load_shared(last_slot), others = load_shared(last_slot + kWorkers * 16);
        fetch_chunk(last_slot);
        if (k >= stored) continue;
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
        store_pack(to, k, s, aligned);
      }
      r0 = r1, r1 = r2, r2 = r3, --ahead;
      if (r0 < rows) end_sums(r0);
    }
    copies_wait<0>();
  }
  __syncwarp();
  cluster_arrive();  // a block that has ended cannot be written to
  cluster_wait();
}

// False when a row does not fit or the device has no room for such a cluster.
template <DivergenceKind K, class T, class Shape>
bool launch_kl(Context& ctx, Params<T> p, int cluster) {
  static ClusterRoom clusters;
  p.slice = slice_of(p.cols, cluster);
  const int64_t columns = p.slice + (p.aligned ? 0 : Row<T>::N - 1);
  const int chunks = int(ceil_div(columns, Shape::workers * Row<T>::N));
  const int slots = std::min(Shape::slots, 3 * chunks);
  if (slots < chunks + 2) return false;
  return launch_together(ctx, clusters, &kl_kernel<K, T, Shape>, Shape::threads, Shape::shared, cluster,
                         p.rows, p, chunks, slots);
}

}  // namespace
}  // namespace tigon::cuda
