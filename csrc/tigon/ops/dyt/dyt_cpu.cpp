#include <algorithm>
#include "tigon/base/op.h"

#include "tigon/base/column_sum.h"
#include "tigon/base/elementwise.h"
#include "tigon/ops/dyt/dyt.h"

namespace tigon::cpu {
namespace {

struct DytForwardRow {
  const void* x;
  float alpha;
  const float *weight, *bias;  // null: none
  void* y;
  int64_t cols;
};
struct DytBackwardRow {
  const void *dy, *x;
  float alpha;
  const float* weight;  // null: none
  void* dx;
  float *dweight, *dbias;
  int64_t cols;
};
struct DytKernels {
  void (*widen)(const void*, float*, int64_t);
  void (*forward)(const DytForwardRow&);
  float (*backward)(const DytBackwardRow&);
};
struct DytTable {
  DytKernels at[3];
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/dyt/dyt_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kRowsPerTask = 16;
constexpr int64_t kMaxPartials = 64;  // of column sums: fixed by shape, so results do not depend on threads
constexpr int64_t kRun = 1024;

const DytKernels& kernels_for(DType dtype) { return TIGON_SELECT(dyt_table).at[int(dtype)]; }

// A parameter in fp32, where it is or as a copy; nullptr stays nullptr.
const float* widened(Context& ctx, const Vector& v) {
  if (!v || v.dtype == DType::f32) return v.as<float>();
  float* copy = ctx.scratch_of<float>(v.size);
  kernels_for(v.dtype).widen(v.data, copy, v.size);
  return copy;
}

}  // namespace

void dyt_fwd(Context& ctx, const DytFwd& a) {
  const DytKernels& k = kernels_for(a.x.dtype);
  const float alpha = *widened(ctx, a.alpha), *weight = widened(ctx, a.weight), *bias = widened(ctx, a.bias);
  parallel(ctx, (a.x.rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t r = task * kRowsPerTask, end = std::min(a.x.rows, r + kRowsPerTask); r < end; ++r)
      k.forward({.x = element_at(a.x, r, 0),
                 .alpha = alpha,
                 .weight = weight,
                 .bias = bias,
                 .y = element_at(a.y, r, 0),
                 .cols = a.x.cols});
  });
}

void dyt_bwd(Context& ctx, const DytBwd& a) {
  const DytKernels& k = kernels_for(a.x.dtype);
  const float alpha = *widened(ctx, a.alpha), *weight = widened(ctx, a.weight);
  int64_t rows = a.x.rows, cols = a.x.cols;
  int64_t chunk = std::max(kRowsPerTask, (rows + kMaxPartials - 1) / kMaxPartials);
  int64_t chunks = (rows + chunk - 1) / chunk;
  float* dweight = a.dweight ? ctx.scratch_of<float>(chunks * cols) : nullptr;
  float* dbias = a.dbias ? ctx.scratch_of<float>(chunks * cols) : nullptr;
  float* dalpha = ctx.scratch_of<float>(chunks);
  parallel(ctx, chunks, [&](int64_t c) {
    auto mine = [&](float* sums) {
      if (sums) std::fill(sums + c * cols, sums + (c + 1) * cols, 0.0f);
      return sums ? sums + c * cols : nullptr;
    };
    float *dw = mine(dweight), *db = mine(dbias);
    double total = 0.0;  // over short runs: one chain over a long matrix would lose digits
    for (int64_t r = c * chunk, end = std::min(rows, r + chunk); r < end; ++r)
      for (int64_t i = 0; i < cols; i += kRun)
        total += double(k.backward({.dy = element_at(a.dy, r, i),
                                    .x = element_at(a.x, r, i),
                                    .alpha = alpha,
                                    .weight = weight ? weight + i : nullptr,
                                    .dx = element_at(a.dx, r, i),
                                    .dweight = dw ? dw + i : nullptr,
                                    .dbias = db ? db + i : nullptr,
                                    .cols = std::min(kRun, cols - i)}));
    dalpha[c] = float(total);
  });
  if (a.dalpha) sum_partials(ctx, dalpha, chunks, 1, a.dalpha);
  if (a.dweight) sum_partials(ctx, dweight, chunks, cols, a.dweight);
  if (a.dbias) sum_partials(ctx, dbias, chunks, cols, a.dbias);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(dyt, Dyt)
}
