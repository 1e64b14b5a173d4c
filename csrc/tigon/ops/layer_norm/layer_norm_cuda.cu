// The CUDA backend of LayerNorm gives its formula to the kernels of the norm family. It moves 2b bytes per
// element forward and 3b backward (b = element size), and also 8 bytes of statistics per row, weight and bias
// once per CTA (from L2), and CTAs * cols * 8 bytes of partial sums through L2. An element takes about 6
// instructions forward and 13 backward; the memory-bound budget is 31 and 46 (bf16).
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/layer_norm/layer_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/layer_norm/layer_norm_math.inc"

constexpr const char* kOp = "layer_norm";

}  // namespace

void layer_norm_fwd(Context& ctx, const LayerNormFwd& a) {
  with_weight_types(kOp, a.x.dtype, a.weight ? a.weight : a.bias, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_forward(kOp, ctx,
                 NormForward<LayerNormForward<float, X>, W, X>{.in = {a.x.row<X>(0)},
                                                               .in_stride = {a.x.stride},
                                                               .param = {a.weight.as<W>(), a.bias.as<W>()},
                                                               .default_value = {1.0f, 0.0f},
                                                               .y = a.y.row<X>(0),
                                                               .y_stride = a.y.stride,
                                                               .rstd = a.rstd.as<float>(),
                                                               .mean = a.mean.as<float>(),
                                                               .rows = a.x.rows,
                                                               .cols = a.x.cols,
                                                               .eps = a.eps});
  });
}

void layer_norm_bwd(Context& ctx, const LayerNormBwd& a) {
  Vector dweight = a.dweight, dbias = a.dbias;
  // One row of partials holds both gradients.
  dweight.size = dbias.size = a.x.cols;
  with_weight_types(kOp, a.x.dtype, a.weight, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_backward(kOp, ctx,
                  NormBackward<LayerNormBackward<float, X>, W, X>{.dy = a.dy.row<X>(0),
                                                                  .in = {a.x.row<X>(0)},
                                                                  .out = {a.dx.row<X>(0)},
                                                                  .dy_stride = a.dy.stride,
                                                                  .in_stride = {a.x.stride},
                                                                  .out_stride = {a.dx.stride},
                                                                  .weight = a.weight.as<W>(),
                                                                  .rstd = a.rstd.as<float>(),
                                                                  .mean = a.mean.as<float>(),
                                                                  .rows = a.x.rows,
                                                                  .cols = a.x.cols},
                  {dweight, dbias});
  });
}

}  // namespace tigon::cuda
