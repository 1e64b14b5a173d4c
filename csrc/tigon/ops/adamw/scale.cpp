#include "tigon/ops/adamw/scale.h"

#include "tigon/base/require.h"

namespace tigon {

void scale(Context& ctx, const Scale& a) {
  const char* op = "scale";
  for (const Vector& x : a.tensors) require_float(op, "tensors", x.dtype);
  require_vector(op, "factor", a.factor, 1, DType::f32);
  TIGON_RUN(op, ctx, scale, a);
}

}  // namespace tigon
