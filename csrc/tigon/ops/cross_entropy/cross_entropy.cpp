#include "tigon/ops/cross_entropy/cross_entropy.h"

#include "tigon/base/aligned_rows.h"
#include "tigon/base/require.h"

namespace tigon {
namespace {

constexpr const char* kOp = "cross_entropy";

// The part of a row that the logits are, and what its gradient needs of the rest.
void check_shard(const CrossEntropyRows& a) {
  int64_t rows = a.logits.rows;
  require_optional(kOp, "row_max", a.row_max, rows);
  require_optional(kOp, "log_sum", a.log_sum, rows);
  require_optional(kOp, "smoothing", a.smoothing, rows);
  if (a.classes == 0) return;
  TIGON_CHECK(kOp, a.first_class >= 0 && a.first_class + a.logits.cols <= a.classes,
              "first_class must leave room for ", a.logits.cols, " of ", a.classes, " classes, got ",
              a.first_class);
  if (a.dlogits.data == nullptr) return;
  require_vector(kOp, "log_share", a.log_share, rows, DType::f32);
  if (a.entropy_scale) require_vector(kOp, "all_entropy", a.all_entropy, rows, DType::f32);
  if (a.class_weight && a.label_smoothing > 0.0f)
    require_vector(kOp, "weight_sum", a.weight_sum, 1, DType::f32);
}

void check_one(const char* name, const Vector& v) {
  TIGON_CHECK(kOp, bool(v), name, " must be given, got none");
  require_vector(kOp, name, v, 1, DType::f32);
}

}  // namespace

void cross_entropy_rows(Context& ctx, const CrossEntropyRows& a) {
  int64_t rows = a.logits.rows, cols = a.logits.cols;
  require_float(kOp, "logits", a.logits.dtype);
  TIGON_CHECK(kOp, cols >= 1, "logits must have at least one column, got ", cols);
  require_vector(kOp, "target", a.target, rows, DType::i64);
  require_parameter(kOp, "bias", a.bias, a.logits);
  require_optional(kOp, "class weight", a.class_weight, a.classes > 0 ? a.classes : cols);
  check_shard(a);
  require_scale(kOp, a.scale, rows);
  if (a.dlogits.data != nullptr) {
    bool narrow = a.logits.dtype == DType::f32 && is_kernel_float(a.dlogits.dtype);
    require_matrix(kOp, "dlogits", a.dlogits, rows, cols, narrow ? a.dlogits.dtype : a.logits.dtype);
    bool in_place = a.dlogits.data == a.logits.data;
    TIGON_CHECK(kOp, !in_place || a.dlogits.stride == a.logits.stride,
                "dlogits in place must have logits' row stride ", a.logits.stride, ", got ",
                a.dlogits.stride);
    TIGON_CHECK(kOp, !in_place || a.dlogits.dtype == a.logits.dtype, "dlogits in place must be ",
                name_of(a.logits.dtype), ", got ", name_of(a.dlogits.dtype));
    TIGON_CHECK(kOp, rows <= 1 || a.dlogits.stride >= cols,
                "dlogits must have rows that do not overlap (stride >= ", cols, "), got stride ",
                a.dlogits.stride);
  }
  require_optional(kOp, "loss", a.loss, rows);
  require_optional(kOp, "lse", a.lse, rows);
  require_optional(kOp, "target_logit", a.target_logit, rows);
  require_optional(kOp, "log_prob", a.log_prob, rows);
  require_optional(kOp, "entropy", a.entropy, rows);
  require_optional(kOp, "entropy_scale", a.entropy_scale, rows);
  require_optional(kOp, "predicted", a.predicted, rows, DType::i64);
  TIGON_CHECK(kOp, a.label_smoothing >= 0.0f && a.label_smoothing <= 1.0f,
              "label_smoothing must be in [0, 1], got ", a.label_smoothing);
  TIGON_CHECK(kOp, a.softcap >= 0.0f, "softcap must be > 0 or none, got ", a.softcap);
  TIGON_CHECK(kOp, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
  if (rows == 0) return;
  CrossEntropyRows aligned = a;
  AlignedRows rows_of(ctx);
  rows_of.read(aligned.logits), rows_of.write(aligned.dlogits);
  TIGON_RUN(kOp, ctx, cross_entropy_rows, aligned);
  rows_of.finish();
}

void cross_entropy_scale(Context& ctx, const CrossEntropyScale& a) {
  check_one("scale", a.scale);
  if (a.denominator) {
    TIGON_CHECK(kOp, a.denominator.size == 1, "denominator must have one element, got ", a.denominator.size);
    DType t = a.denominator.dtype;
    TIGON_CHECK(kOp, t == DType::f32 || t == DType::f64 || t == DType::i64 || t == DType::i32,
                "denominator must be float32, float64, int64 or int32, got ", name_of(t));
  } else if (a.mean) {
    bool mask = a.target.dtype == DType::u8 && !a.class_weight;
    require_dtype(kOp, "target", a.target.dtype, mask ? DType::u8 : DType::i64);
    if (a.class_weight) require_dtype(kOp, "class weight", a.class_weight.dtype, DType::f32);
  }
  TIGON_RUN(kOp, ctx, cross_entropy_scale, a);
}

void cross_entropy_total(Context& ctx, const CrossEntropyTotal& a) {
  require_dtype(kOp, "loss", a.loss.dtype, DType::f32);
  if (a.scale) check_one("scale", a.scale);
  check_one("total", a.total);
  TIGON_RUN(kOp, ctx, cross_entropy_total, a);
}

void cross_entropy_rescale(Context& ctx, const CrossEntropyRescale& a) {
  require_float(kOp, "grad", a.grad.dtype);
  check_one("factor", a.factor);
  if (a.grad.rows == 0 || a.grad.cols == 0) return;
  TIGON_RUN(kOp, ctx, cross_entropy_rescale, a);
}

}  // namespace tigon
