// CUDA backend of gated RMSNorm: the formula, for the kernels of the norm family.
//
// Bytes per element (b = element size): forward 3b, backward 5b. Also 4 bytes of rstd per group,
// the weight once per CTA (from L2), and its gradient's partials through L2.
// Instructions per element: about 20 forward, 40 backward, 4 and 6 of them on the special-function
// unit; the memory-bound budget is 46 and 77, 12 and 20 of them (bf16).
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/gated_rms_norm/gated_rms_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/gated_rms_norm/gated_rms_norm_math.inc"

constexpr const char* kOp = "gated_rms_norm";

// W is the type of the weight: fp32 weights ask for fp32 accuracy of the gate.
template <class W>
struct Scalars {
  float offset;
  bool round_h, round_weighted, silu;
  __device__ float act(float gate) const { return gated_rms_norm_act(ApproxFor<W>(gate), silu); }
  __device__ float slope(float gate) const { return gated_rms_norm_slope(ApproxFor<W>(gate), silu); }
};

// in: x, gate.
template <bool NormFirst, class X, class W>
struct Forward : Scalars<W> {
  using Element = X;
  static constexpr int kIn = 2, kParams = 1;
  static constexpr bool kSubtractMean = false, kWritesResidual = false;
  __device__ float value(const float (&in)[2]) const { return NormFirst ? in[0] : in[0] * this->act(in[1]); }
  __device__ float result(float h, const float (&weight)[1], const float (&in)[2]) const {
    float y = gated_rms_norm_weighted(h, weight[0], this->offset);
    if (!NormFirst) return y;
    return (this->round_weighted ? round_to<X>(y) : y) * this->act(in[1]);
  }
};

// in: x, gate; out: dx, dgate.
template <bool NormFirst, class X, class W>
struct Backward : Scalars<W> {
  using Element = X;
  static constexpr int kIn = 2, kOut = 2, kSums = 1;
  static constexpr bool kSubtractMean = false;
  __device__ float value(const float (&in)[2]) const { return NormFirst ? in[0] : in[0] * this->act(in[1]); }
  __device__ float upstream(float dy, const float (&in)[2]) const {
    return NormFirst ? dy * this->act(in[1]) : dy;
  }
  __device__ void results(float dv, float dy, float h, float weight, const float (&in)[2],
                          float (&out)[2]) const {
    float slope = this->slope(in[1]);
    if constexpr (NormFirst) {
      float y = (this->round_h ? round_to<X>(h) : h) * weight;
      out[0] = dv;
      out[1] = dy * (this->round_weighted ? round_to<X>(y) : y) * slope;
    } else {
      out[0] = dv * this->act(in[1]);
      out[1] = dv * in[0] * slope;
    }
  }
};

// Groups are short, so there are fewer shapes than for the other norms.
using ShapeTable = ShapeList<Unpipelined<8, 2, 32, 2>, Unpipelined<32, 2, 8, 2>, PipelinedBlock<3, 2, 512>>;

template <class W, class Args>
Scalars<W> scalars_of(const Args& a) {
  bool llama = a.how.rounding == Rounding::llama;
  return {.offset = a.weight ? a.how.offset : 0.0f,
          .round_h = llama,
          .round_weighted = llama && !(a.weight && a.weight.dtype != a.x.dtype),
          .silu = a.how.act == GateAct::silu};
}

// Calls fn(order, x type, weight type, y type); with the norm first, y has x's type.
template <class Fn>
void with_types(const GatedRmsNorm& how, DType x, const Vector& weight, DType y, Fn&& fn) {
  if (how.norm_first)
    with_weight_types(kOp, x, weight, [&](auto tx, auto tw) { fn(std::true_type{}, tx, tw, tx); });
  else
    with_result_types(kOp, x, weight, y,
                      [&](auto tx, auto tw, auto ty) { fn(std::false_type{}, tx, tw, ty); });
}

}  // namespace

void gated_rms_norm_fwd(Context& ctx, const GatedRmsNormFwd& a) {
  with_types(a.how, a.x.dtype, a.weight, a.y.dtype,
             [&]<bool NormFirst, class X, class W, class Y>(std::bool_constant<NormFirst>, Type<X>, Type<W>,
                                                            Type<Y>) {
               norm_forward(
                   kOp, ctx,
                   NormForward<Forward<NormFirst, X, W>, W, Y>{.f = {scalars_of<W>(a)},
                                                               .in = {a.x.row<X>(0), a.gate.row<X>(0)},
                                                               .in_stride = {a.x.stride, a.gate.stride},
                                                               .param = {a.weight.as<W>()},
                                                               .default_value = {1.0f},
                                                               .y = a.y.row<Y>(0),
                                                               .y_stride = a.y.stride,
                                                               .rstd = a.rstd.as<float>(),
                                                               .rows = a.x.rows,
                                                               .cols = a.how.group,
                                                               .groups = int(a.x.cols / a.how.group),
                                                               .eps = a.eps});
             });
}

void gated_rms_norm_bwd(Context& ctx, const GatedRmsNormBwd& a) {
  with_types(a.how, a.x.dtype, a.weight, a.dy.dtype,
             [&]<bool NormFirst, class X, class W, class Y>(std::bool_constant<NormFirst>, Type<X>, Type<W>,
                                                            Type<Y>) {
               norm_backward<ShapeTable>(
                   kOp, ctx,
                   NormBackward<Backward<NormFirst, X, W>, W, Y>{.f = {scalars_of<W>(a)},
                                                                 .dy = a.dy.row<Y>(0),
                                                                 .in = {a.x.row<X>(0), a.gate.row<X>(0)},
                                                                 .out = {a.dx.row<X>(0), a.dgate.row<X>(0)},
                                                                 .dy_stride = a.dy.stride,
                                                                 .in_stride = {a.x.stride, a.gate.stride},
                                                                 .out_stride = {a.dx.stride, a.dgate.stride},
                                                                 .weight = a.weight.as<W>(),
                                                                 .rstd = a.rstd.as<float>(),
                                                                 .rows = a.x.rows,
                                                                 .cols = a.how.group,
                                                                 .groups = int(a.x.cols / a.how.group)},
                   {a.dweight});
             });
}

}  // namespace tigon::cuda
