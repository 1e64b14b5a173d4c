// Computes the norm of all gradients as one vector, and the factor that clips it (Pascanu et al. 2013,
// arXiv:1211.5063, algorithm 1).
// Formula     total = sum of squares;  norm = sqrt(total) / grad_scale;  factor = min(1, max_norm / (norm +
//             1e-6))
// Shapes      grads of any sizes; results [1]
// Dtypes      grads f32 | bf16 | f16, each its own; total f64, norm and factor f32
// Rounding    squares f32, sums of at most 64 of them f32, above that f64
// Saved       nothing
// Aliasing    none
// Determinism bitwise: chunks follow from sizes only, and are added in the order of the list
// Traffic     every gradient once
// Refused     other dtypes: tigon::Error before anything is written
#pragma once

#include <span>

#include "tigon/base/fields.h"

namespace tigon {

struct GradNorm {
  std::span<const Vector> grads;
  // f32 [1]: what the gradients were multiplied by; may be absent.
  Vector grad_scale;
  float max_norm = 1.0f;  // >= 0
  // f64 [1]: the sum of squares of the gradients as they are given, scaled.
  Vector total;
  Vector norm;    // f32 [1]
  Vector factor;  // f32 [1]: NaN if the norm is

  void fields(Fields& f) {
    f.list("grads", grads, {});
    f.option("max_norm", max_norm);
    f.scalar("grad_scale", grad_scale, DType::f32, Role::optional);
    f.require(max_norm >= 0.0f, "max_norm must be >= 0, got ", max_norm);
    f.number("total", total, DType::f64);
    f.number("norm", norm);
    f.number("factor", factor);
  }
};

TIGON_API_ENTRY(grad_norm, GradNorm)

}  // namespace tigon
