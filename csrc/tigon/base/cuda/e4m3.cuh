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

// Returns the bytes of two values that are already scaled.
__device__ __forceinline__ uint32_t e4m3_bytes(float low, float high) {
#if __CUDA_ARCH__ >= 890
  // The instruction would clamp what is beyond 448, infinity too.
  auto visible = [](float x) { return fabsf(x) <= 448.0f ? x : __uint_as_float(0x7fffffffu); };
  return cvt_rn_satfinite_e4m3x2_f32(visible(high), visible(low));
#else
  return e4m3_round(__float_as_uint(low)) | e4m3_round(__float_as_uint(high)) << 8;
#endif
}
__device__ __forceinline__ uint32_t e4m3_bytes(float a, float b, float c, float d) {
  return e4m3_bytes(a, b) | e4m3_bytes(c, d) << 16;
}
template <class T, int N>
__device__ __forceinline__ void store_e4m3(uint8_t* q, const Vec<T, N>& v, float inverse) {
  Vec<uint32_t, N / 4> bytes;
#pragma unroll
  for (int j = 0; j < N; j += 4)
    bytes.v[j / 4] = e4m3_bytes(v[j] * inverse, v[j + 1] * inverse, v[j + 2] * inverse, v[j + 3] * inverse);
  store(reinterpret_cast<uint32_t*>(q), bytes);
}

__device__ __forceinline__ void raise_e4m3(uint32_t& largest, float value) {
  largest = max(largest, e4m3_magnitude(__float_as_uint(value)));
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
