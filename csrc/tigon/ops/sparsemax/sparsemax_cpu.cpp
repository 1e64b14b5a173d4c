#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/ops/sparsemax/sparsemax.h"

namespace tigon::cpu {
namespace {

struct SparsemaxKernels {
  void (*forward)(const void* x, void* y, int64_t cols);
  void (*backward)(const void* dy, const void* y, void* dx, int64_t cols);
};
struct SparsemaxTable {
  SparsemaxKernels at[3];  // [dtype]
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/sparsemax/sparsemax_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void sparsemax_fwd(Context& ctx, const SparsemaxFwd& a) {
  const SparsemaxKernels& k = TIGON_SELECT(sparsemax_table).at[int(a.x.dtype)];
  for_each_row(ctx, a.x.rows,
               [&](int64_t r) { k.forward(element_at(a.x, r, 0), element_at(a.y, r, 0), a.x.cols); });
}

void sparsemax_bwd(Context& ctx, const SparsemaxBwd& a) {
  const SparsemaxKernels& k = TIGON_SELECT(sparsemax_table).at[int(a.y.dtype)];
  for_each_row(ctx, a.y.rows, [&](int64_t r) {
    k.backward(element_at(a.dy, r, 0), element_at(a.y, r, 0), element_at(a.dx, r, 0), a.y.cols);
  });
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(sparsemax, Sparsemax)
}
