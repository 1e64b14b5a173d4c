#include "tigon/base/norm_rows.h"

#include "tigon/base/elementwise.h"

namespace tigon::cpu {

void norm_forward(Context& ctx, const NormForward& a, const NormKernels& kernels) {
  int64_t rows = a.y.rows, cols = a.y.cols / a.sections;
  const float* params[kNormMost];
  for (int k = 0; k < kNormMost; ++k) params[k] = in_f32(ctx, a.param[k]);
  for_each_row(ctx, rows, [&](int64_t r) {
    for (int64_t s = 0; s < a.sections; ++s) {
      float unwanted;
      auto statistic = [&](const Vector& v) { return v ? v.as<float>() + r * a.sections + s : &unwanted; };
      NormForwardRow row{.kept = element_at(a.kept, r, s * cols),
                         .y = element_at(a.y, r, s * cols),
                         .y_is_f32 = a.y.dtype == DType::f32,
                         .rstd = statistic(a.rstd),
                         .mean = statistic(a.mean),
                         .cols = cols,
                         .eps = a.eps};
      for (int k = 0; k < kNormMost; ++k) {
        row.in[k] = element_at(a.in[k], r, s * cols);
        row.param[k] = params[k] ? params[k] + s * cols : nullptr;
      }
      kernels.forward(row, a.formula);
    }
  });
}

void norm_backward(Context& ctx, const NormBackward& a, const NormKernels& kernels) {
  int64_t rows = a.dy.rows, width = a.dy.cols, cols = width / a.sections;
  const RowChunks chunks(rows);
  const float* weight = in_f32(ctx, a.weight);
  float* partials[kNormMost];
  for (int k = 0; k < kNormMost; ++k)
    partials[k] = a.sums[k] ? ctx.scratch_of<float>(chunks.count * width) : nullptr;
  parallel(ctx, chunks.count, [&](int64_t c) {
    for (float* p : partials)
      if (p) std::fill(p + c * width, p + (c + 1) * width, 0.0f);
    for (int64_t i = chunks.begin(c) * a.sections; i < chunks.end(c) * a.sections; ++i) {
      const int64_t r = i / a.sections, s = i % a.sections;
      NormBackwardRow row{.dy = element_at(a.dy, r, s * cols),
                          .dy_is_f32 = a.dy.dtype == DType::f32,
                          .weight = weight ? weight + s * cols : nullptr,
                          .rstd = a.rstd.as<float>()[i],
                          .mean = a.mean ? a.mean.as<float>()[i] : 0.0f,
                          .cols = cols};
      for (int k = 0; k < kNormMost; ++k) {
        row.in[k] = element_at(a.in[k], r, s * cols);
        row.out[k] = element_at(a.out[k], r, s * cols);
        row.sums[k] = partials[k] ? partials[k] + c * width + s * cols : nullptr;
      }
      kernels.backward(row, a.formula);
    }
  });
  for (int k = 0; k < kNormMost; ++k)
    if (a.sums[k]) sum_partials(ctx, partials[k], chunks.count, width, a.sums[k]);
}

}  // namespace tigon::cpu
