// The CUDA backend moves the bytes of the codes and of the weight once. A thread has 8 columns of a row,
// which have one scale; elements_kernel takes one element a thread if rows or blocks do not allow that.
#include "tigon/base/cuda/divider.cuh"
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
constexpr int kThreads = 256, kCols = 8;
#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;
#else
constexpr bool kConvertsE4m3 = false;
#endif

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
  // Groups of kCols columns of a row and of a block, and a block's rows, of vectors_kernel.
  Divider row_groups{1}, block_groups{1}, rows_of_block{1};
};

template <CodeKind kKind>
__device__ __forceinline__ float value_of(uint32_t code) {
  if constexpr (kKind == CodeKind::e4m3 && kConvertsE4m3) {
    float low, high;
    cvt_rn_f16x2_e4m3x2(code, low, high);
    return low;
  } else if constexpr (kKind == CodeKind::e4m3) {
    return __uint_as_float(e4m3_widen(code));
  } else if constexpr (kKind == CodeKind::int8) {
    return float(int(code << 24) >> 24);
  } else if constexpr (kKind == CodeKind::int4) {
    return float(int(code) - 8);
  } else {
    return __uint_as_float(e2m1_widen(code));
  }
}

struct Scale {
  float scale, zero;
};
__device__ __forceinline__ Scale scale_at(const Codes& p, int64_t i, int64_t j) {
  const int64_t at = i * p.scales_stride + j;
  Scale s = {0.0f, p.zeros != nullptr ? p.zeros[i * p.zeros_stride + j] : 0.0f};
  switch (p.scales_dtype) {
    case DType::bf16: s.scale = widen(static_cast<const __nv_bfloat16*>(p.scales)[at]); break;
    case DType::f16: s.scale = widen(static_cast<const __half*>(p.scales)[at]); break;
    case DType::e4m3: s.scale = value_of<CodeKind::e4m3>(static_cast<const uint8_t*>(p.scales)[at]); break;
    case DType::u8: s.scale = __uint_as_float(e8m0_widen(static_cast<const uint8_t*>(p.scales)[at])); break;
    default: s.scale = static_cast<const float*>(p.scales)[at];
  }
  if (p.divisor != nullptr) s.scale = s.scale / *p.divisor;
  return s;
}

// Returns the values of nibbles i and i + 4 of a word, exact in fp16: int4 in the last bits of 1024, e2m1 as
// sign, exponent and mantissa, whose value there is 2^-14 of its own.
template <CodeKind kKind>
__device__ __forceinline__ float2 nibbles_of(uint32_t word, int i) {
  auto moved = [&](int left) { return left < 0 ? word >> -left : word << left; };
  const uint32_t bits = kKind == CodeKind::int4
                            ? (moved(-4 * i) & 0x000f000fu) | 0x64006400u
                            : (moved(9 - 4 * i) & 0x0e000e00u) | (moved(12 - 4 * i) & 0x80008000u);
  const auto& both = reinterpret_cast<const __half2&>(bits);
  return __half22float2(kKind == CodeKind::int4 ? __hadd2_rn(both, __floats2half2_rn(-1032.0f, -1032.0f))
                                                : __hmul2_rn(both, __floats2half2_rn(16384.0f, 16384.0f)));
}

// Returns the values of a word of four bytes, or of eight nibbles.
template <CodeKind kKind>
__device__ __forceinline__ void values_of(uint32_t word, float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if constexpr (is_nibble(kKind)) {
      const float2 both = nibbles_of<kKind>(word, i);
      x[i] = both.x, x[i + 4] = both.y;
    } else if constexpr (kKind == CodeKind::e4m3 && kConvertsE4m3) {
      if (i % 2 == 0) cvt_rn_f16x2_e4m3x2(word >> 8 * i & 0xffffu, x[i], x[i + 1]);
    } else {
      x[i] = value_of<kKind>(word >> 8 * i & 0xffu);
    }
}

template <class T, CodeKind kKind>
__global__ __launch_bounds__(kThreads) void vectors_kernel(const __grid_constant__ Codes p) {
  const auto index = uint32_t(blockIdx.x) * kThreads + threadIdx.x, r = p.row_groups.divide(index),
             group = index - r * p.row_groups.divisor;
  if (r >= p.rows) return;
  constexpr int kWords = (is_nibble(kKind) ? kCols / 2 : kCols) / 4;
  const Vec<uint32_t, kWords> w = load_stream<uint32_t, kWords>(
      reinterpret_cast<const uint32_t*>(p.codes + r * p.stride) + group * kWords);
  const Scale s = scale_at(p, p.rows_of_block.divide(r), p.block_groups.divide(group));
  float x[kCols];
#pragma unroll
  for (int i = 0; i < kWords; ++i) values_of<kKind>(w.v[i], x + i * (kCols / kWords));
  auto scaled = [&](float zero) {
#pragma unroll
    for (float& value : x) value = dequantized(value, zero, s.scale);
  };
  p.zeros == nullptr ? scaled(0.0f) : scaled(s.zero);
  Vec<T, kCols> y;
  y.set(x);
  store_v4(static_cast<T*>(p.weight) + r * p.weight_stride + group * kCols, y);
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
void run(Context& ctx, Codes p) {
  const int64_t elements = p.rows * p.cols, groups = elements / kCols;
  const bool vectors = p.cols % kCols == 0 && (p.block_cols % kCols == 0 || p.block_cols >= p.cols) &&
                       is_vectorizable(p.codes, p.stride, is_nibble(kKind) ? 16 : p.cols, 1) &&
                       is_vectorizable(p.weight, p.weight_stride, p.cols, sizeof(T)) &&
                       groups <= INT32_MAX - kThreads;
  if (elements == 0) return;
  if (vectors) {
    p.row_groups = Divider(p.cols / kCols);
    p.block_groups = Divider(std::min(p.block_cols, p.cols) / kCols);
    p.rows_of_block = Divider(std::min(p.block_rows, p.rows));
  }
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
