// The kinds of gated units and their numbers: what the ops that have such a formula (gated_unit.inc) share.
#pragma once

#include <cstdint>

namespace tigon {

enum class GluKind : int8_t { swiglu, geglu, geglu_tanh, reglu, swiglu_oai, relu_squared };
inline constexpr int kGluKinds = 6;
constexpr const char* name_of(GluKind kind) {
  constexpr const char* kNames[] = {"swiglu", "geglu", "geglu", "reglu", "swiglu_oai", "relu_squared"};
  return kNames[int(kind)];
}

struct GluOptions {
  GluKind kind = GluKind::swiglu;
  float gate_multiplier = 1.0f;  // swiglu
  float down_multiplier = 1.0f;  // swiglu
  float alpha = 1.702f;          // swiglu_oai
  float limit = 7.0f;            // swiglu_oai, > 0
};

}  // namespace tigon
