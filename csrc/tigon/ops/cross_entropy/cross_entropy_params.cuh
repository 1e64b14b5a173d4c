// The arguments of the CUDA kernels for cross_entropy's rows.
#pragma once

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/softcap.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon::cuda {

template <class T>
struct CrossEntropyParams {
  const T* logits;
  // May be null, or equal to logits. Of a type D of the kernel's own: T, or 16 bits where T is float.
  void* dlogits;
  const int64_t* target;
  // These four may be null.
  const void* bias;
  const float* class_weight;
  const float* scale;
  const float* entropy_scale;
  // Results, each of which may be null.
  float* loss;
  float* lse;
  float* target_logit;
  float* log_prob;
  float* entropy;
  int64_t* predicted;
  float* row_max;
  float* log_sum;
  float* smoothing;
  // Of a shard: the logits are columns [first_class, first_class + cols) of `classes`. May be null; class_weight begins at
  // the first column.
  const float* log_share;
  const float* all_entropy;
  const float* weight_sum;
  int64_t first_class, classes;
  int64_t rows, stride, dlogits_stride, scale_step, ignore_index;
  // `slice`: columns of a CTA.
  int cols, slice;
  bool bias_is_f32;
  // z = top * tanh(logit_scale * x / softcap), or logit_scale * x; dz/dx = gain * slope.
  float logit_scale, softcap, top, gain;
  float label_smoothing, z_loss;
  // With a softcap, in units of ln 2.
  SoftcapConstants cap;
};

namespace {

#include "tigon/ops/cross_entropy/cross_entropy_math.inc"

// A label of another shard: no column of this row.
template <class T>
__device__ __forceinline__ bool is_elsewhere(const CrossEntropyParams<T>& p, int64_t y) {
  return y >= 0 && y < p.classes && (y < p.first_class || y >= p.first_class + p.cols);
}

// z of the logit in column c, and dz/du if asked.
template <class T>
__device__ __forceinline__ float z_of(const CrossEntropyParams<T>& p, float x, int c,
                                      float* slope = nullptr) {
  if (p.bias != nullptr)
    x += p.bias_is_f32 ? static_cast<const float*>(p.bias)[c] : widen(static_cast<const T*>(p.bias)[c]);
  x *= p.logit_scale;
  if (p.softcap == 0.0f) return x;
  if (slope != nullptr) *slope = softcap_slope(x, p.softcap);
  return softcap_bend(x, p.softcap) * p.top;
}

}  // namespace

// Rows without bias and smoothing, whose z rises with the logit; predicted as with only_label.
// Returns false when no variant fits; nothing has been launched then.
template <class T, class D>
bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<T>& p);
// Of these, rows with a softcap. Also false when no variant fits.
template <class T, class D>
bool cross_entropy_staged(Context& ctx, const CrossEntropyParams<T>& p);

}  // namespace tigon::cuda
