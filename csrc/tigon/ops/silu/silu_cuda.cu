#include "tigon/base/cuda/activation.cuh"
#include "tigon/ops/silu/silu.h"

namespace tigon::cuda {
namespace {
#include "tigon/ops/silu/silu_math.inc"
}  // namespace

void silu_fwd(Context& ctx, const SiluFwd& a) { activation_fwd<silu_y<float>>("silu", ctx, a); }
void silu_bwd(Context& ctx, const SiluBwd& a) { activation_bwd<silu_dx<float>>("silu_bwd", ctx, a); }

}  // namespace tigon::cuda
