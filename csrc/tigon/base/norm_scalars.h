// These are the constants of a norm's formula. A formula struct (<op>_math.inc) derives from one of these
// types, so that every backend builds it from the same values.
#pragma once

namespace tigon {

struct NormScalars {
  // The weight gets this added; 0 if there is no weight.
  float offset = 0.0f;
  // The normalized value is rounded to x's dtype before it is multiplied by the weight.
  bool round_h = false;
};
struct NoNormScalars {
  static constexpr float offset = 0.0f;
  static constexpr bool round_h = false;
};

}  // namespace tigon
