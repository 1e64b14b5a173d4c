#include <algorithm>
#include "tigon/base/op.h"

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/ops/poly_norm/poly_norm.h"

namespace tigon::cpu {
namespace {

struct PolyNormForwardRow {
  const void* x;
  float weight[3], bias;
  void* y;
  float* rstd;  // null: not wanted
  int64_t cols;
  float eps;
};
struct PolyNormBackwardRow {
  const void *dy, *x;
  float weight[3], rstd[3];
  void* dx;  // null: not wanted
  int64_t cols;
};
struct PolyNormKernels {
  void (*forward)(const PolyNormForwardRow&);
  void (*backward)(const PolyNormBackwardRow&, double* sums);
};
struct PolyNormTable {
  PolyNormKernels at[3];  // [dtype]
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/poly_norm/poly_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kMinRows = 16, kMaxPartials = 64;  // fixed by shape, so results do not depend on threads

float number(const Vector& v, int64_t i) {
  return dispatch_float("poly_norm", "weight", v.dtype,
                        [&](auto t) { return to_float(v.as<typename decltype(t)::type>()[i]); });
}

}  // namespace

void poly_norm_fwd(Context& ctx, const PolyNormFwd& a) {
  const PolyNormKernels& k = TIGON_SELECT(poly_norm_table).at[int(a.x.dtype)];
  const Vector& w = a.weight;
  PolyNormForwardRow all{.weight = {number(w, 0), number(w, 1), number(w, 2)},
                         .bias = number(a.bias, 0),
                         .cols = a.x.cols,
                         .eps = a.eps};
  for_each_row(ctx, a.x.rows, [&](int64_t r) {
    PolyNormForwardRow row = all;
    row.x = element_at(a.x, r, 0), row.y = element_at(a.y, r, 0);
    row.rstd = a.rstd ? a.rstd.as<float>() + 3 * r : nullptr;
    k.forward(row);
  });
}

void poly_norm_bwd(Context& ctx, const PolyNormBwd& a) {
  const PolyNormKernels& k = TIGON_SELECT(poly_norm_table).at[int(a.x.dtype)];
  const Vector& w = a.weight;
  PolyNormBackwardRow all{.weight = {number(w, 0), number(w, 1), number(w, 2)}, .cols = a.x.cols};
  const int64_t rows = a.x.rows, chunk = std::max(kMinRows, (rows + kMaxPartials - 1) / kMaxPartials);
  const int64_t chunks = (rows + chunk - 1) / chunk;
  float *dweight = ctx.scratch_of<float>(chunks * 3), *dbias = ctx.scratch_of<float>(chunks);
  parallel(ctx, chunks, [&](int64_t c) {
    double sums[4] = {};
    for (int64_t r = c * chunk, end = std::min(rows, r + chunk); r < end; ++r) {
      PolyNormBackwardRow row = all;
      row.dy = element_at(a.dy, r, 0), row.x = element_at(a.x, r, 0), row.dx = element_at(a.dx, r, 0);
      std::copy_n(a.rstd.as<float>() + 3 * r, 3, row.rstd);
      k.backward(row, sums);
    }
    std::copy_n(sums, 3, dweight + 3 * c);
    dbias[c] = float(sums[3]);
  });
  if (a.dweight) sum_partials(ctx, dweight, chunks, 3, a.dweight);
  if (a.dbias) sum_partials(ctx, dbias, chunks, 1, a.dbias);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(poly_norm, PolyNorm)
}
