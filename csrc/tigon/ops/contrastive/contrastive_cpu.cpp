#include <algorithm>
#include <cmath>
#include <vector>

#include "tigon/base/dispatch.h"
#include "tigon/base/op.h"
#include "tigon/ops/contrastive/contrastive.h"

namespace tigon::cpu {
namespace {

struct ContrastiveTable {
  void (*statistics[3])(const void* scores, int64_t stride, int64_t rows, int64_t cols, float scale,
                        float* row_part, int64_t row_stride, float* col_part, int64_t col_stride);
  float (*gradient[3])(void* row, int64_t cols, float scale, double row_lse, float drow, const float* col_lse,
                       const float* dcol);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/contrastive/contrastive_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {
#include "tigon/ops/contrastive/contrastive_math.inc"

// Returns a row's score of column j.
template <class T>
float z_of(const ContrastiveChunk& a, int64_t row, int64_t j) {
  return to_float(static_cast<const T*>(a.scores)[row * a.stride + j]) * *a.scale;
}
// Calls fn(k, j) for the labels of a row that are columns.
template <class Fn>
void for_labels(const ContrastiveChunk& a, int64_t row, const Fn& fn) {
  for (int64_t k = 0; k < a.label_count; ++k) {
    const int64_t j = a.labels[row * a.label_stride + k];
    if (j >= 0 && j < a.cols) fn(row * a.label_count + k, j);
  }
}
// Sets the scores of pairs that are left out to -inf.
template <class T>
void mask_row(const ContrastiveChunk& a, int64_t row) {
  T* scores = static_cast<T*>(a.scores) + row * a.stride;
  const float* guide = a.guide ? a.guide + row * a.stride : nullptr;
  for (int64_t j = 0; j < a.cols; ++j)
    if (contrastive_left_out(a, row, j, guide ? guide[j] : to_float(scores[j])))
      scores[j] = from_float<T>(-INFINITY);
}

}  // namespace

void contrastive_statistics(Context& ctx, DType dtype, const ContrastiveChunk& a) {
  const int64_t blocks = contrastive_blocks(a.rows), panels = contrastive_panels(a.cols);
  const auto run = TIGON_SELECT(contrastive_table).statistics[int(dtype)];
  dispatch_float("contrastive", "q", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.masked()) parallel(ctx, a.rows, [&](int64_t r) { mask_row<T>(a, r); });
    if (a.picked)
      parallel(ctx, a.rows, [&](int64_t r) {
        std::fill_n(a.picked + r * a.label_count, a.label_count, 0.0f);
        for_labels(a, r, [&](int64_t k, int64_t j) { a.picked[k] = z_of<T>(a, r, j); });
      });
    parallel(ctx, blocks * panels, [&](int64_t task) {
      const int64_t block = task / panels, panel = task % panels;
      const int64_t row = block * kContrastiveBlock, col = panel * kContrastivePanel;
      run(static_cast<const T*>(a.scores) + row * a.stride + col, a.stride,
          std::min<int64_t>(kContrastiveBlock, a.rows - row),
          std::min<int64_t>(kContrastivePanel, a.cols - col), *a.scale,
          a.row_parts ? a.row_parts + 2 * panel * a.rows + row : nullptr, a.rows,
          a.col_parts ? a.col_parts + 2 * block * a.cols + col : nullptr, a.cols);
    });
  });
}

void contrastive_merge(Context& ctx, const ContrastiveMerge& a) {
  constexpr int64_t kNumbers = 1024;
  parallel(ctx, (a.size + kNumbers - 1) / kNumbers, [&](int64_t task) {
    for (int64_t c = task * kNumbers, end = std::min(a.size, c + kNumbers); c < end; ++c) {
      const float* tops = a.parts + c;
      const float* sums = tops + a.size;
      const double old = a.fresh ? -INFINITY : a.out[c];
      double top = old;
      for (int64_t p = 0; p < a.count; ++p) top = std::max(top, double(tops[2 * p * a.size]));
      const double reference = top > -INFINITY ? top : 0.0;
      double total = std::exp(old - reference);
      for (int64_t p = 0; p < a.count; ++p)
        if (const float sum = sums[2 * p * a.size]; sum != 0.0f)
          total += sum * std::exp(double(tops[2 * p * a.size]) - reference);
      a.out[c] = reference + std::log(total);
    }
  });
}

void contrastive_gradient(Context& ctx, DType dtype, const ContrastiveChunk& a) {
  const auto run = TIGON_SELECT(contrastive_table).gradient[int(dtype)];
  float* col_lse = a.dcol ? ctx.scratch_of<float>(2 * a.cols) : nullptr;
  float* slopes = a.slope_parts ? ctx.scratch_of<float>(a.rows) : nullptr;
  for (int64_t j = 0; col_lse && j < a.cols; ++j) {
    const ContrastiveLse lse(a.col_lse[j]);
    col_lse[j] = lse.high, col_lse[a.cols + j] = lse.low;
  }
  dispatch_float("contrastive", "q", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel(ctx, a.rows, [&](int64_t r) {
      if (a.masked()) mask_row<T>(a, r);
      T* scores = static_cast<T*>(a.scores) + r * a.stride;
      const double row_lse = a.row_lse ? a.row_lse[r] : 0.0;
      const float drow = a.drow ? a.drow[r] : 0.0f;
      // A label's gradient is a difference, formed in double before it is rounded.
      thread_local std::vector<float> label_z;
      label_z.assign(size_t(a.label_count), 0.0f);
      const bool differences = a.dpicked != nullptr;
      for_labels(a, r,
                 [&](int64_t k, int64_t j) { label_z[size_t(k - r * a.label_count)] = z_of<T>(a, r, j); });
      for_labels(a, r,
                 [&](int64_t, int64_t j) { scores[j] = differences ? from_float<T>(-INFINITY) : scores[j]; });
      float slope = run(scores, a.cols, *a.scale, row_lse, drow, col_lse, a.dcol);
      for_labels(a, r, [&](int64_t k, int64_t j) {
        if (!differences) return;
        const float z = label_z[size_t(k - r * a.label_count)];
        double g = drow * std::exp(z - row_lse);
        bool again = false;  // true if the column is an earlier label's too
        if (a.dcol) g += a.dcol[j] * std::exp(z - a.col_lse[j]);
        for_labels(a, r, [&](int64_t other, int64_t i) {
          if (i == j) g += a.dpicked[other], again = again || other < k;
        });
        if (!again) slope += float(g * z);
        scores[j] = from_float<T>(float(*a.scale * g));
      });
      if (slopes) slopes[r] = slope;
    });
  });
  const int64_t panels = contrastive_panels(a.cols);
  for (int64_t block = 0; slopes && block < contrastive_blocks(a.rows); ++block) {
    float* part = a.slope_parts + block * panels;
    std::fill_n(part, panels, 0.0f);
    for (int64_t r = block * kContrastiveBlock; r < std::min(a.rows, (block + 1) * kContrastiveBlock); ++r)
      *part += slopes[r];
  }
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(contrastive, Contrastive)
}
