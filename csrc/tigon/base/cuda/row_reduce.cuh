// Reduces over the threads that share a row: some lanes of a warp, a warp, a CTA, or a cluster of CTAs. A
// reduction costs one __syncthreads() per CTA and one mbarrier phase per cluster. The trees are fixed, so
// results are bitwise equal in every run and every thread.
#pragma once

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/row_shapes.cuh"

namespace tigon::cuda {

// Holds the shared memory of a reduction. V has 8 or 16 bytes if there are clusters, V::identity(), and
// all_reduce_lanes<Width>(), which combines each group of Width adjacent lanes. Storage is multi-buffered by
// phase, since a warp may be one row ahead of another, and a CTA of another CTA. Four phases are needed if a
// result is collected one row after it is published.
template <class V, int Phases = 2>
struct ReduceStorage {
  V warp[Phases][32], cta[Phases][kMaxCluster];
  uint64_t barrier[Phases];

  // All threads of a CTA call it before the first cluster_arrive().
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < Phases; ++i) mbarrier_init(&barrier[i]);
    }
  }
};

// All-reduces v over the threads of a row: groups of `Threads` adjacent lanes, or the CTA (0), or
// with kCluster all CTAs of the cluster, which have all started. `phase` counts the calls.
template <int Threads, bool kCluster, class V>
__device__ __forceinline__ V all_reduce_row(V v, ReduceStorage<V>& x, int phase) {
  static_assert(Threads <= 32 && (!kCluster || Threads == 0));
  constexpr int kLanes = Threads == 0 ? 32 : Threads;
  const int lane = int(threadIdx.x % 32), parity = phase & 1;
  v.template all_reduce_lanes<kLanes>();
  if (Threads == 0 && blockDim.x > 32) {
    if (lane == 0) x.warp[parity][threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < int(blockDim.x / 32) ? x.warp[parity][lane] : V::identity();
    v.template all_reduce_lanes<kLanes>();
  }
  if constexpr (kCluster)
    if (const int blocks = int(cluster_size()); blocks > 1) {
      if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&x.barrier[parity], blocks * int(sizeof(V)));
      if (int(threadIdx.x) < blocks)
        st_async(&x.cta[parity][cluster_rank()], threadIdx.x, v, &x.barrier[parity]);
      mbarrier_wait_parity(&x.barrier[parity], phase >> 1 & 1);
      v = lane < blocks ? x.cta[parity][lane] : V::identity();
      v.template all_reduce_lanes<kLanes>();
    }
  return v;
}

// Holds a value and the row that was drawn with it. Persistent CTAs draw their next row from a counter when
// they are free, since SMs differ in their distance from memory. One thread draws, and the reduction of V
// distributes the row.
template <class V>
struct alignas(16) ValueAndRow {
  V v;
  int row, unused;
  __device__ static ValueAndRow identity() { return {V::identity(), -1, 0}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    v.template all_reduce_lanes<Width>();
    row = __reduce_max_sync(0xffffffffu, row);
  }
};

template <int K>
struct alignas(K <= 2 ? 8 : 16) SumArray {
  static_assert(K <= 4);
  float s[K <= 2 ? 2 : 4];
  __device__ static SumArray identity() { return {}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
#pragma unroll
    for (int k = 0; k < K; ++k) s[k] = reduce_lanes<Sum, Width>(s[k]);
  }
};

// Describes the threads that share a row, and makes their reductions.
template <RowConfig kConfig, bool kCluster, bool kPersistent, class V, int Phases = 2>
struct RowReducer {
  static constexpr int kThreads = kConfig.threads_per_row;
  static constexpr bool kIsCluster = kCluster, kIsPersistent = kPersistent;
  using Payload = std::conditional_t<kPersistent, ValueAndRow<V>, V>;
  ReduceStorage<Payload, Phases>& x;
  int blocks = 1, rank = 0, threads, thread, phase = 0;

  __device__ __forceinline__ RowReducer(ReduceStorage<Payload, Phases>& x) : x(x) {
    threads = kConfig.threads_per_row ? kConfig.threads_per_row : int(blockDim.x);
    thread = kConfig.rows_per_block == 1 ? int(threadIdx.x) : int(threadIdx.x % kConfig.threads_per_row);
    if constexpr (kCluster) {
      blocks = int(cluster_size()), rank = int(cluster_rank());
      x.init();
      cluster_arrive();
    }
  }
  // Waits until every CTA of the cluster has arrived: before the first write to another CTA, and
  // before the CTA exits, since others may still write to it.
  __device__ __forceinline__ void wait_for_cluster() const {
    if constexpr (kCluster) cluster_wait();
  }
  __device__ __forceinline__ int64_t first_row() const {
    if constexpr (kCluster) return blockIdx.x / unsigned(blocks);
    return int64_t(blockIdx.x) * kConfig.rows_per_block +
           (kConfig.rows_per_block == 1 ? 0 : threadIdx.x / kConfig.threads_per_row);
  }
  __device__ __forceinline__ int64_t step() const {
    return int64_t(gridDim.x / unsigned(blocks)) * kConfig.rows_per_block;
  }
  // Returns the index of this thread's i-th vector. The CTAs of a cluster take vectors in turn, which
  // balances them.
  __device__ __forceinline__ int vec_index(int i) const {
    return thread + threads * (kCluster ? i * blocks + rank : i);
  }

  // Draws the row after the next, in one thread. The request is issued long before all_reduce()
  // distributes the result.
  __device__ __forceinline__ int draw_row(int* counter) const {
    return kPersistent && counter != nullptr && thread + rank == 0 ? int(2 * step()) + atomicAdd(counter, 1)
                                                                   : -1;
  }
  // Returns the all-reduced value; `later` becomes the row after the next if one was drawn.
  __device__ __forceinline__ V all_reduce(const V& v, int drawn_row, int64_t& later) {
    if constexpr (kPersistent) {
      const Payload payload =
          all_reduce_row<kConfig.threads_per_row, kCluster>(Payload{v, drawn_row, 0}, x, phase++);
      later = payload.row < 0 ? later : payload.row;
      return payload.v;
    } else {
      return all_reduce_row<kConfig.threads_per_row, kCluster>(v, x, phase++);
    }
  }
  // All-reduces sums.
  template <int K>
  __device__ __forceinline__ void all_reduce(float (&sums)[K]) {
    static_assert(!kPersistent);
    V v = {};
#pragma unroll
    for (int k = 0; k < K; ++k) v.s[k] = sums[k];
    v = all_reduce_row<kConfig.threads_per_row, kCluster>(v, x, phase++);
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] = v.s[k];
  }
  // These split a reduction, with work on other rows in between: publish() gives this thread's sums, and
  // collect() returns those of the row. `phase` is counted by publish(). A phase is collected before the next
  // but one is published.
  template <int K>
  __device__ __forceinline__ void publish(const float (&sums)[K]) {
    static_assert(!kPersistent && kConfig.threads_per_row == 0 && Phases == 4);
    V v = {};
#pragma unroll
    for (int k = 0; k < K; ++k) v.s[k] = sums[k];
    const int at = phase++ % Phases, warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    v.template all_reduce_lanes<32>();
    if (lane == 0) x.warp[at][warp] = v;
    __syncthreads();
    if (kCluster && warp == 0) {
      v = reduce_warps(at, lane);
      if (lane == 0) mbarrier_arrive_expect_tx(&x.barrier[at], blocks * int(sizeof(V)));
      if (lane < blocks) st_async(&x.cta[at][rank], lane, v, &x.barrier[at]);
    }
  }
  template <int K>
  __device__ __forceinline__ void collect(int phase, float (&sums)[K]) {
    const int at = phase % Phases, lane = int(threadIdx.x) % 32;
    V v;
    if constexpr (kCluster) {
      mbarrier_wait_parity(&x.barrier[at], phase / Phases & 1);
      v = lane < blocks ? x.cta[at][lane] : V::identity();
      v.template all_reduce_lanes<32>();
    } else {
      v = reduce_warps(at, lane);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] = v.s[k];
  }

 private:
  __device__ __forceinline__ V reduce_warps(int at, int lane) const {
    V v = lane < int(blockDim.x) / 32 ? x.warp[at][lane] : V::identity();
    v.template all_reduce_lanes<32>();
    return v;
  }
};

// Returns e^(x - m). Only fp32 results need the exact product with log2(e).
template <class T>
__device__ __forceinline__ float exp_minus_max(float x, float m) {
  if constexpr (sizeof(T) == 4)
    return exp2_precise(x - m, kLog2e, kLog2eLow);
  else
    return exp2_approx((x - m) * kLog2e);
}
// Returns the value that exponents are relative to. It is 0 if all elements so far are -inf, which then add
// nothing. NaN and +inf propagate.
__device__ __forceinline__ float finite_max(float m) { return m == -INFINITY ? 0.0f : m; }

// Holds online softmax statistics of a part of a row: maximum m and sum s of e^(x - m).
template <class T>
struct alignas(8) OnlineSoftmax {
  float m, s;
  __device__ static OnlineSoftmax identity() { return {-INFINITY, 0.0f}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    const float top = extreme_of_lanes<Max, Width>(m);
    if (m != top) s *= exp_minus_max<T>(m, top);
    m = top;
    s = reduce_lanes<Sum, Width>(s);
  }
};

// Describes the clusters of a kernel with one row per CTA: the CTAs of a cluster (0 if none fits), the
// threads of a CTA, and the resident clusters.
struct ClusterShape {
  int blocks = 0, threads = 1;
  int64_t clusters = 0;
};

inline size_t no_shared(int) { return 0; }

// On the host, returns clusters of `blocks` CTAs with at least min_threads threads each for rows of `vecs`
// vectors, as many as are resident. shared(threads) is the dynamic shared memory of a CTA.
template <class Shared>
ClusterShape fit_cluster(const char* op, OccupancyCache& occupancy, const void* entry,
                         const RowConfig& config, int64_t vecs, int blocks, int min_threads,
                         Shared&& shared) {
  const int threads = config.block_threads(ceil_div(vecs, blocks));
  if (threads < min_threads || threads > config.max_threads) return {};
  const int64_t resident = occupancy.max_active(op, entry, blocks, threads, shared(threads));
  return resident > 0 ? ClusterShape{blocks, threads, resident} : ClusterShape{};
}

// On the host, returns the largest cluster whose CTAs have at least min_threads threads. Small CTAs share an
// SM, so that some warps work while others wait.
template <class Shared>
ClusterShape largest_cluster(const char* op, OccupancyCache& occupancy, const void* entry,
                             const RowConfig& config, int64_t vecs, int min_threads, Shared&& shared) {
  for (int blocks : {16, 8, 4, 2}) {
    const ClusterShape c =
        fit_cluster(op, occupancy, entry, config, vecs, blocks, blocks > 2 ? min_threads : 1, shared);
    if (c.blocks > 0) return c;
  }
  return {};
}

// On the host, returns the size of persistent clusters with most resident threads. The choice depends on the
// row length only, never on the number of rows, so the results of a row do not depend on the batch.
template <class Shared>
ClusterShape max_occupancy_cluster(const char* op, OccupancyCache& occupancy, const void* entry,
                                   const RowConfig& config, int64_t vecs, int min_threads, Shared&& shared) {
  ClusterShape best;
  int64_t most_active = 0;
  for (int blocks : {2, 4, 8, 16}) {
    const ClusterShape c =
        fit_cluster(op, occupancy, entry, config, vecs, blocks, best.blocks > 0 ? min_threads : 1, shared);
    const int64_t active_threads = c.clusters * c.blocks * c.threads;
    if (active_threads > most_active) most_active = active_threads, best = c;
  }
  return best;
}

}  // namespace tigon::cuda
