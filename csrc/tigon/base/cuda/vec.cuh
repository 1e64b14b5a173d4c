// Defines storage types, aligned vectors, and their loads and stores. Arithmetic is fp32; values are rounded
// once, on store.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/dtype.h"

namespace tigon::cuda {

// Maps a host storage type to its device type.
template <class T>
struct DeviceType {
  using type = T;
};
template <>
struct DeviceType<bf16> {
  using type = __nv_bfloat16;
};
template <>
struct DeviceType<f16> {
  using type = __half;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

// Returns x after a round trip through storage type T.
template <class T>
__device__ __forceinline__ float round_to(float x) {
  return widen(narrow<T>(x));
}

// Converting two values is one instruction at twice the rate of converting one.
template <>
__device__ __forceinline__ float round_to<__nv_bfloat16>(float x) {
  __nv_bfloat162 both = __floats2bfloat162_rn(0.0f, x);
  return __uint_as_float(*reinterpret_cast<uint32_t*>(&both) & 0xffff0000u);
}

// An aligned vector of N elements is moved by one instruction if it has 2, 4, 8 or 16 bytes (the pointer must
// be aligned to its size), else by the fewest 16-byte ones.
template <class T, int N>
struct alignas(sizeof(T) * N <= 16 ? sizeof(T) * N : 16) Vec {
  T v[N];

  // Returns element i in fp32. Elements of bf16 are extracted from their 32-bit word: kept as words, a vector
  // takes half the registers of single 16-bit values.
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
      uint32_t word = reinterpret_cast<const uint32_t*>(v)[i / 2];
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return widen(v[i]);
    }
  }
  __device__ __forceinline__ void set(int i, float x) { v[i] = narrow<T>(x); }
  // Sets all elements. Two conversions to 16 bits are one instruction.
  __device__ __forceinline__ void set(const float (&x)[N]) {
    if constexpr (N % 2 == 0 && std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
      for (int i = 0; i < N; i += 2)
        reinterpret_cast<__nv_bfloat162*>(v)[i / 2] = __floats2bfloat162_rn(x[i], x[i + 1]);
    } else if constexpr (N % 2 == 0 && std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < N; i += 2) reinterpret_cast<__half2*>(v)[i / 2] = __floats2half2_rn(x[i], x[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) set(i, x[i]);
    }
  }
};

// Returns values after a round trip through storage type T, two at a time.
template <class T, int N>
__device__ __forceinline__ void round_all(float (&x)[N]) {
  Vec<T, N> rounded;
  rounded.set(x);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = rounded[i];
}

// Returns x, but the compiler cannot tell: `opaque_zero` is 0 at run time only. Unpacking a vector a second
// time then keeps its words live in between instead of its fp32 values, which take twice the registers.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> hide_from_compiler(Vec<T, N> x, uint32_t opaque_zero) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) reinterpret_cast<uint32_t*>(x.v)[i] ^= opaque_zero;
  }
  return x;
}

__device__ __forceinline__ uint4 hide_from_compiler(const uint4& w, uint32_t opaque_zero) {
  return make_uint4(w.x ^ opaque_zero, w.y ^ opaque_zero, w.z ^ opaque_zero, w.w ^ opaque_zero);
}

template <int Bytes>
struct Word;
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

// Loads data that is read once. A plain load is faster on Hopper than ld.cs, ld.nc or
// L1::no_allocate.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_stream(const T* p) {
  Vec<T, N> r;
  constexpr int kBytes = sizeof(T) * N, kWord = kBytes < 16 ? kBytes : 16;
  using W = typename Word<kWord>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kWord; ++i) reinterpret_cast<W*>(&r)[i] = *(reinterpret_cast<const W*>(p) + i);
  return r;
}
// Loads through the read-only path, for weights and tables, which are reused across rows.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load(const T* p) {
  Vec<T, N> r;
  constexpr int kBytes = sizeof(T) * N, kWord = kBytes < 16 ? kBytes : 16;
  using W = typename Word<kWord>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kWord; ++i)
    reinterpret_cast<W*>(&r)[i] = __ldg(reinterpret_cast<const W*>(p) + i);
  return r;
}
// Returns zeros if `pred` is false.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_predicated(bool pred, const T* p) {
  Vec<T, N> r{};
  if constexpr (sizeof(T) * N % 16 == 0) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * N / 16; ++i)
      reinterpret_cast<uint4*>(&r)[i] = ld_global_predicated(pred, p + i * 16 / sizeof(T));
  } else {
    if (pred) r = load_stream<T, N>(p);
  }
  return r;
}
// Does the same, but the result is undefined if `pred` is false.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_predicated_uninit(bool pred, const T* p) {
  static_assert(sizeof(T) * N % 16 == 0);
  Vec<T, N> r;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) * N / 16; ++i)
    reinterpret_cast<uint4*>(&r)[i] = ld_global_predicated_uninit(pred, p + i * 16 / sizeof(T));
  return r;
}
// Loads the elements j for which has(j), and `fill` (its bits) for the others, one by one: for the few
// vectors that cannot be loaded otherwise.
template <class T, int N, class Has>
__device__ __forceinline__ Vec<T, N> load_elements(const T* p, Has&& has, uint32_t fill = 0) {
  constexpr int kWords = int(sizeof(T)) * N / 4;
  using Bits = typename Word<sizeof(T)>::type;
  uint32_t w[kWords] = {};
#pragma unroll 1
  for (int j = N - 1; j >= 0; --j) {
    const uint32_t x = has(j) ? reinterpret_cast<const Bits*>(p)[j] : Bits(fill);
#pragma unroll
    for (int i = kWords - 1; i > 0; --i) w[i] = sizeof(T) == 4 ? w[i - 1] : w[i] << 16 | w[i - 1] >> 16;
    w[0] = sizeof(T) == 4 ? x : w[0] << 16 | x;
  }
  Vec<T, N> r;
#pragma unroll
  for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(&r)[i] = w[i];
  return r;
}
template <class T, int N>
__device__ __forceinline__ void store(T* p, const Vec<T, N>& r) {
  constexpr int kBytes = sizeof(T) * N, kWord = kBytes < 16 ? kBytes : 16;
  using W = typename Word<kWord>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kWord; ++i) reinterpret_cast<W*>(p)[i] = reinterpret_cast<const W*>(&r)[i];
}
// Stores to global memory as 16-byte accesses. The compiler may split an ordinary 16-byte store
// into four.
template <class T, int N>
__device__ __forceinline__ void store_v4(T* p, const Vec<T, N>& r) {
  static_assert(sizeof(T) * N % 16 == 0);
  auto* w = reinterpret_cast<const uint4*>(&r);
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) * N / 16; ++i) st_global(p + i * 16 / sizeof(T), w[i]);
}

// Does the same under a predicate, without a branch.
template <class T, int N>
__device__ __forceinline__ void store_predicated(bool pred, T* p, const Vec<T, N>& r) {
  static_assert(sizeof(T) * N % 16 == 0);
  auto* w = reinterpret_cast<const uint4*>(&r);
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) * N / 16; ++i) st_global_predicated(pred, p + i * 16 / sizeof(T), w[i]);
}

// Drops the first `bytes` bytes of K words: a multiple of T's size, less than 16. The last words are padding.
template <class T, int K, class Bytes>
__device__ __forceinline__ void drop_bytes(uint32_t (&w)[K], Bytes bytes) {
#pragma unroll
  for (int i = 0; i < K - 2; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < K - 3; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
  if constexpr (sizeof(T) < 4) {
#pragma unroll
    for (int i = 0; i < K - 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], bytes % 4 * 8);
  }
}

// True if rows that start at p, `stride` elements apart, consist of aligned 16-byte vectors.
inline bool is_vectorizable(const void* p, int64_t stride, int64_t cols, size_t element) {
  int64_t n = int64_t(16 / element);
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % n == 0 && cols % n == 0;
}

}  // namespace tigon::cuda
