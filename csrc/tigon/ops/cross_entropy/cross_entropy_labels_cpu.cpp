#include <cmath>

#include "tigon/base/dispatch.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"

namespace tigon::cpu {
namespace {
#include "tigon/ops/cross_entropy/cross_entropy_labels.inc"
}  // namespace

void cross_entropy_label_targets(Context&, const CrossEntropyLabels& a) {
  const LabelPointers p = label_pointers(a);
  for (int64_t row = 0; row < p.rows; ++row) label_target(p, row);
}

void cross_entropy_label_scores(Context& ctx, const CrossEntropyLabels& a) {
  const LabelPointers p = label_pointers(a);
  dispatch_float("cross_entropy", "logits", a.logits.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    parallel(ctx, a.chosen.size,
             [&](int64_t i) { label_scores(p, a.logits.row<T>(0), i, [](T x) { return to_float(x); }); });
  });
}

void cross_entropy_label_gradient(Context& ctx, const CrossEntropyLabels& a) {
  const LabelPointers p = label_pointers(a);
  dispatch_float("cross_entropy", "dlogits", a.dlogits.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    parallel(ctx, a.chosen.size, [&](int64_t i) {
      for (int64_t k = 0; k < p.count; ++k)
        if (label_has_gradient(p, i, k))
          a.dlogits.row<T>(i)[labels_of(p, i)[k]] = from_float<T>(float(label_gradient(p, i, k)));
    });
  });
}

void cross_entropy_label_results(Context& ctx, const CrossEntropyLabels& a) {
  const LabelPointers p = label_pointers(a);
  parallel(ctx, p.rows, [&](int64_t row) {
    for (int64_t k = 0; k < p.count; ++k) label_result(p, row, k);
  });
}

}  // namespace tigon::cpu
