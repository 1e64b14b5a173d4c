#include "tigon/base/op.h"
#include "tigon/ops/silu/silu.h"

#define TIGON_KERNELS "tigon/ops/silu/silu_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void silu_fwd(Context& ctx, const SiluFwd& a) { activation_fwd(ctx, TIGON_SELECT(silu_table), a); }
void silu_bwd(Context& ctx, const SiluBwd& a) { activation_bwd(ctx, TIGON_SELECT(silu_table), a); }

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(silu, Silu)
}
