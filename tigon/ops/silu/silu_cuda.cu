#include "tigon/base/cuda/elementwise.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/ops/silu/silu.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/silu/silu_math.inc"

struct Forward {
  // x -> y
  static constexpr int kIn = 1, kOut = 1;
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const { out[0] = silu_y(in[0]); }
};

struct Backward {
  // dy, x -> dx
  static constexpr int kIn = 2, kOut = 1;
  __device__ void operator()(const float (&in)[kIn], float (&out)[kOut]) const {
    out[0] = silu_dx(in[0], in[1]);
  }
};

}  // namespace

// The variants (flat or by rows, 16-byte vectors or single elements) are those of all pointwise
// ops: tigon/base/cuda/elementwise.cuh.

void silu_fwd(Context& ctx, const SiluFwd& a) {
  pointwise("silu", ctx, Pointwise<Forward>{.in = {a.x}, .out = {a.y}});
}

void silu_bwd(Context& ctx, const SiluBwd& a) {
  pointwise("silu_bwd", ctx, Pointwise<Backward>{.in = {a.dy, a.x}, .out = {a.dx}});
}

}  // namespace tigon::cuda
