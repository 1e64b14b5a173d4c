// What a call of a loss head decides before it runs, and the memory that follows: functions of sizes and options.
// The adaptors ask what to keep and in which dtype; Python asks what a call takes (tigon.linear_cross_entropy_memory).
#pragma once

#include "tigon/ops/linear_head/linear_head.h"

namespace tigon {

// Numbers of one width, which Python fills field by field.
struct LossHeadSizes {
  int64_t cuda = 0, dtype = 0, weight_dtype = 0;  // 0 or 1; DTypes of hidden and of the caller's weight
  int64_t rows = 0, worked = 0;                   // worked: those whose logits are computed
  int64_t hidden = 0, vocab = 0, lora_rank = 0;
  int64_t train_hidden = 0, train_weight = 0, train_bias = 0;
  int64_t main_grad = 0;   // weight's gradient is added to what its owner keeps
  int64_t wide = 0;        // logits in f32 from 16-bit operands
  int64_t chunk_rows = 0;  // 0: chosen here
  int64_t cap = -1;        // bytes that the workspace may take; -1: any number
  int64_t per_row = 0;     // losses of rows, whose upstream gradients come later
  int64_t keep_rows =
      0;               // most rows whose logits' gradients stay for them; -1: all where one chunk takes all
  int64_t unit = 0;    // hidden's gradient for an upstream of 1 may stay
  int64_t copies = 2;  // of a row of a chunk, as the cap counts them
  int64_t row = 0, fixed = 0;  // bytes that a driver takes besides: of a row of a chunk, of the call
};

struct LossHeadPlan {
  int64_t chunk_rows = 0;
  int64_t whole_rows = 0;              // most rows that one chunk takes
  int64_t kept = 0, unit = 0;          // rows whose logits' gradients stay; whether hidden's does
  int64_t fits = 0;                    // rows of a chunk within the cap
  int64_t row = 0, fixed = 0;          // bytes of a row of a chunk, as the cap counts them; of the call
  int64_t workspace = 0;               // bytes while a pass runs
  int64_t gradients = 0, results = 0;  // kept from forward to backward; what is left at the end
  int64_t peak = 0;
};
TIGON_API LossHeadPlan linear_head_memory(const LossHeadSizes& sizes);

}  // namespace tigon
