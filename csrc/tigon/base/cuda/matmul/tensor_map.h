// Descriptors of matrices for TMA.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "tigon/base/check.h"

namespace tigon::cuda::matmul {

// `count` adjacent matrices of 16-bit elements, each `outer` rows of `inner` contiguous ones, `stride` elements apart, copied in
// boxes of 64 inner (128 bytes, swizzled) by `box` outer ones. The first element and the stride are aligned to 16 bytes.
inline CUtensorMap make_tensor_map(const char* op, const void* data, CUtensorMapDataType type, int64_t inner,
                                   int64_t outer, int64_t stride, int box, int64_t count = 1) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* fn = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<Encode>(fn);
  }();
  TIGON_CHECK(op, encode != nullptr,
              "the CUDA driver must have cuTensorMapEncodeTiled (CUDA 12.0), found none");
  CUtensorMap map;
  const cuuint64_t sizes[3] = {cuuint64_t(inner), cuuint64_t(outer), cuuint64_t(count)};
  const cuuint64_t strides[2] = {cuuint64_t(stride) * 2, cuuint64_t(outer * stride) * 2};
  const cuuint32_t boxes[3] = {64, cuuint32_t(box), 1}, steps[3] = {1, 1, 1};
  const CUresult status = encode(&map, type, 3, const_cast<void*>(data), sizes, strides, boxes, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TIGON_CHECK(op, status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with CUresult ", int(status));
  return map;
}

}  // namespace tigon::cuda::matmul
