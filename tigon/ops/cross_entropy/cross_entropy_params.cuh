// What the CUDA kernels of cross_entropy's rows are given.
#pragma once

#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon::cuda {

template <class T>
struct CrossEntropyParams {
  const T* logits;
  T* dlogits;  // may be null, or logits
  const int64_t* target;
  const void* bias;            // may be null
  const float* class_weight;   // may be null
  const float* scale;          // may be null
  const float* entropy_scale;  // may be null
  float* loss;                 // results: each may be null
  float* lse;
  float* target_logit;
  float* log_prob;
  float* entropy;
  int64_t* predicted;
  int64_t rows, stride, dlogits_stride, scale_step, ignore_index;
  int cols, slice;  // slice: packs of a block (columns in the held variant)
  bool bias_is_f32;
  float logit_scale, softcap, top,
      gain;  // z = top * tanh(logit_scale * x / softcap) or logit_scale * x; dz/dx = gain * slope
  float label_smoothing, z_loss;
};

// Rows whose z is the logit itself, without smoothing, entropy and argmax. False: no variant fits, nothing was launched.
template <class T>
bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<T>& p);

}  // namespace tigon::cuda
