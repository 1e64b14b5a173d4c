// linear_cross_entropy with the weight's rows sharded over the ranks of a communicator.
//
// Formula     as linear_cross_entropy over the classes of all ranks; a rank's logits are its own
// Exchange    a chunk: one all-gather of statistics (cross_entropy_shards.h), and hidden's gradient once, by all-reduce, or with
//             sequence_parallel hidden by all-gather and its gradient by reduce-scatter; a call: A's gradient by all-reduce
// Shapes      weight, dweight [columns, H], bias, dbias [columns], any number of columns, 0 too; target, token_weight,
//             upstream and results [rows] of all ranks; hidden, dhidden [rows, H], with sequence_parallel [rows / ranks, H]: the
//             rows of one rank after those of the one before it; class_weight [classes]; lora_b, dlora_b [columns, r];
//             lora_a, dlora_a [r, H], the same on all ranks
// Rounding    hidden's gradient once by each rank's product (with lora twice), then as the communicator sums
// Determinism results have the same bits on all ranks, run to run; dhidden as the communicator sums
// Refused     what linear_cross_entropy refuses; wide logits, kept logits, valid_rows, gradients of entropies; dhidden, dlora_a or
//             shares of hidden whose rows are not adjacent. Ranks must agree on sizes, dtypes, options and which gradients are
//             wanted: it is the program's to see to that. A label outside [0, classes) is a NaN row on all ranks.
// With an upstream its rows scale the gradients, else `scale` does (but in f16, where linear_head_finish takes it).
#pragma once

#include "tigon/base/communicator.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tigon {

struct LinearCrossEntropySharded {
  LinearCrossEntropy head;
  int64_t first_class = 0, classes = 0;
  bool sequence_parallel = false;
  Vector
      shard_weight;  // f32 [ranks], sum of each rank's class weights (its columns without); needed with label_smoothing
  Vector weight_sum;  // f32 [1], of class_weight; needed with both it and label_smoothing
};
TIGON_API void linear_cross_entropy_sharded(Context& ctx, Communicator& ranks,
                                            const LinearCrossEntropySharded& a);

}  // namespace tigon
