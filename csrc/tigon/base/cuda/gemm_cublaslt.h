// Matrix products on CUDA, always by cuBLASLt. Plans (descriptors and the heuristic's choice) are
// cached by shape.
#pragma once

#include <string>

#include "tigon/base/context.h"

namespace tigon::cuda {

// The largest workspace that a kernel may ask for.
inline constexpr size_t kGemmWorkspace = size_t(32) << 20;

// A context's memory for its products: empty until one asks for it, then the largest so far.
struct GemmWorkspace {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    void* reserve(Context& ctx, size_t bytes) {
      if (bytes > size) data = ctx.scratch(bytes), size = bytes;
      return data;
    }
  };
  Buffer kernel, a, b;  // what kernels ask for; aligned copies of operands
};

// Runs on the current device and the context's stream, without synchronisation.
void cublaslt_gemm(Context& ctx, const Gemm& g, int device, GemmWorkspace& workspace);

// The kernels that deterministic contexts have used, a line for each product.
std::string cublaslt_kernels();
// Whether matmul/ has kernels of this build for devices of this capability: sm_90a only.
bool has_own_products(int capability);

}  // namespace tigon::cuda
