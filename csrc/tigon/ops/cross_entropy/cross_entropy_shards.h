// Computes the loss of rows whose logits are sharded over the classes, from statistics of the shards. One
// call of cross_entropy_rows makes the statistics of a shard. Every process that has those of all shards
// computes bitwise equal results. These are the statistics of online softmax: Milakov and Gimelshein 2018
// (arXiv:1805.02867).
// Formula     of shard s: m_s = row_max, l_s = log_sum,
//             t_s = log_prob of the label (-inf if it belongs to another), h_s = entropy,
//             g_s = smoothing = sum of w (lse_s - z), W_s = sum of w
//             lse = log sum_s e^(m_s + l_s),  a_s = m_s + l_s - lse
//             log_prob = t_s + a_s of the label's shard,  entropy = sum_s e^a_s (h_s - a_s)
//             loss = token_weight * ( - (1 - eps) w_y log_prob + eps/V sum_s (g_s - W_s a_s) + z_loss lse^2 )
//             log_mass = a_s of the local shard, which cross_entropy_rows needs for the gradient
// Shapes      parts [shards * kinds, rows] in the order of `kinds`; target, token_weight, results [rows];
//             class_weight [classes]; shard_weight [shards]
// Dtypes      target, predicted i64; the rest f32; computed in double
// Rounding    results once
// Saved       nothing
// Aliasing    none
// Determinism shards in order: equal parts give bitwise equal results
// Traffic     parts once, a few words a row
// Refused     sizes or dtypes that do not fit, smoothing without its parts
// A row with NaN in any shard, or nothing but -inf in all, is NaN. A label outside [0, classes) has NaN loss
// and log_prob; an ignored one 0 in all results (predicted: -1). `predicted` is the first argmax of all
// classes, or the first NaN.
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

// Says which statistics a shard has in addition to the first three.
struct CrossEntropyKinds {
  bool entropy = false, smoothing = false, predicted = false;
  // A shard's rows of parts are 0 row_max, 1 log_sum, 2 log_prob, and then these. `predicted` is stored as an
  // f32 number.
  constexpr int entropy_at() const { return 3; }
  constexpr int smoothing_at() const { return 3 + entropy; }
  constexpr int predicted_at() const { return 3 + entropy + smoothing; }
  constexpr int count() const { return 3 + entropy + smoothing + predicted; }
  // The kinds are bits of one number: 1, 2, 4.
  void fields(Fields& f) {
    int64_t kinds = entropy + 2 * smoothing + 4 * predicted;
    f.option("kinds", kinds);
    entropy = (kinds & 1) != 0, smoothing = (kinds & 2) != 0, predicted = (kinds & 4) != 0;
  }
};

// Holds the arguments of a call.
struct CrossEntropyCombine {
  Matrix parts;
  CrossEntropyKinds kinds;
  int64_t shards = 1, shard = 0;  // `shard` is the local one
  Vector target;
  Vector class_weight;  // covers all classes; empty if absent
  Vector shard_weight;  // W_s; needed with label_smoothing
  Vector token_weight;  // empty if absent
  int64_t classes = 0, ignore_index = -100;
  float label_smoothing = 0.0f, z_loss = 0.0f;
  // Results are empty if not wanted.
  Vector loss, z_term, log_prob, lse, entropy, predicted, log_mass;
};
TIGON_API_ENTRY(cross_entropy_combine, CrossEntropyCombine)

// Makes dlogits of a shard's columns by themselves, e^(z - lse_s), those of the whole row: they are
// factor[r] times what they hold afterwards. Only the label's column changes.
// Formula     a = max(e^log_mass, 2^-60), factor = scale * w_y * a
//             dlogits_y = logit_scale / temperature * expm1(log_prob) / a of the whole row's log_prob, if
//             the label is one of these columns
// Rounding    fp64 inside, factor once. Where the label is here, the factor also undoes the rounding of
//             dlogits_y: this element's gradient is the largest of the row, and exact. A mass below 2^-60
//             stands for what is 0 next to the label's term
// Ignored     factor 0, and dlogits stay zeros. A row with NaN in any shard has a NaN factor
// Refused     float16, which has no room for 1 / a
// It knows neither softcap, label smoothing and z-loss nor a gradient of entropies.
struct CrossEntropyRenormalize {
  Matrix dlogits;              // f32 | bf16 [rows, columns]
  Vector target;               // i64 [rows], of all classes
  Vector log_mass, log_prob;   // f32 [rows], from cross_entropy_combine
  Vector scale, class_weight;  // f32 [1] | [rows], 1 if empty; f32 [classes], empty if absent
  int64_t ignore_index = -100, first_class = 0;
  float logit_scale = 1.0f, temperature = 1.0f;
  Vector factor;  // out: f32 [rows]
};
TIGON_API_ENTRY(cross_entropy_renormalize, CrossEntropyRenormalize)

}  // namespace tigon
