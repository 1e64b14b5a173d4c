// Runs the row pass of distillation heads: the divergence of two rows of logits, each with its own dtype,
// bias, scale, softcap and temperature, together with the labels' cross-entropy, and the student's gradient
// in a matrix of its own.
// Formula     z = softcap * tanh(logit_scale * (logit + bias) / softcap) / temperature,
//             or without softcap z = logit_scale * (logit + bias) / temperature, for each side;
//             Q = softmax(z of the student), P = softmax(z of the teacher)
//             soft = factor * D(P, Q), D as in divergence.h;  hard = log sum_c e^h_c - h_label,
//             h = temperature * z of the student: at temperature 1;  entropy = - sum_c Q_c log Q_c
//             loss = soft_weight * soft + hard_weight * hard
// Gradient    of the student's logits: scale * dz_c * (soft_weight * dsoft/dz_c + hard_weight *
//             temperature * (H_c - [c = label])), H = softmax(h),
//             dz_c = logit_scale / temperature * (1 - tanh^2)
// Shapes      student, teacher, dstudent [rows, V], any row stride; bias [V]; labels, loss, soft, hard,
//             entropy [rows]; scale [1] or [rows]
// Dtypes      student f32; teacher, dstudent f32 | bf16 | f16; labels i64; the rest f32; accumulation f32
// Rounding    dstudent once, on store. On CUDA exponentials have a relative error of about 1e-6 if its dtype
//             has 16 bits
// Saved       nothing
// Ignored     rows with labels == ignore_index: results 0 and a row of zeros in dstudent, whatever the inputs
//             and scale are
// NaN, inf    a row with NaN or +inf, or nothing but -inf, has NaN results and a NaN gradient;
//             0 log 0 = 0: a class that one side excludes (-inf) gives no NaN
// Labels      outside [0, V) and not ignore_index: on the CPU tigon::Error before anything is written; on
//             CUDA a NaN hard, loss and gradient in that row if hard_weight is not 0 or hard is wanted
// Aliasing    none
// Determinism bitwise: fixed trees inside a row, rows independent
// Traffic     a row pair is read once on CUDA to 262144 columns (sm_90, in clusters; 163840 with bias,
//             softcap, 32-bit gradients, or a hard loss at another temperature), else three times; dstudent
//             is written once
// Refused     V < 1, beta outside (0, 1) for jsd, temperature <= 0, softcap < 0, a hard loss without labels,
//             sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/ops/divergence/divergence.h"

namespace tigon {

// Says how the logits of one side become z.
struct DistillationSide {
  Vector bias;  // f32 [V], empty if absent
  float logit_scale = 1.0f;
  float softcap = 0.0f;  // 0 if there is none
  float temperature = 1.0f;

  bool capped() const { return softcap > 0.0f; }
  // These factors give z = top() * tanh(inner() * (logit + bias) / softcap), or inner() * (logit + bias), and
  // dz/dlogit = gain() * slope.
  float gain() const { return logit_scale / temperature; }
  float inner() const { return capped() ? logit_scale : gain(); }
  float top() const { return softcap / temperature; }
};

// Holds the arguments of the row pass.
struct DistillationRows {
  Matrix student;
  Matrix teacher;
  DistillationSide student_side, teacher_side;
  Vector labels;  // if empty, every row counts
  // Holds factors of the gradient (not of the results), read on the device; 1 if empty.
  Vector scale;
  // Is empty if not wanted, but its dtype still says how precise the results are.
  Matrix dstudent;
  Vector loss;
  Vector soft, hard, entropy;  // empty if not wanted
  DivergenceKind kind = DivergenceKind::forward_kl;
  int64_t ignore_index = -100;
  float beta = 0.5f;    // only jsd uses it
  float factor = 1.0f;  // factor of soft and its gradient
  float soft_weight = 1.0f, hard_weight = 0.0f;
  // If true (CPU backend only), student and teacher hold log q and log p.
  bool log_probs = false;

  bool has_hard() const { return hard_weight != 0.0f || hard; }
};

TIGON_API_ENTRY(distillation_rows, DistillationRows)

}  // namespace tigon
