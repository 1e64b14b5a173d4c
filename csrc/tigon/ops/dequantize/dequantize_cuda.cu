// The CUDA backend moves the bytes of the codes and of the weight once. A thread has 16 columns of a row,
// which have one scale; elements_kernel takes one element a thread where rows or blocks do not allow that.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/dequantize/dequantize.h"

namespace tigon::cuda {
namespace {

#include "tigon/base/e4m3.inc"
#include "tigon/ops/dequantize/dequantize_math.inc"

constexpr const char* kOp = "dequantize";
constexpr int kThreads = 256, kCols = 16;

struct Codes {
  const uint8_t* codes;
  int64_t stride, rows, cols;
  const void* scales;
  DType scales_dtype;
  int64_t scales_stride;
  const float* zeros;
  int64_t zeros_stride;
  const float* divisor;
  int64_t block_rows, block_cols;
  void* weight;
  int64_t weight_stride;
};

struct Scale {
  float scale, zero;
};
__device__ __forceinline__ Scale scale_at(const Codes& p, int64_t i, int64_t j) {
  const int64_t at = i * p.scales_stride + j;
  Scale s = {0.0f, p.zeros != nullptr ? p.zeros[i * p.zeros_stride + j] : 0.0f};
  switch (p.scales_dtype) {
    case DType::bf16: s.scale = widen(static_cast<const __nv_bfloat16*>(p.scales)[at]); break;
    case DType::f16: s.scale = widen(static_cast<const __half*>(p.scales)[at]); break;
    case DType::e4m3: s.scale = __uint_as_float(e4m3_widen(static_cast<const uint8_t*>(p.scales)[at])); break;
    case DType::u8: s.scale = __uint_as_float(e8m0_widen(static_cast<const uint8_t*>(p.scales)[at])); break;
    default: s.scale = static_cast<const float*>(p.scales)[at];
  }
  if (p.divisor != nullptr) s.scale = s.scale / *p.divisor;
  return s;
}

template <CodeKind kKind>
__device__ __forceinline__ float value_of(uint32_t code) {
  if constexpr (kKind == CodeKind::e4m3)
    return __uint_as_float(e4m3_widen(code));
  else if constexpr (kKind == CodeKind::int8)
    return float(int(code << 24) >> 24);
  else if constexpr (kKind == CodeKind::int4)
    return float(int(code) - 8);
  else
    return __uint_as_float(e2m1_widen(code));
}

// Returns the values of a word of four bytes.
template <CodeKind kKind>
__device__ __forceinline__ void values_of(uint32_t word, float (&x)[4]) {
#if __CUDA_ARCH__ >= 890
  constexpr bool kConverts = kKind == CodeKind::e4m3;
#else
  constexpr bool kConverts = false;
#endif
  if constexpr (kConverts) {
    cvt_rn_f16x2_e4m3x2(word & 0xffffu, x[0], x[1]), cvt_rn_f16x2_e4m3x2(word >> 16, x[2], x[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = value_of<kKind>(word >> (8 * i) & 0xffu);
  }
}

template <class T, CodeKind kKind>
__global__ __launch_bounds__(kThreads) void vectors_kernel(Codes p) {
  const auto index = uint32_t(blockIdx.x) * kThreads + threadIdx.x, groups = uint32_t(p.cols / kCols);
  const uint32_t r = index / groups, c = index % groups * kCols;
  if (r >= p.rows) return;
  constexpr int kBytes = is_nibble(kKind) ? kCols / 2 : kCols;
  const uint8_t* codes = p.codes + r * p.stride + (is_nibble(kKind) ? c / 2 : c);
  const Vec<uint32_t, kBytes / 4> w =
      load_stream<uint32_t, kBytes / 4>(reinterpret_cast<const uint32_t*>(codes));
  const Scale s = scale_at(p, r / uint32_t(p.block_rows), c / uint32_t(p.block_cols));
  float x[kCols];
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) {
    if constexpr (is_nibble(kKind)) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[8 * i + j] = value_of<kKind>(w.v[i] >> (4 * j) & 15u);
    } else {
      float four[4];
      values_of<kKind>(w.v[i], four);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = four[j];
    }
  }
#pragma unroll
  for (int i = 0; i < kCols; ++i) x[i] = dequantized(x[i], s.zero, s.scale);
  Vec<T, kCols> y;
  y.set(x);
  store_v4(static_cast<T*>(p.weight) + r * p.weight_stride + c, y);
}

template <class T, CodeKind kKind>
__global__ __launch_bounds__(kThreads) void elements_kernel(Codes p) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x, r = index / p.cols, c = index % p.cols;
  if (r >= p.rows) return;
  const uint8_t* codes = p.codes + r * p.stride;
  const uint32_t code = is_nibble(kKind) ? codes[c / 2] >> (c % 2 * 4) & 15u : codes[c];
  const Scale s = scale_at(p, r / p.block_rows, c / p.block_cols);
  static_cast<T*>(p.weight)[r * p.weight_stride + c] =
      narrow<T>(dequantized(value_of<kKind>(code), s.zero, s.scale));
}

template <class T, CodeKind kKind>
void run(Context& ctx, const Codes& p) {
  const int64_t elements = p.rows * p.cols, groups = elements / kCols;
  const bool vectors = p.cols % kCols == 0 && (p.block_cols % kCols == 0 || p.block_cols >= p.cols) &&
                       is_vectorizable(p.codes, p.stride, is_nibble(kKind) ? 16 : p.cols, 1) &&
                       is_vectorizable(p.weight, p.weight_stride, p.cols, sizeof(T)) && groups <= INT32_MAX &&
                       p.block_rows <= UINT32_MAX && p.block_cols <= UINT32_MAX;
  const int64_t threads = vectors ? groups : elements;
  launch(kOp, ctx, vectors ? vectors_kernel<T, kKind> : elements_kernel<T, kKind>,
         {.blocks = (threads + kThreads - 1) / kThreads, .threads = kThreads}, p);
}

}  // namespace

void dequantize(Context& ctx, const Dequantize& a) {
  const Codes p = {.codes = static_cast<const uint8_t*>(a.codes.data),
                   .stride = a.codes.stride,
                   .rows = a.weight.rows,
                   .cols = a.columns,
                   .scales = a.scales.data,
                   .scales_dtype = a.scales.dtype,
                   .scales_stride = a.scales.stride,
                   .zeros = static_cast<const float*>(a.zeros.data),
                   .zeros_stride = a.zeros.stride,
                   .divisor = a.divisor.as<float>(),
                   .block_rows = a.block_rows,
                   .block_cols = a.block_cols,
                   .weight = a.weight.data,
                   .weight_stride = a.weight.stride};
  dispatch_float(kOp, "weight", a.weight.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    switch (a.kind) {
      case CodeKind::e4m3: return run<T, CodeKind::e4m3>(ctx, p);
      case CodeKind::int8: return run<T, CodeKind::int8>(ctx, p);
      case CodeKind::int4: return run<T, CodeKind::int4>(ctx, p);
      case CodeKind::e2m1: return run<T, CodeKind::e2m1>(ctx, p);
    }
  });
}

}  // namespace tigon::cuda
