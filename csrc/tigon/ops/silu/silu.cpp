#include "tigon/ops/silu/silu.h"

#include "tigon/base/require.h"

namespace tigon {

void silu_fwd(Context& ctx, const SiluFwd& a) {
  const char* op = "silu";
  if (!require_pointwise(op, {"x", a.x}, {{"y", a.y}})) return;
  on_device(op, ctx, [&] { cpu::silu_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::silu_fwd(ctx, a)));
}

void silu_bwd(Context& ctx, const SiluBwd& a) {
  const char* op = "silu_bwd";
  if (!require_pointwise(op, {"x", a.x}, {{"dy", a.dy}, {"dx", a.dx}})) return;
  on_device(op, ctx, [&] { cpu::silu_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::silu_bwd(ctx, a)));
}

}  // namespace tigon
