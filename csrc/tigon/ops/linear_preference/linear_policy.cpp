#include "tigon/ops/linear_preference/linear_policy.h"

#include "tigon/base/require.h"
#include "tigon/ops/linear_preference/token_loss.h"

namespace tigon {

void linear_policy(Context& ctx, const LinearPolicy& a) {
  bool bonus = a.loss.formula.entropy_factor != 0.0;
  TokenLossHead head = {.head = a.head,
                        .labels = a.labels,
                        .formula = a.formula,
                        .answers = a.loss.answers,
                        .tokens = a.loss.tokens,
                        .coupled = a.loss.formula.coupled(),
                        .entropy = bonus || a.entropy,
                        .entropy_gradient = bonus && a.head.wants_gradients()};
  token_loss_check(head);
  int64_t rows = a.head.hidden.rows;
  require_vector(a.head.op, "log_prob", a.log_prob, rows, DType::f32);
  if (a.entropy) require_vector(a.head.op, "entropy", a.entropy, rows, DType::f32);
  Policy loss = a.loss;
  loss.target = a.labels.target, loss.ignore_index = a.labels.ignore_index;
  loss.loss = a.log_prob;  // made below: what is checked is that it fits
  policy_check(loss);
  policy_begin(ctx, loss, a.totals);
  loss.slope_factor = -1.0f;
  loss.scaled = linear_head_scales_early(a.head.hidden.dtype);
  TokenLossRows found = token_loss(ctx, head, [&](const TokenLossPart& part) {
    loss.first = part.first, loss.count = part.count, loss.base = part.base;
    loss.list = part.places;
    loss.position = part.position;
    loss.log_prob = part.log_prob, loss.dlog_prob = part.dlog_prob;
    loss.entropy = bonus ? part.entropy : Vector{}, loss.dentropy = part.dentropy;
    policy(ctx, loss);
  });
  LinearHeadResults results = {.target = a.labels.target,
                               .ignore_index = a.labels.ignore_index,
                               .position = found.rows.position,
                               .fault = found.rows.fault};
  results.add({.from = found.log_prob, .to = a.log_prob});
  if (a.entropy) results.add({.from = found.entropy, .to = a.entropy});
  linear_head_results(ctx, results);
  policy_end(ctx, loss, a.totals);
}

}  // namespace tigon
