// Computes softmax cross-entropy of rows of logits against one label per row, with its gradient in the same
// pass. One row kernel serves `cross_entropy` (logits given) and `linear_cross_entropy` (logits of a chunk of
// rows).
// Formula     z = softcap * tanh(logit_scale * (logit + bias) / softcap) / temperature,
//             or without softcap z = logit_scale * (logit + bias) / temperature
//             lse = log sum_c e^z_c,  p = e^(z - lse),  y = target, eps = label_smoothing,
//             w = class_weight (1 without)
//             loss = (1 - eps) w_y (lse - z_y) + eps/V sum_c w_c (lse - z_c) + z_loss * lse^2
// Gradient    dlogit_c = scale * dz_c * ( p_c (k + 2 z_loss lse) - [c = y] (1 - eps) w_y - eps/V w_c )
//             with k = (1 - eps) w_y + eps/V sum_c w_c and dz_c = logit_scale / temperature * (1 - tanh^2)
//             plus, with entropy_scale, - entropy_scale * dz_c * p_c (z_c - lse + entropy)
//             (the target's term is formed in fp32 before the one rounding; dbias is the column sum of
//             dlogits, which the caller computes)
// Shapes      logits, dlogits [rows, V], any row stride; target, loss, lse, target_logit, log_prob, entropy,
//             predicted, entropy_scale [rows];
//             bias, class_weight [V]; scale [1] or [rows], read on the device
// Dtypes      logits f32 | bf16 | f16; dlogits the same, or bf16 | f16 for f32 logits; bias f32 or logits'
//             dtype; target, predicted i64; the rest f32; accumulation f32
// Rounding    dlogits once, on store, and for a scalar loss once more if its upstream gradient is not 1; all
//             else in fp32
// Saved       for scalar losses dlogits, formed in the forward pass; for per-row losses logits, target,
//             class_weight
// Shard       With `classes` the logits are classes [first_class, first_class + V) of that number, and the
//             rest of the row is in other shards. target, class_weight and eps / V are those of all classes;
//             lse, entropy, predicted and the sums of the row are of these columns (predicted counts from the
//             first). A label of another shard has target_logit and loss 0 and log_prob -inf. If the whole
//             row's lse is lse - log_mass and its entropy all_entropy (cross_entropy_combine), p = e^(z -
//             lse + log_mass), and dlogits are the columns of the whole row's gradient. If the row's lse and
//             log_prob are given, log_mass is a difference to this lse, and 1 - p of the label is that of
//             this log_prob. With known_max and known_log_sum, the statistics of these columns, lse is
//             their sum. Without any of these, in a call that has row_max, p = e^(z - lse) is that of
//             these columns by themselves (0 if all are at -inf), and cross_entropy_renormalize makes dlogits
//             the whole row's: statistics and gradient in one pass.
// Ignored     rows with target == ignore_index: loss, target_logit, log_prob 0, a row of zeros in dlogits
//             whatever scale is (inf and NaN included); lse, entropy and predicted are those of the row
// NaN, inf    a row with NaN or +inf, or nothing but -inf, has a NaN loss and a NaN gradient; classes at
//             -inf have p = 0. `predicted` is the first NaN if there is one, as in torch.argmax; with
//             only_label such a row may have any
// Labels      outside [0, V) and not ignore_index: on the CPU tigon::Error before anything is written; on
//             CUDA, and in a shard (outside [0, classes)), a NaN loss, a NaN gradient and NaN target_logit
//             and log_prob in that row, never a read out of bounds (no host synchronisation)
// Aliasing    dlogits of logits' dtype may be the memory of logits (in place), no other overlap
// Determinism bitwise: fixed trees inside a row, rows independent. On CUDA this holds for rows with the same
//             offset within 16 bytes and the same kind of call: the alignment decides which thread adds what,
//             and the last bits of a row's lse may depend on which other results are wanted. In a
//             deterministic context neither matters
// Traffic     1 read of logits + 1 write of dlogits (1 read without dlogits), plus a few words a row
// Refused     V < 1, label_smoothing outside [0, 1], softcap < 0, temperature <= 0, sizes or dtypes that do
//             not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

// Holds the arguments of the row pass.
struct CrossEntropyRows {
  Matrix logits;
  // Holds one label per row, i64 [rows].
  Vector target;
  // Is added to the logits in fp32: [V], f32 | logits' dtype; empty if absent.
  Vector bias;
  // Holds a weight for each class, [V] f32; empty if absent.
  Vector class_weight;
  // Holds factors of the gradient (not of the loss), f32 [1] | [rows], read on the device; 1 if empty.
  Vector scale;
  // Holds factors of the entropy's gradient, which is added to the loss's, f32 [rows]; empty if absent.
  Vector entropy_scale;
  // The results from here to log_sum are empty if not wanted.
  Matrix dlogits;
  // Gets the losses, f32 [rows], 0 on ignored rows.
  Vector loss;
  // Gets the log-sum-exp of z, f32 [rows].
  Vector lse;
  // Gets z at the target, f32 [rows], 0 on ignored rows.
  Vector target_logit;
  // Gets z at the target - lse, f32 [rows], 0 on ignored rows. It is more exact than the difference of the
  // two results above.
  Vector log_prob;
  // Gets lse - sum_c p_c z_c, f32 [rows].
  Vector entropy;
  // Gets the first argmax, i64 [rows].
  Vector predicted;
  // If true, predicted need only tell whether it is the label: if not, it is -1 or any other class.
  bool only_label = false;
  // A shard has the next three. They are 0 on ignored rows that no other result needs.
  Vector row_max;  // f32 [rows], max_c z_c
  Vector log_sum;  // f32 [rows], lse - row_max
  // Gets sum_c w_c (lse - z_c), f32 [rows]; needs label_smoothing.
  Vector smoothing;
  int64_t first_class = 0;
  // Is 0 if the logits are all classes; the next three are then not used.
  int64_t classes = 0;
  // Holds lse of these columns - lse of all, f32 [rows], <= 0. dlogits need it without all_lse and row_max.
  Vector log_mass;
  // Hold lse and log_prob of all columns, f32 [rows], which dlogits may have instead of log_mass.
  Vector all_lse, all_log_prob;
  // Hold row_max and log_sum, f32 [rows], which an earlier pass found. A call whose only result is dlogits
  // may have them, with log_mass and all_log_prob; they need not be computed again.
  Vector known_max, known_log_sum;
  // Holds the entropy of all columns, f32 [rows]. dlogits need it with entropy_scale.
  Vector all_entropy;
  // Holds the sum of class_weight [classes], f32 [1]. dlogits need it if both class_weight and
  // label_smoothing are given.
  Vector weight_sum;
  int64_t ignore_index = -100;
  float logit_scale = 1.0f;
  float softcap = 0.0f;  // 0 if there is none
  float temperature = 1.0f;
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
};

// Computes the factor that turns the sum of losses into the requested reduction, and leaves it on the device.
// If a denominator is given it is 1 / denominator. With `mean` it is 1 / sum of w_y over rows that count: inf
// if there are none, so that the mean of nothing is NaN as in torch, while gradients of ignored rows stay
// zeros. Otherwise it is 1 / host_denominator.
struct CrossEntropyScale {
  Vector target;        // i64 [rows], or u8 (a mask) without class_weight
  Vector class_weight;  // [V] f32; empty if absent
  int64_t ignore_index = -100;
  bool mean = false;
  // Is read on the device, f32 | f64 | i64 | i32 [1]; empty if absent.
  Vector denominator;
  double host_denominator = 1.0;
  Vector scale;  // out: f32 [1]
};

// Computes total = scale * sum(loss) in a fixed order, accumulated in double.
struct CrossEntropyTotal {
  Vector loss;   // f32 [rows]
  Vector scale;  // f32 [1]; 1 if empty
  Vector total;  // out: f32 [1]
};

// Computes grad *= factor, rounded once: a stored gradient gets an upstream gradient that only the device
// knows. Memory is not touched if the factor is exactly 1. linear_cross_entropy uses it too.
struct CrossEntropyRescale {
  Matrix grad;    // f32 | bf16 | f16, any row stride
  Vector factor;  // f32 [1]
};

TIGON_API_ENTRY(cross_entropy_rows, CrossEntropyRows)
TIGON_API_ENTRY(cross_entropy_scale, CrossEntropyScale)
TIGON_API_ENTRY(cross_entropy_total, CrossEntropyTotal)
TIGON_API_ENTRY(cross_entropy_rescale, CrossEntropyRescale)

}  // namespace tigon
