#include "tigon/ops/cross_entropy/cross_entropy_shards.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {
constexpr const char* kOp = "cross_entropy_combine";
}  // namespace

void cross_entropy_combine(Context& ctx, const CrossEntropyCombine& a) {
  const int64_t rows = a.target.size;
  TIGON_CHECK(kOp, a.shards >= 1 && a.shard >= 0 && a.shard < a.shards, "shard must be in [0, ", a.shards,
              "), got ", a.shard);
  if (rows == 0) return;  // a matrix without columns does not tell its rows
  require_matrix(kOp, "parts", a.parts, a.shards * a.kinds.count(), rows, DType::f32);
  require_vector(kOp, "target", a.target, rows, DType::i64);
  require_optional(kOp, "class weight", a.class_weight, a.classes);
  require_optional(kOp, "token weight", a.token_weight, rows);
  const bool smooth = a.label_smoothing > 0.0f;
  TIGON_CHECK(kOp, !smooth || !(a.loss) || a.kinds.smoothing,
              "parts must hold smoothing for label_smoothing");
  if (smooth && a.loss) require_vector(kOp, "shard weight", a.shard_weight, a.shards, DType::f32);
  TIGON_CHECK(kOp, !a.entropy || a.kinds.entropy, "parts must hold entropy for entropy");
  TIGON_CHECK(kOp, !a.predicted || a.kinds.predicted, "parts must hold predicted for predicted");
  for (const Vector* v : {&a.loss, &a.z_term, &a.log_prob, &a.lse, &a.entropy, &a.log_share})
    require_optional(kOp, "results", *v, rows);
  if (a.predicted) require_vector(kOp, "predicted", a.predicted, rows, DType::i64);
  TIGON_RUN(kOp, ctx, cross_entropy_combine, a);
}

void cross_entropy_empty_part(Context& ctx, const CrossEntropyEmptyPart& a) {
  require_dtype(kOp, "part", a.part.dtype, DType::f32);
  if (a.part.rows == 0 || a.part.cols == 0) return;
  TIGON_RUN(kOp, ctx, cross_entropy_empty_part, a);
}

}  // namespace tigon
