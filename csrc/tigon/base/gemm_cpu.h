// The built-in CPU matrix product: right for every layout and dtype, in blocks of caches and registers, no more. Frameworks
// bring a better one through Context::gemm; this one serves C++ programs that have none. The same bits for every instruction
// set: without FMA instructions (x86 before AVX2) each multiplication and addition is a call of the C library.
#pragma once

#include "tigon/base/context.h"

namespace tigon::cpu {

void builtin_gemm(Context& ctx, const Gemm& g);

// dst[i] = float(src[i]), and back with one rounding (beta 0) or dst += src (beta 1, f32 only).
void widen(const void* src, DType dtype, float* dst, int64_t n);

}  // namespace tigon::cpu
