#include "tigon/ops/linear_preference/linear_policy.h"

#include "tigon/base/require.h"
#include "tigon/ops/linear_preference/token_loss.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {

void linear_policy(Context& ctx, const LinearPolicy& a) {
  bool bonus = a.loss.formula.entropy_factor != 0.0;
  TokenLossHead head = {.head = {.head = a.head,
                                 .labels = a.labels,
                                 .groups = {{.answers = a.loss.answers,
                                             .tokens = a.loss.tokens,
                                             .coupled = a.loss.formula.coupled()}}},
                        .formula = a.formula,
                        .entropy = bonus,
                        .entropy_gradient = bonus && a.head.wants_gradients(),
                        .log_probs = a.log_prob,
                        .entropies = a.entropy};
  head.head.head.wide_logits = false;
  token_loss_check(head);
  int64_t rows = a.head.hidden.rows;
  require_vector(a.head.op, "log_prob", a.log_prob, rows, DType::f32);
  if (a.entropy) require_vector(a.head.op, "entropy", a.entropy, rows, DType::f32);
  Policy loss = a.loss;
  loss.target = a.labels.target, loss.ignore_index = a.labels.ignore_index;
  loss.loss = a.log_prob;  // is made below; here only its size is checked
  policy_check(loss);
  policy_begin(ctx, loss, a.totals);
  loss.slope_factor = -1.0f;
  loss.scaled = loss_head_scales_early(a.head.hidden.dtype);
  token_loss(ctx, head, [&](const TokenLossPart& part) {
    loss.first = part.first, loss.count = part.count, loss.base = part.base;
    loss.list = part.places;
    loss.position = part.position;
    loss.log_prob = part.log_prob, loss.dlog_prob = part.dlog_prob;
    loss.entropy = bonus ? part.entropy : Vector{}, loss.dentropy = part.dentropy;
    policy(ctx, loss);
  });
  policy_end(ctx, loss, a.totals);
}

namespace {

// Defines PyTorch's operator.
struct LinearPolicyCall {
  LinearPolicy call;
  LossHeadFields head;
  bool wants_entropy = false;

  void fields(Fields& f) {
    Policy& a = call.loss;
    head.operands(f, call.head, call.labels, call.formula);
    f.option("answers", a.answers);
    f.flat("advantage", a.advantage, Role::input), f.flat("old", a.old), f.flat("ref", a.ref);
    f.flat("importance", a.importance);
    call.totals.fields(f, a.formula);
    f.option("wants_entropy", wants_entropy);
    const int64_t rows = call.head.hidden.rows;
    f.number("loss", call.totals.loss), f.number("scale", call.totals.scale);
    head.gradients(f, call.head, call.labels);
    f.result("log_prob", call.log_prob, rows, DType::f32);
    f.result_if(wants_entropy, "entropy", call.entropy, rows);
    f.result_if(bool(a.ref), "kl", a.kl, rows), f.result("clipped", a.clipped, rows, DType::f32);
  }
};

void run(Context& ctx, const LinearPolicyCall& given) {
  LinearPolicy a = given.call;
  a.head.op = "linear_policy";
  a.loss.tokens = a.loss.answers > 0 ? a.head.hidden.rows / a.loss.answers : 0;
  linear_policy(ctx, a);
}

TIGON_OPERATOR(run, LinearPolicyCall, "linear_policy", forward)

}  // namespace

}  // namespace tigon
