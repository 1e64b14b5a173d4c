// Implements contrastive in CUDA. A warp takes a panel of columns (a lane has eight adjacent ones) of a block
// of rows, eight rows at a time.
// statistics: reads the scores once; with columns two exponentials a pair, mostly nine for eight pairs, and
// one without; 8 bytes a row and panel and a column and block.
// gradient: reads and writes the scores once; two exponentials a pair with columns, one without.
#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/each.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/contrastive/contrastive.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/contrastive/contrastive_math.inc"

constexpr const char* kOp = "contrastive";
constexpr int kThreads = 256, kWarps = kThreads / 32, kVec = 8, kBatch = 8;
static_assert(kContrastivePanel == 32 * kVec && kContrastiveBlock % kBatch == 0);

// Returns exp of a number that is not above 0; for 16-bit scores by the approximate instruction.
template <class T>
__device__ __forceinline__ float exp_neg(float t) {
  if constexpr (std::is_same_v<T, float>)
    return exp(t);
  else
    return exp2_neg(t * kLog2e);
}

// Returns the CTAs of a block of rows.
__host__ __device__ constexpr int64_t ctas_of_block(int64_t cols) {
  return (cols + kWarps * kContrastivePanel - 1) / (kWarps * kContrastivePanel);
}
// Says where a warp works.
struct Tile {
  int64_t block, panel, col, first, last;
  __device__ explicit Tile(const ContrastiveChunk& a) {
    const unsigned groups = unsigned(ctas_of_block(a.cols));
    block = blockIdx.x / groups;
    panel = int64_t(blockIdx.x % groups) * kWarps + threadIdx.x / 32;
    col = panel * kContrastivePanel + int64_t(threadIdx.x % 32) * kVec;
    first = block * kContrastiveBlock, last = min(a.rows, first + kContrastiveBlock);
  }
};

// Computes the scores of a row in a lane's columns; -inf if there is none, or if the pair is left out.
template <class T, bool kMasked>
__device__ __forceinline__ void scores_of(const ContrastiveChunk& a, const Vec<T, kVec>& x, float scale,
                                          int64_t row, int64_t col, bool is_row, float (&z)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) z[j] = is_row && col + j < a.cols ? x[j] * scale : -INFINITY;
  if constexpr (kMasked) {
    if (!is_row || col >= a.cols) return;
    Vec<float, kVec> t;
    if (a.guide != nullptr) t = load_stream<float, kVec>(a.guide + row * a.stride + col);
    unsigned out = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (col + j < a.cols && contrastive_resembles(a, row, col + j, a.guide != nullptr ? t[j] : x[j]))
        out |= 1u << j;
    // Labels count, as in contrastive_left_out.
#pragma unroll 1
    for (int64_t k = 0; out != 0 && k < a.label_count; ++k)
      if (const int64_t at = a.labels[row * a.label_stride + k] - col; at >= 0 && at < kVec)
        out &= ~(1u << at);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (out >> j & 1) z[j] = -INFINITY;
  }
}

// Adds more * exp(at) to sum * exp(top), which becomes the larger of both exponents.
template <class T>
__device__ __forceinline__ void add_exponentials(float& top, float& sum, float at, float more) {
  const float larger = fmaxf(top, at), factor = exp_neg<T>(fminf(top, at) - contrastive_reference(larger));
  sum = top < at ? fma(sum, factor, more) : fma(more, factor, sum);
  top = larger;
}

// Handles the usual batch of 16-bit scores: all of them count, and they are so near to each other that
// exponentials relative to the largest serve rows and columns. Otherwise it does nothing and returns false.
template <class T, bool kColumns>
__device__ __forceinline__ bool add_near(const Vec<T, kVec> (&x)[kBatch], float scale, float (&sum)[kBatch],
                                         float& top, float (&col_top)[kVec], float (&col_sum)[kVec]) {
  // exp(-kNear) is above the smallest normal number.
  constexpr float kNear = 80.0f;
  auto words = [&](int i) { return reinterpret_cast<const uint4&>(x[i]); };
  uint32_t most = max_words<T>(words(0)), least = min_words<T>(words(0));
#pragma unroll
  for (int i = 1; i < kBatch; ++i)
    most = max_words<T>(most, max_words<T>(words(i))), least = min_words<T>(least, min_words<T>(words(i)));
  const float largest = extreme_of_lanes<Max, 32>(max_of_word<T>(most)),
              smallest = extreme_of_lanes<Min, 32>(-max_of_word<T>(least ^ 0x80008000u));
  if (!((largest - smallest) * scale <= kNear)) return false;
  top = largest * scale;
  const float to_log2 = scale * kLog2e, reference = largest * to_log2;
  float of_col[kVec] = {};
#pragma unroll
  for (int i = 0; i < kBatch; ++i)
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float e = exp2_approx(fma(x[i][j], to_log2, -reference));
      sum[i] += e, of_col[j] += e;
    }
#pragma unroll
  for (int j = 0; kColumns && j < kVec; ++j) add_exponentials<T>(col_top[j], col_sum[j], top, of_col[j]);
  return true;
}

// Computes the statistics. If pairs may be left out (kMasked), it decides at run time whether columns are
// wanted.
template <class T, bool kColumns, bool kMasked>
__global__ __launch_bounds__(kThreads, 2) void statistics_kernel(const __grid_constant__ ContrastiveChunk a) {
  const Tile tile(a);
  if (tile.panel * kContrastivePanel >= a.cols) return;
  const int lane = int(threadIdx.x) % 32, own = reduced_value<kBatch>(lane);
  const float scale = *a.scale;
  const bool columns = kMasked ? a.col_parts != nullptr : kColumns;
  const bool is_whole = (tile.panel + 1) * kContrastivePanel <= a.cols;
  const T* scores = static_cast<const T*>(a.scores) + tile.col;
  float col_top[kVec], col_sum[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) col_top[j] = -INFINITY, col_sum[j] = 0.0f;
  for (int64_t row = tile.first; row < tile.last; row += kBatch) {
    Vec<T, kVec> x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      x[i] =
          load_predicated<T, kVec>(row + i < tile.last && tile.col < a.cols, scores + (row + i) * a.stride);
    float sum[kBatch] = {}, own_top = 0.0f;
    if (!(sizeof(T) == 2 && !kMasked && is_whole && row + kBatch <= tile.last &&
          add_near<T, kColumns>(x, scale, sum, own_top, col_top, col_sum))) {
      float z[kBatch][kVec];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        scores_of<T, kMasked>(a, x[i], scale, row + i, tile.col, row + i < tile.last, z[i]);
        float row_top = z[i][0];
#pragma unroll
        for (int j = 1; j < kVec; ++j) row_top = fmaxf(row_top, z[i][j]);
        row_top = extreme_of_lanes<Max, 32>(row_top);
        own_top = i == own ? row_top : own_top;
        const float reference = contrastive_reference(row_top);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[i] += exp_neg<T>(z[i][j] - reference);
      }
#pragma unroll
      for (int j = 0; columns && j < kVec; ++j) {
        float top = z[0][j], more = 0.0f;
#pragma unroll
        for (int i = 1; i < kBatch; ++i) top = fmaxf(top, z[i][j]);
        const float reference = contrastive_reference(top);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) more += exp_neg<T>(z[i][j] - reference);
        add_exponentials<T>(col_top[j], col_sum[j], top, more);
      }
    }
    const float row_sum = reduce_values<Sum, kBatch>(sum);
    if (lane < kBatch && row + own < tile.last && a.row_parts != nullptr) {
      float* part = a.row_parts + 2 * tile.panel * a.rows + row + own;
      part[0] = own_top, part[a.rows] = row_sum;
    }
  }
  if (columns) {
    float* parts = a.col_parts + 2 * tile.block * a.cols + tile.col;
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      if (tile.col + j < a.cols) parts[j] = col_top[j], parts[a.cols + j] = col_sum[j];
  }
}

// Computes what a row or column adds to the gradient of one of its scores: weight * exp(z - lse).
template <class T>
struct Share {
  ContrastiveLse lse;
  float low, weight;  // low is in powers of two
  __device__ Share(double lse, float weight)
      : lse(lse == -double(INFINITY) ? 0.0 : lse), low(this->lse.low * kLog2e), weight(weight) {}
  __device__ __forceinline__ float operator()(float z) const {
    if constexpr (std::is_same_v<T, float>)
      return contrastive_share(z, exp(z - lse.high - lse.low), weight);
    else
      return weight * exp2_approx(fma(z - lse.high, kLog2e, -low));  // 1 if z is all that counts
  }
};

template <class T, bool kColumns, bool kMasked>
__global__ __launch_bounds__(kThreads) void gradient_kernel(const __grid_constant__ ContrastiveChunk a) {
  constexpr int kRows = 4;
  const Tile tile(a);
  if (tile.panel * kContrastivePanel >= a.cols) return;
  const bool is_column = tile.col < a.cols;
  const float scale = *a.scale;
  const bool with_columns = kMasked ? a.dcol != nullptr : kColumns;
  float slope = 0.0f;
  T* scores = static_cast<T*>(a.scores) + tile.col;
  auto of_column = [&](int j) {
    const bool is_col = with_columns && tile.col + j < a.cols;
    return Share<T>(is_col ? a.col_lse[tile.col + j] : 0.0, is_col ? a.dcol[tile.col + j] : 0.0f);
  };
  const Share<T> columns[kVec] = {of_column(0), of_column(1), of_column(2), of_column(3),
                                  of_column(4), of_column(5), of_column(6), of_column(7)};
  for (int64_t row = tile.first; row < tile.last; row += kRows) {
    Vec<T, kVec> x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      x[i] = load_predicated<T, kVec>(row + i < tile.last && is_column, scores + (row + i) * a.stride);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t r = row + i;
      if (r >= tile.last) break;
      const Share<T> of_row(a.row_lse != nullptr ? a.row_lse[r] : 0.0, a.drow != nullptr ? a.drow[r] : 0.0f);
      float z[kVec], g[kVec];
      scores_of<T, kMasked>(a, x[i], scale, r, tile.col, true, z);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        g[j] = of_row(z[j]);
        if (with_columns) g[j] += columns[j](z[j]);
      }
      for (int64_t k = 0; k < (a.dpicked != nullptr ? a.label_count : 0); ++k) {
        const int64_t at = a.labels[r * a.label_stride + k] - tile.col;
        if (at < 0 || at >= kVec) continue;
        const float dpicked = a.dpicked[r * a.label_count + k];
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          if (at == j && tile.col + j < a.cols) g[j] += dpicked;
      }
      if (a.slope_parts != nullptr) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) slope += contrastive_slope(z[j], g[j]);
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) g[j] *= scale;
      Vec<T, kVec> y;
      y.set(g);
      if (is_column) store_v4(scores + r * a.stride, y);
    }
  }
  if (a.slope_parts == nullptr) return;
  slope = reduce_lanes<Sum, 32>(slope);
  if (threadIdx.x % 32 == 0) a.slope_parts[tile.block * contrastive_panels(a.cols) + tile.panel] = slope;
}

// Writes picked of a label.
template <class T>
struct Picked {
  ContrastiveChunk a;
  __device__ void operator()(int64_t i) const {
    const int64_t row = i / a.label_count, j = a.labels[row * a.label_stride + i % a.label_count];
    const bool is_col = j >= 0 && j < a.cols;
    a.picked[i] = is_col ? widen(static_cast<const T*>(a.scores)[row * a.stride + j]) * *a.scale : 0.0f;
  }
};

// Merges the parts of a number, eight at a time.
struct Merge {
  ContrastiveMerge a;
  __device__ void operator()(int64_t c) const {
    const ContrastiveLse old(a.fresh ? -INFINITY : a.out[c]);
    float top = old.high, sum = a.fresh ? 0.0f : exp(old.low);
    for (int64_t p = 0; p < a.count; p += kBatch) {
      float tops[kBatch], sums[kBatch], most = top;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float* part = a.parts + 2 * (p + i) * a.size + c;
        tops[i] = p + i < a.count ? part[0] : -INFINITY, sums[i] = p + i < a.count ? part[a.size] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) most = fmaxf(most, tops[i]);
      const float reference = contrastive_reference(most);
      sum *= exp(top - reference);
      top = most;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum += sums[i] * exp(tops[i] - reference);
    }
    a.out[c] = double(contrastive_reference(top)) + double(log(sum));
  }
};

LaunchConfig tiles_of(const ContrastiveChunk& a) {
  return {.blocks = contrastive_blocks(a.rows) * ctas_of_block(a.cols), .threads = kThreads};
}

}  // namespace

void contrastive_statistics(Context& ctx, DType dtype, const ContrastiveChunk& a) {
  dispatch_float(kOp, "q", dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    if (a.picked != nullptr) for_each(kOp, ctx, a.rows * a.label_count, Picked<T>{a});
    const auto kernel = a.masked()               ? &statistics_kernel<T, true, true>
                        : a.col_parts != nullptr ? &statistics_kernel<T, true, false>
                                                 : &statistics_kernel<T, false, false>;
    launch(kOp, ctx, kernel, tiles_of(a), a);
  });
}

void contrastive_merge(Context& ctx, const ContrastiveMerge& a) { for_each(kOp, ctx, a.size, Merge{a}); }

void contrastive_gradient(Context& ctx, DType dtype, const ContrastiveChunk& a) {
  dispatch_float(kOp, "q", dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    const auto kernel = a.masked()          ? &gradient_kernel<T, true, true>
                        : a.dcol != nullptr ? &gradient_kernel<T, true, false>
                                            : &gradient_kernel<T, false, false>;
    launch(kOp, ctx, kernel, tiles_of(a), a);
  });
}

}  // namespace tigon::cuda
