// CUDA backend of LayerNorm: the formula on the engine of the norm family.
//
// Bytes per element (b = element size): forward 2b, backward 3b; besides, 8 bytes a row of statistics, weight and bias once per
// block (from L2) and blocks * cols * 8 bytes of partial sums, written and read back from L2.
// Instructions: about 6 per element forward, 13 backward, against a budget of 31 and 46 at the speed of the memory (bf16).
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/layer_norm/layer_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/layer_norm/layer_norm_math.inc"

constexpr const char* kOp = "layer_norm";

template <class X>
struct Forward {
  using Element = X;
  static constexpr int kIn = 1, kParams = 2;
  static constexpr bool kSubtractMean = true, kWritesResidual = false, round_h = false;
  __device__ float value(const float (&x)[1]) const { return x[0]; }
  __device__ float result(float h, const float (&param)[2], const float (&)[1]) const {
    return layer_norm_y(h, param[0], param[1]);
  }
};

template <class X>
struct Backward {
  using Element = X;
  static constexpr int kIn = 1, kOut = 1, kSums = 2;
  using PlainWeight = void;
  static constexpr bool kSubtractMean = true, round_h = false;
  static constexpr float offset = 0.0f;
  __device__ float value(const float (&x)[1]) const { return x[0]; }
  __device__ float upstream(float dy, const float (&)[1]) const { return dy; }
  __device__ void results(float dv, float, float, float, const float (&)[1], float (&dx)[1]) const {
    dx[0] = dv;
  }
};

// 16384 rows, bf16, us with the second kernel: 1024 columns 35.5 (37.4 with four rows a block), 2048 58.5 (60.3 with five blocks a
// multiprocessor). Percent of a copy: 4096 columns 92, 6144 92 (86 with the next shape), 8192 93 (80 with single packs), 12288 97 (91
// without a lead).
using Lookahead = PipelinedBlock<3, 4, 512, 1, 1>;
using ShapeTable =
    BackwardShapeTable<3, PipelinedRows<2, 32, 4, 8, 1>, PipelinedBlock<2, 2, 128, 4>,
                       PipelinedBlock<2, 2, 320, 2>, UpToVecs<896, Lookahead>, PipelinedBlock<2, 2, 512>,
                       UpToVecs<1152, PipelinedBlock<2, 4, 512>>, Lookahead, PipelinedBlock<2, 4, 512>>;

}  // namespace

void layer_norm_fwd(Context& ctx, const LayerNormFwd& a) {
  with_weight_types(kOp, a.x.dtype, a.weight ? a.weight : a.bias, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_forward(kOp, ctx,
                 NormForward<Forward<X>, W, X>{.in = {a.x.row<X>(0)},
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
  dweight.size = dbias.size = a.x.cols;  // partial rows hold both
  with_weight_types(kOp, a.x.dtype, a.weight, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_backward<ShapeTable>(kOp, ctx,
                              NormBackward<Backward<X>, W, X>{.dy = a.dy.row<X>(0),
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
