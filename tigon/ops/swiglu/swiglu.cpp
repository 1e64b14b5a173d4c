#include "tigon/ops/swiglu/swiglu.h"

#include "tigon/base/require.h"

namespace tigon {

void swiglu_fwd(Context& ctx, const SwigluFwd& a) {
  const char* op = "swiglu";
  require_float(op, "gate", a.gate.dtype);
  require_matrix(op, "up", a.up, a.gate.rows, a.gate.cols, a.gate.dtype);
  require_matrix(op, "y", a.y, a.gate.rows, a.gate.cols, a.gate.dtype);
  if (a.gate.rows == 0 || a.gate.cols == 0) return;
  on_device(op, ctx, [&] { cpu::swiglu_fwd(ctx, a); }, TIGON_ON_CUDA(cuda::swiglu_fwd(ctx, a)));
}

void swiglu_bwd(Context& ctx, const SwigluBwd& a) {
  const char* op = "swiglu_bwd";
  require_float(op, "gate", a.gate.dtype);
  require_matrix(op, "up", a.up, a.gate.rows, a.gate.cols, a.gate.dtype);
  require_matrix(op, "dy", a.dy, a.gate.rows, a.gate.cols, a.gate.dtype);
  bool dgate = a.dgate.data != nullptr, dup = a.dup.data != nullptr;
  if (dgate) require_matrix(op, "dgate", a.dgate, a.gate.rows, a.gate.cols, a.gate.dtype);
  if (dup) require_matrix(op, "dup", a.dup, a.gate.rows, a.gate.cols, a.gate.dtype);
  if (a.gate.rows == 0 || a.gate.cols == 0 || (!dgate && !dup)) return;
  on_device(op, ctx, [&] { cpu::swiglu_bwd(ctx, a); }, TIGON_ON_CUDA(cuda::swiglu_bwd(ctx, a)));
}

}  // namespace tigon
