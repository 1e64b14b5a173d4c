// Matrix products on CUDA: always cuBLASLt's. Plans (descriptors and the heuristic's choice) are kept per shape.
#pragma once

#include "tigon/base/context.h"

namespace tigon::cuda {

// Most that a kernel may ask for.
inline constexpr size_t kGemmWorkspace = size_t(32) << 20;

// A context's memory for its products: none until a kernel asks for some, then the most that one has asked for.
struct GemmWorkspace {
  void* data = nullptr;
  size_t size = 0;
};

// Current device, the context's stream. No synchronisation.
void cublaslt_gemm(Context& ctx, const Gemm& g, int device, GemmWorkspace& workspace);

}  // namespace tigon::cuda
