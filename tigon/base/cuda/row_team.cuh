// What the threads that share a row tell each other: several lanes of a warp, a warp, a block, or a cluster of blocks; one barrier
// of a block, one arrival from each block of a cluster. Fixed trees: the same bits every run, and in every thread.
#pragma once

#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/rows.cuh"

namespace tigon::cuda {

constexpr int kMaxCluster = 16;

// V is 8 or 16 bytes, has V::none(), and merge_lanes<Width>(): all lanes of each group of Width get what these have together.
// In turns: a warp may be one row ahead of another, a block of another block; four of them where what is told is heard a row later.
template <class V, int Turns = 2>
struct Exchange {
  V warp[Turns][32], peer[Turns][kMaxCluster];
  uint64_t arrival[Turns];

  // Of a cluster, before it meets for the first time. All threads.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < Turns; ++i) arrival_init(&arrival[i]);
    }
  }
};

// Groups of `Threads` adjacent lanes share a row; 0: the block; Cluster: its blocks too, which have met. `turn` counts the calls.
template <int Threads, bool Cluster, class V>
__device__ __forceinline__ V merge_row(V v, Exchange<V>& x, int turn) {
  static_assert(Threads <= 32 && (!Cluster || Threads == 0));
  constexpr int kLanes = Threads == 0 ? 32 : Threads;
  const int lane = int(threadIdx.x % 32), parity = turn & 1;
  v.template merge_lanes<kLanes>();
  if (Threads == 0 && blockDim.x > 32) {
    if (lane == 0) x.warp[parity][threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < int(blockDim.x / 32) ? x.warp[parity][lane] : V::none();
    v.template merge_lanes<kLanes>();
  }
  if (const int blocks = Cluster ? int(cluster_size()) : 1; blocks > 1) {
    if (threadIdx.x == 0) arrival_expect(&x.arrival[parity], blocks * int(sizeof(V)));
    if (int(threadIdx.x) < blocks)
      put_arriving(&x.peer[parity][cluster_rank()], threadIdx.x, v, &x.arrival[parity]);
    arrival_wait(&x.arrival[parity], turn >> 1 & 1);
    v = lane < blocks ? x.peer[parity][lane] : V::none();
    v.template merge_lanes<kLanes>();
  }
  return v;
}

// Blocks that stay take the row that is next when they are free: those of a multiprocessor that is nearer to the memory take
// more. One thread draws, and all hear of it together with V.
template <class V>
struct alignas(16) Drawn {
  V v;
  int row, unused;
  __device__ static Drawn none() { return {V::none(), -1, 0}; }
  template <int Width>
  __device__ __forceinline__ void merge_lanes() {
    v.template merge_lanes<Width>();
    row = __reduce_max_sync(0xffffffffu, row);
  }
};

template <int K>
struct alignas(K <= 2 ? 8 : 16) SumsOf {
  static_assert(K <= 4);
  float s[K <= 2 ? 2 : 4];
  __device__ static SumsOf none() { return {}; }
  template <int Width>
  __device__ __forceinline__ void merge_lanes() {
#pragma unroll
    for (int k = 0; k < K; ++k) s[k] = reduce_lanes<Sum, Width>(s[k]);
  }
};

// The threads that share a row: several lanes, a warp, a block or a cluster of blocks.
template <class Shape, bool Cluster, bool Stays, class V, int Turns = 2>
struct Team {
  using Told = std::conditional_t<Stays, Drawn<V>, V>;
  Exchange<Told, Turns>& x;
  int blocks = 1, rank = 0, threads, thread, turn = 0;

  __device__ __forceinline__ Team(Exchange<Told, Turns>& x) : x(x) {
    threads = Shape::threads ? Shape::threads : int(blockDim.x);
    thread = Shape::rows == 1 ? int(threadIdx.x) : int(threadIdx.x % Shape::threads);
    if constexpr (Cluster) {
      blocks = int(cluster_size()), rank = int(cluster_rank());
      x.init();
      cluster_arrive();
    }
  }
  // Every block has started before one writes into another, and has read what the others wrote before it ends.
  __device__ __forceinline__ void meet() const {
    if constexpr (Cluster) cluster_wait();
  }
  __device__ __forceinline__ int64_t first_row() const {
    if constexpr (Cluster) return blockIdx.x / unsigned(blocks);
    return int64_t(blockIdx.x) * Shape::rows + (Shape::rows == 1 ? 0 : threadIdx.x / Shape::threads);
  }
  __device__ __forceinline__ int64_t step() const {
    return int64_t(gridDim.x / unsigned(blocks)) * Shape::rows;
  }
  // Pack i of this thread: the blocks of a cluster take turns, so that all have as much to do.
  __device__ __forceinline__ int pack(int i) const {
    return thread + threads * (Cluster ? i * blocks + rank : i);
  }

  // The row after the next, known to one thread yet: asked for long before merge() tells the others.
  __device__ __forceinline__ int draw(int* counter) const {
    return Stays && counter != nullptr && thread + rank == 0 ? int(2 * step()) + atomicAdd(counter, 1) : -1;
  }
  // What all have together, and the row after the next if one was drawn.
  __device__ __forceinline__ V merge(const V& v, int drawn, int64_t& later) {
    if constexpr (Stays) {
      const Told told = merge_row<Shape::threads, Cluster>(Told{v, drawn, 0}, x, turn++);
      later = told.row < 0 ? later : told.row;
      return told.v;
    } else {
      return merge_row<Shape::threads, Cluster>(v, x, turn++);
    }
  }
  // The same of sums.
  template <int K>
  __device__ __forceinline__ void merge(float (&sums)[K]) {
    static_assert(!Stays);
    V v = {};
#pragma unroll
    for (int k = 0; k < K; ++k) v.s[k] = sums[k];
    v = merge_row<Shape::threads, Cluster>(v, x, turn++);
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] = v.s[k];
  }
  // In two steps, a row's first with another row's second between them: what this thread has, and what all have together. The turns are
  // counted when they are told; one is heard before the next but one is told.
  template <int K>
  __device__ __forceinline__ void tell(const float (&sums)[K]) {
    static_assert(!Stays && Shape::threads == 0 && Turns == 4);
    V v = {};
#pragma unroll
    for (int k = 0; k < K; ++k) v.s[k] = sums[k];
    const int at = turn++ % Turns, warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    v.template merge_lanes<32>();
    if (lane == 0) x.warp[at][warp] = v;
    __syncthreads();
    if (Cluster && warp == 0) {
      v = of_warps(at, lane);
      if (lane == 0) arrival_expect(&x.arrival[at], blocks * int(sizeof(V)));
      if (lane < blocks) put_arriving(&x.peer[at][rank], lane, v, &x.arrival[at]);
    }
  }
  template <int K>
  __device__ __forceinline__ void hear(int turn, float (&sums)[K]) {
    const int at = turn % Turns, lane = int(threadIdx.x) % 32;
    V v;
    if constexpr (Cluster) {
      arrival_wait(&x.arrival[at], turn / Turns & 1);
      v = lane < blocks ? x.peer[at][lane] : V::none();
      v.template merge_lanes<32>();
    } else {
      v = of_warps(at, lane);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] = v.s[k];
  }

 private:
  __device__ __forceinline__ V of_warps(int at, int lane) const {
    V v = lane < int(blockDim.x) / 32 ? x.warp[at][lane] : V::none();
    v.template merge_lanes<32>();
    return v;
  }
};

// e^(x - m). The rounding of x * log2(e) shows in fp32 only.
template <class T>
__device__ __forceinline__ float exp_below(float x, float m) {
  if constexpr (sizeof(T) == 4)
    return exp2_fine(x - m, kLog2e, kLog2eLow);
  else
    return exp2_approx((x - m) * kLog2e);
}
// What exponentials are taken below: nothing but -inf so far adds nothing, NaN and +inf survive.
__device__ __forceinline__ float reference(float m) { return m == -INFINITY ? 0.0f : m; }

// Of a part of a row of T: maximum, and sum of e^(x - m).
template <class T>
struct alignas(8) ExpSum {
  float m, s;
  __device__ static ExpSum none() { return {-INFINITY, 0.0f}; }
  template <int Width>
  __device__ __forceinline__ void merge_lanes() {
    float top;
    if constexpr (Width == 32) {
      int i = __float_as_int(m);  // floats in the order of integers
      i = __reduce_max_sync(0xffffffffu, i ^ (i >> 31 & 0x7fffffff));
      top = __int_as_float(i ^ (i >> 31 & 0x7fffffff));
    } else {
      top = reduce_lanes<Max, Width>(m);
    }
    if (m != top) s *= exp_below<T>(m, top);
    m = top;
    s = reduce_lanes<Sum, Width>(s);
  }
};

// Clusters whose blocks, of a RowBlock, hold a row together: blocks of each, 0 where none fits, threads of a block, how many clusters.
struct Cluster {
  int blocks = 0, threads = 1;
  int64_t clusters = 0;
};

// Host: for rows of `packs` packs, clusters of `blocks` blocks of `least` threads at least, as many as there is room for;
// `shared(threads)`: bytes of a block.
template <class Shape, class Kernel, class Shared>
Cluster cluster_of(const char* op, ClusterRoom& rooms, Kernel kernel, int64_t packs, int blocks, int least,
                   Shared&& shared) {
  const int threads = block_threads<Shape>(ceil_div(packs, blocks));
  if (threads < least || threads > Shape::block) return {};
  const int64_t room = rooms.of(op, kernel, blocks, threads, shared(threads));
  return room > 0 ? Cluster{blocks, threads, room} : Cluster{};
}

// Host: as many as run at a time. Large ones of small blocks, two or more of them on a multiprocessor, if only a part of the warps is left
// without work.
template <class Shape, class Kernel, class Shared>
Cluster large_cluster(const char* op, ClusterRoom& rooms, Kernel kernel, int64_t packs, int least,
                      Shared&& shared) {
  for (int blocks : {16, 8, 4, 2}) {
    const Cluster c = cluster_of<Shape>(op, rooms, kernel, packs, blocks, blocks > 2 ? least : 1, shared);
    if (c.blocks > 0) return c;
  }
  return {};
}

// Host: of clusters that stay, blocks of at least `least` threads each, those with most threads under way, for rows of `packs` packs; as
// many as there is room for. The choice must not depend on how many rows there are, or their bits would.
template <class Shape, class Kernel, class Shared>
Cluster best_cluster(const char* op, ClusterRoom& rooms, Kernel kernel, int64_t packs, int least,
                     Shared&& shared) {
  Cluster best;
  int64_t most = 0;
  for (int blocks : {2, 4, 8, 16}) {
    const Cluster c =
        cluster_of<Shape>(op, rooms, kernel, packs, blocks, best.blocks > 0 ? least : 1, shared);
    const int64_t under_way = c.clusters * c.blocks * c.threads;
    if (under_way > most) most = under_way, best = c;
  }
  return best;
}

}  // namespace tigon::cuda
