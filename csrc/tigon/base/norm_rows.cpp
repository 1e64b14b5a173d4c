#include "tigon/base/norm_rows.h"

#include "tigon/base/elementwise.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kRowsPerTask = 16;
constexpr int64_t kMaxPartials = 64;  // of column sums: fixed by shape, so results do not depend on threads

// fn(row, section) for every section of rows [first, end)
template <class Fn>
void each_section(int64_t first, int64_t end, int64_t sections, const Fn& fn) {
  for (int64_t r = first; r < end; ++r)
    for (int64_t s = 0; s < sections; ++s) fn(r, s);
}

}  // namespace

const float* NormKernels::in_f32(Context& ctx, const Vector& param) const {
  if (!param || param.dtype == DType::f32) return param.as<float>();
  float* wide = ctx.scratch_of<float>(param.size);
  widen(param.data, wide, param.size);
  return wide;
}

void norm_forward(Context& ctx, const NormForward& a, const NormKernels& kernels) {
  int64_t rows = a.y.rows, cols = a.y.cols / a.sections;
  const float* params[kNormMost];
  for (int k = 0; k < kNormMost; ++k) params[k] = kernels.in_f32(ctx, a.param[k]);
  parallel(ctx, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    int64_t first = task * kRowsPerTask;
    each_section(first, std::min(rows, first + kRowsPerTask), a.sections, [&](int64_t r, int64_t s) {
      float unwanted;
      auto statistic = [&](const Vector& v) { return v ? v.as<float>() + r * a.sections + s : &unwanted; };
      NormForwardRow row{.kept = element_at(a.kept, r, s * cols),
                         .y = element_at(a.y, r, s * cols),
                         .rstd = statistic(a.rstd),
                         .mean = statistic(a.mean),
                         .cols = cols,
                         .eps = a.eps};
      for (int k = 0; k < kNormMost; ++k) {
        row.in[k] = element_at(a.in[k], r, s * cols);
        row.param[k] = params[k] ? params[k] + s * cols : nullptr;
      }
      kernels.forward(row, a.formula);
    });
  });
}

void norm_backward(Context& ctx, const NormBackward& a, const NormKernels& kernels) {
  int64_t rows = a.dy.rows, width = a.dy.cols, cols = width / a.sections;
  int64_t chunk = std::max(kRowsPerTask, (rows + kMaxPartials - 1) / kMaxPartials);
  int64_t chunks = (rows + chunk - 1) / chunk;
  const float* weight = kernels.in_f32(ctx, a.weight);
  float* partials[kNormMost];
  for (int k = 0; k < kNormMost; ++k)
    partials[k] = a.sums[k] ? ctx.scratch_of<float>(chunks * width) : nullptr;
  parallel(ctx, chunks, [&](int64_t c) {
    for (float* p : partials)
      if (p) std::fill(p + c * width, p + (c + 1) * width, 0.0f);
    each_section(c * chunk, std::min(rows, (c + 1) * chunk), a.sections, [&](int64_t r, int64_t s) {
      NormBackwardRow row{.dy = element_at(a.dy, r, s * cols),
                          .weight = weight ? weight + s * cols : nullptr,
                          .rstd = a.rstd.as<float>()[r * a.sections + s],
                          .mean = a.mean ? a.mean.as<float>()[r * a.sections + s] : 0.0f,
                          .cols = cols};
      for (int k = 0; k < kNormMost; ++k) {
        row.in[k] = element_at(a.in[k], r, s * cols);
        row.out[k] = element_at(a.out[k], r, s * cols);
        row.sums[k] = partials[k] ? partials[k] + c * width + s * cols : nullptr;
      }
      kernels.backward(row, a.formula);
    });
  });
  for (int k = 0; k < kNormMost; ++k)
    if (a.sums[k]) sum_partials(ctx, partials[k], chunks, width, a.sums[k]);
}

}  // namespace tigon::cpu
