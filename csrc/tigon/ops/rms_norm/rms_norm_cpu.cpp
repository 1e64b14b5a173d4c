#include "tigon/base/norm_rows.h"
#include "tigon/base/op.h"
#include "tigon/ops/rms_norm/rms_norm.h"

#define TIGON_KERNELS "tigon/base/simd/norm_rows.inc"
#define TIGON_FORMULA "tigon/ops/rms_norm/rms_norm_math.inc"
#define TIGON_TABLE const NormTable rms_norm_table = norm_table<RmsNormForward, RmsNormBackward>();
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void rms_norm_fwd(Context& ctx, const RmsNormFwd& a) {
  NormScalars scalars{a.weight ? a.offset : 0.0f, a.rounding == Rounding::llama};
  norm_forward(
      ctx, {.formula = &scalars, .in = {a.x}, .param = {a.weight}, .y = a.y, .rstd = a.rstd, .eps = a.eps},
      TIGON_SELECT(rms_norm_table)[a.x.dtype]);
}

void rms_norm_bwd(Context& ctx, const RmsNormBwd& a) {
  NormScalars scalars{a.weight ? a.offset : 0.0f, a.rounding == Rounding::llama};
  norm_backward(ctx,
                {.formula = &scalars,
                 .dy = a.dy,
                 .in = {a.x},
                 .weight = a.weight,
                 .rstd = a.rstd,
                 .out = {a.dx},
                 .sums = {a.dweight}},
                TIGON_SELECT(rms_norm_table)[a.x.dtype]);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(rms_norm, RmsNorm)
}
