#include "tigon/base/cuda/activation.cuh"
#include "tigon/ops/mish/mish.h"

namespace tigon::cuda {
namespace {
#include "tigon/ops/mish/mish_math.inc"
}  // namespace

void mish_fwd(Context& ctx, const ActivationFwd& a) { activation_fwd<mish_y<float>>("mish", ctx, a); }
void mish_bwd(Context& ctx, const ActivationBwd& a) { activation_bwd<mish_dx<float>>("mish_bwd", ctx, a); }

}  // namespace tigon::cuda
