// What a call of a loss head decides before it runs, and the memory that follows: functions of sizes and
// options. The drivers ask how to divide rows, the adaptors what to keep and in which dtype, Python what a
// call takes (tigon.linear_cross_entropy_memory).
#pragma once

#include <functional>

#include "tigon/base/export.h"
#include "tigon/base/tensor.h"

namespace tigon {

// Numbers of one width, which Python fills field by field.
struct LossHeadSizes {
  int64_t cuda = 0;
  int64_t dtype = int64_t(DType::bf16), weight_dtype = dtype;  // of hidden, of the caller's weight
  int64_t rows = 0, worked = 0;                                // worked: those whose logits are computed
  int64_t hidden = 0, vocab = 0, lora_rank = 0;
  int64_t train_hidden = 0, train_weight = 0, train_bias = 0;
  int64_t main_grad = 0;       // weight's gradient is added to what its owner keeps
  int64_t wide = 0;            // logits in f32 from 16-bit operands
  int64_t chunk_rows = 0;      // 0: chosen here
  int64_t cap = -1;            // bytes that the workspace may take; -1: any number
  int64_t per_row = 0;         // losses of rows, whose upstream gradients come later
  int64_t keep_rows = 0;       // most rows whose logits' gradients stay; -1: all where one chunk takes all
  int64_t unit = 0;            // hidden's gradient for an upstream of 1 may stay
  int64_t copies = 2;          // of a row of a chunk, as the cap counts them
  int64_t row = 0, fixed = 0;  // bytes that a driver takes besides: of a row of a chunk, of the call
  int64_t peak = -1;           // bytes that the call may take, results included; -1: any number
  int64_t classes = 0;         // the loss can form weight's gradient by classes
  int64_t by_classes = 0, kept_rows = 0;  // as in LinearHead
  int64_t lean = 1;                       // chunks are smaller where no gradient of weight is wanted
  int64_t sums = 0;                       // weight's gradient is f32, of one chunk too
};

// True where dlogits of this dtype may carry a factor like 1/count: in f16 small quotients would leave its
// range.
constexpr bool loss_head_scales_early(DType hidden) { return hidden != DType::f16; }
// The dtype that dweight may be formed in.
constexpr DType loss_head_dweight(DType hidden, bool one_chunk) {
  return one_chunk && loss_head_scales_early(hidden) ? hidden : DType::f32;
}

// Elements between rows of logits: whole 128-byte lines, so that an odd vocabulary costs the products
// nothing.
constexpr int64_t loss_head_logit_stride(int64_t vocab) { return (vocab + 63) / 64 * 64; }

// Rows of a chunk, from what the call will allocate; chunk_rows and cap are not looked at.
//   CPU   1024, and a quarter more rather than a second chunk.
//   CUDA  As many as the logits of 512 MiB have, at least 1024: enough for the products' speed. Of a call
//         without a gradient of weight, whose other memory is small, 256 MiB. Where weight has a gradient,
//         every chunk more reads and writes it once more in f32, so logits may take what that gradient's cast
//         will take anyway (H rows); and one chunk takes all rows where that needs no more than a tenth above
//         the f32 sum and its cast (2.3 H rows in 16 bits): no sum, no cast.
TIGON_API int64_t loss_head_chunk_rows(const LossHeadSizes& sizes);
// Most rows that one chunk takes whole.
TIGON_API int64_t loss_head_whole_rows(const LossHeadSizes& sizes);
// Rows whose logits take as much as those of 64 classes of `rows`.
TIGON_API int64_t loss_head_class_rows(int64_t rows, int64_t vocab);
// Most rows of a part with wide logits.
TIGON_API int64_t loss_head_wide_rows(bool cuda, int64_t vocab);

struct LossHeadPlan {
  int64_t chunk_rows = 0;
  int64_t whole_rows = 0;              // most rows that one chunk takes
  int64_t kept = 0, unit = 0;          // rows whose logits' gradients stay; whether hidden's does
  int64_t fits = 0;                    // rows of a chunk within the cap
  int64_t row = 0, fixed = 0;          // bytes of a row of a chunk, as the cap counts them; of the call
  int64_t workspace = 0;               // bytes while a pass runs
  int64_t gradients = 0, results = 0;  // kept from forward to backward; what is left at the end
  int64_t peak = 0;
  int64_t capped = 0;  // the call has to ask for chunk_rows and the next two, and to keep nothing
  int64_t by_classes = 0, kept_rows = 0;
  int64_t least = 0;  // the smallest peak, where it is above that of the sizes
};
TIGON_API LossHeadPlan loss_head_memory(const LossHeadSizes& sizes);
// The plan within the peak of the sizes. `plan` gives that of a call whatever its peak: loss_head_memory,
// or with what a driver takes in addition. A call that would take more keeps nothing and takes smaller
// chunks. Where a sum over chunks needs more memory than weight's gradient does, that is formed by classes;
// with `keeps`, which losses of groups do not, as many rows are kept as fit.
LossHeadPlan loss_head_within(const LossHeadSizes& sizes,
                              const std::function<LossHeadPlan(const LossHeadSizes&)>& plan,
                              bool keeps = false);

}  // namespace tigon
