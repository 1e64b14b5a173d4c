// Computes the GEMMs of hyper-connections with the weight, for 4 streams and all parts (24 rows of the
// weight) and x of 16 bits, on tensor cores. fp32 factors are sums of three bf16 parts (8 bits each, exact),
// x of fp16 of two; products of parts below 2^-24 of the whole are left out. Sums leave the tensor cores,
// which truncate, after at most 32 terms each and are added in fp32. The kernels are:
// split_weight          writes the weight's parts, as weight_gemm_kernel's lanes take them.
// weight_gemm           has a CTA per 256 tokens and range of columns, a warp per 32 tokens. x, read once for
//                       the GEMM and the sum of squares, and the weight come through rings in shared memory.
//                       Columns of a step are permuted so that a lane's are one vector.
// pack_dmatmul          writes dmatmul's parts, as weight_gemm_gradient_kernel's lanes take them, and the
//                       tokens' other coefficients.
// weight_gemm_gradient  has a CTA per 128 columns and range of tokens, a warp per 32 columns. The weight and
//                       the sums of dweight stay in registers; x and dy come through a ring in shared
//                       memory. dx takes two parts of each factor: 2^-16, below its rounding.
// The ranges follow from the sizes only. Sums over ranges are in a fixed order.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/ops/hyper_connection/hyper_connection_cuda.cuh"

namespace tigon::cuda {
namespace {

using namespace hyper_connection;

constexpr int kStreams = 4, kRows = kStreams * (kStreams + 2), kTiles = kRows / 8;
constexpr int kParts = 3;
template <class X>
constexpr int kInputParts = std::is_same_v<X, __nv_bfloat16> ? 1 : 2;

// Returns the bf16 parts of a and b, in pairs. An infinity is its first part.
template <int Parts>
__device__ __forceinline__ void split(float a, float b, uint32_t (&parts)[Parts]) {
#pragma unroll
  for (int i = 0; i < Parts; ++i) {
    parts[i] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
    const float part_a = __uint_as_float(parts[i] << 16), part_b = __uint_as_float(parts[i] & 0xffff0000u);
    a = isinf(part_a) ? 0.0f : a - part_a, b = isinf(part_b) ? 0.0f : b - part_b;
  }
}
// Returns a part of two elements of x.
template <class X>
__device__ __forceinline__ uint32_t input_part(uint32_t word, int part) {
  if constexpr (kInputParts<X> == 1) {
    return word;
  } else {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
    uint32_t parts[2];
    split(both.x, both.y, parts);
    return parts[part];
  }
}
// Calls fn(i, j) for the parts whose products count, the smallest first.
template <int A, int B, class Fn>
__device__ __forceinline__ void for_parts(const Fn& fn) {
#pragma unroll
  for (int sum = kParts - 1; sum >= 0; --sum)
#pragma unroll
    for (int i = 0; i < A; ++i)
      if (sum - i >= 0 && sum - i < B) fn(i, sum - i);
}

// Holds 8 elements of x, the columns of a lane.
template <class X>
using Octet = Vec<X, 8>;
template <class X>
__device__ __forceinline__ uint32_t word(const Octet<X>& v, int i) {
  return reinterpret_cast<const uint32_t*>(&v)[i];
}

// ---------------------------------------------------------------- GEMM

constexpr int kWarps = kThreads / 32, kWarpTokens = 32, kTokens = kWarps * kWarpTokens;
constexpr int kStageColumns = 64, kStages = 3;
// x comes in slots of half a stage's columns.
constexpr int kSlotColumns = kStageColumns / 2, kSlots = 4;
// There are two CTAs on each of 132 SMs.
constexpr int64_t kWeightGemmCtas = 264, kMostSplits = 32;

// Holds 16 columns of the weight's parts as left factors of 16 rows: rows 0 to 15 of each part; rows 16 to 23
// of the second and the third part; rows 16 to 23 of the first part, and zeros. Columns of lane 4 t + q are 8
// q + 4 (step % 2) to + 3 of 32.
struct WeightStep {
  uint4 low[kParts][32];
  uint4 high[2][32];
};
struct WeightStage {
  WeightStep steps[kStageColumns / 16];
};
// A thread reads only vectors of x that it copied itself.
struct WeightGemmShared {
  WeightStage weight[kStages];
  uint4 x[kSlots][kWarpTokens / 8][kThreads];
};

__global__ __launch_bounds__(kThreads) void split_weight_kernel(const float* weight, int64_t stride, int cols,
                                                                int steps, WeightStep* out) {
  const int at = int(blockIdx.x) * kThreads + int(threadIdx.x), lane = at % 32, step = at / 32;
  if (step >= steps) return;
  const int column = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
  // Hold two columns of rows t, t + 8 and t + 16, and the two columns after them.
  uint32_t first[kTiles][kParts], second[kTiles][kParts];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    Vec<float, 4> w{};
    if (column < cols) w = load<float, 4>(weight + (8 * n + lane / 4) * stride + column);
    split(w.v[0], w.v[1], first[n]);
    split(w.v[2], w.v[3], second[n]);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    out[step].low[part][lane] = make_uint4(first[0][part], first[1][part], second[0][part], second[1][part]);
  out[step].high[0][lane] = make_uint4(first[2][1], first[2][2], second[2][1], second[2][2]);
  out[step].high[1][lane] = make_uint4(first[2][0], 0, second[2][0], 0);
}

template <class X>
struct WeightGemm {
  const X* x;
  int64_t x_stride;
  const WeightStage* weight;
  int64_t tokens;
  // split_cols is a multiple of a stage's columns.
  int cols, split_cols, splits;
  // [splits, kRows columns of the matmul and the sum of squares, tokens].
  float* partials;
};

template <class X>
__global__ __launch_bounds__(kThreads, kInputParts<X> == 1 ? 2 : 1) void weight_gemm_kernel(
    const __grid_constant__ WeightGemm<X> p) {
  constexpr int kGroups = kWarpTokens / 8, kCopies = sizeof(WeightStage) / 16;
  extern __shared__ __align__(16) unsigned char memory[];
  WeightGemmShared& shared = *reinterpret_cast<WeightGemmShared*>(memory);
  const int tid = int(threadIdx.x), lane = tid % 32, t = lane / 4, q = lane % 4;
  const int split_index = int(blockIdx.x) % p.splits;
  const int64_t first = int64_t(int(blockIdx.x) / p.splits) * kTokens + tid / 32 * kWarpTokens;
  const int begin = split_index * p.split_cols, end = min(p.cols, begin + p.split_cols);
  const int tokens = int(min(max(p.tokens - first, int64_t(0)), int64_t(kWarpTokens)));

  const X* const from = p.x + (first + t) * p.x_stride + begin + 8 * q;
  // Slot h holds the lane's vectors of tokens t, t + 8, ... at columns 32 h. The weight comes with every
  // second slot.
  auto copy_slot = [&](int h) {
    const int column = begin + h * kSlotColumns;
    // Copies both halves of a stage. The second may be past the end: then it is zeros.
    if (begin + h / 2 * kStageColumns < end) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const bool there = column + 8 * q < end && t + 8 * g < tokens;
        cp_async_L2_128B(&shared.x[h % kSlots][g][tid],
                         there ? from + h * kSlotColumns + 8 * g * p.x_stride : p.x, there ? 16 : 0);
      }
      if (h % 2 == 0) {
        const char* of = reinterpret_cast<const char*>(p.weight + column / kStageColumns);
        for (int i = tid; i < kCopies; i += kThreads)
          cp_async(reinterpret_cast<char*>(shared.weight + h / 2 % kStages) + 16 * i, of + 16 * i);
      }
    }
    cp_async_commit_group();
  };

  // A lane has tokens 2 q and 2 q + 1 of a group: rows t and t + 8, and row t + 16.
  float low[kGroups][4] = {}, high[kGroups][2] = {}, squares[kGroups] = {};
#pragma unroll
  for (int h = 0; h < kSlots - 1; ++h) copy_slot(h);
  for (int column = begin, slot = 0; column < end; column += kStageColumns) {
    const WeightStage& weight = shared.weight[slot / 2 % kStages];
#pragma unroll
    for (int half = 0; half < 2; ++half, ++slot) {
      cp_async_wait_group<kSlots - 2>();
      // The stage's weight has arrived for all, and every warp is past the previous stage.
      if (half == 0) __syncthreads();
      copy_slot(slot + kSlots - 1);
      Octet<X> x[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        x[g] = reinterpret_cast<const Octet<X>&>(shared.x[slot % kSlots][g][tid]);
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int i = 0; i < 8; ++i) squares[g] = fma(x[g][i], x[g][i], squares[g]);
      float low_half[kGroups][4] = {}, high_half[kGroups][4] = {};
      // The smallest products come first: what is truncated is small until the last ones are added.
      for_parts<kInputParts<X>, kParts>([&](int i, int j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const WeightStep& step = weight.steps[2 * half + h];
          const uint4 low_weight = step.low[j][lane];
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            const uint2 b =
                make_uint2(input_part<X>(word(x[g], 2 * h), i), input_part<X>(word(x[g], 2 * h + 1), i));
            mma_m16n8k16(low_half[g], low_weight, b);
            if (j < 2) mma_m16n8k16(high_half[g], step.high[1 - j][lane], b);
          }
        }
      });
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) low[g][i] += low_half[g][i];
#pragma unroll
        for (int i = 0; i < 2; ++i) high[g][i] += high_half[g][i] + high_half[g][i + 2];
      }
    }
  }
  cp_async_wait_group<0>();

  float* const partials = p.partials + int64_t(split_index) * (kRows + 1) * p.tokens + first;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * g + 2 * q + i;
      if (token >= tokens) continue;
      partials[t * p.tokens + token] = low[g][i];
      partials[(t + 8) * p.tokens + token] = low[g][i + 2];
      partials[(t + 16) * p.tokens + token] = high[g][i];
    }
    const float square = reduce_lanes<Sum, 4>(squares[g]);
    if (q == 0 && t + 8 * g < tokens) partials[kRows * p.tokens + t + 8 * g] = square;
  }
}

// Sums over the ranges of columns: the matmul and, from the squares, rstd.
__global__ __launch_bounds__(kThreads) void sum_weight_gemm_kernel(const float* partials, int splits,
                                                                   int64_t tokens, float* matmul,
                                                                   int64_t stride, float* rstd, float cols,
                                                                   float eps) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= tokens * (kRows + 1)) return;
  const int64_t j = at / tokens, token = at - j * tokens;
  float sum = 0.0f;
#pragma unroll 8
  for (int s = 0; s < splits; ++s) sum += partials[s * tokens * (kRows + 1) + at];
  if (j < kRows)
    matmul[token * stride + j] = sum;
  else
    rstd[token] = 1.0f / sqrtf(sum / cols + eps);
}

// ---------------------------------------------------------------- gradients

constexpr int kGradientThreads = 128, kGradientColumns = kGradientThreads, kBlockTokens = 16, kDxParts = 2;
// There are four CTAs on each of 132 SMs, twice.
constexpr int64_t kGradientCtas = 1056;

// Holds the coefficients of 16 tokens.
struct TokenBlock {
  // Holds dmatmul as the left factor of dx, in rows of 16 and of 8.
  uint2 left[kDxParts][3][32];
  // Holds dmatmul as the right factor of dweight.
  uint2 right[kTiles][kParts][32];
  struct Token {
    float pre[kStreams], x_scale, unused[3];
  } tokens[kBlockTokens];
};

__global__ __launch_bounds__(kThreads) void pack_dmatmul_kernel(const float* dmatmul, const float* pre,
                                                                const float* x_scale, int64_t tokens,
                                                                TokenBlock* out) {
  const int64_t block = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int64_t first = block * kBlockTokens;
  if (first >= tokens) return;
  const int lane = int(threadIdx.x) % 32, t = lane / 4, q = lane % 4;
  auto value = [&](int token, int row) {
    return first + token < tokens ? dmatmul[(first + token) * kRows + row] : 0.0f;
  };
  TokenBlock& to = out[block];
  auto put_left = [&](int i, int token, int row, int other_token, int other_row) {
    uint32_t a[kDxParts], b[kDxParts];
    split(value(token, row), value(token, row + 1), a);
    split(value(other_token, other_row), value(other_token, other_row + 1), b);
#pragma unroll
    for (int part = 0; part < kDxParts; ++part) to.left[part][i][lane] = make_uint2(a[part], b[part]);
  };
  put_left(0, t, 2 * q, t + 8, 2 * q);
  put_left(1, t, 2 * q + 8, t + 8, 2 * q + 8);
  put_left(2, t, 2 * q + 16, t + 8, 2 * q + 16);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    uint32_t a[kParts], b[kParts];
    split(value(2 * q, 8 * n + t), value(2 * q + 1, 8 * n + t), a);
    split(value(2 * q + 8, 8 * n + t), value(2 * q + 9, 8 * n + t), b);
#pragma unroll
    for (int part = 0; part < kParts; ++part) to.right[n][part][lane] = make_uint2(a[part], b[part]);
  }
  if (lane < kBlockTokens) {
    TokenBlock::Token of{};
    if (first + lane < tokens) {
#pragma unroll
      for (int i = 0; i < kStreams; ++i) of.pre[i] = pre[(first + lane) * kStreams + i];
      of.x_scale = x_scale[first + lane];
    }
    to.tokens[lane] = of;
  }
}

template <class X>
struct WeightGemmGradient {
  const X *x, *dy;  // dy may be null
  X* dx;
  int64_t x_stride, dy_stride, dx_stride;
  const float* weight;
  int64_t weight_stride;
  const TokenBlock* blocks;
  float* dweight;  // [ranges, kRows, cols]
  int64_t tokens, cols, columns;
  int range;  // token blocks per CTA
  int tiles;  // CTAs per range
};

// A thread reads only vectors of x and dy that it copied itself.
struct GradientStage {
  TokenBlock block;
  uint4 x[2][kGradientThreads], dy[2][kGradientThreads];
};

// Adds the gradients of a block of tokens to the sums of the weight's gradient.
template <class X>
__device__ __forceinline__ void add_weight_gradient(const Octet<X> (&x)[2], const TokenBlock& block, int lane,
                                                    float (&sums)[2][kTiles][4]) {
  uint32_t a[2][4][kInputParts<X>];
#pragma unroll
  for (int g = 0; g < 2; ++g)
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int part = 0; part < kInputParts<X>; ++part)
        a[g][i][part] = movmatrix_trans(input_part<X>(word(x[g], i), part));
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    uint2 b[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) b[part] = block.right[n][part][lane];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float block_sums[4] = {};
      for_parts<kInputParts<X>, kParts>([&](int i, int j) {
        mma_m16n8k16(block_sums,
                     make_uint4(a[0][2 * m][i], a[0][2 * m + 1][i], a[1][2 * m][i], a[1][2 * m + 1][i]),
                     b[j]);
      });
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] += block_sums[i];
    }
  }
}

template <class X, bool kDx, bool kDweight>
__global__ __launch_bounds__(kGradientThreads, 4) void weight_gemm_gradient_kernel(
    const __grid_constant__ WeightGemmGradient<X> p) {
  constexpr int kCopies = sizeof(TokenBlock) / 16;
  __shared__ __align__(16) GradientStage shared[kStages];
  const int tid = int(threadIdx.x), lane = tid % 32, t = lane / 4, q = lane % 4;
  const int range = int(blockIdx.x) / p.tiles;
  const int64_t warp_column = int64_t(int(blockIdx.x) % p.tiles) * kGradientColumns + tid / 32 * 32;
  const int64_t column = warp_column + 8 * q;
  const bool active = column < p.cols, has_dy = kDx && p.dy != nullptr;
  const int stream = active ? int(column / p.columns) : 0;
  const int64_t first_block = int64_t(range) * p.range, first = first_block * kBlockTokens;
  const int tokens = int(min(p.tokens - first, int64_t(p.range) * kBlockTokens));

  // Column n of tile i is the warp's column 8 (n / 2) + 2 i + n % 2, so that a lane has a vector.
  auto tile_column = [&](int i) { return warp_column + t / 2 * 8 + 2 * i + t % 2; };
  uint32_t weight[4][3][kDxParts];
  if constexpr (kDx) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t c = tile_column(i);
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        const float* w = p.weight + (8 * k + 2 * q) * p.weight_stride + c;
        split(c < p.cols ? w[0] : 0.0f, c < p.cols ? w[p.weight_stride] : 0.0f, weight[i][k]);
      }
    }
  }

  const X* const x_from = p.x + (first + t) * p.x_stride + column;
  const X* const dy_from =
      has_dy ? p.dy + (first + t) * p.dy_stride + (column - stream * p.columns) : nullptr;
  X* const dx_to = kDx ? p.dx + (first + t) * p.dx_stride + column : nullptr;
  auto copy_stage = [&](int token, int stage) {
    if (token < tokens) {
      GradientStage& to = shared[stage];
      const char* from = reinterpret_cast<const char*>(p.blocks + first_block + token / kBlockTokens);
      for (int i = tid; i < kCopies; i += kGradientThreads)
        cp_async(reinterpret_cast<char*>(&to.block) + 16 * i, from + 16 * i);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int64_t row = token + 8 * g;
        const bool there = active && row + t < tokens;
        cp_async(&to.x[g][tid], there ? x_from + row * p.x_stride : p.x, there ? 16 : 0);
        if (has_dy) cp_async(&to.dy[g][tid], there ? dy_from + row * p.dy_stride : p.dy, there ? 16 : 0);
      }
    }
    cp_async_commit_group();
  };

  float sums[2][kTiles][4] = {};
  copy_stage(0, 0);
  copy_stage(kBlockTokens, 1);
  int stage = 0;
  for (int token = 0; token < tokens; token += kBlockTokens) {
    cp_async_wait_group<1>();
    __syncthreads();
    // Every warp is past the previous stage.
    copy_stage(token + 2 * kBlockTokens, stage == 0 ? kStages - 1 : stage - 1);
    const TokenBlock& block = shared[stage].block;
    Octet<X> x[2];
#pragma unroll
    for (int g = 0; g < 2; ++g) x[g] = reinterpret_cast<const Octet<X>&>(shared[stage].x[g][tid]);
    if constexpr (kDx) {
      float d[4][4];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const TokenBlock::Token& of = block.tokens[t + 8 * g];
        const float x_scale = of.x_scale, pre = of.pre[stream];
        Octet<X> dy{};
        if (has_dy) dy = reinterpret_cast<const Octet<X>&>(shared[stage].dy[g][tid]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float v = x_scale * x[g][i];
          if (has_dy) v = fma(pre, dy[i], v);
          d[i / 2][2 * g + i % 2] = v;
        }
      }
      for_parts<kDxParts, kDxParts>([&](int i, int j) {
        if (i + j >= kDxParts) return;
        const uint2 a = block.left[i][0][lane], b = block.left[i][1][lane], c = block.left[i][2][lane];
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          const auto& w = weight[tile];
          mma_m16n8k16(d[tile], make_uint4(a.x, a.y, b.x, b.y), make_uint2(w[0][j], w[1][j]));
          mma_m16n8k8(d[tile], c, w[2][j]);
        }
      });
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int64_t row = token + 8 * g;
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = d[i / 2][2 * g + i % 2];
        Octet<X> out;
        out.set(values);
        store_predicated(active && row + t < tokens, dx_to + row * p.dx_stride, out);
      }
    }
    if constexpr (kDweight) add_weight_gradient<X>(x, block, lane, sums);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cp_async_wait_group<0>();
  if constexpr (kDweight) {
    float* const out = p.dweight + int64_t(range) * kRows * p.cols;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t c = tile_column(2 * m + i);
        if (c >= p.cols) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) out[(8 * n + 2 * q + j) * p.cols + c] = sums[m][n][2 * i + j];
      }
  }
}

bool is_usual(const HyperConnection& options, const Matrix& x, const Matrix& weight) {
  return options.streams == kStreams && weight.rows == kRows && x.cols < INT32_MAX / 2 &&
         x.dtype != DType::f32 && is_vectorizable(x.data, x.stride, x.cols, size_of(x.dtype)) &&
         is_vectorizable(weight.data, weight.stride, weight.cols, sizeof(float));
}

// Calls fn<T>() for the 16-bit dtype of x.
template <class Fn>
void by_half(const Matrix& x, const Fn& fn) {
  if (x.dtype == DType::bf16)
    fn.template operator()<__nv_bfloat16>();
  else
    fn.template operator()<__half>();
}

}  // namespace

bool weight_gemm(Context& ctx, const HyperConnectionFwd& a) {
  if (!is_usual(a.options, a.x, a.weight)) return false;
  const int64_t tokens = a.x.rows, cols = a.x.cols;
  const int64_t token_tiles = ceil_div(tokens, kTokens), stages = ceil_div(cols, kStageColumns);
  const int64_t most = std::min(stages, kMostSplits);
  const int64_t wanted =
      ctx.deterministic ? most : std::clamp<int64_t>(kWeightGemmCtas / token_tiles, 1, most);
  const int64_t split_stages = ceil_div(stages, wanted);
  const int64_t splits = ceil_div(stages, split_stages);
  WeightStage* weight = ctx.scratch_of<WeightStage>(stages);
  float* partials = ctx.scratch_of<float>(splits * (kRows + 1) * tokens);
  const int steps = int(stages) * (kStageColumns / 16);
  launch(kOp, ctx, split_weight_kernel,
         {.blocks = ceil_div(int64_t(steps) * 32, kThreads), .threads = kThreads}, a.weight.row<float>(0),
         a.weight.stride, int(cols), steps, weight->steps);
  by_half(a.x, [&]<class X>() {
    static OncePerDevice prepared;
    prepared.run(kOp, [&] {
      TIGON_CUDA_CHECK(
          kOp, cudaFuncSetAttribute(weight_gemm_kernel<X>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int(sizeof(WeightGemmShared))));
    });
    launch(kOp, ctx, weight_gemm_kernel<X>,
           {.blocks = token_tiles * splits, .threads = kThreads, .shared = sizeof(WeightGemmShared)},
           WeightGemm<X>{.x = a.x.row<X>(0),
                         .x_stride = a.x.stride,
                         .weight = weight,
                         .tokens = tokens,
                         .cols = int(cols),
                         .split_cols = int(split_stages * kStageColumns),
                         .splits = int(splits),
                         .partials = partials});
  });
  launch(kOp, ctx, sum_weight_gemm_kernel,
         {.blocks = ceil_div(tokens * (kRows + 1), kThreads), .threads = kThreads}, partials, int(splits),
         tokens, a.matmul.row<float>(0), a.matmul.stride, a.rstd.as<float>(), float(cols),
         a.options.norm_eps);
  return true;
}

bool weight_gemm_gradients(Context& ctx, const HyperConnectionGradients& g) {
  const HyperConnectionBwd& a = *g.call;
  const int64_t tokens = a.x.rows, cols = a.x.cols, columns = cols / a.options.streams;
  const bool dx = a.dx.data != nullptr, dweight = a.dweight.data != nullptr;
  const bool octets = vectors<8>(a.x, columns) && vectors<8>(a.dy, columns) && vectors<8>(a.dx, columns);
  if (!is_usual(a.options, a.x, a.weight) || !octets || (dweight && a.dweight.stride != cols)) return false;
  if (!dx && !dweight) return true;
  const int64_t tiles = ceil_div(cols, kGradientColumns), blocks = ceil_div(tokens, kBlockTokens);
  const int64_t range = ceil_div(blocks, std::clamp<int64_t>(kGradientCtas / tiles, 1, blocks));
  const int64_t ranges = ceil_div(blocks, range);
  TokenBlock* packed = ctx.scratch_of<TokenBlock>(blocks);
  float* partials = dweight ? ctx.scratch_of<float>(ranges * kRows * cols) : nullptr;
  launch(kOp, ctx, pack_dmatmul_kernel, {.blocks = ceil_div(blocks, kThreads / 32), .threads = kThreads},
         static_cast<const float*>(g.dmatmul), static_cast<const float*>(g.pre),
         static_cast<const float*>(g.x_scale), tokens, packed);
  by_half(a.x, [&]<class X>() {
    launch(kOp, ctx,
           !dweight ? weight_gemm_gradient_kernel<X, true, false>
           : dx     ? weight_gemm_gradient_kernel<X, true, true>
                    : weight_gemm_gradient_kernel<X, false, true>,
           {.blocks = tiles * ranges, .threads = kGradientThreads},
           WeightGemmGradient<X>{.x = a.x.row<X>(0),
                                 .dy = a.dy.row<X>(0),
                                 .dx = a.dx.row<X>(0),
                                 .x_stride = a.x.stride,
                                 .dy_stride = a.dy.stride,
                                 .dx_stride = a.dx.stride,
                                 .weight = a.weight.row<float>(0),
                                 .weight_stride = a.weight.stride,
                                 .blocks = packed,
                                 .dweight = partials,
                                 .tokens = tokens,
                                 .cols = cols,
                                 .columns = columns,
                                 .range = int(range),
                                 .tiles = int(tiles)});
  });
  if (dweight)
    sum_partials(kOp, ctx, partials, ranges,
                 {{.data = a.dweight.data, .dtype = DType::f32, .size = kRows * cols}});
  return true;
}

}  // namespace tigon::cuda
