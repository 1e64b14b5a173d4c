// Computes losses of a drafter of speculative decoding. They compare the head of a small draft model, once
// for each of several steps, with the head of the teacher whose tokens it drafts. The logits of no more than
// a chunk of rows exist at any time, and the teacher's are made once for all steps.
// Formula     z = teacher_hidden . teacher_weight^T, of a row, s = hidden . weight^T, of one of its `steps`
//             draft rows (row r of the teacher has the draft rows r steps ... r steps + steps - 1);
//             draft_id[c]: the draft's id of the teacher's class c, -1: it has none; a draft class that no
//             class maps to has p = 0
//             q = softmax(s);  p = softmax of z over the classes with a draft id;
//             P = their share of the softmax over all classes
//             A = 1, or with `overlap_outside` P;  B = 1, or with `soft_outside` P: what is outside the
//             draft's classes counts
//             label     the draft's id of the teacher's first argmax (mask_outside; -1: it has none), or the
//                       first argmax of p
//             overlap   sum min(A p, q), the probability that a drafted token is accepted (Leviathan et
//                       al. 2023, "Fast inference from transformers via speculative decoding", theorem 3.5)
//             ce        - sum B p log q                          hard   - log q[label]
//             kl        sum B p (log B p - log q)                tv     1 - overlap
//             lk        lambda kl + (1 - lambda) tv, lambda = exp(-eta overlap), a constant of the gradient
//                       (Samarin et al. 2026, "LK losses: direct acceptance rate optimization for speculative
//                       decoding", arXiv:2602.23881)
//             a row's loss is that times token_weight; 0 log 0 = 0
// Gradient    ds = B (q - p) (ce, kl),  q - [c = label] (hard),  q (sum q u - u) with u = [q <= A p] (tv),
//             and lambda and 1 - lambda times those for lk; dhidden, dweight as in loss_head.h. The teacher
//             has no gradient
// Shapes      hidden, dhidden [rows steps, H]; weight, dweight [V, H]; teacher_hidden [rows, H_t],
//             teacher_weight [V_t, H_t], any row stride; draft_id [V_t], empty: V = V_t and the ids are the
//             same; teacher_target [rows]; target, token_weight, upstream, loss, overlap, counted [rows
//             steps]; scale, total [1]
// Dtypes      hidden, weight, teacher_hidden, teacher_weight f32 | bf16 | f16, the same; draft_id i32;
//             targets i64; the rest f32
// Rounding    logits of both sides to hidden's dtype, their gradient once, to it too; then as in loss_head.h
// Saved       dhidden, dweight for loss_head_finish; nothing of the size of the logits
// Scaling     as in linear_cross_entropy.h: f32 and bf16 gradients carry `scale`, f16 ones get it at the end
// Masked rows target == ignore_index, the same for a row and its draft rows: results 0, gradient a row of
//             zeros; free if their number is known (loss_head.h). So are rows without a label, except that
//             nothing is saved: `counted` is 0 there, and 1 on all others. A mean divides by the number of
//             teacher_target that count
// Aliasing    none
// Determinism bitwise, run to run
// Traffic     a teacher's row is read once and its draft's columns written; a draft row and those columns
//             read, its gradient written
// Refused     what loss_head_check refuses, a draft row count that is no multiple, draft_id missing if V
//             is not V_t, eta < 0, upstream missing for gradients of per-row losses
#pragma once

#include "tigon/ops/loss_head/loss_head.h"

namespace tigon {

enum class DrafterKind : int8_t { ce, kl, hard, tv, lk };
inline constexpr int kDrafterKinds = 5;

// Holds the arguments of a call.
struct DrafterLoss {
  LinearHead head;  // the draft's operands, and the gradients that are wanted
  LossHeadLabels labels;
  LossReduction reduction;
  Matrix teacher_hidden, teacher_weight;
  Vector teacher_target, draft_id;
  Vector token_weight;  // 1 if empty
  Vector upstream;      // gradient of each draft row's loss, instead of scale
  Vector loss, overlap, counted;
  DrafterKind kind = DrafterKind::kl;
  float eta = 3.0f;
  bool overlap_outside = false, soft_outside = false, mask_outside = false;
};
TIGON_API void drafter_loss(Context& ctx, const DrafterLoss& a);

// Holds what a teacher adds to the memory of a call. The LossHeadSizes of the call are the draft's, with the
// rows of all steps.
struct DrafterSizes {
  int64_t steps = 1, teacher_hidden = 0, teacher_vocab = 0;
  int64_t mapped = 0;  // 1 if draft_id is given
};
TIGON_API LossHeadPlan drafter_loss_plan(const LossHeadSizes& sizes, const DrafterSizes& teacher);

// Computes what the losses need of a few rows of the teacher, in one pass over its logits.
struct DrafterTeacher {
  Matrix logits;    // [rows, V_t]
  Vector draft_id;  // i32 [V_t]; if empty, the columns are the logits
  Matrix columns;   // out, with draft_id: [rows, V], logits' dtype
  bool mask_outside = false;
  Vector max, log_sum;  // out: f32 [rows], log p = z - max - log_sum
  Vector share;         // out: f32 [rows], P; empty if not wanted
  Vector label;         // out: i64 [rows]
};
// Computes losses of the draft rows of a few rows of the teacher, and writes their gradients in the place of
// the logits.
struct DrafterRows {
  Matrix draft;                       // [rows steps, V], in and out
  Matrix teacher;                     // [rows, V], draft's dtype
  Vector max, log_sum, share, label;  // share is 1 if empty
  Vector target;                      // i64 [rows steps]
  Vector scale;                       // f32 [1] | [rows steps]: factor of the gradient; 1 if empty
  Vector loss, overlap, counted;
  int64_t ignore_index = -100;
  DrafterKind kind = DrafterKind::kl;
  float eta = 3.0f;
  bool overlap_outside = false, soft_outside = false, mask_outside = false, gradient = true;
};

#define TIGON_DRAFTER_BACKEND                                  \
  void drafter_teacher(Context& ctx, const DrafterTeacher& a); \
  void drafter_rows(Context& ctx, const DrafterRows& a);
namespace cpu {
TIGON_DRAFTER_BACKEND
}
namespace cuda {
TIGON_DRAFTER_BACKEND
}
#undef TIGON_DRAFTER_BACKEND

}  // namespace tigon
