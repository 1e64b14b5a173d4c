// Writes rows in float8 e4m3 with a scale for each, as fp8_quantize does: device code that the cast shares
// with the ops that write a row and its bytes in one pass. A CTA has one row.
#pragma once

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/row_bytes.h"

namespace tigon::cuda {

#include "tigon/base/e4m3.inc"

// Says where the bytes of rows go. Without q none are wanted.
struct ByteRows {
  uint8_t* q = nullptr;
  int64_t stride = 0;
  float* scales = nullptr;
  const float* factors = nullptr;  // by column
  bool* written = nullptr;         // the host's

  // True if a thread may store the bytes of 8 elements at a time.
  bool takes_vectors() const { return reinterpret_cast<uintptr_t>(q) % 8 == 0 && stride % 8 == 0; }
};
inline ByteRows byte_rows(const RowBytes& of) {
  return {.q = static_cast<uint8_t*>(of.q.data),
          .stride = of.q.stride,
          .scales = of.scales.as<float>(),
          .factors = of.factors.as<float>(),
          .written = of.written};
}

// Returns the bytes of two values that are already scaled. With kFinite none is infinite.
template <bool kFinite = false>
__device__ __forceinline__ uint32_t e4m3_bytes(float low, float high) {
#if __CUDA_ARCH__ >= 890
  // The instruction would clamp what is beyond 448, infinity too.
  auto visible = [](float x) { return kFinite || fabsf(x) <= 448.0f ? x : __uint_as_float(0x7fffffffu); };
  return cvt_rn_satfinite_e4m3x2_f32(visible(high), visible(low));
#else
  return e4m3_round(__float_as_uint(low)) | e4m3_round(__float_as_uint(high)) << 8;
#endif
}
template <bool kFinite = false>
__device__ __forceinline__ uint32_t e4m3_bytes(float a, float b, float c, float d) {
  return e4m3_bytes<kFinite>(a, b) | e4m3_bytes<kFinite>(c, d) << 16;
}
// Returns the bytes of four elements from j on. Without infinity in v the check for it is saved.
template <class T, int N>
__device__ __forceinline__ uint32_t e4m3_bytes(const Vec<T, N>& v, int j, float inverse, bool infinite) {
  auto at = [&](int i) { return v[j + i] * inverse; };
  return infinite ? e4m3_bytes(at(0), at(1), at(2), at(3)) : e4m3_bytes<true>(at(0), at(1), at(2), at(3));
}
template <class T, int N>
__device__ __forceinline__ void store_e4m3(uint8_t* q, const Vec<T, N>& v, float inverse, bool infinite) {
  Vec<uint32_t, N / 4> bytes;
#pragma unroll
  for (int j = 0; j < N; j += 4) bytes.v[j / 4] = e4m3_bytes(v, j, inverse, infinite);
  store(reinterpret_cast<uint32_t*>(q), bytes);
}

__device__ __forceinline__ void raise_e4m3(uint32_t& largest, float value) {
  largest = max(largest, e4m3_magnitude(__float_as_uint(value)));
}
// Does the same for a vector, of bf16 two elements at a time, but takes infinity: the caller looks again.
template <class T, int N>
__device__ __forceinline__ void raise_with_infinity(uint32_t& largest, const Vec<T, N>& v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    __nv_bfloat162 most = {};
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      const uint32_t two = reinterpret_cast<const uint32_t*>(v.v)[j] & 0x7fff7fffu;
      most = __hmax2(most, reinterpret_cast<const __nv_bfloat162&>(two));  // leaves NaN out
    }
    const uint32_t two = reinterpret_cast<const uint32_t&>(most);
    largest = max(largest, max(two << 16, two & 0xffff0000u));
  } else {
    float most = __uint_as_float(largest);
#pragma unroll
    for (int j = 0; j < N; ++j) most = fmaxf(most, fabsf(v[j]));
    largest = __float_as_uint(most);
  }
}
__device__ __forceinline__ bool is_infinite(uint32_t largest) { return largest >= 0x7f800000u; }
// Returns the largest magnitude of some vectors without infinity, and whether there is some.
template <class T, int N, int K>
__device__ __forceinline__ uint32_t largest_e4m3(const Vec<T, N> (&v)[K], bool& infinite) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < K; ++i) raise_with_infinity(largest, v[i]);
  infinite = is_infinite(largest);
  if (!infinite) return largest;
  largest = 0;
#pragma unroll
  for (int i = 0; i < K; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) raise_e4m3(largest, v[i][j]);
  return largest;
}
// Writes the scale of row r and returns its inverse. `largest` is that of the thread; `slots` is not written
// again before the next barrier.
__device__ __forceinline__ float finish_e4m3(const ByteRows& to, int64_t r, uint32_t largest,
                                             uint32_t (&slots)[32]) {
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = threadIdx.x % 32 < blockDim.x / 32 ? slots[threadIdx.x % 32] : 0u;
  const uint32_t scale = e4m3_scale(__reduce_max_sync(0xffffffffu, largest));
  if (threadIdx.x == 0) to.scales[r] = __uint_as_float(scale);
  return __uint_as_float(e4m3_inverse(scale));
}

}  // namespace tigon::cuda
