// The arguments of the CUDA kernels for cross_entropy's rows.
#pragma once

#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon::cuda {

template <class T>
struct CrossEntropyParams {
  const T* logits;
  // May be null, or equal to logits.
  T* dlogits;
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
  int64_t rows, stride, dlogits_stride, scale_step, ignore_index;
  // `slice`: vectors of a row per CTA (columns in rows without options).
  int cols, slice;
  bool bias_is_f32;
  // z = top * tanh(logit_scale * x / softcap), or logit_scale * x; dz/dx = gain * slope.
  float logit_scale, softcap, top, gain;
  float label_smoothing, z_loss;
};

// Rows whose z is the logit itself, without smoothing, entropy and argmax. Returns false when no
// variant fits; nothing has been launched then.
template <class T>
bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<T>& p);

}  // namespace tigon::cuda
