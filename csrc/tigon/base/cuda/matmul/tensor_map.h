// Describes matrices to TMA.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "tigon/base/check.h"

namespace tigon::cuda::matmul {

// Takes 16-bit elements in `kRank` dimensions, copied in boxes of 64 (128 bytes, swizzled) in the first
// dimension by `box` in the second.
template <int kRank>
CUtensorMap encode_tensor_map(const char* op, const void* data, CUtensorMapDataType type,
                              const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                              int box) {
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
  const cuuint32_t boxes[4] = {64, cuuint32_t(box), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult status = encode(&map, type, kRank, const_cast<void*>(data), sizes, strides, boxes, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TIGON_CHECK(op, status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with CUresult ", int(status));
  return map;
}

// Describes `count` adjacent matrices, each `outer` rows of `inner` contiguous elements, `stride` elements
// apart. The first element and the stride are aligned to 16 bytes.
inline CUtensorMap make_tensor_map(const char* op, const void* data, CUtensorMapDataType type, int64_t inner,
                                   int64_t outer, int64_t stride, int box, int64_t count = 1) {
  const auto row = cuuint64_t(stride) * 2;
  return encode_tensor_map<3>(op, data, type, {cuuint64_t(inner), cuuint64_t(outer), cuuint64_t(count)},
                              {row, row * cuuint64_t(outer)}, box);
}

// Describes one matrix whose boxes may end at any row: at (x, kRagged - n, kRagged, end) are its rows from
// end - n on. The rows from `end` on are outside the second dimension, so they are not accessed. kRagged
// steps of the third dimension take back as many of the second, modulo 2^64.
constexpr int kRagged = 1 << 30;
inline CUtensorMap make_ragged_tensor_map(const char* op, const void* data, CUtensorMapDataType type,
                                          int64_t inner, int64_t stride, int box) {
  const auto row = cuuint64_t(stride) * 2;
  return encode_tensor_map<4>(op, data, type, {cuuint64_t(inner), kRagged, kRagged + 1, kRagged},
                              {row, (cuuint64_t(1) << 34) - row, row}, box);
}

}  // namespace tigon::cuda::matmul
