// CUDA backend of modulated RMSNorm: the formula, for the kernels of the norm family, and the
// gradients of scale, shift and weight.
//
// The forward reads the row of scale and shift of each row, from L2 where rows share it. The
// backward is that of an RMSNorm whose weight, (offset + weight) * (1 + scale), and sums by column
// belong to a group of rows: those that share a row of scale. Persistent CTAs process the rows of one
// group each, and fixed partial sums follow. The gradients come from these sums, [groups, cols].
// Where each row has a row of scale of x's type, scale is an input beside x, and dscale a result.
//
// Bytes per element (b = element size): forward 2b, backward 3b, and per element of scale 2b
// forward; backward 4 written and read for the folded weight, 8 written and read for the sums, and
// the gradients.
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_scalars.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_math.inc"

constexpr const char* kOp = "modulated_rms_norm";
constexpr int kThreads = 256;
// Partial rows of dweight.
constexpr int64_t kMaxChunks = 64;

template <class W>
struct Modulation {
  // weight: null for ones without offset.
  const W *weight, *scale;
  int64_t scale_stride, groups, cols;
  float offset;

  __device__ __forceinline__ float shifted_weight(int64_t c) const {
    return weight ? offset + widen(weight[c]) : 1.0f;
  }
  __device__ __forceinline__ float scale_at(int64_t group, int64_t c) const {
    return widen(scale[group * scale_stride + c]);
  }
};
// Null data: not wanted.
template <class W>
struct GroupGradients {
  W *dscale, *dshift;
  int64_t dscale_stride, dshift_stride;
  // [chunks, cols], of dweight.
  float* dweights;
};

// A thread per element. folded: [groups, cols].
template <class W>
__global__ __launch_bounds__(kThreads) void fold_weights_kernel(const Modulation<W> m, float* folded) {
  const int64_t tiles = ceil_div(m.cols, kThreads), group = blockIdx.x / tiles,
                c = blockIdx.x % tiles * kThreads + threadIdx.x;
  if (c < m.cols) folded[group * m.cols + c] = modulated_weight(m.shifted_weight(c), m.scale_at(group, c));
}

// A thread per column and chunk of groups. u, dy: the sums, [groups, cols].
template <class W>
__global__ __launch_bounds__(kThreads) void group_gradients_kernel(const Modulation<W> m, const float* u,
                                                                   const float* dy, int64_t chunk,
                                                                   const GroupGradients<W> out) {
  const int64_t tiles = ceil_div(m.cols, kThreads), part = blockIdx.x / tiles,
                c = blockIdx.x % tiles * kThreads + threadIdx.x;
  if (c >= m.cols) return;
  const float weight = m.shifted_weight(c);
  const int64_t end = min((part + 1) * chunk, m.groups);
  float dweight = 0.0f;
#pragma unroll 4
  for (int64_t g = part * chunk; g < end; ++g) {
    const float of_group = u[g * m.cols + c];
    dweight = fma(1.0f + m.scale_at(g, c), of_group, dweight);
    if (out.dscale) out.dscale[g * out.dscale_stride + c] = narrow<W>(weight * of_group);
    if (out.dshift) out.dshift[g * out.dshift_stride + c] = narrow<W>(dy[g * m.cols + c]);
  }
  if (out.dweights) out.dweights[part * m.cols + c] = dweight;
}

void set_zero(Context& ctx, const Matrix& m) {
  if (m.data == nullptr || m.rows == 0) return;
  const size_t bytes = size_of(m.dtype);
  TIGON_CUDA_CHECK(kOp, cudaMemset2DAsync(m.data, size_t(m.stride) * bytes, 0, size_t(m.cols) * bytes,
                                          size_t(m.rows), static_cast<cudaStream_t>(ctx.stream())));
}

// A row of scale for each row of x, in x's type.
template <class X>
void rows_backward(Context& ctx, const ModulatedRmsNormBwd& a) {
  if (a.dshift.data)  // first: dx may take dy's place
    TIGON_CUDA_CHECK(kOp, cudaMemcpy2DAsync(a.dshift.data, sizeof(X) * size_t(a.dshift.stride), a.dy.data,
                                            sizeof(X) * size_t(a.dy.stride), sizeof(X) * size_t(a.x.cols),
                                            size_t(a.x.rows), cudaMemcpyDeviceToDevice,
                                            static_cast<cudaStream_t>(ctx.stream())));
  if (!a.dx.data && !a.dscale.data && !a.dweight) return;
  norm_backward(kOp, ctx,
                NormBackward<ModulatedRmsNormRowsBackward<float, X>, X, X>{
                    .f = {{.offset = a.weight ? a.offset : 0.0f, .round_h = a.rounding == Rounding::llama}},
                    .dy = a.dy.row<X>(0),
                    .in = {a.x.row<X>(0), a.scale.row<X>(0)},
                    .out = {a.dx.row<X>(0), a.dscale.row<X>(0)},
                    .dy_stride = a.dy.stride,
                    .in_stride = {a.x.stride, a.scale.stride},
                    .out_stride = {a.dx.stride, a.dscale.stride},
                    .weight = a.weight.as<X>(),
                    .rstd = a.rstd.as<float>(),
                    .rows = a.x.rows,
                    .cols = a.x.cols},
                {a.dweight});
}

template <class X, class W>
void backward(Context& ctx, const ModulatedRmsNormBwd& a) {
  const int64_t groups = a.scale.rows, cols = a.x.cols, tiles = ceil_div(cols, kThreads);
  if (a.x.rows == 0) {
    set_zero(ctx, a.dscale), set_zero(ctx, a.dshift);
    return set_zero(ctx, {a.dweight.data, a.dweight.dtype, 1, cols, cols});
  }
  if constexpr (std::is_same_v<X, W>)
    if (groups == a.x.rows) return rows_backward<X>(ctx, a);
  TIGON_CHECK(kOp, groups <= INT32_MAX, "scale must have less than 2^31 rows, got ", groups);
  const Modulation<W> m{a.weight.as<W>(), a.scale.row<W>(0), a.scale.stride, groups, cols, a.offset};
  float* folded = ctx.scratch_of<float>(groups * cols);
  launch(kOp, ctx, fold_weights_kernel<W>, {.blocks = groups * tiles, .threads = kThreads}, m, folded);

  const bool wants_scale = a.dscale.data || a.dweight, wants_sums = wants_scale || a.dshift.data;
  float* sums = wants_sums ? ctx.scratch_of<float>(2 * groups * cols) : nullptr;
  float* dy_sums = a.dshift.data ? sums + groups * cols : nullptr;
  norm_backward(kOp, ctx,
                NormBackward<ModulatedRmsNormBackward<float, X>, float, X>{
                    .f = {{.round_h = a.rounding == Rounding::llama}},
                    .dy = a.dy.row<X>(0),
                    .in = {a.x.row<X>(0)},
                    .out = {a.dx.row<X>(0)},
                    .dy_stride = a.dy.stride,
                    .in_stride = {a.x.stride},
                    .out_stride = {a.dx.stride},
                    .weight = folded,
                    .rstd = a.rstd.as<float>(),
                    .rows = a.x.rows / groups,
                    .cols = cols,
                    .groups = int(groups)},
                {{sums, DType::f32, groups * cols}, {dy_sums, DType::f32, groups * cols}});
  if (!wants_sums) return;
  const int64_t chunk = ceil_div(groups, kMaxChunks), chunks = ceil_div(groups, chunk);
  float* dweights = a.dweight ? ctx.scratch_of<float>(chunks * cols) : nullptr;
  launch(
      kOp, ctx, group_gradients_kernel<W>, {.blocks = chunks * tiles, .threads = kThreads}, m,
      static_cast<const float*>(sums), static_cast<const float*>(dy_sums), chunk,
      GroupGradients<W>{a.dscale.row<W>(0), a.dshift.row<W>(0), a.dscale.stride, a.dshift.stride, dweights});
  if (a.dweight) sum_partials(kOp, ctx, dweights, chunks, {a.dweight});
}

}  // namespace

void modulated_rms_norm_fwd(Context& ctx, const ModulatedRmsNormFwd& a) {
  const Vector parameter{a.scale.data, a.scale.dtype, a.x.cols};
  with_weight_types(kOp, a.x.dtype, parameter, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_forward(kOp, ctx,
                 NormForward<ModulatedRmsNormForward<float, X>, W, X>{
                     .f = {{{a.weight ? a.offset : 0.0f, a.rounding == Rounding::llama},
                            a.x.rows / a.scale.rows,
                            {0, a.scale.stride, a.shift.stride}}},
                     .in = {a.x.row<X>(0)},
                     .in_stride = {a.x.stride},
                     .param = {a.weight.as<W>(), a.scale.row<W>(0), a.shift.row<W>(0)},
                     .default_value = {1.0f, 0.0f, 0.0f},
                     .y = a.y.row<X>(0),
                     .y_stride = a.y.stride,
                     .rstd = a.rstd.as<float>(),
                     .rows = a.x.rows,
                     .cols = a.x.cols,
                     .eps = a.eps});
  });
}

void modulated_rms_norm_bwd(Context& ctx, const ModulatedRmsNormBwd& a) {
  const Vector parameter{a.scale.data, a.scale.dtype, a.x.cols};
  with_weight_types(kOp, a.x.dtype, parameter,
                    [&]<class X, class W>(Type<X>, Type<W>) { backward<X, W>(ctx, a); });
}

}  // namespace tigon::cuda
