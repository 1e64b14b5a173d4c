// Matrix products on CUDA: always cuBLASLt's. Plans (descriptors and the heuristic's choice) are kept per shape.
#pragma once

#include "tigon/base/context.h"

namespace tigon::cuda {

inline constexpr size_t kGemmWorkspace = size_t(32) << 20;

// Current device, the context's stream. `workspace`: null, or what an earlier call of this context put there; it is taken from
// the context's scratch memory (kGemmWorkspace bytes) when a kernel first asks for it. No synchronisation.
void cublaslt_gemm(Context& ctx, const Gemm& g, int device, void*& workspace);

}  // namespace tigon::cuda
