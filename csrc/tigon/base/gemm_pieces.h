// Cuts a 16-bit GEMM into pieces whose contiguous dimensions are whole 16-byte vectors. cuBLASLt's
// tensor-core kernels load and store 16-byte vectors. If a contiguous dimension of some matrix is not a
// multiple of eight elements (a vocabulary of 128257), cuBLASLt runs the whole GEMM with a kernel that is
// five times slower. Pieces that are multiples of eight run at full speed on the same memory. What is left is
// at most seven rows, columns or inner elements, which cost under one per cent of a large GEMM.
#pragma once

#include <array>

#include "tigon/base/aligned_rows.h"

namespace tigon {

struct GemmPieces {
  // The order in which the pieces must run: a later one may add to what an earlier one wrote.
  std::array<Gemm, 8> piece;
  int count = 0;
};

namespace gemm_pieces_detail {

inline const void* offset(const void* p, int64_t elements, DType t) {
  return static_cast<const char*>(p) + elements * int64_t(size_of(t));
}

inline Gemm rows(Gemm g, int64_t first, int64_t count) {
  g.a = offset(g.a, g.trans_a ? first : first * g.lda, g.ab_dtype);
  g.c = const_cast<void*>(offset(g.c, first * g.ldc, g.c_dtype));
  g.m = count;
  return g;
}

inline Gemm columns(Gemm g, int64_t first, int64_t count) {
  g.b = offset(g.b, g.trans_b ? first * g.ldb : first, g.ab_dtype);
  g.c = const_cast<void*>(offset(g.c, first, g.c_dtype));
  g.n = count;
  return g;
}

inline Gemm inner(Gemm g, int64_t first, int64_t count) {
  g.a = offset(g.a, g.trans_a ? first * g.lda : first, g.ab_dtype);
  g.b = offset(g.b, g.trans_b ? first : first * g.ldb, g.ab_dtype);
  g.k = count;
  return g;
}

}  // namespace gemm_pieces_detail

// Returns the GEMM as one piece if cutting gains nothing: float32 operands, dimensions that fit, rows that do
// not begin at 16-byte boundaries (cutting cannot align those), or so little work that launches cost more.
inline GemmPieces gemm_pieces(const Gemm& g, int64_t least_work = int64_t(1) << 30) {
  namespace d = gemm_pieces_detail;
  constexpr int64_t kVector = 8;
  auto begins_aligned = [](const void* p, int64_t stride, DType t) {
    return rows_are_aligned({.data = const_cast<void*>(p), .dtype = t, .stride = stride});
  };
  GemmPieces pieces = {.piece = {g}, .count = 1};
  bool aligned = begins_aligned(g.a, g.lda, g.ab_dtype) && begins_aligned(g.b, g.ldb, g.ab_dtype) &&
                 begins_aligned(g.c, g.ldc, g.c_dtype);
  if (!is_half(g.ab_dtype) || !aligned || g.m * g.n * g.k < least_work) return pieces;
  // Cuts every piece in two. Of the two parts of a sum the small one is written first, so that the large one
  // rounds the whole.
  auto cut = [&](int64_t size, Gemm (*part)(Gemm, int64_t, int64_t), bool sums) {
    int64_t whole = size / kVector * kVector;
    if (whole == 0 || whole == size) return;
    GemmPieces cut_pieces;
    for (int i = 0; i < pieces.count; ++i) {
      Gemm large = part(pieces.piece[size_t(i)], 0, whole);
      Gemm small = part(pieces.piece[size_t(i)], whole, size - whole);
      if (sums) large.beta = 1.0f;
      cut_pieces.piece[size_t(cut_pieces.count++)] = sums ? small : large;
      cut_pieces.piece[size_t(cut_pieces.count++)] = sums ? large : small;
    }
    pieces = cut_pieces;
  };
  if (g.trans_a) cut(g.m, d::rows, false);
  cut(g.n, d::columns, false);
  if (!g.trans_a || g.trans_b) cut(g.k, d::inner, true);
  return pieces;
}

}  // namespace tigon
