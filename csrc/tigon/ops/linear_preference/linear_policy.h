// Policy-gradient losses of a linear head: hidden states x head weight x sampled tokens -> the losses of
// tigon/ops/policy/policy.h and gradients, with the logits of no more than a chunk of rows alive at any time.
// Formula     log_prob and entropy of each row as in tigon/ops/cross_entropy/cross_entropy.h; then the losses
//             of policy.h; the products of tigon/ops/loss_head/loss_head.h of dlogits = -dlog_prob (p -
//             [label]) and of the entropy's term
// Shapes      as in linear_preference.h
// Chunks      any rows where tokens are independent; whole answers otherwise. A gradient of the entropy costs
//             one more read of the logits
// Rounding, scaling, saved, determinism, traffic, refused: as linear_preference.h
#pragma once

#include "tigon/ops/loss_head/loss_head.h"
#include "tigon/ops/policy/policy.h"

namespace tigon {

struct LinearPolicy {
  LinearHead head;
  LossHeadLabels labels;
  LogitFormula formula;
  Policy
      // Formula, answers, tokens, operands and results; its log_prob, entropy, places and gradients are made
      // here
      loss;
  PolicyTotals totals;
  Vector log_prob, entropy;  // out: f32 [rows], 0 where the label is ignored; entropy empty: not wanted
};
TIGON_API void linear_policy(Context& ctx, const LinearPolicy& a);

}  // namespace tigon
