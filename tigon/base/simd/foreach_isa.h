// Compiles the file named by TIGON_KERNELS once per instruction set. See lanes.h. No include guard: one use per .cpp.
// Each part needs the one before it: blank lines keep the formatter from sorting them.
// Unnamed namespaces: two ops may use one name for their kernels without the linker taking one for both.
#include "tigon/base/simd/lanes.h"

#ifndef TIGON_KERNELS
#error "define TIGON_KERNELS before including foreach_isa.h"
#endif

namespace tigon::cpu::scalar {
namespace {
#include "tigon/base/simd/lanes_scalar.inc"

#include "tigon/base/simd/lanes_math.inc"

#include TIGON_KERNELS
}  // namespace
}  // namespace tigon::cpu::scalar

#if defined(TIGON_X86)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace tigon::cpu::avx2 {
namespace {
#include "tigon/base/simd/lanes_avx2.inc"
#include "tigon/base/simd/lanes_math.inc"
#include TIGON_KERNELS
}  // namespace
}  // namespace tigon::cpu::avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace tigon::cpu::avx512 {
namespace {
#include "tigon/base/simd/lanes_avx512.inc"
#include "tigon/base/simd/lanes_math.inc"
#include TIGON_KERNELS
}  // namespace
}  // namespace tigon::cpu::avx512
#pragma GCC pop_options
#endif

#undef TIGON_KERNELS
