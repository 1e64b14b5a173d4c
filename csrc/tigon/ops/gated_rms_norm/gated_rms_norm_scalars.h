// Takes the constants of gated RMSNorm's formula from its arguments.
#pragma once

#include "tigon/base/norm_scalars.h"
#include "tigon/ops/gated_rms_norm/gated_rms_norm.h"

namespace tigon {

struct GatedScalars : NormScalars {
  bool round_weighted, silu;
};

template <class Args>
GatedScalars gated_scalars(const Args& a) {
  const bool llama = a.options.rounding == Rounding::llama;
  return {{.offset = a.weight ? a.options.offset : 0.0f, .round_h = llama},
          llama && !(a.weight && a.weight.dtype != a.x.dtype),
          a.options.act == GateAct::silu};
}

}  // namespace tigon
