// The numbers of modulated RMSNorm's formula.
#pragma once

#include <cstdint>

#include "tigon/base/norm_scalars.h"

namespace tigon {

struct ModulatedScalars : NormScalars {
  int64_t rows_per_param = 1;    // adjacent rows that share a row of scale and shift
  int64_t param_stride[3] = {};  // between rows of weight (0), scale, shift
};

}  // namespace tigon
