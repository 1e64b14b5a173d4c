// Matrix products on CUDA: always cuBLASLt's. Plans (descriptors and the heuristic's choice) are kept per shape.
#pragma once

#include "tigon/base/context.h"

namespace tigon::cuda {

inline constexpr size_t kGemmWorkspace = size_t(32) << 20;

// Current device, given stream. `workspace` holds kGemmWorkspace bytes. No allocation, no synchronisation.
void cublaslt_gemm(const Gemm& g, int device, void* workspace, void* stream);

}  // namespace tigon::cuda
