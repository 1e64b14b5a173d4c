#include "tigon/base/elementwise.h"
#include "tigon/ops/silu/silu.h"

namespace tigon::cpu {
namespace {

struct SiluKernels {
  void (*forward)(const void* x, void* y, int64_t n);
  void (*backward)(const void* dy, const void* x, void* dx, int64_t n);
};
struct SiluTable {
  SiluKernels at[3];  // [dtype]
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/silu/silu_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void silu_fwd(Context& ctx, const SiluFwd& a) {
  const SiluKernels& k = TIGON_SELECT(silu_table).at[int(a.x.dtype)];
  for_each_block(ctx, a.x.rows, a.x.cols, all_dense({&a.x, &a.y}), [&](int64_t r, int64_t c, int64_t n) {
    k.forward(element_at(a.x, r, c), element_at(a.y, r, c), n);
  });
}

void silu_bwd(Context& ctx, const SiluBwd& a) {
  const SiluKernels& k = TIGON_SELECT(silu_table).at[int(a.x.dtype)];
  bool dense = all_dense({&a.dy, &a.x, &a.dx});
  for_each_block(ctx, a.x.rows, a.x.cols, dense, [&](int64_t r, int64_t c, int64_t n) {
    k.backward(element_at(a.dy, r, c), element_at(a.x, r, c), element_at(a.dx, r, c), n);
  });
}

}  // namespace tigon::cpu
