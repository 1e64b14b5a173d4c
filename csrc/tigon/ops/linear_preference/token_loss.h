// Losses of the log-probabilities of labels under a linear head, where a loss belongs to a group of rows: a
// token, an answer, a pair of answers. What linear_preference and linear_policy share; it knows no formula.
// Where every group fits a chunk, a chunk's logits become the gradients of -log_prob in the pass that reads
// them, the formula finds a factor for each row, and the products take it (three products). A gradient of the
// entropy needs the factor before: the chunk's logits are read once more. Where a group fits no chunk all
// chunks go forth, the formula sees all rows at once, and the chunks go back, the last one's logits still
// there (four products less one chunk's first). Without gradients they only go forth.
#pragma once

#include <functional>

#include "tigon/ops/loss_head/engine.h"

namespace tigon {

struct TokenLossHead {
  LossHead head;  // operands, labels, groups and reference
  LogitFormula formula;
  bool entropy = false;           // the formula takes it
  bool entropy_gradient = false;  // dentropy will be written
  Vector log_probs, entropies;    // out: f32 [rows], 0 where the label is ignored; empty: not wanted
};

// What a formula sees: groups [first, first + count), the places from `base` on that log_prob has.
struct TokenLossPart {
  int64_t first = 0, count = 0, base = 0;
  int64_t places = 0;  // of all rows worked on
  Vector position;     // i64 [rows]: place of each row, -1: none; empty: a row's place is its number
  Vector log_prob, ref, entropy;  // f32, by place
  // To be written, f32, by place: minus the slope in log_prob; the slope in entropy. Empty: not wanted.
  Vector dlog_prob, dentropy;
};
using TokenLossFormula = std::function<void(const TokenLossPart&)>;

void token_loss_check(const TokenLossHead& a);
void token_loss(Context& ctx, const TokenLossHead& a, const TokenLossFormula& formula);

}  // namespace tigon
