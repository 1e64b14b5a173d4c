#include "tigon/base/grouped_gemm.h"

#include <cstring>

#include "tigon/base/elementwise.h"
#include "tigon/base/matrix_gemm.h"
#include "tigon/base/require.h"

namespace tigon {
namespace cpu {

void grouped_gemm(Context& ctx, const GroupedGemm& g) {
  for (int64_t i = 0; i < g.groups; ++i) {
    int64_t first = g.offsets[i], rows = g.offsets[i + 1] - first, group_rows = g.b.rows / g.groups;
    Matrix a = rows_from(g.a, first, rows);
    Matrix b = g.reduce_rows ? rows_from(g.b, first, rows) : rows_from(g.b, i * group_rows, group_rows);
    Matrix c = g.reduce_rows ? rows_from(g.c, i * g.a.cols, g.a.cols) : rows_from(g.c, first, rows);
    if (g.reduce_rows && rows == 0)
      for (int64_t r = 0; r < c.rows; ++r)
        std::memset(cpu::element_at(c, r, 0), 0, size_t(c.cols) * size_of(c.dtype));
    if (rows == 0) continue;
    gemm(ctx, {.a = a, .b = b, .c = c, .trans_a = g.reduce_rows, .trans_b = g.trans_b});
    if (g.a2.data == nullptr) continue;
    group_rows = g.b2.rows / g.groups;
    gemm(ctx, {.a = rows_from(g.a2, first, rows),
               .b = rows_from(g.b2, i * group_rows, group_rows),
               .c = c,
               .trans_b = g.trans_b,
               .beta = 1.0f});
  }
}

}  // namespace cpu

void grouped_gemm(Context& ctx, const GroupedGemm& g) { TIGON_RUN("grouped_gemm", ctx, grouped_gemm, g); }

bool has_grouped_gate(Context& ctx, [[maybe_unused]] const GroupedGemm& g,
                      [[maybe_unused]] const GroupedGate& gate) {
  bool has = false;
  on_device("grouped_gemm", ctx, [] {}, TIGON_ON_CUDA(has = cuda::has_grouped_gate(g, gate)));
  return has;
}

void grouped_gated_gemm(Context& ctx, const GroupedGemm& g, const GroupedGate& gate) {
  TIGON_CHECK("grouped_gemm", has_grouped_gate(ctx, g, gate),
              "there must be a gated GEMM for these, found none");
  on_device("grouped_gemm", ctx, [] {}, TIGON_ON_CUDA(cuda::grouped_gated_gemm(ctx, g, gate)));
}

}  // namespace tigon
