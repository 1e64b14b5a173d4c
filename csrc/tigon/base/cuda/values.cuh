// Values whose element type is known at run time only: a few per row.
#pragma once

#include "tigon/base/cuda/vec.cuh"

namespace tigon::cuda {

// No data: all are 1.
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
};

}  // namespace tigon::cuda
