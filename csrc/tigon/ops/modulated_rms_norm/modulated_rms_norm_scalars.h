// Holds the constants of modulated RMSNorm's formula.
#pragma once

#include <cstdint>

#include "tigon/base/norm_scalars.h"

namespace tigon {

struct ModulatedScalars : NormScalars {
  // This many adjacent rows share a row of scale and shift.
  int64_t rows_per_param = 1;
  int64_t param_stride[3] = {};  // from row to row of weight (0), scale and shift
};

}  // namespace tigon
