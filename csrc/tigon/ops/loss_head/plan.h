// Declares what a call of a loss head decides before it runs, and the memory that follows. All of it are
// functions of sizes and options. The drivers ask how to divide rows, the adaptors what to keep and in which
// dtype, and Python how much memory a call takes (tigon.linear_cross_entropy_memory).
#pragma once

#include <functional>

#include "tigon/base/export.h"
#include "tigon/base/tensor.h"

namespace tigon {

// Holds the sizes and options of a call. All numbers have one width, since Python fills them field by field.
struct LossHeadSizes {
  int64_t cuda = 0;
  int64_t dtype = int64_t(DType::bf16), weight_dtype = dtype;  // dtypes of hidden and of the caller's weight
  int64_t rows = 0, worked = 0;                                // worked: rows whose logits are computed
  int64_t hidden = 0, vocab = 0, lora_rank = 0;
  int64_t train_hidden = 0, train_weight = 0, train_bias = 0;
  int64_t main_grad = 0;   // 1 if weight's gradient is added to what its owner keeps
  int64_t wide = 0;        // 1 if logits are f32 although operands have 16 bits
  int64_t chunk_rows = 0;  // 0 if they are chosen here
  int64_t cap = -1;        // bytes that the workspace may take; -1 for any number
  int64_t per_row = 0;     // 1 for losses of rows, whose upstream gradients come later
  // Limits the rows whose logits' gradients are kept; -1 keeps all if one chunk takes all.
  int64_t keep_rows = 0;
  int64_t unit = 0;    // 1 if hidden's gradient for an upstream gradient of 1 may be kept
  int64_t copies = 2;  // copies of a row of a chunk that the cap counts
  // Hold the bytes that a driver takes in addition: for each row of a chunk, and for the call.
  int64_t row = 0, fixed = 0;
  // Limits the bytes that the call may take, with its results; -1 for any number.
  int64_t peak = -1;
  int64_t classes = 0;                    // 1 if the loss can form weight's gradient by classes
  int64_t by_classes = 0, kept_rows = 0;  // as in LinearHead
  int64_t lean = 1;                       // 1 if chunks are smaller without a gradient of weight
  int64_t sums = 0;                       // 1 if weight's gradient is f32 even if one chunk takes all
};

// True if dlogits of this dtype may carry a factor like 1/count: in f16 small quotients would leave its
// range.
constexpr bool loss_head_scales_early(DType hidden) { return hidden != DType::f16; }
// Returns the dtype that dweight may be formed in.
constexpr DType loss_head_dweight(DType hidden, bool one_chunk) {
  return one_chunk && loss_head_scales_early(hidden) ? hidden : DType::f32;
}

// Returns the elements from one row of logits to the next: whole 128-byte lines, so that an odd vocabulary
// does not slow the GEMMs down.
constexpr int64_t loss_head_logit_stride(int64_t vocab) { return (vocab + 63) / 64 * 64; }

// Returns the rows of a chunk, from what the call will allocate. It does not use chunk_rows and cap.
//   CPU   1024 rows. A quarter more are taken if this avoids a second chunk.
//   CUDA  As many rows as have 512 MiB of logits, at least 1024, which is enough for the GEMMs' speed. A call
//         without a gradient of weight takes 256 MiB, since its other memory is small. If weight has a
//         gradient, each further chunk reads and writes it once more in f32. Logits may therefore take what
//         the cast of that gradient will take anyway (H rows). One chunk takes all rows if this needs no
//         more than a tenth above the f32 sum and its cast (2.3 H rows in 16 bits): then there is neither
//         sum nor cast.
TIGON_API int64_t loss_head_chunk_rows(const LossHeadSizes& sizes);
// Returns the most rows that one chunk takes whole.
TIGON_API int64_t loss_head_whole_rows(const LossHeadSizes& sizes);
// Returns the rows whose logits take as much memory as the logits of `rows` rows for 64 classes.
TIGON_API int64_t loss_head_class_rows(int64_t rows, int64_t vocab);
// Returns the most rows of a part with wide logits.
TIGON_API int64_t loss_head_wide_rows(bool cuda, int64_t vocab);

// Holds what a call decides, and its memory in bytes.
struct LossHeadPlan {
  int64_t chunk_rows = 0;
  int64_t whole_rows = 0;  // most rows that one chunk takes whole
  // Hold the number of rows whose logits' gradients are kept, and 1 if hidden's gradient is kept.
  int64_t kept = 0, unit = 0;
  int64_t fits = 0;  // rows of a chunk that fit within the cap
  // Hold the bytes of a row of a chunk, as the cap counts them, and of the call.
  int64_t row = 0, fixed = 0;
  int64_t workspace = 0;  // bytes while a pass runs
  // Hold the bytes that are kept from forward to backward, and those that are left at the end.
  int64_t gradients = 0, results = 0;
  int64_t peak = 0;
  // Is 1 if the call has to pass on chunk_rows, by_classes and kept_rows, and to keep nothing.
  int64_t capped = 0;
  int64_t by_classes = 0, kept_rows = 0;
  // Holds the smallest peak if it is above that of the sizes.
  int64_t least = 0;
};
// Returns the plan of a call and its memory, without regard to sizes.peak.
TIGON_API LossHeadPlan loss_head_plan(const LossHeadSizes& sizes);
// Returns the plan that stays within the peak of the sizes. `plan` returns the plan of a call that ignores
// the peak: loss_head_plan, or that with what a driver takes in addition. A call that would take more keeps
// nothing and takes smaller chunks. If a sum over chunks needs more memory than weight's gradient does, the
// gradient is formed by classes. With `keeps`, which losses of groups do not set, as many rows are kept as
// fit.
LossHeadPlan loss_head_plan_within(const LossHeadSizes& sizes,
                                   const std::function<LossHeadPlan(const LossHeadSizes&)>& plan,
                                   bool keeps = false);

}  // namespace tigon
