// Multiplies every tensor of a list by one factor, in place, as clip_grad_norm_ does to gradients after
// grad_norm. A list is one launch, whatever its sizes, alignments and dtypes. A table that does not fit the
// parameters of a kernel takes a few tiny launches more, which write it to scratch.
// Formula     x *= factor
// Shapes      tensors of any sizes; factor [1]
// Dtypes      tensors f32 | bf16 | f16, each its own; factor f32
// Rounding    the product in f32, to nearest even on store; the factor is not rounded to the tensors' dtype
// Saved       nothing; the tensors are updated in place
// Aliasing    none among the tensors
// Determinism bitwise: every element by itself, whatever the list, the device or its instruction set
// Traffic     every tensor read and written once; a factor of exactly 1 reads and writes none of them
// Refused     other dtypes, a factor that is not one f32: tigon::Error before anything is written
#pragma once

#include <span>

#include "tigon/base/fields.h"

namespace tigon {

struct Scale {
  std::span<const Vector> tensors;
  Vector factor;  // f32 [1], on the context's device

  void fields(Fields& f) {
    f.list("tensors", tensors, {.updated = true});
    f.scalar("factor", factor, DType::f32);
  }
};

TIGON_API_ENTRY(scale, Scale)

}  // namespace tigon
