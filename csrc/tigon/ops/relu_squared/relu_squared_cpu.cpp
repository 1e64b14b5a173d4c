#include "tigon/base/op.h"
#include "tigon/ops/relu_squared/relu_squared.h"

#define TIGON_KERNELS "tigon/base/simd/activation.inc"
#define TIGON_FORMULA "tigon/ops/relu_squared/relu_squared_math.inc"
#define TIGON_TABLE const ActivationTable table = activation_table<relu_squared_y<V>, relu_squared_dx<V>>();
#include "tigon/base/simd/foreach_isa.h"

namespace tigon {
TIGON_ACTIVATION_CPU(relu_squared, table)
TIGON_OP(relu_squared, Activation)
}  // namespace tigon
