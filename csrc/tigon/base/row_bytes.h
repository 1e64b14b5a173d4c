// Asks an op for the rows of a result in float8 too, as fp8_quantize makes them (ops/fp8_linear).
#pragma once

#include "tigon/base/tensor.h"

namespace tigon {

// An op whose kernel writes them in the same pass says so; otherwise the caller casts the result. They are no
// fields of the op: `ops/fp8_linear/fp8_producers.h` has them.
struct RowBytes {
  Matrix q;
  Vector scales;
  Vector factors;  // by column, 1 if empty
  bool* written = nullptr;
};

}  // namespace tigon
