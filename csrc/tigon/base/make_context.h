// Makes the contexts of a program that has no framework.
#pragma once

#include <memory>

#include "tigon/base/context.h"

namespace tigon {

// The standalone CPU context has its own thread pool (as many as hardware threads by default), malloc and the
// built-in GEMM.
TIGON_API std::unique_ptr<Context> make_cpu_context(int threads = 0);
// The standalone CUDA context works on the current device, with cudaMallocAsync and with cuBLASLt opened at
// run time. Throws tigon::Error if the library was built without CUDA.
TIGON_API std::unique_ptr<Context> make_cuda_context(void* stream = nullptr);

}  // namespace tigon
