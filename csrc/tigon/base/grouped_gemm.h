// Products of groups of rows. Group g owns the rows [offsets[g], offsets[g + 1]) of a; offsets begin with 0 and do not decrease.
// Rows past the last offset are neither read nor written.
#pragma once

#include "tigon/base/context.h"

namespace tigon {

//   rows      c[r] = a[r] op(B_g): b holds the groups' matrices one after the other, [groups * k, n], or [groups * n, k] with
//             trans_b
//   over_rows C_g = (rows g of a)^T (rows g of b): c is [groups * columns of a, columns of b]; zeros where a group is empty
struct GroupedGemm {
  const int32_t* offsets = nullptr;
  int64_t groups = 0;
  Matrix a;
  Matrix b;
  Matrix c;
  bool trans_b = false;
  bool over_rows = false;
};

// On the CPU one product of the context per group, on CUDA one launch where has_grouped_gemm() and the rows are of 16 bits and
// whole 16-byte vectors, at most 2^30: tigon::Error otherwise.
void grouped_gemm(Context& ctx, const GroupedGemm& g);
// Whether the context's device has such a kernel: sm_90a.
bool has_grouped_gemm(Context& ctx);

namespace cuda {
void grouped_gemm(Context& ctx, const GroupedGemm& g);
bool has_grouped_gemm();
}  // namespace cuda

}  // namespace tigon
