#include "tigon/ops/cross_entropy/cross_entropy.h"

#include "tigon/base/op.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"

namespace tigon {
namespace {

constexpr const char *kOp = "cross_entropy", *kCombine = "cross_entropy_combine";

void require_f32(const char* name, const Vector& v, int64_t size) {
  require_vector(kOp, name, v, size, DType::f32);
}

// Checks the arguments of a shard: its part of the row, and what its gradient needs of the rest.
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
  if (a.all_lse)
    require_f32("all_lse", a.all_lse, rows), require_f32("all_log_prob", a.all_log_prob, rows);
  else if (a.log_mass || !a.row_max)
    require_f32("log_mass", a.log_mass, rows);
  if (a.known_max || a.known_log_sum) {
    require_f32("known_max", a.known_max, rows), require_f32("known_log_sum", a.known_log_sum, rows);
    require_f32("log_mass", a.log_mass, rows), require_f32("all_log_prob", a.all_log_prob, rows);
    for (const Vector* v : {&a.loss, &a.lse, &a.target_logit, &a.log_prob, &a.entropy, &a.predicted,
                            &a.row_max, &a.log_sum, &a.smoothing})
      TIGON_CHECK(kOp, !*v, "with known_max dlogits must be the only result");
  }
  if (a.entropy_scale) require_f32("all_entropy", a.all_entropy, rows);
  if (a.class_weight && a.label_smoothing > 0.0f) require_f32("weight_sum", a.weight_sum, 1);
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

void check_one(const char* name, const Vector& v) {
  TIGON_CHECK(kOp, bool(v), name, " must be given, got none");
  require_f32(name, v, 1);
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
    require_rows_apart(kOp, "dlogits", a.dlogits, "logits'", a.logits);
    TIGON_CHECK(kOp, a.dlogits.data != a.logits.data || a.dlogits.dtype == a.logits.dtype,
                "dlogits in place must be ", name_of(a.logits.dtype), ", got ", name_of(a.dlogits.dtype));
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

void cross_entropy_combine(Context& ctx, const CrossEntropyCombine& a) {
  const int64_t rows = a.target.size;
  TIGON_CHECK(kCombine, a.shards >= 1 && a.shard >= 0 && a.shard < a.shards, "shard must be in [0, ",
              a.shards, "), got ", a.shard);
  if (rows == 0) return;  // a matrix without columns does not tell its rows
  require_matrix(kCombine, "parts", a.parts, a.shards * a.kinds.count(), rows, DType::f32);
  require_vector(kCombine, "target", a.target, rows, DType::i64);
  require_optional(kCombine, "class weight", a.class_weight, a.classes);
  require_optional(kCombine, "token weight", a.token_weight, rows);
  const bool smooth = a.label_smoothing > 0.0f;
  TIGON_CHECK(kCombine, !smooth || !(a.loss) || a.kinds.smoothing,
              "parts must hold smoothing for label_smoothing");
  if (smooth && a.loss) require_vector(kCombine, "shard weight", a.shard_weight, a.shards, DType::f32);
  TIGON_CHECK(kCombine, !a.entropy || a.kinds.entropy, "parts must hold entropy for entropy");
  TIGON_CHECK(kCombine, !a.predicted || a.kinds.predicted, "parts must hold predicted for predicted");
  for (const Vector* v : {&a.loss, &a.z_term, &a.log_prob, &a.lse, &a.entropy, &a.log_mass})
    require_optional(kCombine, "results", *v, rows);
  if (a.predicted) require_vector(kCombine, "predicted", a.predicted, rows, DType::i64);
  TIGON_RUN(kCombine, ctx, cross_entropy_combine, a);
}

void cross_entropy_renormalize(Context& ctx, const CrossEntropyRenormalize& a) {
  const int64_t rows = a.target.size;
  require_vector(kOp, "target", a.target, rows, DType::i64);
  require_f32("log_mass", a.log_mass, rows), require_f32("log_prob", a.log_prob, rows);
  require_scale(kOp, a.scale, rows);
  require_optional(kOp, "class weight", a.class_weight, a.class_weight.size);
  require_f32("factor", a.factor, rows);
  TIGON_CHECK(kOp, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
  if (rows == 0) return;
  require_matrix(kOp, "dlogits", a.dlogits, rows, a.dlogits.cols, a.dlogits.dtype);
  TIGON_CHECK(kOp, a.dlogits.dtype != DType::f16, "dlogits must be float32 or bfloat16, got float16");
  TIGON_RUN(kOp, ctx, cross_entropy_renormalize, a);
}

// The structs below are PyTorch's operators.
namespace {

void take_rows(Fields& f, CrossEntropyRows& a) {
  f.rows("logits", a.logits);
  f.input("target", a.target);
}
void take_options(Fields& f, CrossEntropyRows& a) {
  f.option("ignore_index", a.ignore_index), f.option("label_smoothing", a.label_smoothing);
  f.option("softcap", a.softcap), f.option("z_loss", a.z_loss);
}

// Computes the loss of every row, or one number, with its gradient in the same pass.
struct CrossEntropyLoss {
  enum class Reduction : int8_t { none, mean, sum } reduction = Reduction::none;
  CrossEntropyRows rows;
  Vector denominator, total;
  std::optional<double> host_denominator;

  void fields(Fields& f) {
    take_rows(f, rows);
    f.optional("weight", rows.class_weight);
    f.scalar("denominator", denominator, DType::f32, Role::optional);
    f.option("host_denominator", host_denominator), f.option("reduction", reduction);
    take_options(f, rows);
    f.rows_or_number("loss", reduction == Reduction::none, rows.loss, rows.logits.rows, total);
    f.result_over("dlogits", rows.dlogits, "logits", rows.logits, Role::gradient, Fields::kEvenRows);
  }
};

void loss(Context& ctx, const CrossEntropyLoss& call) {
  CrossEntropyRows a = call.rows;
  const bool mean = call.reduction == CrossEntropyLoss::Reduction::mean;
  if (call.reduction == CrossEntropyLoss::Reduction::none) return cross_entropy_rows(ctx, a);
  a.loss = {.data = ctx.scratch_of<float>(a.logits.rows), .size = a.logits.rows};
  if (call.denominator || call.host_denominator || mean) {
    a.scale = {.data = ctx.scratch_of<float>(1), .size = 1};
    cross_entropy_scale(ctx, {.target = a.target,
                              .class_weight = a.class_weight,
                              .ignore_index = a.ignore_index,
                              .mean = mean && !call.host_denominator,
                              .denominator = call.denominator,
                              .host_denominator = call.host_denominator.value_or(1.0),
                              .scale = a.scale});
  }
  cross_entropy_rows(ctx, a);
  cross_entropy_total(ctx, {.loss = a.loss, .scale = a.scale, .total = call.total});
}

// Computes the gradient of unreduced losses from the logits.
struct CrossEntropyGradient : CrossEntropyRows {
  void fields(Fields& f) {
    f.input("dloss", scale);
    take_rows(f, *this);
    f.optional("weight", class_weight);
    take_options(f, *this);
    f.result("dlogits", dlogits, logits);
  }
};
void gradient(Context& ctx, const CrossEntropyGradient& a) { cross_entropy_rows(ctx, a); }

struct Rescale : CrossEntropyRescale {
  void fields(Fields& f) {
    f.updated("grad", grad, Role::rows);
    f.scalar("factor", factor, DType::f32);
  }
};
void rescale(Context& ctx, const Rescale& a) { cross_entropy_rescale(ctx, a); }

TIGON_OPERATOR(loss, CrossEntropyLoss, "cross_entropy", forward)
TIGON_OPERATOR(gradient, CrossEntropyGradient, "cross_entropy", backward)
TIGON_OPERATOR(rescale, Rescale, "cross_entropy_rescale", none)

// tigon.parallel drives these three: statistics of a shard, the loss from the statistics of all shards, and
// the gradient. Losses that are functions of Python take the first and the last of whole rows (classes 0).
void take_shard(Fields& f, CrossEntropyRows& a) {
  take_rows(f, a);
  f.optional("bias", a.bias), f.optional("class_weight", a.class_weight);
  take_options(f, a);
  f.option("first_class", a.first_class), f.option("classes", a.classes);
  f.option("logit_scale", a.logit_scale), f.option("temperature", a.temperature);
}

// Writes the rows of `parts` and, if given, dlogits of the shard's columns by themselves. Returns the
// predicted classes.
struct ShardStatistics : CrossEntropyRows {
  Matrix parts;
  CrossEntropyKinds kinds;

  void fields(Fields& f) {
    take_shard(f, *this);
    f.updated("parts", parts, Role::input), f.updated("dlogits", dlogits);
    kinds.fields(f);
    f.result_if(kinds.predicted, "predicted", predicted, logits.rows, DType::i64);
  }
};
void shard_statistics(Context& ctx, const ShardStatistics& call) {
  CrossEntropyRows a = call;
  if (a.logits.rows == 0) return;
  require_matrix(kOp, "parts", call.parts, call.kinds.predicted_at() + call.kinds.predicted, a.logits.rows,
                 DType::f32);
  auto row = [&](int64_t i) { return Vector{.data = call.parts.row<float>(i), .size = a.logits.rows}; };
  a.row_max = row(0), a.log_sum = row(1), a.log_prob = row(2);
  if (call.kinds.entropy) a.entropy = row(call.kinds.entropy_at());
  if (call.kinds.smoothing) a.smoothing = row(call.kinds.smoothing_at());
  cross_entropy_rows(ctx, a);
}

struct ShardGradient : CrossEntropyRows {
  void fields(Fields& f) {
    take_shard(f, *this);
    f.updated("dlogits", dlogits, Role::input);
    f.optional("scale", scale), f.optional("entropy_scale", entropy_scale);
    f.optional("log_mass", log_mass), f.optional("all_entropy", all_entropy),
        f.optional("weight_sum", weight_sum);
    f.optional("known_max", known_max), f.optional("known_log_sum", known_log_sum),
        f.optional("all_log_prob", all_log_prob);
  }
};
void shard_gradient(Context& ctx, const ShardGradient& a) { cross_entropy_rows(ctx, a); }

struct ShardRenormalize : CrossEntropyRenormalize {
  void fields(Fields& f) {
    f.updated("dlogits", dlogits, Role::rows);
    f.input("target", target), f.input("log_mass", log_mass), f.input("log_prob", log_prob);
    f.optional("scale", scale), f.optional("class_weight", class_weight);
    f.option("ignore_index", ignore_index), f.option("first_class", first_class);
    f.option("logit_scale", logit_scale), f.option("temperature", temperature);
    f.result("factor", factor, target.size, DType::f32);
  }
};
void shard_renormalize(Context& ctx, const ShardRenormalize& a) { cross_entropy_renormalize(ctx, a); }

// Combines the statistics of all shards. `numbers` has a row each for loss, z_term, log_prob, lse, entropy
// (written only if its parts are present) and log_mass.
struct ShardsCombine : CrossEntropyCombine {
  Matrix numbers;

  void fields(Fields& f) {
    f.rows("parts", parts);
    f.input("target", target);
    f.optional("class_weight", class_weight), f.optional("shard_weight", shard_weight);
    f.optional("token_weight", token_weight);
    f.option("shards", shards), f.option("shard", shard);
    kinds.fields(f);
    f.option("classes", classes), f.option("ignore_index", ignore_index);
    f.option("label_smoothing", label_smoothing), f.option("z_loss", z_loss);
    f.result("numbers", numbers, 6, target.size, DType::f32);
    f.result_if(kinds.predicted, "predicted", predicted, target.size, DType::i64);
  }
};
void shards_combine(Context& ctx, const ShardsCombine& call) {
  CrossEntropyCombine a = call;
  auto row = [&](int64_t i) { return Vector{.data = call.numbers.row<float>(i), .size = a.target.size}; };
  a.loss = row(0), a.z_term = row(1), a.log_prob = row(2), a.lse = row(3), a.log_mass = row(5);
  if (a.kinds.entropy) a.entropy = row(4);
  cross_entropy_combine(ctx, a);
}

// Computes the factor of a reduction, and the total.
struct Scale : CrossEntropyScale {
  std::optional<double> number;

  void fields(Fields& f) {
    f.input("target", target), f.optional("class_weight", class_weight);
    f.option("ignore_index", ignore_index), f.option("mean", mean), f.option("denominator", number);
    f.number("scale", scale);
  }
};
void scale(Context& ctx, const Scale& call) {
  CrossEntropyScale a = call;
  a.host_denominator = call.number.value_or(1.0), a.mean = a.mean && !call.number;
  cross_entropy_scale(ctx, a);
}
struct Total : CrossEntropyTotal {
  void fields(Fields& f) {
    f.input("losses", loss), f.scalar("scale", scale, DType::f32);
    f.number("total", total);
  }
};
void total(Context& ctx, const Total& a) { cross_entropy_total(ctx, a); }

// Names the steps for several labels per row: the scores of a shard's labels, the log-probabilities from the
// scores of all shards, and the gradient at a shard's labels.
enum class LabelStep { scores, results, gradient };
template <LabelStep step>
struct ShardLabels : CrossEntropyLabels {
  void fields(Fields& f) {
    constexpr bool scored = step == LabelStep::scores, differentiated = step == LabelStep::gradient;
    if (scored) f.rows("logits", logits);
    if (differentiated) f.updated("dlogits", dlogits, Role::rows);
    f.flat("labels", labels, labels.size, DType::i64);
    f.flat("chosen", chosen, chosen.size, DType::i64, scored);
    f.flat("scores", scores, scores.size, DType::f32, scored),
        f.flat("top", top, top.size, DType::f32, scored);
    f.option("ignore_index", ignore_index);
    if (scored) f.optional("bias", bias);
    if (!scored)
      f.input("log_prob", log_prob), f.option("softcap", softcap), f.option("temperature", temperature);
    if (differentiated) {
      f.flat("upstream", upstream, labels.size, DType::f32);
      f.optional("entropy_scale", entropy_scale), f.optional("entropy", entropy);
    }
    if (step != LabelStep::results) f.option("logit_scale", logit_scale);
    if (step == LabelStep::results) f.result("log_probs", out, labels.size, DType::f32);
  }
  static void run(Context& ctx, const ShardLabels& call) {
    CrossEntropyLabels a = call;
    if (a.chosen.size == 0) return;
    a.count = a.labels.size / a.chosen.size, a.target = a.chosen;
    a.classes = step == LabelStep::scores ? a.logits.cols : a.dlogits.cols;
    if (step == LabelStep::scores) cross_entropy_label_scores(ctx, a);
    if (step == LabelStep::results) cross_entropy_label_results(ctx, a);
    if (step == LabelStep::gradient) cross_entropy_label_gradient(ctx, a);
  }
};
using LabelScores = ShardLabels<LabelStep::scores>;
using LabelResults = ShardLabels<LabelStep::results>;
using LabelGradient = ShardLabels<LabelStep::gradient>;

TIGON_OPERATOR(scale, Scale, "cross_entropy_scale", none)
TIGON_OPERATOR(total, Total, "cross_entropy_total", none)
TIGON_CALL(LabelScores, "cross_entropy_shard_scores", none)
TIGON_CALL(LabelResults, "cross_entropy_shard_log_probs", none)
TIGON_CALL(LabelGradient, "cross_entropy_shard_label_gradient", none)
TIGON_OPERATOR(shard_statistics, ShardStatistics, "cross_entropy_shard_statistics", none)
TIGON_OPERATOR(shard_gradient, ShardGradient, "cross_entropy_shard_gradient", none)
TIGON_OPERATOR(shard_renormalize, ShardRenormalize, "cross_entropy_shard_renormalize", none)
TIGON_OPERATOR(shards_combine, ShardsCombine, "cross_entropy_combine", none)

}  // namespace

}  // namespace tigon
