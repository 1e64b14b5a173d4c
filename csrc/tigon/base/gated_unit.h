// Lists the kinds of gated units and their constants, which all ops with such a formula (gated_unit.inc)
// share.
#pragma once

#include <cstdint>
#include <utility>

namespace tigon {

enum class GluKind : int8_t { swiglu, geglu, geglu_tanh, reglu, swiglu_oai, relu_squared, swiglu_clamped };
inline constexpr int kGluKinds = 7;
constexpr const char* name_of(GluKind kind) {
  constexpr const char* kNames[] = {"swiglu",     "geglu",        "geglu", "reglu",
                                    "swiglu_oai", "relu_squared", "swiglu"};
  return kNames[int(kind)];
}

constexpr bool is_kind(GluKind kind) { return int(kind) >= 0 && int(kind) < kGluKinds; }

struct GluOptions {
  GluKind kind = GluKind::swiglu;
  float gate_multiplier = 1.0f;  // swiglu
  float down_multiplier = 1.0f;  // swiglu
  float alpha = 1.702f;          // swiglu_oai
  float limit = 7.0f;            // the clamped kinds; > 0
};

// Calls fn.operator()<kind>() on the host. Kernels use with_kind (gated_unit.inc).
template <class Fn>
void dispatch_kind(GluKind kind, Fn&& fn) {
  [&]<int... K>(std::integer_sequence<int, K...>) {
    ((int(kind) == K ? fn.template operator()<GluKind(K)>() : void()), ...);
  }(std::make_integer_sequence<int, kGluKinds>{});
}

// Returns true for the kinds that clamp their inputs.
constexpr bool is_clamped(GluKind kind) {
  return kind == GluKind::swiglu_oai || kind == GluKind::swiglu_clamped;
}

}  // namespace tigon
