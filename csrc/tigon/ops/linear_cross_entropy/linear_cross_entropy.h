// Linear layer and softmax cross-entropy in one: hidden states x head weight x labels -> loss and gradients, with the logits
// of no more than a chunk of rows alive at any time.
//
// Formula     logit = hidden . weight^T (+ lora_scale (hidden . lora_a^T) . lora_b^T) (+ bias), then row by row the loss of
//             tigon/ops/cross_entropy/cross_entropy.h, times token_weight
//             dhidden = dlogits . weight,  dweight = dlogits^T . hidden,  dbias = column sum of dlogits
//             with lora: u = lora_scale (hidden . lora_a^T), t = lora_scale (dlogits . lora_b):
//             dhidden += t . lora_a,  dlora_a = t^T . hidden,  dlora_b = dlogits^T . u
//             For a scalar loss dlogits exists while the chunk does (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary
//             Language Models", section 4, discusses the recomputing alternative): three matrix products in all.
// Shapes      hidden, dhidden [rows, H], any row stride; weight [V, H], any row stride; dweight [V, H]; target, loss [rows];
//             bias, dbias, class_weight [V]; scale [1]; upstream, entropy_upstream, token_weight [rows];
//             lora_a, dlora_a [r, H]; lora_b, dlora_b [V, r]
// Dtypes      hidden, weight, lora_a, lora_b f32 | bf16 | f16, the same; target, predicted i64; dhidden of hidden's dtype;
//             dbias, dlora_a, dlora_b f32; dweight f32, or hidden's where one chunk takes all rows; losses, scale and the other
//             results of rows f32; products accumulate in f32
// Rounding    logits and dlogits of a chunk are rounded to hidden's dtype (with lora the logits twice, u and t once); dweight
//             is summed over chunks in f32 and rounded once, when finish() casts it; a single chunk's is rounded by its product,
//             and again by finish() where the upstream gradient is not a power of two. The number of chunks does not show
//             beyond the order of f32 additions and that.
//             (In PyTorch on the CPU, bf16 products reach the f32 sum after one rounding per chunk: aten's product is bf16.)
// Saved       dhidden, dweight, dbias for finish(); nothing of the size of the logits
// Scaling     f32 and bf16: dlogits carry `scale` (1/count, 1/denominator). f16: they do not, small quotients would leave its
//             range; linear_cross_entropy_finish multiplies by scale then.
// Masked rows target == ignore_index. Every result of such a row is 0 (predicted: -1), its dhidden is a row of zeros.
//             They cost nothing where their number is known: on the CPU always, on CUDA where `valid_rows` says it (the list of
//             rows that count is made on the device: no synchronisation). Without it every row is computed.
//             A promise that does not hold: on the CPU refused; on CUDA every loss of the call is NaN (so is their sum), unless
//             valid_rows equals rows, where nothing was left out and all is right.
// Aliasing    none
// Determinism bitwise, run to run
// Traffic     per chunk: hidden and weight once or twice each, logits written, read, written, read twice; of more than one chunk
//             dweight read and written in f32 per chunk after the first; with left-out rows hidden and dhidden once more each
// Refused     sizes, dtypes or devices that do not fit, chunk_rows < 0, H < 1, V < 1, and what cross_entropy refuses; on the
//             CPU labels outside [0, V) and a valid_rows that is not the count
#pragma once

#include "tigon/base/context.h"

namespace tigon {

enum class Reduction : int { none = 0, mean = 1, sum = 2 };

struct LinearCrossEntropy {
  Matrix hidden;
  Matrix weight;
  Vector target;
  Vector bias;          // [V] f32 | hidden's dtype; empty: none
  Vector class_weight;  // [V] f32; empty: none
  Vector
      token_weight;  // [rows] f32, factor of a row's loss and gradient (not of a mean's denominator); empty: none
  Vector denominator;  // [1] on the device; empty: none
  double host_denominator = 0.0;
  bool has_host_denominator = false;
  Reduction reduction = Reduction::mean;
  int64_t ignore_index = -100;
  float label_smoothing = 0.0f;
  float softcap = 0.0f;  // 0: none
  float logit_scale = 1.0f;
  float temperature = 1.0f;  // z = softcap * tanh(logit_scale * logit / softcap) / temperature
  float z_loss = 0.0f;
  int64_t chunk_rows = 0;   // 0: linear_cross_entropy_chunk
  int64_t valid_rows = -1;  // how many labels are not ignore_index; -1: not known
  Vector
      upstream;  // f32 [rows]: gradient of each row's loss, instead of scale (the backward of Reduction::none)
  Vector entropy_upstream;  // f32 [rows]: gradient of each row's entropy besides; empty: none

  Matrix lora_a, lora_b;  // empty: none
  float lora_scale = 1.0f;

  Vector loss;       // f32 [rows], always
  Vector total;      // out: f32 [1], mean and sum
  Vector scale;      // out: f32 [1], mean and sum
  Vector z_term;     // out: f32 [rows], token_weight * z_loss * lse^2; empty: not wanted
  Vector log_prob;   // out: f32 [rows], z_y - lse; empty: not wanted
  Vector lse;        // out: f32 [rows]; empty: not wanted
  Vector entropy;    // out: f32 [rows]; empty: not wanted
  Vector predicted;  // out: i64 [rows], first argmax; empty: not wanted
  Matrix
      kept;  // dlogits of the rows worked on, without upstream and token_weight [>= their number, V]; empty: none
  Matrix dhidden;            // empty: not wanted
  Matrix dweight;            // [V, H] f32, or hidden's dtype with one chunk; empty: not wanted
  bool add_dweight = false;  // dweight is added to what is there (a gradient kept in f32 by its owner)
  Vector dbias;              // f32 [V]; empty: not wanted
  Matrix dlora_a, dlora_b;   // f32; empty: not wanted
};
TIGON_API void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& a);

// The gradients of per-row losses from `kept`, which a call with the same target and valid_rows wrote: two products. kept is
// only read. Not with lora.
TIGON_API void linear_cross_entropy_kept_gradient(Context& ctx, const LinearCrossEntropy& a);

// out = in * dloss * scale (scale only where dlogits did not carry it: empty otherwise), rounded once. out may be in where scale
// is empty: then nothing is read or written for dloss 1.
struct LinearCrossEntropyFinish {
  Matrix in;
  Vector dloss;  // f32 [1], on the device
  Vector scale;  // f32 [1], on the device; empty: 1
  Matrix out;
};
TIGON_API void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a);

// One chunk in two halves, for a caller who decides on the upstream gradient in between. The arguments are those of one
// chunk: `a.hidden`, `a.target`, results and upstream of its rows; a.upstream is required by the second half.
//   logits     the product, and log_prob, entropy, lse, predicted where wanted; valid_rows, reduction are not looked at
//   gradient   logits become dlogits, then the products; `first`: dweight and its like are written, not added to
TIGON_API void linear_cross_entropy_chunk_logits(Context& ctx, const LinearCrossEntropy& a, Matrix logits);
TIGON_API void linear_cross_entropy_chunk_gradient(Context& ctx, const LinearCrossEntropy& a, Matrix logits,
                                                   bool first);

// True when dlogits of this dtype carry `scale` already.
constexpr bool linear_cross_entropy_scales_early(DType hidden) { return hidden != DType::f16; }

// Rows per chunk, from what the call will allocate.
//   CPU   1024, and a quarter more rather than a second chunk.
//   CUDA  As many as the logits of 512 MiB have, at least 1024: enough for the products' speed. Where weight has a gradient,
//         every chunk more reads and writes it once more in f32, so logits may take what that gradient's cast will take anyway
//         (H rows); and one chunk takes all rows where that needs no more than a tenth above the f32 sum and its cast (2.3 H
//         rows in 16 bits): no sum, no cast.
struct LinearCrossEntropySizes {
  Device device = Device::cpu;
  DType dtype = DType::bf16;
  int64_t rows = 0, hidden = 0, vocab = 0;
  bool dweight = false;      // weight's gradient is formed
  bool add_dweight = false;  // and added to what its owner keeps
};
TIGON_API int64_t linear_cross_entropy_chunk(const LinearCrossEntropySizes& sizes);
// Most rows that one chunk takes whole.
TIGON_API int64_t linear_cross_entropy_whole(const LinearCrossEntropySizes& sizes);
// The dtype that dweight may be formed in.
constexpr DType linear_cross_entropy_dweight(DType hidden, bool one_chunk) {
  return one_chunk && linear_cross_entropy_scales_early(hidden) ? hidden : DType::f32;
}

// The rows that count, in order, from one pass over the labels. Where their number is not index.size, `fault` is NaN and every
// label is made a wrong one, so that nothing computed from the list can pass for a result; `index` is inside [0, rows) always.
struct LinearCrossEntropyCompact {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector index;     // out: i64 [count], row of each; 0 beyond the true count
  Vector labels;    // out: i64 [count]
  Vector position;  // out: i64 [rows], place of each row in the list, -1: ignored
  Vector fault;     // out: f32 [1], 0 or NaN
};
TIGON_API void linear_cross_entropy_compact(Context& ctx, const LinearCrossEntropyCompact& a);

// Factor of the gradient of each row in the list: token_weight * upstream * scale, what is empty counting as 1; 0 where
// the label is ignored.
struct LinearCrossEntropyFactors {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector index;                          // empty: row i is row i
  Vector token_weight, upstream, scale;  // f32 [rows], [rows], [1]
  Vector out;                            // f32 [count]
};

// Results of all rows from those of the list.
struct LinearCrossEntropyResults {
  Vector target, position, fault, token_weight;  // position, fault empty: the list is all rows
  int64_t ignore_index = -100;
  float z_loss = 0.0f;
  Vector loss, lse, log_prob, entropy, predicted;  // of the list
  Vector out_loss, out_z_term, out_lse, out_log_prob, out_entropy, out_predicted;
};

// Rows of a matrix by a list: gather to[i] = from[index[i]], scatter to[index[i]] = from[i]; times factor[i] where given.
struct LinearCrossEntropyMove {
  Matrix from, to;
  Vector index;   // empty: row i is row i, from may be to then
  Vector factor;  // f32; empty: 1
  bool scatter = false;
};

// Rows with columns appended or cut off: to[r][c] = from[r][c], 0 past from's columns. Products of 16-bit operands on CUDA
// want rows of whole 16-byte vectors. Same dtype, no overlap.
struct LinearCrossEntropyColumns {
  Matrix from, to;
};
TIGON_API void linear_cross_entropy_columns(Context& ctx, const LinearCrossEntropyColumns& a);

#define TIGON_LINEAR_CROSS_ENTROPY_BACKEND                                             \
  void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a);   \
  void linear_cross_entropy_ones(Context& ctx, Vector out);                            \
  void linear_cross_entropy_zero(Context& ctx, const Matrix& out);                     \
  void linear_cross_entropy_compact(Context& ctx, const LinearCrossEntropyCompact& a); \
  void linear_cross_entropy_factors(Context& ctx, const LinearCrossEntropyFactors& a); \
  void linear_cross_entropy_results(Context& ctx, const LinearCrossEntropyResults& a); \
  void linear_cross_entropy_move(Context& ctx, const LinearCrossEntropyMove& a);       \
  void linear_cross_entropy_columns(Context& ctx, const LinearCrossEntropyColumns& a);
namespace cpu {
TIGON_LINEAR_CROSS_ENTROPY_BACKEND
}
namespace cuda {
TIGON_LINEAR_CROSS_ENTROPY_BACKEND
}
#undef TIGON_LINEAR_CROSS_ENTROPY_BACKEND

}  // namespace tigon
