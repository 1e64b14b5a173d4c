#include "tigon/ops/linear_preference/linear_preference.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/linear_preference/token_loss.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {

LossHeadPlan linear_preference_plan(const LossHeadSizes& sizes, int64_t answers, int64_t tokens) {
  LossHeadSizes s = sizes;
  s.main_grad = 0;  // weight's gradient is formed as without main_grad, then added
  int64_t size = int64_t(size_of(DType(s.dtype))), together = std::max<int64_t>(answers * tokens, 1);
  int64_t chunk = loss_head_plan(s).chunk_rows,
          copies = s.train_weight;  // copies of hidden, times the factors
  if (answers > 0 && chunk < s.rows) {
    bool bound = s.chunk_rows > 0 || s.cap >= 0;
    LinearHead head = {.hidden = {.dtype = DType(s.dtype)}, .weight = {.rows = s.vocab}};
    int64_t most = bound ? chunk : loss_head_group_limit(head, chunk);
    bool fits = answers * tokens <= most;
    if (fits) chunk = std::max(chunk, answers * tokens) / together * together;
    // Pairs are gathered and their gradients scattered. If chunks go forward and back, the logits' gradients
    // have the factors.
    copies = !fits ? 0 : answers == 2 ? 2 : copies;
  }
  s.chunk_rows = std::max<int64_t>(chunk, 1);
  LossHeadPlan plan = loss_head_plan(s);
  if (sizes.main_grad && s.train_weight)
    plan.results -= s.vocab * s.hidden * int64_t(size_of(DType(s.weight_dtype)));
  if (DType(s.dtype) == DType::f64) return plan;
  int64_t more = copies * chunk * s.hidden * size + 40 * s.rows;
  plan.workspace += more, plan.peak += more;
  return plan;
}

void linear_preference(Context& ctx, const LinearPreference& a) {
  bool lone = a.loss.formula.kind == PreferenceKind::kto;
  TokenLossHead head = {.head = {.head = a.head,
                                 .labels = a.labels,
                                 .groups = {{.answers = (lone ? 1 : 2) * a.loss.pairs,
                                             .tokens = a.loss.tokens,
                                             .pairs = !lone,
                                             .coupled = true}},
                                 .reference = a.ref},
                        .formula = a.formula};
  head.head.head.wide_logits = false;
  token_loss_check(head);
  Preference loss = a.loss;
  // The vectors of losses are made below; here only their sizes are checked.
  loss.loss = {.data = a.totals.loss.data, .dtype = DType::f32, .size = loss.pairs};
  if (!lone) loss.nll = loss.loss;
  preference_check(loss);
  TIGON_CHECK(a.head.op, !a.ref.hidden.data || !loss.ref, "ref must be sums or a head, got both");
  preference_begin(ctx, loss, a.totals);
  loss.slope_factor = -1.0;
  loss.scaled = loss_head_scales_early(a.head.hidden.dtype);
  token_loss(ctx, head, [&](const TokenLossPart& part) {
    loss.first = part.first, loss.count = part.count, loss.base = part.base;
    loss.position = part.position;
    loss.log_prob = part.log_prob, loss.ref_log_prob = part.ref, loss.dlog_prob = part.dlog_prob;
    preference(ctx, loss);
  });
  preference_end(ctx, loss, a.totals);
}

namespace {

// Defines PyTorch's operator.
struct LinearPreferenceCall {
  LinearPreference call;
  LossHeadFields head;
  int64_t answers = 0;

  void fields(Fields& f) {
    Preference& a = call.loss;
    PreferenceTotals& totals = call.totals;
    head.operands(f, call.head, call.labels, call.formula);
    f.option("answers", answers);
    f.optional("ref_hidden", call.ref.hidden), f.optional("ref_weight", call.ref.weight);
    f.optional("ref_bias", call.ref.bias);
    totals.fields(f, a);
    const bool lone = a.formula.kind == PreferenceKind::kto;
    a.pairs = lone ? answers : answers / 2;
    f.number("loss", totals.loss), f.number("scale", totals.scale);
    head.gradients(f, call.head, call.labels);
    f.result("sums", a.sums, answers, DType::f32), f.result("rewards", a.rewards, answers, DType::f32);
    f.number_if(!lone, "nll", totals.nll);
    f.result_if(!lone, "margin", a.margin, a.pairs);
  }
};

void run(Context& ctx, const LinearPreferenceCall& given) {
  LinearPreference a = given.call;
  a.head.op = a.ref.op = "linear_preference";
  a.loss.tokens = given.answers > 0 ? a.head.hidden.rows / given.answers : 0;
  a.loss.ignore_index = a.labels.ignore_index;
  if (!a.loss.target) a.loss.target = a.labels.target;
  linear_preference(ctx, a);
}

TIGON_OPERATOR(run, LinearPreferenceCall, "linear_preference", forward)

}  // namespace

}  // namespace tigon

// Is called by Python, through ctypes.
extern "C" TIGON_API void tigon_linear_preference_plan(const tigon::LossHeadSizes* sizes, int64_t answers,
                                                       int64_t tokens, tigon::LossHeadPlan* plan) {
  *plan = tigon::loss_head_plan_within(*sizes, [&](const tigon::LossHeadSizes& s) {
    return tigon::linear_preference_plan(s, answers, tokens);
  });
}
