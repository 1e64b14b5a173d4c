#include "tigon/ops/linear_preference/token_loss.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

struct Plan {
  LinearHeadRows rows;
  std::vector<LinearHeadSpan> spans;
  bool whole = true;  // no span cuts a group whose rows depend on each other
};

int64_t groups_of(const TokenLossHead& a) { return a.pairs ? a.answers / 2 : a.answers; }

// Rows of each group: those that count where labels are at hand.
std::vector<int64_t> group_rows(Context& ctx, const TokenLossHead& a) {
  int64_t groups = groups_of(a);
  std::vector<int64_t> found(size_t(groups), (a.pairs ? 2 : 1) * a.tokens);
  if (ctx.device() != Device::cpu) return found;
  std::fill(found.begin(), found.end(), 0);
  const int64_t* labels = a.labels.target.as<int64_t>();
  for (int64_t r = 0; r < a.labels.target.size; ++r)
    found[size_t(r / a.tokens % groups)] += labels[r] != a.labels.ignore_index;
  return found;
}

// The list in which the rows of a pair are adjacent.
LinearHeadRows pair_rows(Context& ctx, const TokenLossHead& a, const LinearHeadRows& rows) {
  bool compact = ctx.device() == Device::cpu;
  int64_t count = compact ? rows.count : a.labels.target.size;
  LinearHeadRows r = {.count = count,
                      .listed = true,
                      .labels = linear_head_vector(ctx, count, DType::i64),
                      .index = linear_head_vector(ctx, count, DType::i64),
                      .position = linear_head_vector(ctx, a.labels.target.size, DType::i64)};
  LossHeadPairs list = {.target = a.labels.target,
                        .ignore_index = a.labels.ignore_index,
                        .pairs = a.answers / 2,
                        .tokens = a.tokens,
                        .compact = compact,
                        .index = r.index,
                        .labels = r.labels,
                        .position = r.position};
  on_device(
      a.head.op, ctx, [&] { cpu::loss_head_pairs(ctx, list); },
      TIGON_ON_CUDA(cuda::loss_head_pairs(ctx, list)));
  return r;
}

// Spans of at most `limit` rows, of as equal length as chunks are without groups.
std::vector<LinearHeadSpan> row_spans(const TokenLossHead& a, const LinearHeadRows& rows, int64_t limit) {
  std::vector<LinearHeadSpan> spans;
  for (int64_t begin = 0; begin < rows.count; begin += limit) {
    int64_t count = std::min(limit, rows.count - begin), all = groups_of(a);
    LinearHeadSpan span = {.begin = begin, .count = count, .group = 0, .groups = all};
    if (!rows.listed && !a.pairs && rows.count > limit) {  // rows in order: the answers that they belong to
      span.group = begin / a.tokens;
      span.groups = (begin + count - 1) / a.tokens - span.group + 1;
    }
    spans.push_back(span);
  }
  return spans;
}

Plan make_plan(Context& ctx, const TokenLossHead& a) {
  // The bits of a product depend on its rows: the same groups with and without gradients.
  bool grouped = a.coupled;
  LinearHeadLabels labels = a.labels;
  // Where the list is made on the device, the host does not know how many rows of it a group has: it serves where one chunk takes all.
  if (grouped && ctx.device() != Device::cpu && labels.valid_rows >= 0 &&
      linear_head_limit(ctx, a.head, labels.valid_rows, labels.chunk_rows) < labels.valid_rows)
    labels.valid_rows = -1;
  Plan plan = {.rows = linear_head_rows(ctx, a.head, labels)};
  int64_t limit = linear_head_limit(ctx, a.head, plan.rows.count, labels.chunk_rows);
  if (!grouped || plan.rows.count <= limit) {
    plan.spans = row_spans(a, plan.rows, limit);
    return plan;
  }
  std::vector<int64_t> sizes = group_rows(ctx, a);
  int64_t most = labels.chunk_rows > 0 ? limit : linear_head_group_limit(a.head, limit);
  plan.whole = *std::max_element(sizes.begin(), sizes.end()) <= most;
  if (plan.whole && a.pairs) plan.rows = pair_rows(ctx, a, plan.rows);
  plan.spans = plan.whole ? linear_head_plan(a.head, sizes, limit) : row_spans(a, plan.rows, limit);
  return plan;
}

CrossEntropyRows row_pass(const TokenLossHead& a, const LinearHead& head, const LinearHeadChunk& c,
                          const LinearHeadRows& rows) {
  return {.logits = c.logits,
          .target = linear_head_part(rows.labels, c.begin, c.count),
          .bias = head.bias,
          .ignore_index = a.labels.ignore_index,
          .logit_scale = a.formula.logit_scale,
          .softcap = a.formula.softcap,
          .temperature = a.formula.temperature};
}

// Part of a vector by place; unlike linear_head_part of one element too.
Vector places(const Vector& v, int64_t begin, int64_t count) {
  if (!v) return v;
  return {.data = v.as<float>() + begin, .dtype = v.dtype, .size = count};
}

class Run {
 public:
  Run(Context& ctx, const TokenLossHead& a, const TokenLossFormula& formula)
      : ctx_(ctx), a_(a), formula_(formula), plan_(make_plan(ctx, a)) {
    linear_head_check_chunks(a.head, int64_t(plan_.spans.size()));
    bool gradients = a.head.wants_gradients();
    auto values = [&](bool wanted) { return wanted ? linear_head_vector(ctx, plan_.rows.count) : Vector{}; };
    at_once_ = gradients && plan_.whole;
    unit_ = at_once_ && !a.entropy_gradient;
    late_ = unit_ || (ctx.deterministic && !a.entropy_gradient);
    for (const LinearHeadSpan& s : plan_.spans) chunk_ = std::max(chunk_, s.count);
    log_prob_ = values(true), entropy_ = values(a.entropy), ref_ = values(a.ref.hidden.data != nullptr);
    dlog_prob_ = values(gradients), dentropy_ = values(gradients && a.entropy_gradient);
    linear_head_clear(ctx, a.head, plan_.rows);
    workspace_ = linear_head_workspace(ctx, a.head, plan_.rows, {.chunk = chunk_, .factored = late_});
  }

  TokenLossRows run() {
    if (ref_) reference();
    LinearHeadChunk last;
    for (const LinearHeadSpan& s : plan_.spans) {
      if (s.count > 0) {
        last = linear_head_chunk(a_.head, plan_.rows, workspace_, s.begin, s.count);
        forward(last);
      }
      if (at_once_) {
        formula_(part(s));
        if (s.count > 0) backward(last, first_);
        first_ = first_ && s.count == 0;
      }
    }
    bool all = plan_.spans.empty() || !at_once_;
    if (all) formula_(part({.count = plan_.rows.count, .groups = groups_of(a_)}));
    if (dlog_prob_ && !at_once_) back(last);
    return {.rows = plan_.rows, .log_prob = log_prob_, .entropy = entropy_};
  }

 private:
  TokenLossPart part(const LinearHeadSpan& s) const {
    auto of = [&](const Vector& v) { return places(v, s.begin, s.count); };
    return {.first = s.group,
            .count = s.groups,
            .base = s.begin,
            .places = plan_.rows.count,
            .position = plan_.rows.position,
            .log_prob = of(log_prob_),
            .ref = of(ref_),
            .entropy = of(entropy_),
            .dlog_prob = of(dlog_prob_),
            .dentropy = of(dentropy_)};
  }

  // The reference's log-probabilities, with the memory of the logits.
  void reference() {
    LinearHeadWorkspace own =
        linear_head_workspace(ctx_, a_.ref, plan_.rows, {.chunk = chunk_, .logits = false});
    own.logits = workspace_.logits;
    for (const LinearHeadSpan& s : plan_.spans) {
      if (s.count == 0) continue;
      LinearHeadChunk c = linear_head_chunk(a_.ref, plan_.rows, own, s.begin, s.count);
      linear_head_logits(ctx_, a_.ref, c);
      CrossEntropyRows pass = row_pass(a_, a_.ref, c, plan_.rows);
      pass.log_prob = places(ref_, c.begin, c.count);
      cross_entropy_rows(ctx_, pass);
    }
  }

  void forward(LinearHeadChunk& c) {
    linear_head_logits(ctx_, a_.head, c);
    CrossEntropyRows pass = row_pass(a_, a_.head, c, plan_.rows);
    pass.log_prob = places(log_prob_, c.begin, c.count);
    pass.entropy = places(entropy_, c.begin, c.count);
    if (unit_) pass.dlogits = c.logits;
    cross_entropy_rows(ctx_, pass);
  }

  // From logits, or from the gradients that forward() has made of them.
  void backward(LinearHeadChunk& c, bool first) {
    Vector factor = places(dlog_prob_, c.begin, c.count);
    if (!unit_) {
      CrossEntropyRows pass = row_pass(a_, a_.head, c, plan_.rows);
      pass.dlogits = c.logits;
      if (!late_) pass.scale = factor;
      pass.entropy_scale = places(dentropy_, c.begin, c.count);
      cross_entropy_rows(ctx_, pass);
    }
    linear_head_gradients(ctx_, a_.head, c, {.first = first, .factor = late_ ? factor : Vector{}});
  }

  void back(LinearHeadChunk c) {
    for (size_t i = plan_.spans.size(); i-- > 0;) {
      const LinearHeadSpan& s = plan_.spans[i];
      bool last = i + 1 == plan_.spans.size();
      if (!last) {
        c = linear_head_chunk(a_.head, plan_.rows, workspace_, s.begin, s.count);
        linear_head_logits(ctx_, a_.head, c);
      }
      backward(c, last);
    }
  }

  Context& ctx_;
  const TokenLossHead& a_;
  const TokenLossFormula& formula_;
  Plan plan_;
  bool at_once_ = false, unit_ = false, first_ = true;
  bool late_ = false;  // rows are scaled after the products
  int64_t chunk_ = 0;
  Vector log_prob_, entropy_, ref_, dlog_prob_, dentropy_;
  LinearHeadWorkspace workspace_;
};

}  // namespace

void token_loss_check(const TokenLossHead& a) {
  const char* op = a.head.op;
  linear_head_check(a.head);
  TIGON_CHECK(op, a.answers >= 0 && a.tokens >= 0 && a.answers * a.tokens == a.head.hidden.rows,
              "hidden must have ", a.answers, " answers of ", a.tokens, " tokens, got ", a.head.hidden.rows,
              " rows");
  TIGON_CHECK(op, !a.pairs || a.answers % 2 == 0,
              "target must have an even number of rows (chosen, then rejected), got ", a.answers);
  linear_head_check(op, a.formula);
  if (a.ref.hidden.data == nullptr) return;
  linear_head_check(a.ref);
  TIGON_CHECK(op, a.ref.hidden.rows == a.head.hidden.rows, "ref must have ", a.head.hidden.rows,
              " rows, got ", a.ref.hidden.rows);
  TIGON_CHECK(op, a.ref.weight.rows == a.head.weight.rows, "ref must have ", a.head.weight.rows,
              " classes, got ", a.ref.weight.rows);
  require_dtype(op, "ref", a.ref.hidden.dtype, a.head.hidden.dtype);
}

TokenLossRows token_loss(Context& ctx, const TokenLossHead& a, const TokenLossFormula& formula) {
  return Run(ctx, a, formula).run();
}

}  // namespace tigon
