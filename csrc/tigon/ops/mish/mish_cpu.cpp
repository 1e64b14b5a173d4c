#include "tigon/base/op.h"
#include "tigon/ops/mish/mish.h"

#define TIGON_KERNELS "tigon/base/simd/activation.inc"
#define TIGON_FORMULA "tigon/ops/mish/mish_math.inc"
#define TIGON_TABLE const ActivationTable table = activation_table<mish_y<V>, mish_dx<V>>();
#include "tigon/base/simd/foreach_isa.h"

namespace tigon {
TIGON_ACTIVATION_CPU(mish, table)
TIGON_OP(mish, Activation)
}  // namespace tigon
