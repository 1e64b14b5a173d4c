// Computes policy-gradient losses of a linear head: hidden states x head weight x sampled tokens -> the
// losses of tigon/ops/policy/policy.h and gradients. The logits of no more than a chunk of rows exist at any
// time.
// Formula     log_prob and entropy of each row as in tigon/ops/cross_entropy/cross_entropy.h; then the losses
//             of policy.h; the GEMMs of tigon/ops/loss_head/loss_head.h of dlogits = -dlog_prob (p -
//             [label]) and of the entropy's term
// Shapes      as in linear_preference.h
// Chunks      any rows if tokens are independent; whole answers otherwise. A gradient of the entropy costs
//             one more read of the logits
// Rounding, scaling, saved, determinism, traffic, refused: as linear_preference.h
#pragma once

#include "tigon/ops/loss_head/loss_head.h"
#include "tigon/ops/policy/policy.h"

namespace tigon {

// Holds the arguments of a call.
struct LinearPolicy {
  LinearHead head;
  LossHeadLabels labels;
  LogitFormula formula;
  // Holds the formula, answers, tokens, operands and results. The call makes log_prob, entropy, places and
  // gradients of it.
  Policy loss;
  PolicyTotals totals;
  // Get the log-probability and entropy of each row, f32 [rows], 0 if the label is ignored; entropy is empty
  // if not wanted.
  Vector log_prob, entropy;
};
TIGON_API void linear_policy(Context& ctx, const LinearPolicy& a);

}  // namespace tigon
