// Products of groups of rows. Group g owns the rows [offsets[g], offsets[g + 1]) of a; offsets begin with 0 and do not decrease.
// Rows past the last offset are neither read nor written.
#pragma once

#include "tigon/base/context.h"
#include "tigon/base/gated_unit.h"

namespace tigon {

//   rows         c[r] = a[r] op(B_g): b holds the groups' matrices one after the other, [groups * k, n], or [groups * n, k] with
//                trans_b
//   reduce_rows  C_g = (rows g of a)^T (rows g of b): c is [groups * columns of a, columns of b]; zeros where a group is empty
struct GroupedGemm {
  const int32_t* offsets = nullptr;
  int64_t groups = 0;
  Matrix a;
  Matrix b;
  Matrix c;
  bool trans_b = false;
  bool reduce_rows = false;
};

// On the CPU one product of the context per group, on CUDA one launch on sm_90a, where rows are of 16 bits and whole 16-byte
// vectors, at most 2^30: tigon::Error otherwise.
void grouped_gemm(Context& ctx, const GroupedGemm& g);

// An expert's first product: act = the gated unit of c's columns, gate before up, rounded. c is written where it has data; without, its
// sizes count.
struct GroupedGate {
  GluOptions unit;
  Matrix act;    // [rows, columns of c / 2]
  Vector order;  // i32, where row r is a's row order[r] / (rows / a.rows); empty: row r
};
void grouped_gated_gemm(Context& ctx, const GroupedGemm& g, const GroupedGate& gate);
// Whether it takes these: rows on sm_90a as above, a unit whose function is a sigmoid, halves of whole 16-byte vectors; with order
// trans_b and at most 1024 columns of act, past which rows are gathered too often.
bool has_grouped_gate(Context& ctx, const GroupedGemm& g, const GroupedGate& gate);

namespace cuda {
// Whether the rows are of 16 bits and whole 16-byte vectors.
bool fits(const GroupedGemm& g);
void grouped_gated_gemm(Context& ctx, const GroupedGemm& g, const GroupedGate& gate);
bool has_grouped_gate(const GroupedGemm& g, const GroupedGate& gate);
void grouped_gemm(Context& ctx, const GroupedGemm& g);
bool has_grouped_gemm();
}  // namespace cuda

}  // namespace tigon
