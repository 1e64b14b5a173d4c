#include "tigon/ops/linear_preference/linear_preference.h"

#include "tigon/base/require.h"
#include "tigon/ops/linear_preference/token_loss.h"

namespace tigon {

void linear_preference(Context& ctx, const LinearPreference& a) {
  bool lone = a.loss.formula.kind == PreferenceKind::kto;
  TokenLossHead head = {.head = a.head,
                        .ref = a.ref,
                        .labels = a.labels,
                        .ignore_index = a.ignore_index,
                        .valid_rows = a.valid_rows,
                        .chunk_rows = a.chunk_rows,
                        .softcap = a.softcap,
                        .logit_scale = a.logit_scale,
                        .temperature = a.temperature,
                        .answers = (lone ? 1 : 2) * a.loss.pairs,
                        .tokens = a.loss.tokens,
                        .pairs = !lone,
                        .coupled = true};
  token_loss_check(head);
  Preference loss = a.loss;
  // The vectors of losses are made below: what is checked is that they fit.
  loss.loss = {.data = a.totals.loss.data, .dtype = DType::f32, .size = loss.pairs};
  if (!lone) loss.nll = loss.loss;
  preference_check(loss);
  TIGON_CHECK(a.head.op, !a.ref.hidden.data || !loss.ref, "ref must be sums or a head, got both");
  preference_begin(ctx, loss, a.totals);
  loss.slope_factor = -1.0;
  loss.scaled = linear_head_scales_early(a.head.hidden.dtype);
  token_loss(ctx, head, [&](const TokenLossPart& part) {
    loss.first = part.first, loss.count = part.count, loss.base = part.base;
    loss.position = part.position;
    loss.log_prob = part.log_prob, loss.ref_log_prob = part.ref, loss.dlog_prob = part.dlog_prob;
    preference(ctx, loss);
  });
  preference_end(ctx, loss, a.totals);
}

}  // namespace tigon
