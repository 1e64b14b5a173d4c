#include "tigon/base/elementwise.h"
#include "tigon/ops/swiglu/swiglu.h"

namespace tigon::cpu {
namespace {

struct SwigluKernels {
  void (*forward)(const void* gate, const void* up, void* y, int64_t n);
  void (*backward)(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t n);
};
struct SwigluTable {
  SwigluKernels at[3];  // [dtype]
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/swiglu/swiglu_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void swiglu_fwd(Context& ctx, const SwigluFwd& a) {
  const SwigluKernels& k = TIGON_SELECT(swiglu_table).at[int(a.gate.dtype)];
  bool dense = all_dense({&a.gate, &a.up, &a.y});
  for_each_block(ctx, a.gate.rows, a.gate.cols, dense, [&](int64_t r, int64_t c, int64_t n) {
    k.forward(element_at(a.gate, r, c), element_at(a.up, r, c), element_at(a.y, r, c), n);
  });
}

void swiglu_bwd(Context& ctx, const SwigluBwd& a) {
  const SwigluKernels& k = TIGON_SELECT(swiglu_table).at[int(a.gate.dtype)];
  bool dense = all_dense({&a.dy, &a.gate, &a.up, &a.dgate, &a.dup});
  for_each_block(ctx, a.gate.rows, a.gate.cols, dense, [&](int64_t r, int64_t c, int64_t n) {
    k.backward(element_at(a.dy, r, c), element_at(a.gate, r, c), element_at(a.up, r, c),
               element_at(a.dgate, r, c), element_at(a.dup, r, c), n);
  });
}

}  // namespace tigon::cpu
