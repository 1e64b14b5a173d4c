// Linear layer and softmax cross-entropy in one: hidden states x head weight x labels -> loss and gradients, with the logits
// of no more than a chunk of rows alive at any time.
//
// Formula     logit = hidden . weight^T (+ bias), then the loss of tigon/ops/cross_entropy/cross_entropy.h row by row
//             dhidden = dlogits . weight,  dweight = dlogits^T . hidden,  dbias = column sum of dlogits
//             For a scalar loss dlogits exists while the chunk does (Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary
//             Language Models", section 4, discusses the recomputing alternative): three matrix products in all.
// Shapes      hidden, dhidden [rows, H], any row stride; weight [V, H], any row stride; dweight [V, H]; target, loss [rows];
//             bias, dbias, class_weight [V]; scale [1]; upstream [rows]
// Dtypes      hidden, weight f32 | bf16 | f16, the same; target i64; dhidden of hidden's dtype; dweight, dbias f32;
//             losses, scale f32; products accumulate in f32
// Rounding    logits and dlogits of a chunk are rounded to hidden's dtype; dweight is summed over chunks in f32 and rounded
//             only when finish() casts it: the number of chunks does not show beyond the order of f32 additions.
//             (In PyTorch on the CPU, bf16 products reach the f32 sum after one rounding per chunk: aten's product is bf16.)
// Saved       dhidden, dweight, dbias for finish(); nothing of the size of the logits
// Scaling     f32 and bf16: dlogits carry `scale` (1/count, 1/denominator). f16: they do not, small quotients would leave its
//             range; linear_cross_entropy_finish multiplies by scale then.
// Aliasing    none
// Determinism bitwise, run to run
// Traffic     per chunk: hidden and weight once or twice each, logits written, read, written, read twice; dweight read and
//             written in f32 per chunk after the first
// Refused     sizes, dtypes or devices that do not fit, chunk_rows < 0, H < 1, V < 1, and what cross_entropy refuses
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
  Vector denominator;   // [1] on the device; empty: none
  double host_denominator = 0.0;
  bool has_host_denominator = false;
  Reduction reduction = Reduction::mean;
  int64_t ignore_index = -100;
  float label_smoothing = 0.0f;
  float softcap = 0.0f;  // 0: none
  float logit_scale = 1.0f;
  float z_loss = 0.0f;
  int64_t chunk_rows = 0;  // 0: linear_cross_entropy_chunk
  Vector upstream;         // f32 [rows]: gradient of each row's loss, instead of scale (the backward of Reduction::none)

  Vector loss;     // f32 [rows], always
  Vector total;    // out: f32 [1], mean and sum
  Vector scale;    // out: f32 [1], mean and sum
  Matrix dhidden;  // empty: not wanted
  Matrix dweight;  // f32 [V, H]; empty: not wanted
  Vector dbias;    // f32 [V]; empty: not wanted
};
TIGON_API void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& a);

// out = in * dloss * scale (scale only where dlogits did not carry it: empty otherwise), rounded once. in may not be out.
struct LinearCrossEntropyFinish {
  Matrix in;
  Vector dloss;  // f32 [1], on the device
  Vector scale;  // f32 [1], on the device; empty: 1
  Matrix out;
};
TIGON_API void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a);

// True when dlogits of this dtype carry `scale` already.
constexpr bool linear_cross_entropy_scales_early(DType hidden) { return hidden != DType::f16; }

// Rows per chunk for a batch. CUDA: 4096, the knee of the cost model 150/C (dweight is read and written once more per chunk);
// a batch that exceeds it by less than a quarter stays whole; larger ones are cut evenly. CPU: 1024.
TIGON_API int64_t linear_cross_entropy_chunk(Device device, int64_t rows);

namespace cpu {
void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a);
void linear_cross_entropy_ones(Context& ctx, Vector out);
}  // namespace cpu
namespace cuda {
void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a);
void linear_cross_entropy_ones(Context& ctx, Vector out);
}  // namespace cuda

}  // namespace tigon
