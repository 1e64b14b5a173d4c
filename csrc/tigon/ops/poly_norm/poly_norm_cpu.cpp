#include <algorithm>
#include "tigon/base/op.h"

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/ops/poly_norm/poly_norm.h"

namespace tigon::cpu {
namespace {

struct PolyNormKernels {
  void (*forward)(const PolyNormFwd& a, int64_t row);
  void (*backward)(const PolyNormBwd& a, int64_t row, double* sums);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/poly_norm/poly_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void poly_norm_fwd(Context& ctx, const PolyNormFwd& a) {
  auto forward = TIGON_SELECT(poly_norm_table)[a.x.dtype].forward;
  for_each_row(ctx, a.x.rows, [&](int64_t r) { forward(a, r); });
}

void poly_norm_bwd(Context& ctx, const PolyNormBwd& a) {
  auto backward = TIGON_SELECT(poly_norm_table)[a.x.dtype].backward;
  const RowChunks chunks(a.x.rows);
  float *dweight = ctx.scratch_of<float>(chunks.count * 3), *dbias = ctx.scratch_of<float>(chunks.count);
  parallel(ctx, chunks.count, [&](int64_t c) {
    double sums[4] = {};
    for (int64_t r = chunks.begin(c); r < chunks.end(c); ++r) backward(a, r, sums);
    std::copy_n(sums, 3, dweight + 3 * c);
    dbias[c] = float(sums[3]);
  });
  if (a.dweight) sum_partials(ctx, dweight, chunks.count, 3, a.dweight);
  if (a.dbias) sum_partials(ctx, dbias, chunks.count, 1, a.dbias);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(poly_norm, PolyNorm)
}
