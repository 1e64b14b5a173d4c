#include "tigon/base/cuda/elementwise.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/ops/swiglu/swiglu.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/swiglu/swiglu_math.inc"

struct Forward {
  static constexpr int kIn = 2, kOut = 1;  // gate, up -> y
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = swiglu_y(in[0], in[1]);
  }
};

struct Backward {
  static constexpr int kIn = 3, kOut = 2;  // dy, gate, up -> dgate, dup
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    swiglu_gradients(in[0], in[1], in[2], out[0], out[1]);
  }
};

}  // namespace

// Variants: those of every pointwise op (flat or rows, 16-byte packs or single elements),
// tigon/base/cuda/elementwise.cuh.

void swiglu_fwd(Context& ctx, const SwigluFwd& a) {
  pointwise("swiglu", ctx, Pointwise<Forward>{.in = {a.gate, a.up}, .out = {a.y}});
}

void swiglu_bwd(Context& ctx, const SwigluBwd& a) {
  const Matrix& up = a.dgate.data != nullptr ? a.up : a.gate;  // dup alone needs no up
  pointwise("swiglu_bwd", ctx, Pointwise<Backward>{.in = {a.dy, a.gate, up}, .out = {a.dgate, a.dup}});
}

}  // namespace tigon::cuda
