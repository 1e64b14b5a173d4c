// The CUDA backend uses cuBLASLt's GEMM, with a scale for each row of both operands.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/fp8_linear/fp8_linear.h"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "fp8_linear";
constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void ones_kernel(float* x, int64_t size) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < size) x[i] = 1.0f;
}

template <class T, class B>
__global__ __launch_bounds__(kThreads) void bias_kernel(T* y, int64_t stride, int64_t rows, int cols,
                                                        const B* bias) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, r = i / cols;
  const int c = int(i % cols);
  if (r < rows) y[r * stride + c] = narrow<T>(widen(y[r * stride + c]) + widen(bias[c]));
}
void add_bias(Context& ctx, const Vector& bias, const Matrix& y) {
  dispatch_float(kOp, "y", y.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    dispatch_float(kOp, "bias", bias.dtype, [&](auto b) {
      using B = typename DeviceType<typename decltype(b)::type>::type;
      launch(kOp, ctx, bias_kernel<T, B>,
             {.blocks = (y.rows * y.cols + kThreads - 1) / kThreads, .threads = kThreads},
             static_cast<T*>(y.data), y.stride, y.rows, int(y.cols), static_cast<const B*>(bias.data));
    });
  });
}

}  // namespace

void fp8_ones(Context& ctx, const Vector& v) {
  launch(kOp, ctx, ones_kernel, {.blocks = (v.size + kThreads - 1) / kThreads, .threads = kThreads},
         v.as<float>(), v.size);
}

void fp8_gemm(Context& ctx, const Fp8Gemm& p) {
  if (p.c.rows == 0) return;
  const int capability = device_facts().capability;
  TIGON_CHECK(kOp, capability >= 89, "matmuls of float8 must run on compute capability 8.9 or newer, got ",
              capability / 10, ".", capability % 10);
  ctx.gemm({.m = p.c.rows,
            .n = p.c.cols,
            .k = p.a.cols,
            .a = p.a.data,
            .lda = p.a.stride,
            .b = p.b.data,
            .ldb = p.b.stride,
            .trans_b = true,
            .c = p.c.data,
            .ldc = p.c.stride,
            .ab_dtype = DType::e4m3,
            .c_dtype = p.c.dtype,
            .beta = float(p.add),
            .a_scales = p.a_scales.as<float>(),
            .b_scales = p.b_scales.as<float>(),
            .fast_sums = p.fast_sums});
  if (p.bias) add_bias(ctx, p.bias, p.c);
}

}  // namespace tigon::cuda
