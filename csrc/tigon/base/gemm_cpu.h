// The built-in CPU GEMM handles every layout and dtype, blocks for caches and registers, and does no more.
// Frameworks bring a better one through Context::gemm; this one serves C++ programs that have none. Its
// results are bitwise equal for every instruction set. Without FMA instructions (x86 before AVX2) each fma is
// a call of the C library.
#pragma once

#include "tigon/base/context.h"

namespace tigon::cpu {

void builtin_gemm(Context& ctx, const Gemm& g);

// widen() computes dst[i] = float(src[i]). narrow() goes back, with one rounding (beta 0) or as dst += src
// (beta 1, f32 only).
void widen(const void* src, DType dtype, float* dst, int64_t n);

}  // namespace tigon::cpu
