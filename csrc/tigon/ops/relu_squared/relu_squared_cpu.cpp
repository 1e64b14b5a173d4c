#include "tigon/base/op.h"
#include "tigon/ops/relu_squared/relu_squared.h"

#define TIGON_KERNELS "tigon/ops/relu_squared/relu_squared_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void relu_squared_fwd(Context& ctx, const ReluSquaredFwd& a) {
  activation_fwd(ctx, TIGON_SELECT(relu_squared_table), a);
}
void relu_squared_bwd(Context& ctx, const ReluSquaredBwd& a) {
  activation_bwd(ctx, TIGON_SELECT(relu_squared_table), a);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(relu_squared, ReluSquared)
}
