// An op of one tensor saves its input: y = f(x) and dx = dy * f'(x). This header holds the arguments of such
// ops and the way the CPU backend walks them. tigon/base/simd/activation.inc makes the table of kernels, and
// tigon/base/cuda/activation.cuh launches on CUDA.
#pragma once

#include "tigon/base/elementwise.h"
#include "tigon/base/fields.h"

namespace tigon {

struct ActivationFwd {
  Matrix x;
  Matrix y;

  void fields(Fields& f) {
    f.rows("x", x, 0);
    f.result("y", y, x);
  }
};

struct ActivationBwd {
  Matrix dy;
  Matrix x;
  Matrix dx;

  void fields(Fields& f) {
    f.input("dy", dy, x);
    f.rows("x", x, 0);
    f.result("dx", dx, x);
  }
};

namespace cpu {

struct ActivationKernels {
  void (*forward)(const void* x, void* y, int64_t n);
  void (*backward)(const void* dy, const void* x, void* dx, int64_t n);
};
using ActivationTable = ByDtype<ActivationKernels>;

inline void activation_fwd(Context& ctx, const ActivationTable& table, const ActivationFwd& a) {
  const ActivationKernels& k = table[a.x.dtype];
  for_each_block(ctx, a.x.rows, a.x.cols, all_dense({&a.x, &a.y}), [&](int64_t r, int64_t c, int64_t n) {
    k.forward(element_at(a.x, r, c), element_at(a.y, r, c), n);
  });
}

inline void activation_bwd(Context& ctx, const ActivationTable& table, const ActivationBwd& a) {
  const ActivationKernels& k = table[a.x.dtype];
  bool dense = all_dense({&a.dy, &a.x, &a.dx});
  for_each_block(ctx, a.x.rows, a.x.cols, dense, [&](int64_t r, int64_t c, int64_t n) {
    k.backward(element_at(a.dy, r, c), element_at(a.x, r, c), element_at(a.dx, r, c), n);
  });
}

}  // namespace cpu
}  // namespace tigon

// Defines tigon::cpu::<op>_fwd and <op>_bwd from the table in the op's <op>_cpu.cpp.
#define TIGON_ACTIVATION_CPU(op, table)                                                                     \
  void cpu::op##_fwd(Context& ctx, const ActivationFwd& a) { activation_fwd(ctx, TIGON_SELECT(table), a); } \
  void cpu::op##_bwd(Context& ctx, const ActivationBwd& a) { activation_bwd(ctx, TIGON_SELECT(table), a); }
