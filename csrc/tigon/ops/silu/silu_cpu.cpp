#include "tigon/base/op.h"
#include "tigon/ops/silu/silu.h"

#define TIGON_KERNELS "tigon/base/simd/activation.inc"
#define TIGON_FORMULA "tigon/ops/silu/silu_math.inc"
#define TIGON_TABLE const ActivationTable table = activation_table<silu_y<V>, silu_dx<V>>();
#include "tigon/base/simd/foreach_isa.h"

namespace tigon {
TIGON_ACTIVATION_CPU(silu, table)
TIGON_OP(silu, Activation)
}  // namespace tigon
