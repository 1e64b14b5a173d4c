// The CUDA backend of gated RMSNorm gives its formula to the kernels of the norm family. It moves 3b bytes
// per element forward and 5b backward (b = element size), and also 4 bytes of rstd per group, the weight once
// per CTA (from L2), and its gradient's partials through L2. An element takes about 20 instructions forward
// and 40 backward, 4 and 6 of them on the special-function unit; the memory-bound budget is 46 and 77, 12 and
// 20 of them (bf16).
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/gated_rms_norm/gated_rms_norm_scalars.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/gated_rms_norm/gated_rms_norm_math.inc"

constexpr const char* kOp = "gated_rms_norm";

// Calls fn(order, x type, weight type, y type). With the norm first, y has x's type. fp32 weights ask for
// fp32 accuracy of the gate: see ApproxFor<W> below.
template <class Fn>
void with_types(const GatedRmsNorm& options, DType x, const Vector& weight, DType y, Fn&& fn) {
  if (options.norm_first)
    with_weight_types(kOp, x, weight, [&](auto tx, auto tw) { fn(std::true_type{}, tx, tw, tx); });
  else
    with_result_types(kOp, x, weight, y,
                      [&](auto tx, auto tw, auto ty) { fn(std::false_type{}, tx, tw, ty); });
}

}  // namespace

void gated_rms_norm_fwd(Context& ctx, const GatedRmsNormFwd& a) {
  with_types(a.options, a.x.dtype, a.weight, a.y.dtype,
             [&]<bool NormFirst, class X, class W, class Y>(std::bool_constant<NormFirst>, Type<X>, Type<W>,
                                                            Type<Y>) {
               norm_forward(kOp, ctx,
                            NormForward<GatedRmsNormForward<float, X, NormFirst, ApproxFor<W>>, W, Y>{
                                .f = {gated_scalars(a)},
                                .in = {a.x.row<X>(0), a.gate.row<X>(0)},
                                .in_stride = {a.x.stride, a.gate.stride},
                                .param = {a.weight.as<W>()},
                                .default_value = {1.0f},
                                .y = a.y.row<Y>(0),
                                .y_stride = a.y.stride,
                                .rstd = a.rstd.as<float>(),
                                .rows = a.x.rows,
                                .cols = a.options.group,
                                .groups = int(a.x.cols / a.options.group),
                                .eps = a.eps});
             });
}

void gated_rms_norm_bwd(Context& ctx, const GatedRmsNormBwd& a) {
  with_types(a.options, a.x.dtype, a.weight, a.dy.dtype,
             [&]<bool NormFirst, class X, class W, class Y>(std::bool_constant<NormFirst>, Type<X>, Type<W>,
                                                            Type<Y>) {
               norm_backward(kOp, ctx,
                             NormBackward<GatedRmsNormBackward<float, X, NormFirst, ApproxFor<W>>, W, Y>{
                                 .f = {gated_scalars(a)},
                                 .dy = a.dy.row<Y>(0),
                                 .in = {a.x.row<X>(0), a.gate.row<X>(0)},
                                 .out = {a.dx.row<X>(0), a.dgate.row<X>(0)},
                                 .dy_stride = a.dy.stride,
                                 .in_stride = {a.x.stride, a.gate.stride},
                                 .out_stride = {a.dx.stride, a.dgate.stride},
                                 .weight = a.weight.as<W>(),
                                 .rstd = a.rstd.as<float>(),
                                 .rows = a.x.rows,
                                 .cols = a.options.group,
                                 .groups = int(a.x.cols / a.options.group)},
                             {a.dweight});
             });
}

}  // namespace tigon::cuda
