#include "tigon/base/norm_rows.h"
#include "tigon/base/op.h"
#include "tigon/ops/gated_rms_norm/gated_rms_norm_scalars.h"

namespace tigon::cpu {
namespace {

struct GatedTables {
  NormTable by_order[2];  // indexed by norm first
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/gated_rms_norm/gated_rms_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

const NormKernels& kernels_for(const GatedRmsNorm& options, DType x) {
  return TIGON_SELECT(gated_rms_norm_tables).by_order[options.norm_first][x];
}

}  // namespace

void gated_rms_norm_fwd(Context& ctx, const GatedRmsNormFwd& a) {
  GatedScalars scalars = gated_scalars(a);
  norm_forward(ctx,
               {.formula = &scalars,
                .in = {a.x, a.gate},
                .param = {a.weight},
                .y = a.y,
                .rstd = a.rstd,
                .eps = a.eps,
                .sections = a.x.cols / a.options.group},
               kernels_for(a.options, a.x.dtype));
}

void gated_rms_norm_bwd(Context& ctx, const GatedRmsNormBwd& a) {
  GatedScalars scalars = gated_scalars(a);
  norm_backward(ctx,
                {.formula = &scalars,
                 .dy = a.dy,
                 .in = {a.x, a.gate},
                 .weight = a.weight,
                 .rstd = a.rstd,
                 .out = {a.dx, a.dgate},
                 .sums = {a.dweight},
                 .sections = a.x.cols / a.options.group},
                kernels_for(a.options, a.x.dtype));
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(gated_rms_norm, GatedRmsNorm)
}
