// Handles several labels per row, around the row pass of cross_entropy.h, which knows one. The label of the
// row pass is the one with the largest logit among the K, so that its log-probability, and with it those of
// the others, is exact however confident the model is.
// Formula     log_prob_k = (z_k - z_t) + log_prob_t with t the row pass's label, z as in cross_entropy.h
// Gradient    of -sum_k g_k log_prob_k in the logit of class c: dz_c (p_c sum_k g_k - sum_{y_k = c} g_k). The
//             row pass writes it for every class that is no label, from scale = sum_k g_k. For a label it is
//             written after the row pass:
//             dz_c (B p_c - A (1 - p_c)), A the sum of g_k with y_k = c, B of the others,
//             1 - p_c = -expm1(log_prob);
//             with entropy_scale e also - e dz_c p_c (log_prob + entropy)
// Shapes      labels, upstream, out [rows, count]; target, factor [rows]; of a part of the rows: logits,
//             dlogits [n, V], chosen, top, log_prob, entropy, entropy_scale [n], scores [n, count]
// Dtypes      labels, target, chosen, index, position i64; logits, dlogits, bias as in cross_entropy.h; the
//             rest f32
// Rounding    fp64 inside, each result once
// Ignored     a label ignore_index has log_prob 0 and no gradient; a row of nothing but such labels has
//             target ignore_index
// Labels      the same more than once is legal. One outside [0, V) becomes the row's target: its row has NaN
//             results, as in cross_entropy.h
// Shard       labels count from the shard's first class. Those of other shards are outside [0, V) and not
//             ignore_index: they have no score and no gradient here, and their upstream is part of B. `top`,
//             `scores` and log_prob of the results and of the gradient are those of all shards
// Determinism bitwise: sums over a row's labels in order
// Traffic     a few words for each label
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

// Holds the arguments of all four steps.
struct CrossEntropyLabels {
  Vector labels;
  int64_t count = 0;
  int64_t ignore_index = -100, classes = 0;
  Vector upstream;  // f32 [rows * count], g; empty if absent

  // The next two cover all rows.
  // Gets a label that counts, or one that is refused, or ignore_index, i64 [rows].
  Vector target;
  // Gets the sum of upstream over labels that count, f32 [rows]; empty if not wanted.
  Vector factor;

  // From here on, a call works on n rows: row i is index[i], or begin + i.
  int64_t begin = 0;
  Vector index;
  // Holds the target of each row, i64 [n], and gets the label of the row pass.
  Vector chosen;
  // Gets logit_scale * (logit + bias) of each label, f32 [n * count].
  Vector scores;
  // Gets the score of the chosen label, f32 [n].
  Vector top;
  Matrix logits;
  Vector bias;  // [V]; empty if absent
  float logit_scale = 1.0f, softcap = 0.0f, temperature = 1.0f;
  Matrix dlogits;
  // Holds the log-probability of the chosen label, f32 [n].
  Vector log_prob;
  // Hold entropies and factors of their gradients, f32 [n]; entropy_scale is empty if absent.
  Vector entropy, entropy_scale;

  // The results cover all rows: `position` is the place of each row among the n (its number if empty; -1 if
  // it has none), and all are NaN if fault is not 0.
  Vector position, fault;
  Vector out;  // f32 [rows * count]
};
// Computes target and factor.
TIGON_API_ENTRY(cross_entropy_label_targets, CrossEntropyLabels)
// Computes chosen, scores and top before the row pass.
TIGON_API_ENTRY(cross_entropy_label_scores, CrossEntropyLabels)
// Computes dlogits at the labels after it.
TIGON_API_ENTRY(cross_entropy_label_gradient, CrossEntropyLabels)
// Computes out from scores, top and log_prob of all rows worked on.
TIGON_API_ENTRY(cross_entropy_label_results, CrossEntropyLabels)

}  // namespace tigon
