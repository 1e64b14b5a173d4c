#include "tigon/ops/cross_entropy/cross_entropy_labels.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

constexpr const char* kOp = "cross_entropy";

void require_f32(const char* name, const Vector& v, int64_t size) {
  require_vector(kOp, name, v, size, DType::f32);
}

void check_labels(const CrossEntropyLabels& a) {
  TIGON_CHECK(kOp, a.count >= 1, "labels must have at least one column, got ", a.count);
  require_dtype(kOp, "labels", a.labels.dtype, DType::i64);
  require_vector(kOp, "target", a.target, a.labels.size / a.count, DType::i64);
  require_optional(kOp, "upstream", a.upstream, a.labels.size);
}

void check_part(const CrossEntropyLabels& a) {
  int64_t n = a.chosen.size;
  check_labels(a);
  require_dtype(kOp, "chosen", a.chosen.dtype, DType::i64);
  require_optional(kOp, "index", a.index, n, DType::i64);
  require_f32("scores", a.scores, n * a.count);
  require_f32("top", a.top, n);
  TIGON_CHECK(kOp, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
}

}  // namespace

void cross_entropy_label_targets(Context& ctx, const CrossEntropyLabels& a) {
  check_labels(a);
  require_optional(kOp, "factor", a.factor, a.target.size);
  if (a.target.size == 0) return;
  TIGON_RUN(kOp, ctx, cross_entropy_label_targets, a);
}

void cross_entropy_label_scores(Context& ctx, const CrossEntropyLabels& a) {
  check_part(a);
  require_matrix(kOp, "logits", a.logits, a.chosen.size, a.classes, a.logits.dtype);
  if (a.chosen.size == 0) return;
  TIGON_RUN(kOp, ctx, cross_entropy_label_scores, a);
}

void cross_entropy_label_gradient(Context& ctx, const CrossEntropyLabels& a) {
  check_part(a);
  require_matrix(kOp, "dlogits", a.dlogits, a.chosen.size, a.classes, a.dlogits.dtype);
  require_f32("upstream", a.upstream, a.labels.size);
  require_f32("log_prob", a.log_prob, a.chosen.size);
  if (a.entropy_scale) {
    require_f32("entropy_scale", a.entropy_scale, a.chosen.size);
    require_f32("entropy", a.entropy, a.chosen.size);
  }
  if (a.chosen.size == 0) return;
  TIGON_RUN(kOp, ctx, cross_entropy_label_gradient, a);
}

void cross_entropy_label_results(Context& ctx, const CrossEntropyLabels& a) {
  check_part(a);
  require_f32("log_prob", a.log_prob, a.chosen.size);
  require_f32("out", a.out, a.labels.size);
  require_optional(kOp, "position", a.position, a.target.size, DType::i64);
  if (a.target.size == 0) return;
  TIGON_RUN(kOp, ctx, cross_entropy_label_results, a);
}

}  // namespace tigon
