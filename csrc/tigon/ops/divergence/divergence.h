// Computes divergences of two rows of classes, a student's and a teacher's, with the student's gradient in
// the same pass. Distillation minimises them.
// Formula     log q = log softmax(student / temperature),
//             log p = log softmax(teacher / temperature) (log_probs: the
//             inputs themselves), P = teacher's p, Q = student's q, over the classes of a row:
//             forward_kl  KL(P || Q) = sum p (log p - log q)    (Kullback & Leibler 1951, eq. 2.4)
//             reverse_kl  KL(Q || P) = sum q (log q - log p)
//             jsd         beta KL(P || M) + (1 - beta) KL(Q || M),
//                         M = beta P + (1 - beta) Q  (generalised Jensen-Shannon: Lin 1991,
//                         "Divergence measures based on the Shannon entropy", eq. 4.1; 0 < beta < 1)
//             tvd         1/2 sum |q - p|
//             0 log 0 = 0: a class that one side excludes (-inf) gives no NaN. loss = factor * that sum
// Gradient    g = dloss / d(log q):  forward_kl -p;  reverse_kl q (log q - log p + 1);
//             jsd (1 - beta) q (log q - log m);
//             tvd q sign(q - p) / 2, 0 if q = p
//             dstudent = factor * scale * (g - q * sum g) / temperature, log_probs: factor * scale * g
// Shapes      student, teacher, dstudent [rows, V], any row stride; labels, loss [rows]; scale [1] or [rows]
// Dtypes      student f32 | bf16 | f16, teacher and dstudent the same; labels i64; the rest f32; accumulation
//             f32
// Rounding    dstudent once, on store
// Saved       for scalar losses dstudent, formed in the forward pass; for per-row losses student, teacher,
//             labels
// Ignored     rows with labels == ignore_index: loss 0 and a row of zeros in dstudent, whatever the inputs
//             and scale are
// NaN, inf    a row with NaN or +inf, or nothing but -inf, has a NaN loss and gradient (log_probs: as the
//             formula says)
// Aliasing    dstudent may be the memory of student (in place), no other overlap
// Determinism bitwise: fixed trees inside a row, rows independent; on CUDA for rows with the same offset
//             within 16 bytes
// Traffic     2 reads + 1 write of [rows, V] (2 reads without dstudent) if a row pair fits on chip: on CUDA
//             to 262144 columns in 16 bits (KL 655360), 196608 in 32 (clusters of 16; 8192 and 4096 before
//             sm_90); longer ones and rows of different alignment are read three times
// Refused     V < 1, beta outside (0, 1) for jsd, temperature <= 0, or not 1 with log_probs, sizes or dtypes
//             that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

enum class DivergenceKind : int8_t { forward_kl, reverse_kl, jsd, tvd };
inline constexpr int kDivergenceKinds = 4;

// Holds the arguments of the row pass.
struct DivergenceRows {
  Matrix student;
  Matrix teacher;
  // Holds labels, i64 [rows]. If empty, every row counts.
  Vector labels;
  // Holds factors of the gradient (not of the loss), f32 [1] | [rows], read on the device; 1 if empty.
  Vector scale;
  Matrix dstudent;  // empty if not wanted
  Vector loss;      // f32 [rows]
  DivergenceKind kind = DivergenceKind::forward_kl;
  int64_t ignore_index = -100;
  float beta = 0.5f;  // only jsd uses it
  float temperature = 1.0f;
  float factor = 1.0f;  // factor of loss and gradient
  bool log_probs = false;
};

TIGON_API_ENTRY(divergence_rows, DivergenceRows)

// Holds beta in fp32 and the factor that undoes its rounding: near beta = 1 jsd is proportional to 1 - beta.
struct DivergenceBeta {
  float beta;
  double factor;
};
TIGON_API DivergenceBeta divergence_beta(DivergenceKind kind, double beta);

}  // namespace tigon
