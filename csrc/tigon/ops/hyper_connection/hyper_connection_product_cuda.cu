// Products of hyper-connections with the weight, for 4 streams and all parts (24 rows of the weight), on the FMA units.
//
// product           a CTA per 64 tokens and range of columns, x read once for the products and the sum of squares. Tiles of x
//                   (fp32) and of the weight lie in shared memory, double-buffered; a warp takes an eighth of a tile's columns
//                   for all tokens and rows, a thread 8 tokens times 6 rows. Sums over warps, then over ranges, in fixed order.
// product_gradient  a CTA per 256 columns and range of tokens. A thread has the weight of its 2 columns and the sums of their
//                   dweight in registers; dproduct of a token comes from shared memory. Sums over ranges in fixed order.
//
// The ranges follow from the sizes alone: two rounds of CTAs on 132 SMs.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/ops/hyper_connection/hyper_connection_cuda.cuh"

namespace tigon::cuda {
namespace {

using namespace hyper_connection;

constexpr int kStreams = 4, kRows = kStreams * (kStreams + 2);

// ---------------------------------------------------------------- product

constexpr int kTokens = 64, kWarps = kThreads / 32, kRowVecs = 16;
constexpr int kPasses = kTokens * kRowVecs / kThreads;
// A thread's tokens are 8 apart, its rows of the weight 4.
constexpr int kTokenGroups = 8, kRowGroups = 4;
constexpr int kThreadTokens = kTokens / kTokenGroups, kThreadRows = kRows / kRowGroups;
// Tokens of the sums of a row and warp in shared memory: the 4 row groups of a warp lie in different banks.
constexpr int kSumPitch = kTokens + 8;
constexpr int64_t kProductCtas = 528, kMostSplits = 32;

// A tile has 16 vectors of x per token. Vector v's four columns of quarter h are at kQuarter * h + 4 * v, so that adjacent lanes
// store adjacent words. The pitch is an odd number of 16-byte words: rows of a column lie in different banks.
template <class X>
struct ProductTile {
  static constexpr int kVec = 16 / int(sizeof(X)), kQuarters = kVec / 4, kQuarter = 4 * kRowVecs;
  static constexpr int kColumns = kRowVecs * kVec, kPitch = kColumns + 4;
  static constexpr int kStage = (kTokens + kRows) * kPitch;
  static constexpr int kFloats = std::max(2 * kStage, kWarps * kRows * kSumPitch);
};

template <class X>
struct Product {
  const X* x;
  int64_t x_stride;
  const float* weight;
  int64_t weight_stride;
  int64_t tokens;
  int cols, split_cols, splits;  // split_cols: a multiple of a tile's
  float* partials;               // [splits, kRows products and the sum of squares, tokens]
};

template <class X>
__global__ __launch_bounds__(kThreads, 2) void product_kernel(const __grid_constant__ Product<X> p) {
  using Tile = ProductTile<X>;
  constexpr int kPitch = Tile::kPitch;
  extern __shared__ __align__(16) float shared[];
  const int tid = int(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const int split = int(blockIdx.x) % p.splits;
  const int64_t first = int64_t(int(blockIdx.x) / p.splits) * kTokens;
  const int begin = split * p.split_cols, end = min(p.cols, begin + p.split_cols);
  const int tokens = int(min(p.tokens - first, int64_t(kTokens)));

  // The vectors of x that this thread stages: vector `vec` of tokens `row`, row + kPassRows, ...
  constexpr int kPassRows = kThreads / kRowVecs;
  const int vec = tid % kRowVecs, row = tid / kRowVecs;
  const X* x_from = p.x + (first + row) * p.x_stride + begin + vec * Tile::kVec;
  Vec<X, Tile::kVec> staged[kPasses];
  float squares[kPasses] = {};
  auto load_x = [&](int column) {
    const bool inside = column + vec * Tile::kVec < end;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      staged[i] = load_predicated<X, Tile::kVec>(inside && row + i * kPassRows < tokens,
                                                 x_from + i * kPassRows * p.x_stride);
    x_from += Tile::kColumns;
  };
  auto store_x = [&](float* stage) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int h = 0; h < Tile::kQuarters; ++h) {
        Vec<float, 4> out;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          out.v[j] = staged[i][4 * h + j];
          squares[i] = fma(out.v[j], out.v[j], squares[i]);
        }
        store(stage + (row + i * kPassRows) * kPitch + h * Tile::kQuarter + vec * 4, out);
      }
  };
  // And of the weight: word `word` of rows `weight_row`, weight_row + kCopyRows, ...
  constexpr int kWords = Tile::kColumns / 4, kCopyRows = kThreads / kWords;
  const int word = tid % kWords, weight_row = tid / kWords;
  const int place =
      (kTokens + weight_row) * kPitch + word % Tile::kQuarters * Tile::kQuarter + word / Tile::kQuarters * 4;
  const float* weight_from = p.weight + weight_row * p.weight_stride + begin + word * 4;
  auto copy_weight = [&](float* stage, int column) {
    const bool inside = column + word * 4 < end;
#pragma unroll
    for (int i = 0; i * kCopyRows < kRows; ++i)
      if (weight_row + i * kCopyRows < kRows)
        cp_async(stage + place + i * kCopyRows * kPitch,
                 inside ? weight_from + i * kCopyRows * p.weight_stride : p.weight, inside ? 16 : 0);
    weight_from += Tile::kColumns;
    cp_async_commit_group();
  };

  // Lanes 2i and 2i + 1 read the same words of x, lanes i and i + 2 the same words of the weight: loads of 16 bytes take one
  // access per half-warp.
  const int token_group = lane / 2 % kTokenGroups, row_group = lane % 2 + lane / 16 * 2;
  float sums[kThreadTokens][kThreadRows] = {};
  auto multiply = [&](const float* stage) {
    constexpr int kWarpColumns = Tile::kColumns / kWarps;
    const float* x = stage + token_group * kPitch + warp * kWarpColumns;
    const float* w = stage + (kTokens + row_group) * kPitch + warp * kWarpColumns;
    // Unrolled, the conversion of what is staged moves in between, which takes too many registers.
#pragma unroll 1
    for (int c = 0; c < kWarpColumns; c += 4) {
      Vec<float, 4> of_weight[kThreadRows];
#pragma unroll
      for (int j = 0; j < kThreadRows; ++j)
        of_weight[j] = load_stream<float, 4>(w + j * kRowGroups * kPitch + c);
#pragma unroll
      for (int i = 0; i < kThreadTokens; ++i) {
        const Vec<float, 4> of_x = load_stream<float, 4>(x + i * kTokenGroups * kPitch + c);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int j = 0; j < kThreadRows; ++j) sums[i][j] = fma(of_x.v[e], of_weight[j].v[e], sums[i][j]);
      }
    }
  };

  load_x(begin);
  copy_weight(shared, begin);
  store_x(shared);
  cp_async_wait_group<0>();
  __syncthreads();
  int stage = 0;
  for (int column = begin; column < end; column += Tile::kColumns, stage ^= 1) {
    const int next = column + Tile::kColumns;
    float* const other = shared + (stage ^ 1) * Tile::kStage;
    if (next < end) {
      load_x(next);
      copy_weight(other, next);
    }
    multiply(shared + stage * Tile::kStage);
    if (next < end) store_x(other);
    cp_async_wait_group<0>();
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < kThreadTokens; ++i)
#pragma unroll
    for (int j = 0; j < kThreadRows; ++j)
      shared[(warp * kRows + j * kRowGroups + row_group) * kSumPitch + i * kTokenGroups + token_group] =
          sums[i][j];
  __syncthreads();
  float* const partials = p.partials + int64_t(split) * (kRows + 1) * p.tokens + first;
  for (int at = tid; at < kRows * kTokens; at += kThreads) {
    const int j = at / kTokens, token = at % kTokens;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[(w * kRows + j) * kSumPitch + token];
    if (token < tokens) partials[j * p.tokens + token] = sum;
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int token = row + i * kPassRows;
    const float square = reduce_lanes<Sum, kRowVecs>(squares[i]);
    if (vec == 0 && token < tokens) partials[kRows * p.tokens + token] = square;
  }
}

// Sums of the ranges of columns: products and, of the squares, rstd.
__global__ __launch_bounds__(kThreads) void sum_products_kernel(const float* partials, int splits,
                                                                int64_t tokens, float* product,
                                                                int64_t stride, float* rstd, float cols,
                                                                float eps) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= tokens * (kRows + 1)) return;
  const int64_t j = at / tokens, token = at - j * tokens;
  float sum = 0.0f;
#pragma unroll 8
  for (int s = 0; s < splits; ++s) sum += partials[s * tokens * (kRows + 1) + at];
  if (j < kRows)
    product[token * stride + j] = sum;
  else
    rstd[token] = 1.0f / sqrtf(sum / cols + eps);
}

// ---------------------------------------------------------------- gradients

constexpr int kGradientThreads = 128, kThreadColumns = 2,
              kGradientColumns = kGradientThreads * kThreadColumns;
// Tokens whose coefficients are in shared memory, and whose x and dy are loaded together: 16 bytes each of a thread.
constexpr int kChunk = 32;
template <class X>
constexpr int kGroup = 16 / int(kThreadColumns * sizeof(X));
// The coefficients of a token: dproduct, pre, x_scale.
constexpr int kPreAt = kRows, kScaleAt = kPreAt + kStreams, kCoefficients = 32;
constexpr int64_t kGradientCtas = 792;

template <class X>
struct ProductGradient {
  const X *x, *dy;  // dy may be null
  X* dx;
  int64_t x_stride, dy_stride, dx_stride;
  const float* weight;
  int64_t weight_stride;
  const float *dproduct, *pre, *x_scale;  // dense
  float* dweight;                         // [ranges, kRows, cols]
  int64_t tokens, cols, columns;
  int range;  // tokens of a CTA
  int tiles;  // CTAs of a range
};

template <class X, bool kDx, bool kDweight>
__global__ __launch_bounds__(kGradientThreads,
                             3) void product_gradient_kernel(const __grid_constant__ ProductGradient<X> p) {
  using Pair = Vec<X, kThreadColumns>;
  using Raw = typename Word<sizeof(Pair)>::type;
  constexpr int kTogether = kGroup<X>;
  __shared__ __align__(16) float coefficients[kChunk][kCoefficients];
  const int tid = int(threadIdx.x), range = int(blockIdx.x) / p.tiles;
  const int64_t first = int64_t(range) * p.range;
  const int tokens = int(min(p.tokens - first, int64_t(p.range)));
  const int64_t column = int64_t(int(blockIdx.x) % p.tiles) * kGradientColumns + tid * kThreadColumns;
  const bool active = column < p.cols;
  const int stream = active ? int(column / p.columns) : 0;

  Vec<float, kThreadColumns> weight[kRows];
  float sums[kRows][kThreadColumns] = {};
  if constexpr (kDx) {
#pragma unroll
    for (int j = 0; j < kRows; ++j)
      weight[j] = active ? load<float, kThreadColumns>(p.weight + j * p.weight_stride + column)
                         : Vec<float, kThreadColumns>{};
  }

  const bool has_dy = kDx && p.dy != nullptr;
  const X* x_from = p.x + first * p.x_stride + column;
  const X* dy_from = has_dy ? p.dy + first * p.dy_stride + (column - stream * p.columns) : nullptr;
  X* dx_to = kDx ? p.dx + first * p.dx_stride + column : nullptr;
  // Words, not pairs: a pair of 16-bit values that may be zeros is put together from its halves.
  Raw x[kTogether], dy[kTogether];
  // The next tokens'; zeros behind the last one.
  auto load_group = [&](int token) {
#pragma unroll
    for (int g = 0; g < kTogether; ++g) {
      const bool there = active && token + g < tokens;
      x[g] = there ? *reinterpret_cast<const Raw*>(x_from) : Raw{};
      x_from += p.x_stride;
      if constexpr (kDx) {
        dy[g] = there && has_dy ? *reinterpret_cast<const Raw*>(dy_from) : Raw{};
        dy_from += p.dy_stride;
      }
    }
  };
  auto load_coefficients = [&](int token) {
    const int left = tokens - token;
    const float* const dproduct = p.dproduct + (first + token) * kRows;
#pragma unroll
    for (int i = tid; i < kChunk * kRows; i += kGradientThreads)
      coefficients[i / kRows][i % kRows] = i / kRows < left ? dproduct[i] : 0.0f;
    if constexpr (kDx) {
      static_assert(kChunk * kStreams == kGradientThreads);
      const int row = tid / kStreams, i = tid % kStreams;
      coefficients[row][kPreAt + i] = row < left ? p.pre[(first + token) * kStreams + tid] : 0.0f;
      if (tid < kChunk) coefficients[tid][kScaleAt] = tid < left ? p.x_scale[first + token + tid] : 0.0f;
    }
  };

  load_group(0);
  for (int chunk = 0; chunk < tokens; chunk += kChunk) {
    __syncthreads();
    load_coefficients(chunk);
    __syncthreads();
    const int last = min(tokens, chunk + kChunk);
    for (int token = chunk; token < last; token += kTogether) {
      Raw x_now[kTogether], dy_now[kTogether];
#pragma unroll
      for (int g = 0; g < kTogether; ++g) x_now[g] = x[g], dy_now[g] = dy[g];
      load_group(token + kTogether);
#pragma unroll
      for (int g = 0; g < kTogether; ++g) {
        const float* of_token = coefficients[token - chunk + g];
        const Pair x_pair = reinterpret_cast<const Pair&>(x_now[g]);
        float d[kThreadColumns] = {};
#pragma unroll
        for (int j = 0; j < kRows; j += 4) {
          const Vec<float, 4> dproduct = load_stream<float, 4>(of_token + j);
#pragma unroll
          for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int c = 0; c < kThreadColumns; ++c) {
              if constexpr (kDx) d[c] = fma(dproduct.v[e], weight[j + e].v[c], d[c]);
              if constexpr (kDweight) sums[j + e][c] = fma(dproduct.v[e], x_pair[c], sums[j + e][c]);
            }
        }
        if constexpr (!kDx) continue;
        const Pair dy_pair = reinterpret_cast<const Pair&>(dy_now[g]);
        const float pre = of_token[kPreAt + stream], x_scale = of_token[kScaleAt];
#pragma unroll
        for (int c = 0; c < kThreadColumns; ++c) {
          d[c] = fma(x_scale, x_pair[c], d[c]);
          if (has_dy) d[c] = fma(pre, dy_pair[c], d[c]);
        }
        Pair out;
        out.set(d);
        if (active && token + g < tokens) store(dx_to, out);
        dx_to += p.dx_stride;
      }
    }
  }
  if constexpr (kDweight) {
    if (!active) return;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      Vec<float, kThreadColumns> out;
      out.set(sums[j]);
      store(p.dweight + (int64_t(range) * kRows + j) * p.cols + column, out);
    }
  }
}

bool is_usual(const HyperConnection& how, const Matrix& x, const Matrix& weight) {
  return how.streams == kStreams && weight.rows == kRows && x.cols < INT32_MAX / 2 &&
         is_vectorizable(x.data, x.stride, x.cols, size_of(x.dtype)) &&
         is_vectorizable(weight.data, weight.stride, weight.cols, sizeof(float));
}

}  // namespace

bool products(Context& ctx, const HyperConnectionFwd& a) {
  if (!is_usual(a.how, a.x, a.weight)) return false;
  bool fits = false;
  by_type(a.x, [&]<class X>() {
    using Tile = ProductTile<X>;
    constexpr size_t kShared = Tile::kFloats * sizeof(float);
    static OccupancyCache occupancy;
    fits = int64_t(kShared) <= device_facts().shared_per_block &&
           occupancy.max_active(kOp, product_kernel<X>, 1, kThreads, kShared) > 0;
    if (!fits) return;
    const int64_t tokens = a.x.rows, cols = a.x.cols;
    const int64_t token_tiles = ceil_div(tokens, kTokens), tiles = ceil_div(cols, Tile::kColumns);
    const int64_t most = std::min(tiles, kMostSplits);
    const int64_t split_tiles = ceil_div(tiles, std::clamp<int64_t>(kProductCtas / token_tiles, 1, most));
    const int64_t splits = ceil_div(tiles, split_tiles);
    float* partials = ctx.scratch_of<float>(splits * (kRows + 1) * tokens);
    launch(kOp, ctx, product_kernel<X>,
           {.blocks = token_tiles * splits, .threads = kThreads, .shared = kShared},
           Product<X>{.x = a.x.row<X>(0),
                      .x_stride = a.x.stride,
                      .weight = a.weight.row<float>(0),
                      .weight_stride = a.weight.stride,
                      .tokens = tokens,
                      .cols = int(cols),
                      .split_cols = int(split_tiles * Tile::kColumns),
                      .splits = int(splits),
                      .partials = partials});
    launch(kOp, ctx, sum_products_kernel,
           {.blocks = ceil_div(tokens * (kRows + 1), kThreads), .threads = kThreads}, partials, int(splits),
           tokens, a.product.row<float>(0), a.product.stride, a.rstd.as<float>(), float(cols),
           a.how.norm_eps);
  });
  return fits;
}

bool product_gradients(Context& ctx, const HyperConnectionGradients& g) {
  const HyperConnectionBwd& a = *g.call;
  const int64_t tokens = a.x.rows, cols = a.x.cols, columns = cols / a.how.streams;
  const bool dx = a.dx.data != nullptr, dweight = a.dweight.data != nullptr;
  const bool pairs = vectors<kThreadColumns>(a.x, columns) && vectors<kThreadColumns>(a.dy, columns) &&
                     vectors<kThreadColumns>(a.dx, columns);
  if (!is_usual(a.how, a.x, a.weight) || !pairs || (dweight && a.dweight.stride != cols)) return false;
  if (!dx && !dweight) return true;
  const int64_t tiles = ceil_div(cols, kGradientColumns), chunks = ceil_div(tokens, kChunk);
  const int64_t range_chunks = ceil_div(chunks, std::clamp<int64_t>(kGradientCtas / tiles, 1, chunks));
  const int64_t ranges = ceil_div(chunks, range_chunks);
  float* partials = dweight ? ctx.scratch_of<float>(ranges * kRows * cols) : nullptr;
  by_type(a.x, [&]<class X>() {
    launch(kOp, ctx,
           !dweight ? product_gradient_kernel<X, true, false>
           : dx     ? product_gradient_kernel<X, true, true>
                    : product_gradient_kernel<X, false, true>,
           {.blocks = tiles * ranges, .threads = kGradientThreads},
           ProductGradient<X>{.x = a.x.row<X>(0),
                              .dy = a.dy.row<X>(0),
                              .dx = a.dx.row<X>(0),
                              .x_stride = a.x.stride,
                              .dy_stride = a.dy.stride,
                              .dx_stride = a.dx.stride,
                              .weight = a.weight.row<float>(0),
                              .weight_stride = a.weight.stride,
                              .dproduct = g.dproduct,
                              .pre = g.pre,
                              .x_scale = g.x_scale,
                              .dweight = partials,
                              .tokens = tokens,
                              .cols = cols,
                              .columns = columns,
                              .range = int(range_chunks * kChunk),
                              .tiles = int(tiles)});
  });
  if (dweight)
    sum_partials(kOp, ctx, partials, ranges,
                 {{.data = a.dweight.data, .dtype = DType::f32, .size = kRows * cols}});
  return true;
}

}  // namespace tigon::cuda
