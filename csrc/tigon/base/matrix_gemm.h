// Runs a GEMM on matrix views.
#pragma once

#include "tigon/base/context.h"

namespace tigon {

// C = alpha op(A) op(B) + beta C. The flags are those of Gemm.
struct MatrixGemm {
  Matrix a, b, c;
  bool trans_a = false, trans_b = false;
  float alpha = 1.0f, beta = 0.0f;
  bool unrounded = false;
  bool padded_a = false;
  bool reduce_rows = false;
};
inline Gemm gemm_of(const MatrixGemm& p) {
  return {.m = p.c.rows,
          .n = p.c.cols,
          .k = p.trans_a ? p.a.rows : p.a.cols,
          .a = p.a.data,
          .lda = p.a.stride,
          .trans_a = p.trans_a,
          .b = p.b.data,
          .ldb = p.b.stride,
          .trans_b = p.trans_b,
          .c = p.c.data,
          .ldc = p.c.stride,
          .ab_dtype = p.a.dtype,
          .c_dtype = p.c.dtype,
          .alpha = p.alpha,
          .beta = p.beta,
          .unrounded = p.unrounded,
          .padded_a = p.padded_a,
          .reduce_rows = p.reduce_rows};
}
inline void gemm(Context& ctx, const MatrixGemm& p) { ctx.gemm(gemm_of(p)); }

}  // namespace tigon
