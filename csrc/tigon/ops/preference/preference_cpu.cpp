#include <cmath>

#include "tigon/base/simd/lanes.h"
#include "tigon/ops/preference/preference.h"

namespace tigon::cpu {
namespace {
#include "tigon/ops/preference/preference_math.inc"
}  // namespace

void preference(Context& ctx, const Preference& a) {
  const int sides = a.formula.kind == PreferenceKind::kto ? 1 : 2;
  parallel(ctx, a.count, [&](int64_t group) {
    int64_t pair = a.first + group;
    PreferenceSums sums = {};
    for (int side = 0; side < sides; ++side)
      for (int64_t t = 0; t < a.tokens; ++t) preference_add(a, pair, side, t, sums);
    PreferenceSlopes slopes = preference_finish(a, pair, sums);
    if (!a.dlog_prob) return;
    for (int side = 0; side < sides; ++side)
      for (int64_t t = 0; t < a.tokens; ++t) preference_write(a, pair, side, t, slopes);
  });
}

}  // namespace tigon::cpu
