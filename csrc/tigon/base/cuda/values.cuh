// Holds values whose element type is known at run time only: a few per row, or vectors of them.
#pragma once

#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// Without data, all values are 1.
struct Values {
  void* data;
  DType dtype;
  __device__ __forceinline__ float operator[](int64_t i) const {
    if (data == nullptr) return 1.0f;
    if (dtype == DType::f32) return static_cast<const float*>(data)[i];
    if (dtype == DType::bf16) return widen(static_cast<const __nv_bfloat16*>(data)[i]);
    return widen(static_cast<const __half*>(data)[i]);
  }
  __device__ __forceinline__ void set(int64_t i, float x) const {
    if (dtype == DType::f32)
      static_cast<float*>(data)[i] = x;
    else if (dtype == DType::bf16)
      static_cast<__nv_bfloat16*>(data)[i] = narrow<__nv_bfloat16>(x);
    else
      static_cast<__half*>(data)[i] = narrow<__half>(x);
  }
  // Loads elements [i, i + N), aligned to 16 bytes if N is more than 1.
  template <int N>
  __device__ __forceinline__ void load(int64_t i, float (&x)[N]) const {
    auto read = [&]<class T>(const T* p) {
      const Vec<T, N> v = load_stream<T, N>(p + i);
#pragma unroll
      for (int k = 0; k < N; ++k) x[k] = v[k];
    };
    if (dtype == DType::f32) return read(static_cast<const float*>(data));
    if (dtype == DType::bf16) return read(static_cast<const __nv_bfloat16*>(data));
    read(static_cast<const __half*>(data));
  }
  template <int N>
  __device__ __forceinline__ void store(int64_t i, const float (&x)[N]) const {
    auto write = [&]<class T>(T* p) {
      Vec<T, N> v;
      v.set(x);
      cuda::store(p + i, v);
    };
    if (dtype == DType::f32) return write(static_cast<float*>(data));
    if (dtype == DType::bf16) return write(static_cast<__nv_bfloat16*>(data));
    write(static_cast<__half*>(data));
  }
  // Returns x as a store and a load would leave it.
  template <int N>
  __device__ __forceinline__ void round(float (&x)[N]) const {
    if (dtype == DType::bf16) round_all<__nv_bfloat16, N>(x);
    if (dtype == DType::f16) round_all<__half, N>(x);
  }
};

}  // namespace tigon::cuda
