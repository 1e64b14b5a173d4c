// Distils from one head into another: hidden states x head weight of a student against those of a teacher (or
// its logits) -> a divergence and the student's gradients. The logits of no more than a few rows exist at any
// time.
// Formula     student = hidden . weight^T (+ lora_scale (hidden . lora_a^T) . lora_b^T),
//             teacher = teacher_hidden . teacher_weight^T, or given;
//             row by row the loss of tigon/ops/divergence/distillation.h, times token_weight
//             dhidden, dweight, dbias, dlora_a, dlora_b from the gradient of the student's logits as in
//             loss_head.h: three GEMMs of the student's and one of the teacher's. The teacher has no
//             gradients.
//             Softmaxes, entropies and labels are those of the classes that both have, the first min(V_s,
//             V_t): rows of the longer weight (columns of logits) beyond them are padding, take no part and
//             have gradient 0
// Shapes      hidden, dhidden [rows, H]; weight, dweight [V_s, H]; teacher_hidden [rows, H_t], teacher_weight
//             [V_t, H_t], any row stride; teacher_logits [rows, V_t]; bias, dbias [V_s]; teacher_bias [V_t];
//             lora_a, dlora_a [r, H]; lora_b, dlora_b [V_s, r]; target, token_weight, upstream, loss, soft,
//             hard, entropy [rows]; scale, total [1]
// Dtypes      hidden, weight, lora_a, lora_b f32 | bf16 | f16, the same; teacher_hidden, teacher_weight the
//             same among themselves, teacher_logits any of them; biases f32; target i64; dhidden hidden's;
//             dweight f32, or hidden's if one chunk takes all rows; the rest f32
// Rounding    logits are f32: the GEMMs are not rounded to 16 bits; the logits' gradient once, to hidden's
//             dtype; then as in loss_head.h. The rows of a chunk do not show beyond the order of f32
//             additions
// Saved       dhidden, dweight, dbias, dlora_a, dlora_b for loss_head_finish; nothing of the size of the
//             logits
// Scaling     as in linear_cross_entropy.h: f32 and bf16 gradients carry `scale`, f16 ones get it at the end
// Masked rows target == ignore_index: results 0, gradient a row of zeros; free if their number is known
//             (loss_head.h)
// Aliasing    none
// Determinism bitwise, run to run
// Traffic     per row V (8 + 2 size) bytes of logits (teacher_logits: 4 + their size + 2 size), and the
//             GEMMs' operands
// Refused     what loss_head_check and distillation_rows refuse, a teacher with both or neither of its
//             forms, upstream missing for gradients of per-row losses; on the CPU labels outside the common
//             classes
#pragma once

#include "tigon/ops/divergence/distillation.h"
#include "tigon/ops/loss_head/loss_head.h"

namespace tigon {

// Holds the arguments of a call.
struct LinearDivergence {
  LinearHead head;  // the student's operands, and the gradients that are wanted
  LossHeadLabels labels;
  LogitFormula formula, teacher_formula;  // both have one temperature
  LossReduction reduction;
  Matrix teacher_hidden, teacher_weight;  // empty if teacher_logits is given
  Vector teacher_bias;                    // empty if absent
  Matrix teacher_logits;
  // Holds factors of each row's loss and gradient (not of a mean's denominator), f32 [rows]; empty if absent.
  Vector token_weight;
  DivergenceKind kind = DivergenceKind::forward_kl;
  float beta = 0.5f, factor = 1.0f;  // as divergence_beta returns them
  float soft_weight = 1.0f, hard_weight = 0.0f;
  Vector upstream;             // f32 [rows]: gradient of each row's loss, instead of scale
  Vector loss;                 // is always wanted
  Vector soft, hard, entropy;  // empty if not wanted
};
TIGON_API void linear_divergence(Context& ctx, const LinearDivergence& a);
// Returns loss_head_plan of the student with what the logits of both sides take. If teacher_hidden is 0,
// the teacher's logits are given.
TIGON_API LossHeadPlan linear_divergence_plan(const LossHeadSizes& sizes, int64_t teacher_hidden);

// Returns the rows whose f32 logits exist at a time, on each of `sides` sides: as many as take 1 GiB, at
// least 512, in multiples of 128.
TIGON_API int64_t linear_divergence_logit_rows(int64_t vocab, int sides);

}  // namespace tigon
