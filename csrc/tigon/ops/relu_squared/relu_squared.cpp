#include "tigon/ops/relu_squared/relu_squared.h"

#include "tigon/base/require.h"

namespace tigon {

void relu_squared_fwd(Context& ctx, const ReluSquaredFwd& a) {
  const char* op = "relu_squared";
  if (!require_pointwise(op, {"x", a.x}, {{"y", a.y}})) return;
  on_device(op, ctx, [&] { cpu::relu_squared_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::relu_squared_fwd(ctx, a)));
}

void relu_squared_bwd(Context& ctx, const ReluSquaredBwd& a) {
  const char* op = "relu_squared_bwd";
  if (!require_pointwise(op, {"x", a.x}, {{"dy", a.dy}, {"dx", a.dx}})) return;
  on_device(op, ctx, [&] { cpu::relu_squared_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::relu_squared_bwd(ctx, a)));
}

}  // namespace tigon
