// The CUDA backend of residual addition with RMSNorm gives its formula to the kernels of the norm family. It
// moves 4b bytes per element forward and 4b backward (3b without dh; b = element size), and also 4 bytes of
// rstd per row, the weight once per CTA (from L2), and CTAs * cols * 4 bytes of dweight partials through L2.
// An element takes about 6 instructions forward and 12 backward; the memory-bound budget is 62 (bf16).
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/add_rms_norm/add_rms_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/add_rms_norm/add_rms_norm_math.inc"

constexpr const char* kOp = "add_rms_norm";

}  // namespace

void add_rms_norm_fwd(Context& ctx, const AddRmsNormFwd& a) {
  with_result_types(
      kOp, a.x.dtype, a.weight, a.y.dtype, [&]<class X, class W, class Y>(Type<X>, Type<W>, Type<Y>) {
        norm_forward(
            kOp, ctx,
            NormForward<AddRmsNormForward<float, X>, W, Y>{
                .f = {{.offset = a.weight ? a.offset : 0.0f, .round_h = a.rounding == Rounding::llama}},
                .in = {a.x.row<X>(0), a.residual.row<X>(0)},
                .in_stride = {a.x.stride, a.residual.stride},
                .param = {a.weight.as<W>()},
                .default_value = {1.0f},
                .residual_out = a.h.row<X>(0),
                .y = a.y.row<Y>(0),
                .residual_out_stride = a.h.stride,
                .y_stride = a.y.stride,
                .rstd = a.rstd.as<float>(),
                .bytes = byte_rows(a.bytes),
                .rows = a.x.rows,
                .cols = a.x.cols,
                .eps = a.eps});
      });
}

void add_rms_norm_bwd(Context& ctx, const AddRmsNormBwd& a) {
  with_result_types(
      kOp, a.h.dtype, a.weight, a.dy.dtype, [&]<class X, class W, class Y>(Type<X>, Type<W>, Type<Y>) {
        norm_backward(
            kOp, ctx,
            NormBackward<AddRmsNormBackward<float, X>, W, Y>{
                .f = {{.offset = a.weight ? a.offset : 0.0f, .round_h = a.rounding == Rounding::llama}},
                .dy = a.dy.row<Y>(0),
                .in = {a.h.row<X>(0), a.dh.row<X>(0)},
                .out = {a.dx.row<X>(0)},
                .dy_stride = a.dy.stride,
                .in_stride = {a.h.stride, a.dh.stride},
                .out_stride = {a.dx.stride},
                .weight = a.weight.as<W>(),
                .rstd = a.rstd.as<float>(),
                .rows = a.h.rows,
                .cols = a.h.cols},
            {a.dweight});
      });
}

}  // namespace tigon::cuda
