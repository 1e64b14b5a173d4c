#include <algorithm>
#include "tigon/base/op.h"

#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/gemm_cpu.h"
#include "tigon/base/norm_rows.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_scalars.h"

#define TIGON_KERNELS "tigon/base/simd/norm_rows.inc"
#define TIGON_FORMULA "tigon/ops/modulated_rms_norm/modulated_rms_norm_math.inc"
#define TIGON_TABLE \
  const NormTable modulated_rms_norm_table = norm_table<ModulatedRmsNormForward, ModulatedRmsNormBackward>();
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kRowsPerTask = 16;
// The number of tasks of the backward is a function of the shape, so results do not depend on threads.
constexpr int64_t kMaxTasks = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Computes the gradients of one row of scale and shift from its sums, and what it adds to dweight.
template <class W>
struct GroupGradients {
  const ModulatedRmsNormBwd& a;

  float shifted_weight(int64_t c) const { return a.weight ? a.offset + to_float(a.weight.as<W>()[c]) : 1.0f; }
  void fold_weight(int64_t group, float* folded) const {
    const W* scale = a.scale.row<W>(group);
    for (int64_t c = 0; c < a.x.cols; ++c) folded[c] = shifted_weight(c) * (1.0f + to_float(scale[c]));
  }
  // u and dy are sums over the rows of the group.
  void write(int64_t group, const float* u, const float* dy, float* dweight) const {
    const W* scale = a.scale.row<W>(group);
    for (int64_t c = 0; c < a.x.cols; ++c) {
      if (a.dscale.data) a.dscale.row<W>(group)[c] = from_float<W>(shifted_weight(c) * u[c]);
      if (a.dshift.data) a.dshift.row<W>(group)[c] = from_float<W>(dy[c]);
      if (dweight) dweight[c] += (1.0f + to_float(scale[c])) * u[c];
    }
  }
};

// Writes the sums over no rows: 0, whatever they would be multiplied by.
template <class W>
void no_rows(const ModulatedRmsNormBwd& a) {
  for (int64_t group = 0; group < a.scale.rows; ++group)
    for (const Matrix& m : {a.dscale, a.dshift})
      if (m.data) std::fill_n(m.row<W>(group), a.x.cols, W{});
  if (a.dweight) std::fill_n(a.dweight.as<W>(), a.x.cols, W{});
}

// A task takes some groups, or part of the rows of one group if groups are few. Its own rows of scratch hold
// the folded weight and the two sums. Parts of a group are added in a second step.
template <class W>
void backward(Context& ctx, const ModulatedRmsNormBwd& a) {
  const int64_t groups = a.scale.rows, cols = a.x.cols, rows = groups > 0 ? a.x.rows / groups : 0;
  if (rows == 0) return no_rows<W>(a);
  const int64_t most_parts =
      std::max<int64_t>(1, std::min(kMaxTasks / std::max<int64_t>(1, groups), ceil_div(rows, kRowsPerTask)));
  const int64_t rows_of_part = std::max<int64_t>(1, ceil_div(rows, most_parts));
  const int64_t parts = std::max<int64_t>(1, ceil_div(rows, rows_of_part));
  const int64_t groups_of_task = parts > 1 ? 1 : std::max<int64_t>(1, ceil_div(groups, kMaxTasks));
  const int64_t tasks = ceil_div(groups, groups_of_task);  // counts the tasks of all parts
  const GroupGradients<W> of{a};
  const NormScalars scalars{.round_h = a.rounding == Rounding::llama};
  float* scratch = ctx.scratch_of<float>(tasks * parts * 3 * cols);
  const NormKernels& kernels = TIGON_SELECT(modulated_rms_norm_table)[a.x.dtype];
  float* dweights = a.dweight ? ctx.scratch_of<float>(tasks * cols) : nullptr;
  auto dweight_of = [&](int64_t task) { return dweights ? dweights + task * cols : nullptr; };
  if (dweights) std::fill(dweights, dweights + tasks * cols, 0.0f);
  parallel(ctx, tasks * parts, [&](int64_t i) {
    const int64_t task = i / parts, part = i % parts;
    float *folded = scratch + i * 3 * cols, *u = folded + cols, *dy = u + cols;
    for (int64_t g = task * groups_of_task; g < std::min(groups, (task + 1) * groups_of_task); ++g) {
      of.fold_weight(g, folded);
      std::fill(u, u + 2 * cols, 0.0f);
      for (int64_t r = g * rows + part * rows_of_part,
                   end = g * rows + std::min(rows, (part + 1) * rows_of_part);
           r < end; ++r)
        kernels.backward({.dy = element_at(a.dy, r, 0),
                          .in = {element_at(a.x, r, 0)},
                          .dy_is_f32 = a.dy.dtype == DType::f32,
                          .weight = folded,
                          .out = {element_at(a.dx, r, 0)},
                          .sums = {u, dy},
                          .rstd = a.rstd.as<float>()[r],
                          .cols = cols},
                         &scalars);
      if (parts == 1) of.write(g, u, dy, dweight_of(task));
    }
  });
  if (parts > 1)
    parallel(ctx, groups, [&](int64_t g) {
      float* first = scratch + g * parts * 3 * cols + cols;
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t c = 0; c < 2 * cols; ++c) first[c] += first[part * 3 * cols + c];
      of.write(g, first, first + cols, dweight_of(g));
    });
  if (a.dweight) sum_partials(ctx, dweights, tasks, cols, a.dweight);
}

}  // namespace

void modulated_rms_norm_fwd(Context& ctx, const ModulatedRmsNormFwd& a) {
  const ModulatedScalars scalars{{a.weight ? a.offset : 0.0f, a.rounding == Rounding::llama}};
  const int64_t rows = a.x.rows, rows_per_scale = rows / a.scale.rows;
  const int64_t cols = a.x.cols, tasks = ceil_div(rows, kRowsPerTask);
  const NormKernels& kernels = TIGON_SELECT(modulated_rms_norm_table)[a.x.dtype];
  const float* weight = in_f32(ctx, a.weight);
  // Holds scale and shift of the group of a task's rows in fp32, if they have another type.
  float* scratch = a.scale.dtype == DType::f32 ? nullptr : ctx.scratch_of<float>(tasks * 2 * cols);
  parallel(ctx, tasks, [&](int64_t task) {
    const float *scale = nullptr, *shift = nullptr;
    for (int64_t r = task * kRowsPerTask, begin = r; r < std::min(rows, begin + kRowsPerTask); ++r) {
      if (r == begin || r % rows_per_scale == 0) {
        auto in_f32 = [&](const Matrix& m, float* wide) -> const float* {
          if (m.data == nullptr) return nullptr;
          if (scratch == nullptr) return m.row<const float>(r / rows_per_scale);
          widen(element_at(m, r / rows_per_scale, 0), m.dtype, wide, cols);
          return wide;
        };
        scale = in_f32(a.scale, scratch + task * 2 * cols);
        shift = in_f32(a.shift, scratch + (task * 2 + 1) * cols);
      }
      float unwanted;
      kernels.forward({.in = {element_at(a.x, r, 0)},
                       .param = {weight, scale, shift},
                       .y = element_at(a.y, r, 0),
                       .y_is_f32 = a.y.dtype == DType::f32,
                       .rstd = a.rstd ? a.rstd.as<float>() + r : &unwanted,
                       .cols = cols,
                       .eps = a.eps},
                      &scalars);
    }
  });
}

void modulated_rms_norm_bwd(Context& ctx, const ModulatedRmsNormBwd& a) {
  dispatch_float("modulated_rms_norm", "scale", a.scale.dtype,
                 [&](auto t) { backward<typename decltype(t)::type>(ctx, a); });
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(modulated_rms_norm, ModulatedRmsNorm)
}
