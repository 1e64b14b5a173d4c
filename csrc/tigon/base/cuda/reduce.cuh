// Reduces over the threads that share a row. The trees are fixed, so results are bitwise equal in every run.
#pragma once

#include <type_traits>

namespace tigon::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
  static constexpr float identity = 0.0f;
  __device__ static float combine(float a, float b) { return a + b; }
};
struct Max {
  static constexpr float identity = -INFINITY;
  __device__ static float combine(float a, float b) { return fmaxf(a, b); }
};
struct Min {
  static constexpr float identity = INFINITY;
  __device__ static float combine(float a, float b) { return fminf(a, b); }
};

// All-reduce within each group of `Width` adjacent lanes (a power of two <= 32) by butterfly
// shuffles at distances First, 2 First, ... Width / 2.
template <class Op, int Width, int First = 1>
__device__ __forceinline__ float reduce_lanes(float x) {
#pragma unroll
  for (int step = First; step < Width; step <<= 1) x = Op::combine(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
// Returns the sum over this lane and the lanes before it.
__device__ __forceinline__ int prefix_sum_of_lanes(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += other;
  }
  return x;
}
// Maps the bits of floats to integers of the same order, with NaN above all, and back.
__device__ __forceinline__ int in_order(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
// All-reduces by Max or Min. Over a warp this is one instruction, and the maximum is NaN if there is one.
template <class Op, int Width>
__device__ __forceinline__ float extreme_of_lanes(float x) {
  if constexpr (Width < 32) return reduce_lanes<Op, Width>(x);
  const int key = in_order(__float_as_int(x));
  return __int_as_float(in_order(std::is_same_v<Op, Max> ? __reduce_max_sync(kAllLanes, key)
                                                         : __reduce_min_sync(kAllLanes, key)));
}
// All-reduces K values (a power of two) over the warp, each by the tree of reduce_lanes(). A lane returns the
// one value reduced_value<K>(lane).
template <class Op, int K>
__device__ __forceinline__ float reduce_values(float (&x)[K]) {
#pragma unroll
  for (int step = 1, n = K / 2; n > 0; step <<= 1, n /= 2) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float sent = upper ? x[i] : x[i + n], kept = upper ? x[i + n] : x[i];
      x[i] = Op::combine(kept, __shfl_xor_sync(kAllLanes, sent, step));
    }
  }
  return reduce_lanes<Op, 32, K>(x[0]);
}
template <int K>
__device__ __forceinline__ int reduced_value(int lane) {
  int value = 0;
#pragma unroll
  for (int bit = 1; bit < K; bit <<= 1) value = 2 * value + ((lane & bit) != 0);
  return value;
}
// Reduces K values of one thread by a binary tree over neighbours.
template <class Op, int K>
__device__ __forceinline__ float reduce_registers(float (&x)[K]) {
#pragma unroll
  for (int step = 1; step < K; step <<= 1)
#pragma unroll
    for (int i = 0; i + step < K; i += 2 * step) x[i] = Op::combine(x[i], x[i + step]);
  return x[0];
}

// All-reduces K values over threads [row * Threads, (row + 1) * Threads) of the CTA (0 stands for the whole
// CTA). With kLaneSplit, that many adjacent groups of lanes hold what one lane would hold without it, and are
// combined first, so that the sum is bitwise equal. `slots` is 16-byte aligned shared memory of 32 * K
// floats. Callers that reduce twice pass two arrays or synchronise in between. All threads of the CTA take
// part.
template <class Op, int Threads, int kLaneSplit = 1, int K>
__device__ __forceinline__ void reduce_row(float (&x)[K], float* slots) {
  constexpr int kWarps = Threads == 0 ? 32 : Threads / 32, kLanes = (kWarps > 0 ? 32 : Threads) / kLaneSplit;
  constexpr int kWidth = kWarps <= 2 ? 2 : kWarps <= 4 ? 4 : kWarps <= 8 ? 8 : kWarps <= 16 ? 16 : 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = warp / (kWarps > 0 ? kWarps : 1) * kWarps,
            warps = Threads == 0 ? blockDim.x / 32 : kWarps;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    x[k] = reduce_lanes<Op, kLanes>(reduce_lanes<Op, kLanes * kLaneSplit, kLanes>(x[k]));
    if (kWarps > 1 && lane == 0) slots[k * 32 + warp] = x[k];
  }
  if constexpr (kWarps > 1) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const float* of = slots + k * 32 + first;
      // Each thread combines the warps' values itself.
      if (Threads == 0 && warps <= 4) {
        float4 s = *reinterpret_cast<const float4*>(of);
        s.y = warps > 1 ? s.y : Op::identity;
        s.z = warps > 2 ? s.z : Op::identity;
        s.w = warps > 3 ? s.w : Op::identity;
        x[k] = Op::combine(Op::combine(s.x, s.y), Op::combine(s.z, s.w));
      } else {
        const float y = lane % kWidth < warps ? of[lane % kWidth] : Op::identity;
        x[k] = reduce_lanes<Op, kWidth>(y);
      }
    }
  }
}
template <class Op, int Threads>
__device__ __forceinline__ float reduce_row(float x, float* slots) {
  float one[1] = {x};
  reduce_row<Op, Threads>(one, slots);
  return one[0];
}

}  // namespace tigon::cuda
