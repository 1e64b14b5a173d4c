// The contexts of a program without a framework.
#pragma once

#include <memory>

#include "tigon/base/context.h"

namespace tigon {

// The standalone CPU context: own thread pool (hardware threads unless told), malloc, built-in matrix product.
TIGON_API std::unique_ptr<Context> make_cpu_context(int threads = 0);
// The standalone CUDA context on the current device: cudaMallocAsync, cuBLASLt opened at run time.
// Throws tigon::Error when the library was built without CUDA.
TIGON_API std::unique_ptr<Context> make_cuda_context(void* stream = nullptr);

}  // namespace tigon
