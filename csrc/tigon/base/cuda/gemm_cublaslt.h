// Runs GEMMs on CUDA, always by cuBLASLt. Plans (descriptors and the heuristic's choice) are cached by shape.
#pragma once

#include <string>

#include "tigon/base/context.h"

namespace tigon::cuda {

// No kernel may ask for a larger workspace.
inline constexpr size_t kGemmWorkspace = size_t(32) << 20;

// Keeps a context's memory for GEMM: empty until one asks for it, then the largest so far.
struct GemmWorkspace {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    void* reserve(Context& ctx, size_t bytes) {
      if (bytes > size) data = ctx.scratch(bytes), size = bytes;
      return data;
    }
  };
  // `kernel` is what kernels ask for; a and b are aligned copies of operands.
  Buffer kernel, a, b;
};

// Runs on the current device and the context's stream, without synchronisation.
void cublaslt_gemm(Context& ctx, const Gemm& g, int device, GemmWorkspace& workspace);

// Lists the kernels that deterministic contexts have used, a line for each GEMM.
std::string cublaslt_kernels();
// True if this build has matmul/ kernels for devices of this capability: sm_90a only.
bool has_matmul_kernels(int capability);

}  // namespace tigon::cuda
