#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"
#include "tigon/ops/loss_head/engine.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_cross_entropy";

// Checks what the engine does not check.
void check(const LinearCrossEntropy& a) {
  int64_t rows = a.head.hidden.rows;
  loss_head_check(a.head);
  require_optional(kOp, "class_weight", a.class_weight, a.head.weight.rows, DType::f32);
  require_optional(kOp, "entropy_upstream", a.entropy_upstream, rows, DType::f32);
  loss_head_check(kOp, a.formula);
  const LinearCrossEntropyResults& r = a.results;
  require_optional(kOp, "z_term", r.z_term, rows, DType::f32);
  require_optional(kOp, "log_prob", r.log_prob, rows, DType::f32);
  require_optional(kOp, "lse", r.lse, rows, DType::f32);
  require_optional(kOp, "entropy", r.entropy, rows, DType::f32);
  require_optional(kOp, "predicted", r.predicted, rows, DType::i64);
  const KeptLogits& k = a.kept;
  if (k.unit.data) require_matrix(kOp, "unit", k.unit, rows, a.head.hidden.cols, a.head.hidden.dtype);
  if (k.dlogits.data)
    require_matrix(kOp, "kept", k.dlogits, k.dlogits.rows, a.head.weight.rows, a.head.hidden.dtype);
  bool any = k.unit.data || k.dlogits.data;
  TIGON_CHECK(kOp, !any || (a.reduction.kind == Reduction::none && (k.are_logits || !a.entropy_upstream)),
              "unit and kept must be of per-row losses, without gradients of entropies");
  TIGON_CHECK(kOp, !k.are_logits || (!k.unit.data && !a.head.wide_logits),
              "kept logits must be rounded ones, without unit");
}

Vector row_factors(Context& ctx, const LinearCrossEntropy& a, const LossHeadRows& rows,
                   const Vector& token_weight, const Vector& upstream) {
  Vector out = loss_head_vector(ctx, rows.count);
  loss_head_factors(ctx, {.target = a.labels.target,
                          .ignore_index = a.labels.ignore_index,
                          .index = rows.index,
                          .token_weight = token_weight,
                          .upstream = upstream,
                          .out = out});
  return out;
}

// Returns the call with one label for each row. If a row has several, it is any that counts, and upstream is
// the sum of theirs.
LinearCrossEntropy labelled(Context& ctx, const LinearCrossEntropy& call) {
  LinearCrossEntropy a = call;
  a.head.op = kOp;
  const LinearCrossEntropyLabels& l = a.several;
  if (l.labels) {
    int64_t rows = a.head.hidden.rows, size = rows * l.count;
    TIGON_CHECK(kOp, l.count >= 1, "target must have at least one label a row, got ", l.count);
    require_vector(kOp, "target", l.labels, size, DType::i64);
    if (l.upstream) require_vector(kOp, "upstream", l.upstream, size, DType::f32);
    require_optional(kOp, "label_log_prob", l.log_prob, size, DType::f32);
    bool plain = a.reduction.kind == Reduction::none && !a.class_weight && !a.token_weight &&
                 !a.results.log_prob && !a.kept.unit.data && !a.kept.dlogits.data &&
                 a.label_smoothing == 0.0f && a.z_loss == 0.0f && a.labels.shift.shift == 0;
    TIGON_CHECK(kOp, plain, "several labels a row must have log-probabilities alone, and no shift");
    a.labels.target = loss_head_vector(ctx, rows, DType::i64);
    if (l.upstream) a.upstream = loss_head_vector(ctx, rows);
    cross_entropy_label_targets(ctx, {.labels = l.labels,
                                      .count = l.count,
                                      .ignore_index = a.labels.ignore_index,
                                      .classes = a.head.weight.rows,
                                      .upstream = l.upstream,
                                      .target = a.labels.target,
                                      .factor = a.upstream});
  }
  a.labels = loss_head_labels(ctx, kOp, a.labels);
  return a;
}

// Returns the call as the engine takes it.
LossHead head_of(const LinearCrossEntropy& a) {
  using Holds = LossHeadKept::Holds;
  return {.head = a.head,
          .labels = a.labels,
          .reduction = a.reduction,
          .class_weight = a.class_weight,
          .loss = a.results.loss,
          .token_weight = a.token_weight,
          .upstream = a.upstream,
          .kept = {.dlogits = a.kept.dlogits, .holds = Holds::nothing, .overwrite = a.kept.overwrite}};
}

// Returns the row pass of `count` rows from `begin` on, with the results that `r` asks for.
CrossEntropyRows row_pass(const LinearCrossEntropy& a, const Matrix& logits, const Vector& labels,
                          const LinearCrossEntropyResults& r, int64_t begin, int64_t count) {
  auto part = [&](const Vector& of) { return loss_head_slice(of, begin, count); };
  return {.logits = logits,
          .target = part(labels),
          .bias = a.head.bias,
          .class_weight = a.class_weight,
          .loss = part(r.loss),
          .lse = part(r.lse),
          .log_prob = part(r.log_prob),
          .entropy = part(r.entropy),
          .predicted = part(r.predicted),
          .only_label = r.only_label,
          .ignore_index = a.labels.ignore_index,
          .logit_scale = a.formula.logit_scale,
          .softcap = a.formula.softcap,
          .temperature = a.formula.temperature,
          .label_smoothing = a.label_smoothing,
          .z_loss = a.z_loss};
}

// Returns the memory where the row pass leaves its results.
LinearCrossEntropyResults results_of(LossHeadRun& run, const LinearCrossEntropy& a) {
  const LinearCrossEntropyResults& to = a.results;
  LinearCrossEntropyResults r = {.loss = run.result(to.loss, a.token_weight),
                                 .log_prob = run.result(to.log_prob, {}, false),
                                 .lse = run.result(to.lse, {}, false),
                                 .entropy = run.result(to.entropy, {}, false),
                                 .predicted = run.result(to.predicted, {}, false),
                                 .only_label = to.only_label};
  if (!to.z_term) return r;
  if (!r.lse) r.lse = loss_head_vector(run.ctx, run.rows.count);
  run.results.add(
      {.from = r.lse, .to = to.z_term, .factor = a.token_weight, .gain = a.z_loss, .square = true});
  run.writes = true;
  return r;
}

// Computes losses and log-probabilities of labels, and the gradients of logits.
class LabelPass : public RowPass {
 public:
  explicit LabelPass(const LinearCrossEntropy& a) : a_(a) {}

  void memory(LossHeadRun& run) override {
    r_ = results_of(run, a_);
    if (a_.several.labels) several(run);
    if (run.wants_gradients() && !run.a.unit) factors(run);
    if (run.by_classes) whole(run);
    if (statistics(run)) run.spans.clear();
  }

  void rows(const LossHeadRun& run, const LossHeadPart& p) override {
    const bool gradients = run.a.head.wants_gradients() || (p.begin < run.kept && !a_.kept.are_logits);
    CrossEntropyRows pass = row_pass(a_, p.logits, run.rows.labels, r_, p.begin, p.count);
    if (gradients) {
      pass.dlogits = p.to;
      pass.scale = loss_head_slice(factor_, p.begin, p.count);
      pass.entropy_scale = loss_head_slice(entropy_factor_, p.begin, p.count);
    }
    if (labels_.count == 0) return cross_entropy_rows(run.ctx, pass);
    const CrossEntropyLabels labels = labels_of(run, p);
    cross_entropy_label_scores(run.ctx, labels);
    cross_entropy_rows(run.ctx, pass);
    if (gradients) cross_entropy_label_gradient(run.ctx, labels);
  }

  void classes(const LossHeadRun& run, const LossHeadClasses& c) override {
    CrossEntropyRows pass = row_pass(a_, c.logits, run.rows.labels, {}, c.begin, c.count);
    pass.scale = loss_head_slice(late_factor_ ? late_factor_ : factor_, c.begin, c.count);
    pass.entropy_scale = loss_head_slice(entropy_factor_, c.begin, c.count);
    loss_head_class_gradient(run, c, pass, {r_.lse, r_.log_prob, r_.entropy, weight_sum_});
  }

  void finish(const LossHeadRun& run) override {
    if (a_.several.log_prob) cross_entropy_label_results(run.ctx, labels_);
  }

 protected:
  void factors(const LossHeadRun& run) {
    factor_ = run.factor();
    if (a_.entropy_upstream)
      entropy_factor_ =
          run.rows.listed ? row_factors(run.ctx, a_, run.rows, {}, a_.entropy_upstream) : a_.entropy_upstream;
  }

  const LinearCrossEntropy& a_;
  LinearCrossEntropyResults r_;  // results of the rows worked on
  Vector factor_, entropy_factor_;
  Vector late_factor_;  // applies after the GEMMs, not in the gradients of logits

 private:
  // Allocates what gradients by classes need to know of the rows.
  void whole(const LossHeadRun& run) {
    TIGON_CHECK(kOp, labels_.count == 0, "by_classes must be of one label a row");
    for (Vector* v : {&r_.lse, &r_.log_prob, &r_.entropy})
      if (!*v && (v != &r_.entropy || entropy_factor_)) *v = loss_head_vector(run.ctx, run.rows.count);
    if (!a_.class_weight || a_.label_smoothing == 0.0f) return;
    weight_sum_ = loss_head_vector(run.ctx, 1);
    cross_entropy_total(run.ctx, {.loss = a_.class_weight, .total = weight_sum_});
  }

  void several(const LossHeadRun& run) {
    const LossHeadRows& rows = run.rows;
    r_.log_prob = loss_head_vector(run.ctx, rows.count);
    if (a_.entropy_upstream && !r_.entropy) r_.entropy = loss_head_vector(run.ctx, rows.count);
    labels_ = {.labels = a_.several.labels,
               .count = a_.several.count,
               .ignore_index = a_.labels.ignore_index,
               .classes = a_.head.weight.rows,
               .upstream = a_.several.upstream,
               .target = a_.labels.target,
               .chosen = rows.labels,
               .scores = loss_head_vector(run.ctx, rows.count * a_.several.count),
               .top = loss_head_vector(run.ctx, rows.count),
               .bias = a_.head.bias,
               .logit_scale = a_.formula.logit_scale,
               .softcap = a_.formula.softcap,
               .temperature = a_.formula.temperature,
               .log_prob = r_.log_prob,
               .position = rows.position,
               .fault = rows.fault,
               .out = a_.several.log_prob};
  }

  // Returns the labels of a part of the rows worked on.
  CrossEntropyLabels labels_of(const LossHeadRun& run, const LossHeadPart& p) const {
    CrossEntropyLabels l = labels_;
    auto part = [&](const Vector& of) { return loss_head_slice(of, p.begin, p.count); };
    l.begin = p.begin;
    l.index = run.rows.listed ? part(run.rows.index) : Vector{};
    l.chosen = part(l.chosen), l.top = part(l.top), l.log_prob = part(l.log_prob);
    l.scores = loss_head_slice(l.scores, p.begin * l.count, p.count * l.count);
    l.entropy = part(r_.entropy), l.entropy_scale = part(entropy_factor_);
    l.logits = p.logits, l.dlogits = p.to;
    return l;
  }

  // Computes losses, log-probabilities and lse without logits if the call wants nothing else of them. Returns
  // false if that is not possible.
  bool statistics(const LossHeadRun& run) const {
    const bool more = run.a.head.wants_gradients() || run.a.kept.dlogits.data || a_.several.labels ||
                      r_.entropy || r_.predicted || a_.label_smoothing > 0.0f;
    const int64_t count = run.rows.count;
    if (more || count == 0) return false;
    const Matrix parts = loss_head_matrix(run.ctx, 3, count, count, DType::f32);
    if (!loss_head_statistics(run.ctx, a_.head, run.rows, a_.formula, parts)) return false;
    cross_entropy_combine(run.ctx, {.parts = parts,
                                    .target = run.rows.labels,
                                    .class_weight = a_.class_weight,
                                    .classes = a_.head.weight.rows,
                                    .ignore_index = a_.labels.ignore_index,
                                    .z_loss = a_.z_loss,
                                    .loss = r_.loss,
                                    .log_prob = r_.log_prob,
                                    .lse = r_.lse});
    return true;
  }

  CrossEntropyLabels labels_;  // count is 0 if a row has one label
  Vector weight_sum_;
};

// Computes the gradients of per-row losses. If unit is given, dhidden comes from it without a GEMM; the
// engine forms the rest.
class RowsGradientPass final : public LabelPass {
 public:
  RowsGradientPass(const LinearCrossEntropy& a, const Matrix& dhidden) : LabelPass(a), dhidden_(dhidden) {}

  void begin(LossHeadRun& run) override {
    const LinearHead& head = run.a.head;
    if (!run.wants_gradients()) run.spans.clear();
    const bool reads_weight = !run.spans.empty() && (head.dhidden.data || run.kept < run.rows.count);
    TIGON_CHECK(kOp, head.weight.data || !reads_weight,
                "weight must be given where logits are computed again, got its shape");
    if (!a_.kept.unit.data || !dhidden_.data) return;
    const LossHeadRows all = {.count = dhidden_.rows};
    const Vector factor = row_factors(run.ctx, a_, all, a_.token_weight, a_.upstream);
    loss_head_move(run.ctx, {.from = a_.kept.unit, .to = dhidden_, .factor = factor});
  }

  void memory(LossHeadRun& run) override {
    if (!run.wants_gradients()) return;
    LabelPass::memory(run);
    // The row pass writes losses; nobody reads these.
    if (run.rows.listed) r_.loss = loss_head_vector(run.ctx, run.rows.count);
    // Which rows are kept depends on their number. Rows that are computed again are therefore scaled at the
    // same place as kept ones, after the GEMMs, and so are rows whose logits were kept.
    late_ = (run.ctx.deterministic || a_.kept.are_logits) && !a_.entropy_upstream && !a_.several.labels;
    formed_ = a_.kept.are_logits ? 0 : run.kept;
    run.factored = formed_ > 0 || late_;
    if (run.factored && factor_.data == a_.upstream.data)  // 0 on ignored rows, for any upstream
      factor_ = row_factors(run.ctx, a_, run.rows, {}, a_.upstream);
    late_factor_ = factor_;
    if (late_) factor_ = {};
  }

  Vector gradient(const LossHeadRun&, const LossHeadSpan& s, const LossHeadPart&) override {
    return s.begin < formed_ || late_ ? loss_head_slice(late_factor_, s.begin, s.count) : Vector{};
  }

 private:
  Matrix dhidden_;
  bool late_ = false;
  int64_t formed_ = 0;  // rows whose dlogits were kept
};

}  // namespace

void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& call) {
  const LinearCrossEntropy a = labelled(ctx, call);
  check(a);
  require_vector(kOp, "loss", a.results.loss, a.head.hidden.rows, DType::f32);
  LossHead head = head_of(a);
  head.unit = a.kept.unit.data != nullptr;
  if (head.unit) head.head.dhidden = a.kept.unit;
  LabelPass pass(a);
  loss_head_run(ctx, head, pass);
}

void linear_cross_entropy_rows_gradient(Context& ctx, const LinearCrossEntropy& call) {
  using Holds = LossHeadKept::Holds;
  LinearCrossEntropy a = labelled(ctx, call);
  check(a);
  require_vector(kOp, "upstream", a.upstream, a.head.hidden.rows, DType::f32);
  a.results = {}, a.several.log_prob = {},
  a.reduction = {.kind = Reduction::none};  // only gradients are wanted
  LossHead head = head_of(a);
  head.kept.holds = a.kept.are_logits ? Holds::logits : Holds::gradients;
  if (a.kept.unit.data) head.head.dhidden = {};  // the engine forms the other gradients
  RowsGradientPass pass(a, a.head.dhidden);
  loss_head_run(ctx, head, pass);
}

}  // namespace tigon
