// Computes preference losses of a linear head: hidden states x head weight x labels -> the losses of
// tigon/ops/preference/preference.h and gradients. The logits of no more than a chunk of rows exist at any
// time.
// Formula     log_prob = log softmax(z)[label] of each row, z as in tigon/ops/cross_entropy/cross_entropy.h
//             from the logits of tigon/ops/loss_head/loss_head.h; then the losses of preference.h, and the
//             gradients of the GEMMs (loss_head.h) of dlogits = c (p - [label]), c = -dloss / dlog_prob.
//             With `ref` the scores' references are the sums of a second head's log-probabilities over the
//             same tokens
// Shapes      hidden, dhidden [answers * tokens, H]; labels [answers * tokens]; the rest as in preference.h
//             and loss_head.h
// Dtypes      hidden, weight f32 | bf16 | f16, the same, those of ref too; losses and metrics f32
// Rounding    as linear_cross_entropy: logits and dlogits of a chunk to hidden's dtype; c hidden and c
//             dhidden once more
// Scaling     f32 and bf16: gradients carry `scale`. f16: they do not; loss_head_finish multiplies by it
// Saved       the gradients
// Chunks      hold pairs whole (a kto answer whole); on the CPU, and if valid_rows says their number and
//             one chunk takes all, rows that do not count cost nothing. A group whose logits exceed 1 GiB:
//             all chunks forth, then back (token_loss.h)
// Aliasing    none
// Determinism bitwise, run to run
// Traffic     three GEMMs (one without gradients; four less one chunk's first if a group fits no
//             chunk), one more for ref; per chunk the logits are written, read and written, read twice
// Refused     what loss_head_check, cross_entropy and preference refuse, an odd number of answers in pairs, a
//             ref of other rows or classes: tigon::Error before anything is written
#pragma once

#include "tigon/ops/loss_head/loss_head.h"
#include "tigon/ops/preference/preference.h"

namespace tigon {

// Holds the arguments of a call.
struct LinearPreference {
  LinearHead head;
  // Holds hidden, weight and bias of the reference. If hidden is empty, loss.ref has it, or there is none.
  LinearHead ref;
  LossHeadLabels labels;  // for rows that count in loss.target or loss.nll_target
  LogitFormula formula;
  // Holds the formula, pairs, tokens, operands and results. The call makes log_prob, places, groups and
  // gradients of it.
  Preference loss;
  PreferenceTotals totals;
};
// Returns loss_head_plan for groups of `answers` answers of `tokens` tokens that share a chunk (2 answers:
// pairs; 0: each token by itself).
TIGON_API LossHeadPlan linear_preference_plan(const LossHeadSizes& sizes, int64_t answers, int64_t tokens);
TIGON_API void linear_preference(Context& ctx, const LinearPreference& a);

}  // namespace tigon
