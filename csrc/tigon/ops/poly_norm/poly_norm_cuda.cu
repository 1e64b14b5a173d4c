// The CUDA backend of PolyNorm gives its formula to the row kernel. It moves 2b bytes per element forward and
// 3b backward (b = element size), and also 12 bytes of rstd and 16 bytes of partial sums per row. An element
// takes about 10 instructions forward and 18 backward; the memory-bound budget is 27 and 41 (bf16).
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_kernel.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/poly_norm/poly_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/poly_norm/poly_norm_math.inc"

constexpr const char* kOp = "poly_norm";

// Points to a vector of T or float.
struct Coefficients {
  const void* data;
  bool wide;
  template <class T>
  __device__ __forceinline__ float get(int i) const {
    return wide ? static_cast<const float*>(data)[i] : widen(static_cast<const T*>(data)[i]);
  }
};
Coefficients coefficients(const Vector& v) { return {v.data, v.dtype == DType::f32}; }

template <class T>
struct PolyNormForward {
  using Element = T;
  using Payload = SumArray<3>;
  using Scratch = NoScratch;
  static constexpr int kIn = 1;
  static constexpr bool kFill[kIn] = {false};
  RowsOf<T, kIn> rows;
  Coefficients weight, bias;
  // Null means not wanted.
  float* rstd;
  float eps;

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr int N = AlignedRow<T>::N;
    SumArray<3> own = {};
    row.for_each_vec([&](const float (&x)[1][N], int) {
      float squares[3] = {};
#pragma unroll
      for (int j = 0; j < N; ++j) poly_norm_add_squares(x[0][j], squares);
#pragma unroll
      for (int k = 0; k < 3; ++k) own.s[k] += squares[k];
    });
    const SumArray<3> all = row.all_reduce(own);
    float slope[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const float square = all.s[k] / float(rows.cols) + eps;
      const float scale = sizeof(T) == 2 ? rsqrtf(square) : 1.0f / sqrtf(square);
      if (rstd && row.leads()) rstd[3 * row.index + k] = scale;
      slope[k] = weight.get<T>(2 - k) * scale;
    }
    const float shift = bias.get<T>(0);
    row.write([&](const float (&x)[1][N], int j, int) { return poly_norm_y(x[0][j], slope, shift); });
  }
};

template <class T>
struct PolyNormBackward {
  using Element = T;
  using Payload = SumArray<4>;
  using Scratch = NoScratch;
  static constexpr int kIn = 2;
  static constexpr bool kFill[kIn] = {false, false};
  // The rows are x and dy.
  RowsOf<T, kIn> rows;
  Coefficients weight;
  const float* rstd;
  // Holds dweight and dbias by row; zero from row `rows` on. Null if not wanted.
  float4* partials;
  int64_t partial_rows;

  template <class Row>
  __device__ __forceinline__ void operator()(Row& row) const {
    constexpr int N = AlignedRow<T>::N;
    SumArray<4> own = {};
    row.for_each_vec([&](const float (&x)[2][N], int) {
      float products[4] = {};
#pragma unroll
      for (int j = 0; j < N; ++j) poly_norm_add_products(x[1][j], x[0][j], products);
#pragma unroll
      for (int k = 0; k < 4; ++k) own.s[k] += products[k];
    });
    const SumArray<4> all = row.all_reduce(own);
    float scale[3], product[3], mean[3], slope[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      scale[k] = row.live ? rstd[3 * row.index + k] : 0.0f;
      product[k] = all.s[k] * scale[k];
      mean[k] = product[k] / float(rows.cols);
      slope[k] = weight.get<T>(2 - k) * scale[k];
    }
    if (partials && row.leads()) {
      partials[row.index] = make_float4(product[2], product[1], product[0], all.s[3]);
      if (row.index + 1 == rows.rows)
        for (int64_t r = rows.rows; r < partial_rows; ++r) partials[r] = float4{};
    }
    float p[3], q[3];
    poly_norm_dx_coefficients(slope, scale, mean, p, q);
    row.write([&](const float (&x)[2][N], int j, int) { return poly_norm_dx(x[1][j], x[0][j], p, q); });
  }
};

// Many rows are added in two steps, so that many threads take part. The first step adds rows that are kApart
// apart.
constexpr int64_t kManyRows = 2048, kApart = 128;

}  // namespace

void poly_norm_fwd(Context& ctx, const PolyNormFwd& a) {
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    run_row_op(kOp, ctx,
               PolyNormForward<T>{.rows = rows_of<T, 1>({a.x}, a.y),
                                  .weight = coefficients(a.weight),
                                  .bias = coefficients(a.bias),
                                  .rstd = a.rstd.as<float>(),
                                  .eps = a.eps});
  });
}

void poly_norm_bwd(Context& ctx, const PolyNormBwd& a) {
  if (a.x.rows == 0) {
    for (const Vector& v : {a.dweight, a.dbias})
      if (v)
        TIGON_CUDA_CHECK(kOp, cudaMemsetAsync(v.data, 0, size_of(v.dtype) * size_t(v.size),
                                              static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  const int64_t group = a.x.rows > kManyRows ? kApart : 1, groups = ceil_div(a.x.rows, group);
  float* partials = a.dweight || a.dbias ? ctx.scratch_of<float>(groups * group * 4) : nullptr;
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    run_row_op(kOp, ctx,
               PolyNormBackward<T>{.rows = rows_of<T, 2>({a.x, a.dy}, a.dx),
                                   .weight = coefficients(a.weight),
                                   .rstd = a.rstd.as<float>(),
                                   .partials = reinterpret_cast<float4*>(partials),
                                   .partial_rows = groups * group});
  });
  if (partials == nullptr) return;
  Vector dweight = a.dweight, dbias = a.dbias;
  // One row of partials holds both gradients.
  dweight.size = 3, dbias.size = 1;
  if (group > 1) {
    float* sums = ctx.scratch_of<float>(group * 4);
    sum_partials(kOp, ctx, partials, groups, {Vector{sums, DType::f32, group * 4}});
    sum_partials(kOp, ctx, sums, group, {dweight, dbias});
  } else {
    sum_partials(kOp, ctx, partials, groups, {dweight, dbias});
  }
}

}  // namespace tigon::cuda
