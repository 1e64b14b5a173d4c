#include "tigon/base/op.h"
#include "tigon/ops/sparsemax/sparsemax.h"

#define TIGON_KERNELS "tigon/ops/sparsemax/sparsemax_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon {
TIGON_DISTRIBUTION_CPU(sparsemax)
TIGON_OP(sparsemax, Distribution)
}  // namespace tigon
