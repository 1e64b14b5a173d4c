// What the threads that share a row tell each other: several lanes of a warp, a warp, a block, or a cluster of blocks; one barrier
// of a block, one arrival from each block of a cluster. Fixed trees: the same bits every run, and in every thread.
#pragma once

#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"

namespace tigon::cuda {

constexpr int kMaxCluster = 16;

// V is 8 or 16 bytes, has V::none(), and merge_lanes<Width>(): all lanes of each group of Width get what these have together.
// In turns: a warp may be one row ahead of another, a block of another block.
template <class V>
struct Exchange {
  V warp[2][32], peer[2][kMaxCluster];
  uint64_t arrival[2];

  // Of a cluster, before it meets for the first time. All threads.
  __device__ __forceinline__ void init() {
    if (threadIdx.x == 0) arrival_init(&arrival[0]), arrival_init(&arrival[1]);
  }
};

// Groups of `Threads` adjacent lanes share a row; 0: the block; Cluster: its blocks too, which have met. `turn` counts the calls.
template <int Threads, bool Cluster, class V>
__device__ __forceinline__ V merge_row(V v, Exchange<V>& x, int turn) {
  static_assert(Threads <= 32 && (!Cluster || Threads == 0));
  constexpr int kLanes = Threads == 0 ? 32 : Threads;
  const int lane = int(threadIdx.x) % 32, parity = turn & 1;
  v.template merge_lanes<kLanes>();
  if (Threads == 0 && blockDim.x > 32) {
    if (lane == 0) x.warp[parity][threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < int(blockDim.x) / 32 ? x.warp[parity][lane] : V::none();
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

struct alignas(8) PlainSum {
  float s, unused;
  __device__ static PlainSum none() { return {0.0f, 0.0f}; }
  template <int Width>
  __device__ __forceinline__ void merge_lanes() {
    s = reduce_lanes<Sum, Width>(s);
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

}  // namespace tigon::cuda
