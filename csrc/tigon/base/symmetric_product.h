// Matrix products that are symmetric because of their factors, as X X^T and the product of two polynomials of one matrix.
#pragma once

#include "tigon/base/context.h"

namespace tigon {

// d = alpha a b^T + beta c + gamma I of `count` adjacent fp16 matrices, summed in fp32 and rounded once: half of the tiles are
// computed, and stored twice.
struct SymmetricProduct {
  int64_t count = 1, n = 0, k = 0;
  bool trans = false;  // a^T b of [k, n] matrices; otherwise a b^T of [n, k]
  const void *a = nullptr, *b = nullptr;
  const void* c = nullptr;  // [n, n], or null
  void* d = nullptr;        // [n, n], another than a, b and c
  float alpha = 1.0f, beta = 0.0f, gamma = 0.0f;
};

namespace cuda {
// False: nothing was done, the device is no sm_90, or rows do not begin at multiples of 16 bytes.
TIGON_API bool symmetric_product(Context& ctx, const SymmetricProduct& p);
}  // namespace cuda

}  // namespace tigon
