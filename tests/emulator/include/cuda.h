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
  int64_t size[4], stride[3];  // in elements; of three dimensions the last size is 1
  int box[2];
};
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                       const cuuint64_t* sizes, const cuuint64_t* strides,
                                       const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  bool fits = (rank == 3 || rank == 4) && uintptr_t(data) % 16 == 0 && box[0] == 64 && box[1] <= 256;
  *map = {.data = static_cast<uint16_t*>(data), .size = {1, 1, 1, 1}, .box = {int(box[0]), int(box[1])}};
  for (cuuint32_t i = 0; i < rank; ++i)
    map->size[i] = int64_t(sizes[i]), fits = fits && (i < 2 || box[i] == 1);
  for (cuuint32_t i = 0; i + 1 < rank; ++i) {
    map->stride[i] = int64_t(strides[i] / 2);
    fits = fits && strides[i] % 16 == 0 && strides[i] < cuuint64_t(1) << 40;
  }
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
inline int cudaGetDriverEntryPointByVersion(const char*, void** fn, unsigned, unsigned long long,
                                            cudaDriverEntryPointQueryResult*) {
  *fn = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return 0;
}
