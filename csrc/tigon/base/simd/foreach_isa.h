// Compiles the file named by TIGON_KERNELS once per instruction set (see lanes.h). It has no include guard,
// since each .cpp uses it once. If those kernels are the base's (activation.inc, norm_rows.inc),
// TIGON_FORMULA names the op's formula and TIGON_TABLE defines the table that it makes of them. Each part
// needs the one before it, so blank lines keep the formatter from sorting them. The namespaces are unnamed,
// so that two ops may use one name for their kernels and the linker keeps them apart.
#include "tigon/base/simd/lanes.h"

#ifndef TIGON_KERNELS
#error "define TIGON_KERNELS before including foreach_isa.h"
#endif

#undef TIGON_LANE_CALL
#define TIGON_LANE_CALL [[maybe_unused, gnu::noinline]] static
#if defined(TIGON_X86) && !defined(__clang__)
#pragma GCC push_options
// This set serves processors without AVX2.
#pragma GCC optimize("Os")
#endif
namespace tigon::cpu::scalar {
namespace {
#include "tigon/base/simd/lanes_scalar.inc"

#include "tigon/base/simd/lanes_math.inc"

#include TIGON_KERNELS
}  // namespace
}  // namespace tigon::cpu::scalar
#if defined(TIGON_X86) && !defined(__clang__)
#pragma GCC pop_options
#endif
#undef TIGON_LANE_CALL
#define TIGON_LANE_CALL TIGON_LANE

#if defined(TIGON_X86)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace tigon::cpu::avx2 {
namespace {
#include "tigon/base/simd/lanes_avx2.inc"
#include "tigon/base/simd/lanes_math.inc"
#include TIGON_KERNELS
}  // namespace
}  // namespace tigon::cpu::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
namespace tigon::cpu::avx512 {
namespace {
#include "tigon/base/simd/lanes_avx512.inc"
#include "tigon/base/simd/lanes_math.inc"
#include TIGON_KERNELS
}  // namespace
}  // namespace tigon::cpu::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#undef TIGON_KERNELS
#undef TIGON_FORMULA
#undef TIGON_TABLE
