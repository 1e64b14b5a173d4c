#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/ops/softmax/softmax.h"

namespace tigon::cpu {
namespace {

struct SoftmaxKernels {
  void (*forward)(const void* x, void* y, int64_t cols);
  void (*backward)(const void* dy, const void* y, void* dx, int64_t cols);
};
struct SoftmaxTable {
  SoftmaxKernels at[3];  // [dtype]
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/softmax/softmax_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void softmax_fwd(Context& ctx, const SoftmaxFwd& a) {
  const SoftmaxKernels& k = TIGON_SELECT(softmax_table).at[int(a.x.dtype)];
  for_each_row(ctx, a.x.rows,
               [&](int64_t r) { k.forward(element_at(a.x, r, 0), element_at(a.y, r, 0), a.x.cols); });
}

void softmax_bwd(Context& ctx, const SoftmaxBwd& a) {
  const SoftmaxKernels& k = TIGON_SELECT(softmax_table).at[int(a.y.dtype)];
  for_each_row(ctx, a.y.rows, [&](int64_t r) {
    k.backward(element_at(a.dy, r, 0), element_at(a.y, r, 0), element_at(a.dx, r, 0), a.y.cols);
  });
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(softmax, Softmax)
}
