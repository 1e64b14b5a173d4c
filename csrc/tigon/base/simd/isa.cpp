#include <cstdlib>
#include <string_view>

#include "tigon/base/simd/lanes.h"

namespace tigon::cpu {
namespace {

Isa machine_isa() {
#if defined(TIGON_X86)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Isa::avx2;
#endif
  return Isa::scalar;
}

Isa chosen_isa() {
  Isa best = machine_isa();
  const char* wish = std::getenv("TIGON_CPU_ISA");
  if (wish == nullptr) return best;
  std::string_view name(wish);
  Isa isa = name == "scalar" ? Isa::scalar : name == "avx2" ? Isa::avx2 : Isa::avx512;
  return isa < best ? isa : best;
}

Isa& current() {
  static Isa isa = chosen_isa();
  return isa;
}

}  // namespace

Isa active_isa() { return current(); }

bool force_isa(Isa isa) {
  if (isa > machine_isa()) return false;
  current() = isa;
  return true;
}

}  // namespace tigon::cpu
