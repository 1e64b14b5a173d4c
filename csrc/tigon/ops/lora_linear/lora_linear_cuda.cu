// The CUDA backend has the parts around the GEMMs.
#include <algorithm>

#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/lora_linear/lora_linear.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/lora_linear/lora_linear_math.inc"

constexpr const char* kOp = "lora_linear";
constexpr int kThreads = 256, kCopies = 16;

// --- copies of adapters -----------------------------------------------------------------------

struct Copies {
  LoraCopy at[kCopies];
  int parts;  // CTAs for each
};

__device__ __forceinline__ float value_of(const void* p, DType t, int64_t i) {
  if (t == DType::f32) return static_cast<const float*>(p)[i];
  if (t == DType::bf16) return widen(static_cast<const __nv_bfloat16*>(p)[i]);
  return widen(static_cast<const __half*>(p)[i]);
}
__device__ __forceinline__ void set_value(void* p, DType t, int64_t i, float x) {
  if (t == DType::f32)
    static_cast<float*>(p)[i] = x;
  else if (t == DType::bf16)
    static_cast<__nv_bfloat16*>(p)[i] = narrow<__nv_bfloat16>(x);
  else
    static_cast<__half*>(p)[i] = narrow<__half>(x);
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Copies copies) {
  const LoraCopy& c = copies.at[blockIdx.x / copies.parts];
  const int part = blockIdx.x % copies.parts;
  const int64_t cols = c.to.cols, all = c.to.rows * cols;
  for (int64_t i = int64_t(part) * kThreads + threadIdx.x; i < all; i += int64_t(copies.parts) * kThreads) {
    const int64_t row = all <= INT32_MAX ? uint32_t(i) / uint32_t(cols) : i / cols, col = i - row * cols;
    const bool there = row < c.from.rows && col < c.from.cols;
    set_value(c.to.data, c.to.dtype, row * c.to.stride + col,
              there ? value_of(c.from.data, c.from.dtype, row * c.from.stride + col) : 0.0f);
  }
}

// --- dropout ----------------------------------------------------------------------------------

// Each thread takes four columns, in one vector or one by one.
template <class T, bool Vectorized>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t cols,
                   Dropper dropper, const int64_t* seed, bool add) {
  dropper.seed = uint64_t(*seed);
  const int64_t blocks = (cols + 3) / 4;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < rows * blocks;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / blocks, block = i - row * blocks;
    const T* x = from + row * from_stride + 4 * block;
    T* y = to + row * to_stride + 4 * block;
    const DropFactors f = dropper.factors(row, block);
    if constexpr (Vectorized) {
      const Vec<T, 4> in = load_stream<T, 4>(x);
      Vec<T, 4> before{}, out;
      if (add) before = load_stream<T, 4>(y);
#pragma unroll
      for (int k = 0; k < 4; ++k) out.set(k, add ? before[k] + in[k] * f.of[k] : in[k] * f.of[k]);
      store<T, 4>(y, out);
    } else {
      const int here = int(cols - 4 * block < 4 ? cols - 4 * block : 4);
      for (int k = 0; k < here; ++k) {
        const float d = widen(x[k]) * f.of[k];
        y[k] = narrow<T>(add ? widen(y[k]) + d : d);
      }
    }
  }
}

// --- bias -------------------------------------------------------------------------------------

// CTAs take `across` pieces of a row's columns and kBiasRows rows.
constexpr int kBiasRows = 64;
template <class T>
__global__ void __launch_bounds__(kThreads)
    bias_kernel(const T* bias, T* y, int64_t stride, int64_t rows, int64_t cols, int across) {
  const int64_t c = int64_t(blockIdx.x % across) * kThreads + threadIdx.x;
  if (c >= cols) return;
  const T b = bias[c];
  const int64_t first = int64_t(blockIdx.x / across) * kBiasRows;
  for (int64_t r = first; r < rows && r < first + kBiasRows; ++r) y[r * stride + c] = b;
}

// --- DoRA -------------------------------------------------------------------------------------

// Computes y = factor x for the vectors lane, lane + lanes, ... of a row.
template <class T, int N>
__device__ __forceinline__ void scale_row(const T* x, T* y, int64_t cols, float factor, int lane, int lanes) {
  for (int64_t c = int64_t(lane) * N; c < cols; c += int64_t(lanes) * N) {
    const Vec<T, N> in = load<T, N>(x + c);
    Vec<T, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) out.set(k, factor * in[k]);
    store<T, N>(y + c, out);
  }
}

// Each row has a CTA.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    dora_kernel(const __grid_constant__ DoraFactors a, const __grid_constant__ DoraGemms gemms) {
  __shared__ double slots[kThreads / 32];
  const int64_t row = blockIdx.x, rank = a.b.cols, cols = a.weight.cols;
  const T* w = static_cast<const T*>(a.weight.data) + row * a.weight.stride;
  float sum = 0.0f;
  for (int64_t c = int64_t(threadIdx.x) * N; c < cols; c += kThreads * N) {
    const Vec<T, N> in = load<T, N>(w + c);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += in[k] * in[k];
  }
  double square[1] = {sum};
  const float* cross = static_cast<const float*>(gemms.cross.data) + row * gemms.cross.stride;
  auto b = [&](int64_t i) { return value_of(a.b.data, a.b.dtype, row * a.b.stride + i); };
  const int lane = threadIdx.x % 32;
  for (int64_t i = threadIdx.x / 32; i < rank; i += kThreads / 32) {
    const float* gram = static_cast<const float*>(gemms.gram.data) + i * gemms.gram.stride;
    float own = lane == 0 ? 2.0f * cross[i] : 0.0f;
    for (int64_t k = lane; k < rank; k += 32) own += a.scale * gram[k] * b(k);
    square[0] += a.scale * b(i) * own;
  }
  sum_block<kThreads>(square, slots);
  const DoraFactor f = dora_factor(value_of(a.magnitude.data, a.magnitude.dtype, row), square[0]);
  if (threadIdx.x == 0) {
    static_cast<float*>(a.factors.data)[row] = f.factor;
    static_cast<float*>(a.inverses.data)[row] = f.inverse;
  }
  if (a.y.data != nullptr)
    scale_row<T, N>(w, static_cast<T*>(a.y.data) + row * a.y.stride, cols, f.factor, int(threadIdx.x),
                    kThreads);
}

// Each row has `lanes` threads, a power of two.
template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t rows, int64_t cols,
                 const float* factors, int lanes) {
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  if (row < rows)
    scale_row<T, N>(x + row * x_stride, y + row * y_stride, cols, factors[row], int(threadIdx.x) % lanes,
                    lanes);
}

// Calls fn(type, vector length) for rows of whole 16-byte vectors, or for any rows.
template <class Fn>
void dispatch_rows(const char* op, const Matrix& x, const Matrix& y, const Fn& fn) {
  dispatch_float(op, "x", x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int kVector = 16 / sizeof(T);
    auto whole = [](const Matrix& m) {
      return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride % kVector == 0 &&
             m.cols % kVector == 0;
    };
    if (whole(x) && (y.data == nullptr || whole(y)))
      fn(T{}, std::integral_constant<int, kVector>{});
    else
      fn(T{}, std::integral_constant<int, 1>{});
  });
}

}  // namespace

void lora_copy(Context& ctx, std::span<const LoraCopy> list) {
  constexpr int64_t kElementsPerBlock = 4 * kThreads, kMostBlocks = 512;
  for (size_t first = 0; first < list.size(); first += kCopies) {
    const size_t count = std::min(list.size() - first, size_t(kCopies));
    Copies copies{};
    int64_t most = 1;
    for (size_t i = 0; i < count; ++i) {
      copies.at[i] = list[first + i];
      most = std::max(most, copies.at[i].to.rows * copies.at[i].to.cols);
    }
    copies.parts = int(std::min(ceil_div(most, kElementsPerBlock), kMostBlocks));
    launch(kOp, ctx, copy_kernel, {.blocks = int64_t(count) * copies.parts, .threads = kThreads}, copies);
  }
}

void lora_dropout(Context& ctx, const LoraDropout& a) {
  const Dropper dropper = make_dropper(a.p, a.stream);
  dispatch_float(kOp, "x", a.from.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    auto whole = [](const Matrix& m) {
      return reinterpret_cast<uintptr_t>(m.data) % (4 * sizeof(T)) == 0 && m.stride % 4 == 0 &&
             m.cols % 4 == 0;
    };
    dispatch_bool(whole(a.from) && whole(a.to), [&](auto vectorized) {
      const int64_t blocks = ceil_div(a.from.rows * ceil_div(a.from.cols, 4), kThreads);
      launch(kOp, ctx, dropout_kernel<T, decltype(vectorized)::value>,
             {.blocks = std::min<int64_t>(blocks, INT32_MAX), .threads = kThreads}, a.from.row<const T>(0),
             a.from.stride, a.to.row<T>(0), a.to.stride, a.from.rows, a.from.cols, dropper,
             a.seed.as<const int64_t>(), a.add);
    });
  });
}

void lora_bias(Context& ctx, const Vector& bias, const Matrix& y) {
  const int64_t across = ceil_div(y.cols, kThreads);
  dispatch_float(kOp, "bias", y.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    launch(kOp, ctx, bias_kernel<T>, {.blocks = across * ceil_div(y.rows, kBiasRows), .threads = kThreads},
           bias.as<const T>(), y.row<T>(0), y.stride, y.rows, y.cols, int(across));
  });
}

void dora_factors(Context& ctx, const DoraFactors& a, const DoraGemms& gemms) {
  dispatch_rows("dora_factors", a.weight, a.y, [&](auto type, auto vector) {
    launch("dora_factors", ctx, dora_kernel<decltype(type), decltype(vector)::value>,
           {.blocks = a.weight.rows, .threads = kThreads}, a, gemms);
  });
}

void scale_rows(Context& ctx, const ScaleRows& a) {
  dispatch_rows("scale_rows", a.x, a.y, [&](auto type, auto vector) {
    using T = decltype(type);
    constexpr int kVector = decltype(vector)::value;
    int lanes = 1;
    while (lanes < kThreads && int64_t(lanes) * kVector < a.x.cols) lanes *= 2;
    launch("scale_rows", ctx, scale_kernel<T, kVector>,
           {.blocks = ceil_div(a.x.rows * lanes, kThreads), .threads = kThreads}, a.x.row<const T>(0),
           a.x.stride, a.y.row<T>(0), a.y.stride, a.x.rows, a.x.cols, a.factors.as<const float>(), lanes);
  });
}

}  // namespace tigon::cuda
