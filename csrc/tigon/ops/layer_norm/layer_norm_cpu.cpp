#include "tigon/base/norm_rows.h"
#include "tigon/base/op.h"
#include "tigon/ops/layer_norm/layer_norm.h"

#define TIGON_KERNELS "tigon/base/simd/norm_rows.inc"
#define TIGON_FORMULA "tigon/ops/layer_norm/layer_norm_math.inc"
#define TIGON_TABLE const NormTable layer_norm_table = norm_table<LayerNormForward, LayerNormBackward>();
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void layer_norm_fwd(Context& ctx, const LayerNormFwd& a) {
  NoNormScalars none;
  norm_forward(ctx,
               {.formula = &none,
                .in = {a.x},
                .param = {a.weight, a.bias},
                .y = a.y,
                .rstd = a.rstd,
                .mean = a.mean,
                .eps = a.eps},
               TIGON_SELECT(layer_norm_table)[a.x.dtype]);
}

void layer_norm_bwd(Context& ctx, const LayerNormBwd& a) {
  NoNormScalars none;
  norm_backward(ctx,
                {.formula = &none,
                 .dy = a.dy,
                 .in = {a.x},
                 .weight = a.weight,
                 .rstd = a.rstd,
                 .mean = a.mean,
                 .out = {a.dx},
                 .sums = {a.dweight, a.dbias}},
                TIGON_SELECT(layer_norm_table)[a.x.dtype]);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(layer_norm, LayerNorm)
}
