#include "tigon/base/elementwise.h"
#include "tigon/ops/glu/glu.h"

namespace tigon::cpu {
namespace {

struct GluKernels {
  void (*forward)(const void* gate, const void* up, void* y, int64_t n, const GluOptions& options);
  void (*backward)(const void* dy, const void* gate, const void* up, void* dgate, void* dup, int64_t n,
                   const GluOptions& options);
};
struct GluTable {
  ByDtype<GluKernels> at[kGluKinds];
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/glu/glu_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

const GluKernels& kernels(const GluOptions& o, DType t) { return TIGON_SELECT(glu_table).at[int(o.kind)][t]; }
// Returns the columns of `gate` and `dgate` per column of y.
int64_t width(const GluOptions& o) { return o.kind == GluKind::swiglu_oai ? 2 : 1; }

}  // namespace

void glu_fwd(Context& ctx, const GluFwd& a) {
  const GluKernels& k = kernels(a.options, a.gate.dtype);
  int64_t wide = width(a.options);
  bool dense = all_dense({&a.gate, &a.up, &a.y});
  for_each_block(ctx, a.y.rows, a.y.cols, dense, [&](int64_t r, int64_t c, int64_t n) {
    k.forward(element_at(a.gate, r, wide * c), element_at(a.up, r, c), element_at(a.y, r, c), n, a.options);
  });
}

void glu_bwd(Context& ctx, const GluBwd& a) {
  const GluKernels& k = kernels(a.options, a.gate.dtype);
  int64_t wide = width(a.options);
  bool dense = all_dense({&a.dy, &a.gate, &a.up, &a.dgate, &a.dup});
  for_each_block(ctx, a.dy.rows, a.dy.cols, dense, [&](int64_t r, int64_t c, int64_t n) {
    k.backward(element_at(a.dy, r, c), element_at(a.gate, r, wide * c), element_at(a.up, r, c),
               element_at(a.dgate, r, wide * c), element_at(a.dup, r, c), n, a.options);
  });
}

}  // namespace tigon::cpu
