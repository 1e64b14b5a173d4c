// Runs AdamW over a list of tensors (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization",
// arXiv:1711.05101, algorithm 2; Kingma & Ba 2015, arXiv:1412.6980, algorithm 1; amsgrad: Reddi et al. 2018,
// arXiv:1904.09237, algorithm 2). A list is one launch, whatever its sizes, alignments and dtypes. A list
// that does not fit the parameters of a kernel takes a few tiny launches more, which write it to scratch. If
// lr or step is on the device, one more launch computes the constants that depend on them.
// Formula     g = sign * grad * clip / grad_scale, sign -1 with maximize;
//             g += weight_decay * p  unless decoupled
//             p -= lr * weight_decay * p  if decoupled;  t = steps done + 1
//             m += (1 - beta1) * (g - m);  v += (1 - beta2) * (g^2 - v);  u = v, or max(u, v) with amsgrad
//             p -= lr / (1 - beta1^t) * m / (sqrt(u) / sqrt(1 - beta2^t) + eps)
// Shapes      all streams of a tensor have its size; they are read in the order of memory
// Dtypes      param f32 | bf16 | f16; grad param's or f32; each moment f32, bf16 or param's, max_exp_avg_sq
//             as exp_avg_sq; or both moments are codes, u8; arithmetic f32, what depends on t only f64
// Rounding    p by the values of m, v and u before these are rounded, on store: those of 16 bits to nearest
//             even or, with moment_rounding, stochastic; u takes v's bits. To nearest, v of bf16 stalls:
//             (1 - beta2) (g^2 - v) is below half of its gap unless g^2 is far above v. p of 16 bits takes
//             one of AdamwRounding, and p of 32 bits none:
//             nearest     to nearest even, as PyTorch does
//             stochastic  up with the probability of what is cut off, by 16 bits of Philox4x32-10 (Salmon et
//                         al. 2011, SC '11) keyed by (seed, t, first + index): bitwise equal on every
//                         device, in any list and any split. Moments take multiples of these bits
//                         (adamw_bits.inc)
//             split       p is the upper half of an fp32 master, rounded to nearest, ties away from 0;
//                         `low` holds its low 16 bits. bf16 only
//             master      `master` holds it; p is rounded from it, bf16 as in split
// Codes       8 bits (Dettmers et al. 2021, arXiv:2110.02861; the map of bitsandbytes, adamw_codes.h) in
//             blocks of 256 elements from the first on; the last block may be shorter. A block codes x = m,
//             and x = sqrt(v), so that a small v next to large ones is not lost. It keeps a = max |x|. The
//             code is the nearest to x * (1 / a), the lower of two that are as near, and not 0 if
//             sqrt(v) > 0.
//             It reads as m = q * a, v = (q * a)^2. The update takes m and v as they are before they are
//             coded. If an m or v of a block is not finite, a is NaN, and so are all its elements in the next
//             step. If a is below 2^-126, it counts as 0. Zero has code 127 in exp_avg, and 0 in exp_avg_sq.
//             amsgrad is refused. Codes take one launch more.
// Saved       nothing; param, the moments, low or master, and step are updated in place
// Aliasing    none among the tensors of a call
// Determinism bitwise: every element by itself, whatever the list, its order, the device or its instruction
//             set
// Traffic     read grad; read and write all the others: 14 bytes an element in bf16, 28 in f32;
//             with codes 10.06 and 16.06
// Refused     sizes, dtypes, hyperparameters, or steps that do not fit: tigon::Error before anything is
//             written
#pragma once

#include <span>

#include "tigon/base/fields.h"

namespace tigon {

enum class AdamwRounding : int8_t { nearest, stochastic, split, master };
inline constexpr int kAdamwRoundings = 4;
constexpr const char* name_of(AdamwRounding r) {
  constexpr const char* kNames[] = {"nearest", "stochastic", "split", "master"};
  return kNames[int(r)];
}

// Holds the hyperparameters that tensors share.
struct AdamwGroup {
  double lr = 1e-3;
  // If given, this element on the context's device is used instead of lr.
  const float* lr_on_device = nullptr;
  double beta1 = 0.9;    // in [0, 1)
  double beta2 = 0.999;  // in [0, 1)
  double eps = 1e-8;     // >= 0
  double weight_decay = 1e-2;
  bool decoupled = true;
  bool maximize = false;
};

struct AdamwTensor {
  Vector param;
  Vector grad;
  Vector exp_avg;
  Vector exp_avg_sq;
  // amsgrad has it; absent otherwise.
  Vector max_exp_avg_sq;
  // i16: the low half of the master, with rounding split and a 16-bit param.
  Vector low;
  // f32: the master weights, with rounding master and a 16-bit param.
  Vector master;
  // f32 [ceil(size / 256)]: the absmax of each block of codes; absent if the moments are no codes.
  Vector avg_absmax;
  Vector root_absmax;
  // f32 [1]: the number of steps done, to which the call adds one. If absent, `steps` counts.
  Vector step;
  // The number of steps done before this call; at most 2^31 - 2.
  int64_t steps = 0;
  // The first element has this index in the stream of random bits.
  int64_t first = 0;
  int64_t group = 0;
};

struct Adamw {
  std::span<const AdamwTensor> tensors;
  std::span<const AdamwGroup> groups;
  AdamwRounding rounding = AdamwRounding::nearest;
  AdamwRounding moment_rounding = AdamwRounding::nearest;  // nearest or stochastic
  uint64_t seed = 0;
  // The next three are scalars [1] f32 on the context's device, or absent.
  Vector clip;        // factor of every gradient
  Vector grad_scale;  // divisor of every gradient
  Vector found_inf;   // if not 0, nothing is written
};

TIGON_API_ENTRY(adamw, Adamw)

}  // namespace tigon
