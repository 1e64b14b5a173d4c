// Computes GEMMs whose result is symmetric because of their factors, such as X X^T and the product of two
// polynomials of one matrix.
#pragma once

#include "tigon/base/context.h"

namespace tigon {

// d = alpha a b^T + beta c + gamma I for `count` adjacent fp16 matrices, summed in fp32 and rounded once.
// Half of the tiles are computed, and each is stored twice.
struct SymmetricGemm {
  int64_t count = 1, n = 0, k = 0;
  // Computes a^T b of [k, n] matrices; otherwise a b^T of [n, k] matrices.
  bool trans = false;
  const void *a = nullptr, *b = nullptr;
  const void* c = nullptr;  // [n, n], or null
  void* d = nullptr;        // [n, n]; must not overlap a, b or c
  float alpha = 1.0f, beta = 0.0f, gamma = 0.0f;
};

namespace cuda {
// Returns false if nothing was done: the device is not sm_90, or rows do not begin at multiples of 16 bytes.
TIGON_API bool symmetric_gemm(Context& ctx, const SymmetricGemm& p);
}  // namespace cuda

}  // namespace tigon
