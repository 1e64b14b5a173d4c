#include <algorithm>
#include "tigon/base/op.h"

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/ops/dyt/dyt.h"

namespace tigon::cpu {
namespace {

struct DytParameters {
  float alpha;
  const float *weight, *bias;  // null if absent
};
struct DytKernels {
  void (*forward)(const DytFwd& a, const DytParameters& p, int64_t row);
  // Takes columns [first, first + n) of a row. Adds to dweight and dbias, and returns the part of dalpha.
  float (*backward)(const DytBwd& a, const DytParameters& p, int64_t row, int64_t first, int64_t n,
                    float* dweight, float* dbias);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/dyt/dyt_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void dyt_fwd(Context& ctx, const DytFwd& a) {
  auto forward = TIGON_SELECT(dyt_table)[a.x.dtype].forward;
  const DytParameters p{*in_f32(ctx, a.alpha), in_f32(ctx, a.weight), in_f32(ctx, a.bias)};
  for_each_row(ctx, a.x.rows, [&](int64_t r) { forward(a, p, r); });
}

void dyt_bwd(Context& ctx, const DytBwd& a) {
  constexpr int64_t kRun = 1024;
  auto backward = TIGON_SELECT(dyt_table)[a.x.dtype].backward;
  const DytParameters p{*in_f32(ctx, a.alpha), in_f32(ctx, a.weight), nullptr};
  const int64_t cols = a.x.cols;
  const RowChunks chunks(a.x.rows);
  float* dweight = a.dweight ? ctx.scratch_of<float>(chunks.count * cols) : nullptr;
  float* dbias = a.dbias ? ctx.scratch_of<float>(chunks.count * cols) : nullptr;
  float* dalpha = ctx.scratch_of<float>(chunks.count);
  parallel(ctx, chunks.count, [&](int64_t c) {
    auto mine = [&](float* sums) {
      if (sums) std::fill(sums + c * cols, sums + (c + 1) * cols, 0.0f);
      return sums ? sums + c * cols : nullptr;
    };
    float *dw = mine(dweight), *db = mine(dbias);
    // Adds sums of short runs: one chain over a long matrix would lose digits.
    double total = 0.0;
    for (int64_t r = chunks.begin(c); r < chunks.end(c); ++r)
      for (int64_t i = 0; i < cols; i += kRun)
        total += double(backward(a, p, r, i, std::min(kRun, cols - i), dw, db));
    dalpha[c] = float(total);
  });
  if (a.dalpha) sum_partials(ctx, dalpha, chunks.count, 1, a.dalpha);
  if (a.dweight) sum_partials(ctx, dweight, chunks.count, cols, a.dweight);
  if (a.dbias) sum_partials(ctx, dbias, chunks.count, cols, a.dbias);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(dyt, Dyt)
}
