// Tensor maps of CUDA's driver: matrices of 16-bit elements with swizzled rows of 128 bytes.
#pragma once

#include <cstdint>

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  uint16_t* data;
  int64_t size[3], stride[2];  // in elements
  int box[2];
};
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                       const cuuint64_t* sizes, const cuuint64_t* strides,
                                       const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 3 || uintptr_t(data) % 16 || (strides[0] | strides[1]) % 16 || box[0] != 64 || box[1] > 256 ||
      box[2] != 1)
    return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<uint16_t*>(data),
          {int64_t(sizes[0]), int64_t(sizes[1]), int64_t(sizes[2])},
          {int64_t(strides[0] / 2), int64_t(strides[1] / 2)},
          {int(box[0]), int(box[1])}};
  return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline int cudaGetDriverEntryPointByVersion(const char*, void** fn, unsigned, unsigned long long,
                                            cudaDriverEntryPointQueryResult*) {
  *fn = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return 0;
}
