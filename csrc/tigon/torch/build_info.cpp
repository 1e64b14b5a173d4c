// tigon.env() asks these plain C functions, found by name, about the library.
#include "tigon/base/context.h"
#include "tigon/base/simd/lanes.h"

// Returns the instruction set that the CPU kernels use in this process.
extern "C" TIGON_API const char* tigon_isa() {
  switch (tigon::cpu::active_isa()) {
    case tigon::cpu::Isa::avx512: return "avx512";
    case tigon::cpu::Isa::avx2: return "avx2";
    default: return "scalar";
  }
}

// Returns the toolkit and the architectures of the CUDA kernels in this library, or an empty string.
extern "C" TIGON_API const char* tigon_cuda_build() {
  return tigon::built_with_cuda() ? TIGON_CUDA_BUILD : "";
}

extern "C" TIGON_API const char* tigon_compiler() { return __VERSION__; }
