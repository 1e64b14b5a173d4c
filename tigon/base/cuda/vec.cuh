// Storage types, 16-byte packs and cached loads for kernels. Arithmetic is fp32; rounding happens once, on store.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "tigon/base/dtype.h"

namespace tigon::cuda {

// Device image of a host storage type.
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

// Value after a round trip through storage type T.
template <class T>
__device__ __forceinline__ float round_to(float x) {
  return widen(narrow<T>(x));
}

// As half of a conversion of two, which runs at twice the rate of a single one.
template <>
__device__ __forceinline__ float round_to<__nv_bfloat16>(float x) {
  __nv_bfloat162 both = __floats2bfloat162_rn(0.0f, x);
  return __uint_as_float(*reinterpret_cast<uint32_t*>(&both) & 0xffff0000u);
}

// N adjacent elements moved in one instruction (N * sizeof(T) = 2, 4, 8 or 16 bytes, pointer aligned to it), or in the
// fewest when larger than 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N <= 16 ? sizeof(T) * N : 16) Pack {
  T v[N];

  // Element i in fp32. bf16 is taken out of the 32-bit word it arrived in: kept as words, a pack costs half the registers
  // that the compiler spends on single 16-bit values.
  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
      uint32_t word = reinterpret_cast<const uint32_t*>(v)[i / 2];
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return widen(v[i]);
    }
  }
  __device__ __forceinline__ void set(int i, float x) { v[i] = narrow<T>(x); }
  // All elements; two conversions to 16 bits are one instruction.
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

// Values after a round trip through storage type T, two at a time.
template <class T, int N>
__device__ __forceinline__ void round_all(float (&x)[N]) {
  Pack<T, N> rounded;
  rounded.set(x);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = rounded[i];
}

// The same pack, which the compiler must take for another (`zero` is a 0 that it does not know). Taking a pack apart twice
// then holds its words in between, not the fp32 values of the first time at twice the registers.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> again(Pack<T, N> x, uint32_t zero) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) reinterpret_cast<uint32_t*>(x.v)[i] ^= zero;
  }
  return x;
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

// Load of data that is read once. A plain one: on an H200 it is 6 to 10 % of the copy rate faster than ld.cs, ld.nc and
// L1::no_allocate (swiglu 16384 x 14336: 103 % of a device copy against 93 to 95 %), and st.cs gains nothing over st.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_stream(const T* p) {
  Pack<T, N> r;
  constexpr int kBytes = sizeof(T) * N, kWord = kBytes < 16 ? kBytes : 16;
  using W = typename Word<kWord>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kWord; ++i) reinterpret_cast<W*>(&r)[i] = *(reinterpret_cast<const W*>(p) + i);
  return r;
}
// Ordinary load through the read-only path (weights, tables: reused across rows).
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
  Pack<T, N> r;
  constexpr int kBytes = sizeof(T) * N, kWord = kBytes < 16 ? kBytes : 16;
  using W = typename Word<kWord>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kWord; ++i)
    reinterpret_cast<W*>(&r)[i] = __ldg(reinterpret_cast<const W*>(p) + i);
  return r;
}
// 16 bytes of global memory, words of `fill` where not `wanted`. Issued where it stands and without a branch: the compiler moves an
// ordinary load down to its first use, and one behind an `if` behind the first use of the load before it.
__device__ __forceinline__ uint4 load_where(bool wanted, const void* p, uint32_t fill = 0) {
  uint4 w;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, %6;\nmov.u32 %1, %6;\nmov.u32 %2, %6;\nmov.u32 %3, %6;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
      : "l"(p), "r"(unsigned(wanted)), "r"(fill));
  return w;
}
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_where(bool wanted, const T* p) {
  Pack<T, N> r{};
  if constexpr (sizeof(T) * N % 16 == 0) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) * N / 16; ++i)
      reinterpret_cast<uint4*>(&r)[i] = load_where(wanted, static_cast<const void*>(p + i * 16 / sizeof(T)));
  } else {
    if (wanted) r = load_stream<T, N>(p);
  }
  return r;
}
// The same, undefined where not `wanted`.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_if(bool wanted, const T* p) {
  static_assert(sizeof(T) * N % 16 == 0);
  Pack<T, N> r;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) * N / 16; ++i) {
    uint4 w;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
        : "l"(p + i * 16 / sizeof(T)), "r"(unsigned(wanted)));
    reinterpret_cast<uint4*>(&r)[i] = w;
  }
  return r;
}
template <class T, int N>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& r) {
  constexpr int kBytes = sizeof(T) * N, kWord = kBytes < 16 ? kBytes : 16;
  using W = typename Word<kWord>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kWord; ++i) reinterpret_cast<W*>(p)[i] = reinterpret_cast<const W*>(&r)[i];
}
// The same into global memory, never in parts: the compiler may make four of an ordinary 16 byte store.
template <class T, int N>
__device__ __forceinline__ void store_whole(T* p, const Pack<T, N>& r) {
  static_assert(sizeof(T) * N % 16 == 0);
  auto* w = reinterpret_cast<const uint4*>(&r);
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) * N / 16; ++i)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p + i * 16 / sizeof(T)), "r"(w[i].x),
                 "r"(w[i].y), "r"(w[i].z), "r"(w[i].w)
                 : "memory");
}

// And without a branch.
template <class T, int N>
__device__ __forceinline__ void store_where(bool wanted, T* p, const Pack<T, N>& r) {
  static_assert(sizeof(T) * N % 16 == 0);
  auto* w = reinterpret_cast<const uint4*>(&r);
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) * N / 16; ++i)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(
            p + i * 16 / sizeof(T)),
        "r"(w[i].x), "r"(w[i].y), "r"(w[i].z), "r"(w[i].w), "r"(unsigned(wanted))
        : "memory");
}

// True when rows that start at p and follow every `stride` elements can be read in packs of 16 bytes.
inline bool packs_align(const void* p, int64_t stride, int64_t cols, size_t element) {
  int64_t n = int64_t(16 / element);
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % n == 0 && cols % n == 0;
}

}  // namespace tigon::cuda
