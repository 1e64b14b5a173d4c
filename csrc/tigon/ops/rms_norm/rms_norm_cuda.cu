// The CUDA backend of RMSNorm gives its formula to the kernels of the norm family. It moves 2b bytes per
// element forward and 3b backward (b = element size), and also 4 bytes of rstd per row, the weight once per
// CTA (from L2), and CTAs * cols * 4 bytes of dweight partials through L2. An element takes about 4
// instructions forward and 10 backward; the memory-bound budget is 31 and 46 (bf16).
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/rms_norm/rms_norm_math.inc"

constexpr const char* kOp = "rms_norm";

}  // namespace

void rms_norm_fwd(Context& ctx, const RmsNormFwd& a) {
  with_result_types(
      kOp, a.x.dtype, a.weight, a.y.dtype, [&]<class X, class W, class Y>(Type<X>, Type<W>, Type<Y>) {
        norm_forward(
            kOp, ctx,
            NormForward<RmsNormForward<float, X>, W, Y>{
                .f = {{.offset = a.weight ? a.offset : 0.0f, .round_h = a.rounding == Rounding::llama}},
                .in = {a.x.row<X>(0)},
                .in_stride = {a.x.stride},
                .param = {a.weight.as<W>()},
                .default_value = {1.0f},
                .y = a.y.row<Y>(0),
                .y_stride = a.y.stride,
                .rstd = a.rstd.as<float>(),
                .bytes = byte_rows(a.bytes),
                .rows = a.x.rows,
                .cols = a.x.cols,
                .eps = a.eps});
      });
}

void rms_norm_bwd(Context& ctx, const RmsNormBwd& a) {
  with_result_types(
      kOp, a.x.dtype, a.weight, a.dy.dtype, [&]<class X, class W, class Y>(Type<X>, Type<W>, Type<Y>) {
        norm_backward(
            kOp, ctx,
            NormBackward<RmsNormBackward<float, X>, W, Y>{
                .f = {{.offset = a.weight ? a.offset : 0.0f, .round_h = a.rounding == Rounding::llama}},
                .dy = a.dy.row<Y>(0),
                .in = {a.x.row<X>(0)},
                .out = {a.dx.row<X>(0)},
                .dy_stride = a.dy.stride,
                .in_stride = {a.x.stride},
                .out_stride = {a.dx.stride},
                .weight = a.weight.as<W>(),
                .rstd = a.rstd.as<float>(),
                .rows = a.x.rows,
                .cols = a.x.cols},
            {a.dweight});
      });
}

}  // namespace tigon::cuda
