#include "tigon/ops/fp8_linear/fp8_producers.h"

#include "tigon/base/op.h"

namespace tigon {
namespace {

void cast(Context& ctx, const Matrix& x, const RowBytes& to) {
  fp8_quantize(ctx, {.x = x, .column_factors = to.factors, .q = to.q, .scales = to.scales});
}

template <class Op>
void forward(const char* op, Context& ctx, const Fp8Forward<Op>& args, void (*entry)(Context&, const Op&)) {
  Fp8Forward<Op> a = checked(op, ctx, args);
  bool written = false;
  a.bytes.written = &written;
  entry(ctx, a);
  if (!written) cast(ctx, a.y, a.bytes);
}

}  // namespace

void rms_norm_fp8(Context& ctx, const RmsNormFp8& a) { forward("rms_norm", ctx, a, &rms_norm_fwd); }
void add_rms_norm_fp8(Context& ctx, const AddRmsNormFp8& a) {
  forward("add_rms_norm", ctx, a, &add_rms_norm_fwd);
}
void glu_fp8(Context& ctx, const GluFp8& a) { forward("glu", ctx, a, &glu_fwd); }
void glu_bwd_fp8(Context& ctx, const GluBwdFp8& args) {
  GluBwdFp8 a = checked("glu_bwd", ctx, args);
  bool written = false;
  a.gate_bytes.written = a.up_bytes.written = &written;
  glu_bwd(ctx, a);
  if (written) return;
  cast(ctx, a.dgate, a.gate_bytes);
  cast(ctx, a.dup, a.up_bytes);
}

TIGON_OPERATOR(rms_norm_fp8, RmsNormFp8, "rms_norm_fp8", none)
TIGON_OPERATOR(add_rms_norm_fp8, AddRmsNormFp8, "add_rms_norm_fp8", none)
TIGON_OPERATOR(glu_fp8, GluFp8, "glu_fp8", none)
TIGON_OPERATOR(glu_bwd_fp8, GluBwdFp8, "glu_bwd_fp8", none)

}  // namespace tigon
