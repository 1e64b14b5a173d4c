// A row op of this kind saves its result: y = f(x), and dx is computed from dy and y. This header holds the
// arguments of such ops and the way the CPU backend walks them. tigon/base/cuda/row_kernel.cuh launches on
// CUDA.
#pragma once

#include "tigon/base/activation.h"

namespace tigon {

using DistributionFwd = ActivationFwd;

struct DistributionBwd {
  Matrix dy;
  Matrix y;
  Matrix dx;

  void fields(Fields& f) {
    f.input("dy", dy, y);
    f.rows("y", y, 0);
    f.result("dx", dx, y);
  }
};

namespace cpu {

struct DistributionKernels {
  void (*forward)(const void* x, void* y, int64_t cols);
  void (*backward)(const void* dy, const void* y, void* dx, int64_t cols);
};
using DistributionTable = ByDtype<DistributionKernels>;

inline void distribution_fwd(Context& ctx, const DistributionTable& table, const DistributionFwd& a) {
  const DistributionKernels& k = table[a.x.dtype];
  for_each_row(ctx, a.x.rows,
               [&](int64_t r) { k.forward(element_at(a.x, r, 0), element_at(a.y, r, 0), a.x.cols); });
}

inline void distribution_bwd(Context& ctx, const DistributionTable& table, const DistributionBwd& a) {
  const DistributionKernels& k = table[a.y.dtype];
  for_each_row(ctx, a.y.rows, [&](int64_t r) {
    k.backward(element_at(a.dy, r, 0), element_at(a.y, r, 0), element_at(a.dx, r, 0), a.y.cols);
  });
}

}  // namespace cpu
}  // namespace tigon

// Defines tigon::cpu::<op>_fwd and <op>_bwd from the table in the op's <op>_cpu.inc.
#define TIGON_DISTRIBUTION_CPU(op)                              \
  void cpu::op##_fwd(Context& ctx, const DistributionFwd& a) {  \
    distribution_fwd(ctx, TIGON_SELECT(distribution_table), a); \
  }                                                             \
  void cpu::op##_bwd(Context& ctx, const DistributionBwd& a) {  \
    distribution_bwd(ctx, TIGON_SELECT(distribution_table), a); \
  }
