#include "tigon/base/norm_rows.h"
#include "tigon/base/op.h"
#include "tigon/ops/add_rms_norm/add_rms_norm.h"

#define TIGON_KERNELS "tigon/base/simd/norm_rows.inc"
#define TIGON_FORMULA "tigon/ops/add_rms_norm/add_rms_norm_math.inc"
#define TIGON_TABLE const NormTable add_rms_norm_table = norm_table<AddRmsNormForward, AddRmsNormBackward>();
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void add_rms_norm_fwd(Context& ctx, const AddRmsNormFwd& a) {
  NormScalars scalars{a.weight ? a.offset : 0.0f, a.rounding == Rounding::llama};
  norm_forward(ctx,
               {.formula = &scalars,
                .in = {a.x, a.residual},
                .param = {a.weight},
                .kept = a.h,
                .y = a.y,
                .rstd = a.rstd,
                .eps = a.eps},
               TIGON_SELECT(add_rms_norm_table)[a.x.dtype]);
}

void add_rms_norm_bwd(Context& ctx, const AddRmsNormBwd& a) {
  NormScalars scalars{a.weight ? a.offset : 0.0f, a.rounding == Rounding::llama};
  norm_backward(ctx,
                {.formula = &scalars,
                 .dy = a.dy,
                 .in = {a.h, a.dh},
                 .weight = a.weight,
                 .rstd = a.rstd,
                 .out = {a.dx},
                 .sums = {a.dweight}},
                TIGON_SELECT(add_rms_norm_table)[a.h.dtype]);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(add_rms_norm, AddRmsNorm)
}
