// The numbers of a norm's formula. A formula struct (<op>_math.inc) derives from one of these, so that every backend makes it
// from the same values.
#pragma once

namespace tigon {

struct NormScalars {
  float offset = 0.0f;   // added to the weight; 0 without a weight
  bool round_h = false;  // the normalized value is rounded to x's dtype before the weight
};
struct NoNormScalars {
  static constexpr float offset = 0.0f;
  static constexpr bool round_h = false;
};

}  // namespace tigon
