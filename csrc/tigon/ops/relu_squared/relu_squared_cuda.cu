#include "tigon/base/cuda/activation.cuh"
#include "tigon/ops/relu_squared/relu_squared.h"

namespace tigon::cuda {
namespace {
#include "tigon/ops/relu_squared/relu_squared_math.inc"
}  // namespace

void relu_squared_fwd(Context& ctx, const ReluSquaredFwd& a) {
  activation_fwd<relu_squared_y<float>>("relu_squared", ctx, a);
}
void relu_squared_bwd(Context& ctx, const ReluSquaredBwd& a) {
  activation_bwd<relu_squared_dx<float>>("relu_squared_bwd", ctx, a);
}

}  // namespace tigon::cuda
