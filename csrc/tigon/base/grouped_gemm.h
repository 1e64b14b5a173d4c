// Multiplies groups of rows by a matrix per group. Group g owns the rows [offsets[g], offsets[g + 1]) of a.
// Offsets begin with 0 and do not decrease. Rows past the last offset are neither read nor written.
#pragma once

#include "tigon/base/context.h"
#include "tigon/base/gated_unit.h"

namespace tigon {

// There are two kinds of grouped GEMM:
//   rows         c[r] = a[r] op(B_g): b holds the groups' matrices one after the other, [groups * k, n], or
//                [groups * n, k] with trans_b
//   reduce_rows  C_g = (rows g of a)^T (rows g of b): c is [groups * columns of a, columns of b], with zeros
//                for an empty group
struct GroupedGemm {
  const int32_t* offsets = nullptr;
  int64_t groups = 0;
  Matrix a;
  Matrix b;
  Matrix c;
  // If present, a2[r] op(B2_g) is added: b2 is to a2 what b is to a. Not with reduce_rows.
  Matrix a2, b2;
  bool trans_b = false;
  bool reduce_rows = false;
};

// The CPU runs one GEMM of the context per group. CUDA runs one launch on sm_90a, which needs 16-bit rows of
// whole 16-byte vectors, at most 2^30 of them; otherwise it throws tigon::Error.
void grouped_gemm(Context& ctx, const GroupedGemm& g);

// The first GEMM of an expert computes act = the gated unit of c's columns, gate before up, rounded. c is
// written if it has data; otherwise only its sizes count.
struct GroupedGate {
  GluOptions unit;
  Matrix act;  // [rows, columns of c / 2]
  // i32: row r is a's row order[r] / (rows / a.rows). If empty, it is row r.
  Vector order;
};
void grouped_gated_gemm(Context& ctx, const GroupedGemm& g, const GroupedGate& gate);
// True if grouped_gemm takes these arguments: rows on sm_90a as above, a unit whose function is a sigmoid,
// and halves of whole 16-byte vectors. With `order` it also needs trans_b and at most 1024 columns of act:
// beyond that, rows would be gathered too often.
bool has_grouped_gate(Context& ctx, const GroupedGemm& g, const GroupedGate& gate);

namespace cuda {
// True if rows are 16-bit and consist of whole 16-byte vectors.
bool fits(const GroupedGemm& g);
void grouped_gated_gemm(Context& ctx, const GroupedGemm& g, const GroupedGate& gate);
bool has_grouped_gate(const GroupedGemm& g, const GroupedGate& gate);
void grouped_gemm(Context& ctx, const GroupedGemm& g);
bool has_grouped_gemm();
}  // namespace cuda

}  // namespace tigon
