// The CUDA backend of modulated RMSNorm gives its formula to the kernels of the norm family, and computes the
// gradients of scale, shift and weight. The forward reads the row of scale and shift of each row, or keeps it
// in shared memory over the rows of a CTA that share it. The backward is that of an RMSNorm whose weight,
// (offset + weight) * (1 + scale), and sums by column belong to a group of rows: those that share a row of
// scale. Persistent CTAs process the rows of one group each, and form its weight. The gradients come from
// fixed partial sums. If each row has a row of scale of x's type, scale is a second input, and dscale and
// dshift are results. It moves 2b bytes per element forward and 3b backward (b = element size). An element of
// scale costs 2b forward, and backward 8 bytes written and read for each CTA of a group, plus the gradients.
#include "tigon/base/cuda/column_sum.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_scalars.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_math.inc"

constexpr const char* kOp = "modulated_rms_norm";
constexpr int kThreads = 256;
// dweight has at most this many partial rows.
constexpr int64_t kMaxChunks = 64;

template <class W>
struct Modulation {
  // A null weight stands for ones without offset.
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
template <class X, class W>
struct GroupsBackward : ModulatedRmsNormBackward<float, X> {
  Modulation<W> m;

  // Handles N columns, `step` apart.
  template <int N>
  __device__ __forceinline__ void weights(int64_t group, int64_t c, float (&w)[N], int step = 1) const {
#pragma unroll
    for (int j = 0; j < N; ++j, c += step)
      w[j] = c < m.cols ? modulated_weight(m.shifted_weight(c), m.scale_at(group, c)) : 0.0f;
  }
};
// Null data means not wanted.
template <class W>
struct GroupGradients {
  W *dscale, *dshift;
  int64_t dscale_stride, dshift_stride;
  // [chunks, cols]: partial rows of dweight.
  float* dweights;
};

// A CTA takes some columns of `chunk` groups; `Lanes` threads share a column. `partials` is [parts, 2,
// groups, cols], of u and dy.
template <class W, int Lanes>
__global__ __launch_bounds__(kThreads) void group_gradients_kernel(const Modulation<W> m,
                                                                   const float* partials, int64_t parts,
                                                                   int64_t chunk,
                                                                   const GroupGradients<W> out) {
  constexpr int kColumns = kThreads / Lanes, kLoadsInFlight = 8;
  __shared__ float slots[2][Lanes][kColumns];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int lane = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const int64_t tiles = ceil_div(m.cols, kColumns), part = blockIdx.x / tiles,
                c = blockIdx.x % tiles * kColumns + column, pitch = m.groups * m.cols;
  const bool in_row = c < m.cols;
  const float weight = in_row ? m.shifted_weight(c) : 0.0f;
  const int64_t end = min((part + 1) * chunk, m.groups);
  float dweight = 0.0f;
#pragma unroll 1
  for (int64_t g = part * chunk; g < end; ++g) {
    float sums[2] = {};
    if (in_row)
      sum_columns<kLoadsInFlight>(partials + lane * 2 * pitch + g * m.cols + c, pitch, Lanes * 2 * pitch,
                                  int((parts - lane + Lanes - 1) / Lanes), sums);
    if constexpr (Lanes > 1) {
      // The first lane may still read those of the previous group.
      __syncthreads();
#pragma unroll
      for (int k = 0; k < 2; ++k) slots[k][lane][column] = sums[k];
      __syncthreads();
      if (lane > 0) continue;
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int i = 1; i < Lanes; ++i) sums[k] += slots[k][i][column];
    }
    if (!in_row) continue;
    dweight = fma(1.0f + m.scale_at(g, c), sums[0], dweight);
    if (out.dscale) out.dscale[g * out.dscale_stride + c] = narrow<W>(weight * sums[0]);
    if (out.dshift) out.dshift[g * out.dshift_stride + c] = narrow<W>(sums[1]);
  }
  if (out.dweights && lane == 0 && in_row) out.dweights[part * m.cols + c] = dweight;
}

void set_zero(Context& ctx, const Matrix& m) {
  if (m.data == nullptr || m.rows == 0) return;
  const size_t bytes = size_of(m.dtype);
  TIGON_CUDA_CHECK(kOp, cudaMemset2DAsync(m.data, size_t(m.stride) * bytes, 0, size_t(m.cols) * bytes,
                                          size_t(m.rows), static_cast<cudaStream_t>(ctx.stream())));
}

// Each row of x has a row of scale, in x's type.
template <class X>
void rows_backward(Context& ctx, const ModulatedRmsNormBwd& a) {
  if (!a.dx.data && !a.dscale.data && !a.dweight) {
    if (a.dshift.data)
      TIGON_CUDA_CHECK(kOp, cudaMemcpy2DAsync(a.dshift.data, sizeof(X) * size_t(a.dshift.stride), a.dy.data,
                                              sizeof(X) * size_t(a.dy.stride), sizeof(X) * size_t(a.x.cols),
                                              size_t(a.x.rows), cudaMemcpyDeviceToDevice,
                                              static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  norm_backward(kOp, ctx,
                NormBackward<ModulatedRmsNormRowsBackward<float, X>, X, X>{
                    .f = {{.offset = a.weight ? a.offset : 0.0f, .round_h = a.rounding == Rounding::llama}},
                    .dy = a.dy.row<X>(0),
                    .in = {a.x.row<X>(0), a.scale.row<X>(0)},
                    .out = {a.dx.row<X>(0), a.dscale.row<X>(0), a.dshift.row<X>(0)},
                    .dy_stride = a.dy.stride,
                    .in_stride = {a.x.stride, a.scale.stride},
                    .out_stride = {a.dx.stride, a.dscale.stride, a.dshift.stride},
                    .weight = a.weight.as<X>(),
                    .rstd = a.rstd.as<float>(),
                    .rows = a.x.rows,
                    .cols = a.x.cols},
                {a.dweight});
}

// Computes the gradients of scale, shift and weight from the partial sums.
template <class W>
void group_gradients(Context& ctx, const ModulatedRmsNormBwd& a, const Modulation<W>& m,
                     const float* partials, int64_t parts) {
  const int64_t chunk = ceil_div(m.groups, kMaxChunks), chunks = ceil_div(m.groups, chunk);
  float* dweights = a.dweight ? ctx.scratch_of<float>(chunks * m.cols) : nullptr;
  const GroupGradients<W> out{a.dscale.row<W>(0), a.dshift.row<W>(0), a.dscale.stride, a.dshift.stride,
                              dweights};
  // Many parts take many threads, so that each has few loads.
  auto run = [&]<int Lanes>() {
    launch(kOp, ctx, group_gradients_kernel<W, Lanes>,
           {.blocks = chunks * ceil_div(m.cols, kThreads / Lanes), .threads = kThreads, .pdl = true}, m,
           partials, parts, chunk, out);
  };
  if (parts <= 8)
    run.template operator()<1>();
  else if (parts <= 128)
    run.template operator()<8>();
  else
    run.template operator()<32>();
  if (a.dweight) sum_partials(kOp, ctx, dweights, chunks, {a.dweight});
}

template <class X, class W>
void backward(Context& ctx, const ModulatedRmsNormBwd& a) {
  const int64_t groups = a.scale.rows, cols = a.x.cols;
  if (a.x.rows == 0) {
    set_zero(ctx, a.dscale), set_zero(ctx, a.dshift);
    return set_zero(ctx, {a.dweight.data, a.dweight.dtype, 1, cols, cols});
  }
  if constexpr (std::is_same_v<X, W>)
    if (groups == a.x.rows) return rows_backward<X>(ctx, a);
  TIGON_CHECK(kOp, groups <= INT32_MAX, "scale must have less than 2^31 rows, got ", groups);
  const Modulation<W> m{a.weight.as<W>(), a.scale.row<W>(0), a.scale.stride, groups, cols, a.offset};
  const bool wants_sums = a.dscale.data || a.dshift.data || a.dweight;
  NormBackward<GroupsBackward<X, W>, float, X> p{.f = {{{.round_h = a.rounding == Rounding::llama}}, m},
                                                 .dy = a.dy.row<X>(0),
                                                 .in = {a.x.row<X>(0)},
                                                 .out = {a.dx.row<X>(0)},
                                                 .dy_stride = a.dy.stride,
                                                 .in_stride = {a.x.stride},
                                                 .out_stride = {a.dx.stride},
                                                 .rstd = a.rstd.as<float>(),
                                                 .rows = a.x.rows / groups,
                                                 .cols = cols,
                                                 .groups = int(groups)};
  const int64_t parts = norm_backward_rows(kOp, ctx, p, wants_sums);
  if (wants_sums) group_gradients(ctx, a, m, p.partials, parts);
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
