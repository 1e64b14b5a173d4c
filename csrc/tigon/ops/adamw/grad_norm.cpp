#include "tigon/ops/adamw/grad_norm.h"

#include "tigon/base/require.h"

namespace tigon {

void grad_norm(Context& ctx, const GradNorm& a) {
  const char* op = "grad_norm";
  for (const Vector& g : a.grads) require_float(op, "grads", g.dtype);
  require_optional(op, "grad_scale", a.grad_scale, 1);
  TIGON_CHECK(op, a.max_norm >= 0.0f, "max_norm must be >= 0, got ", a.max_norm);
  require_vector(op, "total", a.total, 1, DType::f64);
  require_vector(op, "norm", a.norm, 1, DType::f32);
  require_vector(op, "factor", a.factor, 1, DType::f32);
  TIGON_RUN(op, ctx, grad_norm, a);
}

}  // namespace tigon
