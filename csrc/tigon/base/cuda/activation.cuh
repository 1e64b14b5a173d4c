// Launches ops of one tensor (tigon/base/activation.h), given their formula.
#pragma once

#include "tigon/base/activation.h"
#include "tigon/base/cuda/elementwise.cuh"
#include "tigon/base/cuda/math.cuh"

namespace tigon::cuda {

template <float (*kY)(float)>
struct ActivationForward {
  // Maps x -> y.
  static constexpr int kIn = 1, kOut = 1;
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const { out[0] = kY(in[0]); }
};

template <float (*kDx)(float, float)>
struct ActivationBackward {
  // Maps dy, x -> dx.
  static constexpr int kIn = 2, kOut = 1;
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const { out[0] = kDx(in[0], in[1]); }
};

template <float (*kY)(float)>
void activation_fwd(const char* op, Context& ctx, const ActivationFwd& a) {
  pointwise(op, ctx, Pointwise<ActivationForward<kY>>{.in = {a.x}, .out = {a.y}});
}
template <float (*kDx)(float, float)>
void activation_bwd(const char* op, Context& ctx, const ActivationBwd& a) {
  pointwise(op, ctx, Pointwise<ActivationBackward<kDx>>{.in = {a.dy, a.x}, .out = {a.dx}});
}

}  // namespace tigon::cuda
