// Sixteen fp32 lanes form one vocabulary for three instruction sets: scalar (float[16]), AVX2+FMA+F16C (2 x
// 8) and AVX-512 (1 x 16). A CPU kernel is written once in an <op>_cpu.inc file against the names below, and
// compiled for every set by
//     #define TIGON_KERNELS "tigon/ops/<op>/<op>_cpu.inc"
//     #include "tigon/base/simd/foreach_isa.h"
// which includes it inside `namespace tigon::cpu::{scalar,avx2,avx512}` with matching target pragmas. The
// file ends with a `const Table kTable{...}` of function pointers, and `select_isa` picks one table at run
// time. No -m flags are used, so no inline function of a standard header is ever compiled for an instruction
// set that the machine may lack. Every operation rounds exactly as IEEE says and sums follow one fixed tree,
// so all three sets give bitwise equal results.
// V            value of 16 lanes with + - * / and unary -
// M            lane mask: lt, gt, le, eq (false for NaN), is_nan; select(m, a, b)
// set1 load store        float, bf16, f16; round to nearest even
// load_n store_n         the first n lanes; the others read as a fill value
// load_span store_span   what is left of a row, at most 16
// load_pairs store_pairs the same for interleaved pairs a b a b ...
// fma max min            max/min return the SECOND operand if either is NaN: put data second and NaN survives
// sqrt round_even scale2 (p * 2^n, one rounding) sum hmax
// mul exp exp2_neg log log2 sigmoid tanh reciprocal normal silu_slope  (lanes_math.inc)
#pragma once

#include "tigon/base/dispatch.h"

namespace tigon::cpu {

enum class Isa : int { scalar, avx2, avx512 };

// Returns the best set of this machine, or the one named by TIGON_CPU_ISA=scalar|avx2|avx512 (never above
// what the machine has).
Isa active_isa();
// Overrides active_isa, for tests, until it is called again. Returns false if the machine lacks that set.
bool force_isa(Isa isa);

template <class Table>
const Table& select_isa(const Table& scalar, const Table& avx2, const Table& avx512) {
  switch (active_isa()) {
    case Isa::avx512: return avx512;
    case Isa::avx2: return avx2;
    default: return scalar;
  }
}

}  // namespace tigon::cpu

#if defined(__x86_64__)
#define TIGON_X86 1
#include <immintrin.h>
#endif
#include <cmath>
#include <cstring>

#define TIGON_LANE [[gnu::always_inline]] static inline
// Marks a longer lane function, which the scalar set calls. Inlined everywhere, that set would be most of the
// library.
#define TIGON_LANE_CALL TIGON_LANE
// The same word marks the functions of shared <op>_math.inc formulas: a lane function here, a __device__
// function in CUDA.
#define TIGON_FN [[gnu::always_inline]] inline
// Stands at the end of an <op>_cpu.cpp and picks the table of the running machine.
#if defined(TIGON_X86)
#define TIGON_SELECT(table)                                                        \
  ::tigon::cpu::select_isa(::tigon::cpu::scalar::table, ::tigon::cpu::avx2::table, \
                           ::tigon::cpu::avx512::table)
#else
#define TIGON_SELECT(table) ::tigon::cpu::scalar::table
#endif
