// This file replaces tigon/base/cuda if the library is built without CUDA.
#include "tigon/base/check.h"
#include "tigon/base/make_context.h"

namespace tigon {

std::unique_ptr<Context> make_cuda_context(void*) {
  detail::fail("context",
               {"this build of Tigon has no CUDA backend (rebuild with nvcc and -DTIGON_CUDA=ON)"});
}
bool built_with_cuda() { return false; }

}  // namespace tigon
