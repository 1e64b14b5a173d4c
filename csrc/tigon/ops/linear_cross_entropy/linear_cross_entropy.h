// Computes a linear layer and softmax cross-entropy in one: hidden states x head weight x labels -> loss and
// gradients. The logits of no more than a chunk of rows exist at any time.
// Formula     logit = hidden . weight^T (+ lora_scale (hidden . lora_a^T) . lora_b^T) (+ bias), then row by
//             row the loss of tigon/ops/cross_entropy/cross_entropy.h, times token_weight
//             dhidden = dlogits . weight,  dweight = dlogits^T . hidden,  dbias = column sum of dlogits
//             with lora: u = lora_scale (hidden . lora_a^T), t = lora_scale (dlogits . lora_b):
//             dhidden += t . lora_a,  dlora_a = t^T . hidden,  dlora_b = dlogits^T . u
//             For a scalar loss dlogits exists while the chunk does (Wijmans et al. 2024, "Cut Your Losses in
//             Large-Vocabulary Language Models", section 4, discusses the recomputing alternative): three
//             GEMMs in all. The label of a row is target's, or with a shift that of the row so far ahead in
//             the same sequence
// Shapes      hidden, dhidden [rows, H], any row stride; weight [V, H], any row stride; dweight [V, H];
//             target, loss [rows]; bias, dbias, class_weight [V]; scale [1]; upstream, entropy_upstream,
//             token_weight [rows]; lora_a, dlora_a [r, H]; lora_b, dlora_b [V, r]
// Dtypes      hidden, weight, lora_a, lora_b f32 | bf16 | f16, the same; target, predicted i64; dhidden of
//             hidden's dtype; dbias, dlora_a, dlora_b f32; dweight f32, or hidden's if one chunk takes all
//             rows; losses, scale and the other results of rows f32; GEMMs accumulate in f32
// Rounding    logits and dlogits of a chunk are rounded to hidden's dtype (with lora the logits twice, u and
//             t once), with wide_logits only dlogits; dweight is summed over chunks in f32 and rounded once,
//             when finish() casts it; a single chunk's is rounded by its GEMM, and again by finish() if
//             the upstream gradient is not a power of two. The number of chunks does not show beyond the
//             order of f32 additions and that. (In PyTorch on the CPU, bf16 GEMMs reach the f32 sum after
//             one rounding per chunk, since aten's GEMM returns bf16.)
// Saved       scalar losses: dhidden, dweight, dbias for finish(); nothing of the size of the logits. Per-row
//             losses: unit and kept if the caller has the memory
// Scaling     f32 and bf16: dlogits carry `scale` (1/count, 1/denominator). f16: they do not, small quotients
//             would leave its range; loss_head_finish multiplies by scale then.
// Masked rows target == ignore_index. Every result of such a row is 0 (predicted: -1), its dhidden is a row
//             of zeros. They cost nothing if their number is known: on the CPU always, on CUDA if
//             `valid_rows` says it (the list of rows that count is made on the device: no synchronisation).
//             Without it every row is computed. A promise that does not hold: on the CPU refused; on CUDA
//             every loss of the call is NaN (so is their sum), unless valid_rows equals rows: then
//             nothing was left out and all is right.
// Aliasing    none
// Determinism bitwise, run to run
// Traffic     per chunk: hidden and weight once or twice each, logits written, read, written, read twice; of
//             more than one chunk dweight read and written in f32 per chunk after the first; with left-out
//             rows hidden and dhidden once more each
// Refused     sizes, dtypes or devices that do not fit, chunk_rows < 0, H < 1, V < 1, and what cross_entropy
//             refuses; on the CPU labels outside [0, V) and a valid_rows that is not the count
#pragma once

#include "tigon/ops/loss_head/loss_head.h"

namespace tigon {

// Holds several labels for each row of per-row losses (tigon/ops/cross_entropy/cross_entropy_labels.h).
// target and upstream are made from them. A row counts if one of its labels does.
struct LinearCrossEntropyLabels {
  Vector labels;  // i64 [rows * count]; empty if a row has one label
  int64_t count = 0;
  Vector upstream;  // f32 [rows * count]: minus the gradient of each log-probability
  Vector log_prob;  // out: f32 [rows * count]; empty if not wanted
};

// Holds the results of rows; they are empty if not wanted.
struct LinearCrossEntropyResults {
  Vector loss;              // f32 [rows], always wanted
  Vector z_term;            // f32 [rows], token_weight * z_loss * lse^2
  Vector log_prob;          // f32 [rows], z_y - lse
  Vector lse, entropy;      // f32 [rows]
  Vector predicted;         // i64 [rows], first argmax
  bool only_label = false;  // predicted need only tell whether it is the label
};

// Holds what per-row losses keep between forward and backward. dlogits of a row are its upstream gradient
// times what only the row gives. The forward can form the second factor, without upstream and token_weight,
// and what follows from it.
struct KeptLogits {
  Matrix unit;     // [rows, H] dhidden for an upstream gradient of 1; empty if absent
  Matrix dlogits;  // [any number, V] of the first rows worked on; empty if absent
  // If true, dlogits hold the logits, as gradients of entropies need them; without unit and wide_logits.
  bool are_logits = false;
  bool overwrite = false;  // the gradients are formed in the memory of the kept logits
};

// Holds the arguments of a call.
struct LinearCrossEntropy {
  LinearHead head;  // operands, and the gradients that are wanted
  LossHeadLabels labels;
  LogitFormula formula;
  LossReduction reduction;
  Vector class_weight;  // [V] f32; empty if absent
  // Holds factors of each row's loss and gradient (not of a mean's denominator), f32 [rows]; empty if absent.
  Vector token_weight;
  float label_smoothing = 0.0f;
  float z_loss = 0.0f;
  // Holds the gradient of each row's loss, f32 [rows], which is used instead of scale (the backward of
  // Reduction::none).
  Vector upstream;
  Vector entropy_upstream;           // f32 [rows]: gradient of each row's entropy; empty if absent
  LinearCrossEntropyLabels several;  // with them log_prob, unit and dlogits must be empty
  LinearCrossEntropyResults results;
  KeptLogits kept;
};
// Computes losses, and the gradients of a scalar loss or what per-row losses keep.
TIGON_API void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& a);

// Computes the gradients of per-row losses. With the factor c = upstream * token_weight of each row:
//   unit given   dhidden = diag(c) unit, without a GEMM; dhidden may be unit's own memory
//   rows kept    dweight, dbias, dlora from kept dlogits and diag(c) hidden, without logits; dlogits are
//                only read
//   other rows   logits are computed again, or read if they were kept, and c is folded into their gradients
// The call that gave `kept` had the same target, valid_rows and options. If all dlogits are kept, or if there
// is a unit and nothing else is wanted, the values of weight and bias are not read. An entropy_upstream needs
// logits, so neither unit nor dlogits may be given with it.
TIGON_API void linear_cross_entropy_rows_gradient(Context& ctx, const LinearCrossEntropy& a);

}  // namespace tigon
