#include "tigon/ops/linear_preference/token_loss.h"

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

// Returns a slice of a vector by place. Unlike loss_head_slice it also cuts a vector of size 1.
Vector places(const Vector& v, int64_t begin, int64_t count) {
  if (!v) return v;
  return {.data = v.as<float>() + begin, .dtype = v.dtype, .size = count};
}

class TokenPass final : public RowPass {
 public:
  TokenPass(const TokenLossHead& a, const TokenLossFormula& formula) : a_(a), formula_(formula) {}

  void memory(LossHeadRun& run) override {
    const bool gradients = run.wants_gradients();
    auto values = [&](bool wanted) { return wanted ? loss_head_vector(run.ctx, run.rows.count) : Vector{}; };
    unit_ = !run.twice() && !a_.entropy_gradient;
    run.factored = late_ = unit_ || (run.ctx.deterministic && !a_.entropy_gradient);
    log_prob_ = a_.log_probs ? run.result(a_.log_probs) : values(true);
    entropy_ = a_.entropies ? run.result(a_.entropies, {}, false) : values(a_.entropy);
    ref_ = values(run.a.reference.hidden.data != nullptr);
    lse_ = values(run.by_classes);
    dlog_prob_ = values(gradients), dentropy_ = values(gradients && a_.entropy_gradient);
  }

  void reference(const LossHeadRun& run, const LossHeadPart& p) override {
    CrossEntropyRows pass = row_pass(run, run.a.reference, p);
    pass.log_prob = places(ref_, p.begin, p.count);
    cross_entropy_rows(run.ctx, pass);
  }

  void rows(const LossHeadRun& run, const LossHeadPart& p) override {
    CrossEntropyRows pass = row_pass(run, run.a.head, p);
    pass.log_prob = places(log_prob_, p.begin, p.count);
    pass.entropy = places(entropy_, p.begin, p.count);
    pass.lse = places(lse_, p.begin, p.count);
    if (unit_) pass.dlogits = p.to;
    cross_entropy_rows(run.ctx, pass);
  }

  // Forms the gradients from logits, or leaves those that rows() has made of them, and returns the factors.
  Vector gradient(const LossHeadRun& run, const LossHeadSpan& s, const LossHeadPart& p) override {
    if (!run.twice()) formula_(part_of(run, s));
    const Vector factor = places(dlog_prob_, s.begin, s.count);
    if (!unit_ && s.count > 0) {
      CrossEntropyRows pass = row_pass(run, run.a.head, p);
      pass.dlogits = p.to;
      if (!late_) pass.scale = factor;
      pass.entropy_scale = places(dentropy_, s.begin, s.count);
      cross_entropy_rows(run.ctx, pass);
    }
    return late_ ? factor : Vector{};
  }

  void classes(const LossHeadRun& run, const LossHeadClasses& c) override {
    CrossEntropyRows pass = row_pass(run, run.a.head, {c.begin, c.count, c.logits, c.logits});
    pass.scale = places(dlog_prob_, c.begin, c.count);
    pass.entropy_scale = places(dentropy_, c.begin, c.count);
    loss_head_class_gradient(run, c, pass, {lse_, log_prob_, entropy_, {}});
  }

  void turn(const LossHeadRun& run) override {
    formula_(part_of(run, {.count = run.rows.count, .groups = run.a.groups->count()}));
  }

 private:
  CrossEntropyRows row_pass(const LossHeadRun& run, const LinearHead& head, const LossHeadPart& p) const {
    return {.logits = p.logits,
            .target = loss_head_slice(run.rows.labels, p.begin, p.count),
            .bias = head.bias,
            .ignore_index = run.a.labels.ignore_index,
            .logit_scale = a_.formula.logit_scale,
            .softcap = a_.formula.softcap,
            .temperature = a_.formula.temperature};
  }

  TokenLossPart part_of(const LossHeadRun& run, const LossHeadSpan& s) const {
    auto of = [&](const Vector& v) { return places(v, s.begin, s.count); };
    return {.first = s.group,
            .count = s.groups,
            .base = s.begin,
            .places = run.rows.count,
            .position = run.rows.position,
            .log_prob = of(log_prob_),
            .ref = of(ref_),
            .entropy = of(entropy_),
            .dlog_prob = of(dlog_prob_),
            .dentropy = of(dentropy_)};
  }

  const TokenLossHead& a_;
  const TokenLossFormula& formula_;
  Vector log_prob_, entropy_, ref_, lse_, dlog_prob_, dentropy_;
  bool unit_ = false;  // true if rows() makes gradients of -log_prob
  bool late_ = false;  // true if rows are scaled after the GEMMs
};

}  // namespace

void token_loss_check(const TokenLossHead& a) {
  const LinearHead &head = a.head.head, &ref = a.head.reference;
  const LossHeadGroups& g = *a.head.groups;
  const int64_t rows = head.hidden.rows, classes = head.weight.rows;
  loss_head_check(head);
  TIGON_CHECK(head.op, g.answers >= 0 && g.tokens >= 0 && g.answers * g.tokens == rows, "hidden must have ",
              g.answers, " answers of ", g.tokens, " tokens, got ", rows, " rows");
  TIGON_CHECK(head.op, !g.pairs || g.answers % 2 == 0,
              "target must have an even number of rows (chosen, then rejected), got ", g.answers);
  loss_head_check(head.op, a.formula);
  if (ref.hidden.data == nullptr) return;
  loss_head_check(ref);
  TIGON_CHECK(head.op, ref.hidden.rows == rows, "ref must have ", rows, " rows, got ", ref.hidden.rows);
  TIGON_CHECK(head.op, ref.weight.rows == classes, "ref must have ", classes, " classes, got ",
              ref.weight.rows);
  require_dtype(head.op, "ref", ref.hidden.dtype, head.hidden.dtype);
}

void token_loss(Context& ctx, const TokenLossHead& a, const TokenLossFormula& formula) {
  TokenPass pass(a, formula);
  loss_head_run(ctx, a.head, pass);
}

}  // namespace tigon
