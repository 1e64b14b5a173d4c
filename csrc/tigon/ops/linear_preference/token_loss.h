// Computes losses of the log-probabilities of labels under a linear head, if a loss belongs to a group of
// rows: a token, an answer, or a pair of answers. linear_preference and linear_policy share it; it knows no
// formula. If every group fits a chunk, the pass that reads a chunk's logits replaces them by the gradients
// of -log_prob. The formula then finds a factor for each row, and the GEMMs apply it (three GEMMs). A
// gradient of the entropy needs the factor before that, so the chunk's logits are read once more.
// If a group fits no chunk, all chunks go forward, the formula sees all rows at once, and the chunks go back,
// starting with the last one, whose logits still exist (four GEMMs less one chunk's first). Without gradients
// the chunks only go forward.
#pragma once

#include <functional>

#include "tigon/ops/loss_head/engine.h"

namespace tigon {

// Holds the arguments of a call.
struct TokenLossHead {
  LossHead head;  // operands, labels, groups and reference
  LogitFormula formula;
  bool entropy = false;           // true if the formula reads it
  bool entropy_gradient = false;  // true if the formula writes dentropy
  Vector log_probs, entropies;    // out: f32 [rows], 0 if ignored; empty if not wanted
};

// Holds what a formula sees: groups [first, first + count), and the places from `base` on that log_prob has.
struct TokenLossPart {
  int64_t first = 0, count = 0, base = 0;
  int64_t places = 0;  // number of all rows worked on
  // Holds the place of each row, i64 [rows], -1 if it has none. If empty, a row's place is its number.
  Vector position;
  Vector log_prob, ref, entropy;  // f32, by place
  // The formula writes these, f32 by place: minus the slope in log_prob, and the slope in entropy. They are
  // empty if not wanted.
  Vector dlog_prob, dentropy;
};
using TokenLossFormula = std::function<void(const TokenLossPart&)>;

// Makes the refusals.
void token_loss_check(const TokenLossHead& a);
// Runs a call.
void token_loss(Context& ctx, const TokenLossHead& a, const TokenLossFormula& formula);

}  // namespace tigon
