#include "tigon/base/op.h"
#include "tigon/ops/softmax/softmax.h"

#define TIGON_KERNELS "tigon/ops/softmax/softmax_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon {
TIGON_DISTRIBUTION_CPU(softmax)
TIGON_OP(softmax, Distribution)
}  // namespace tigon
