// Turns a run-time dtype or flag into a template parameter, through a templated lambda instead of a macro.
#pragma once

#include <type_traits>

#include "tigon/base/check.h"
#include "tigon/base/tensor.h"

namespace tigon {

template <class T>
struct Type {
  using type = T;
};

// Calls fn(Type<float>{}), fn(Type<bf16>{}) or fn(Type<f16>{}).
template <class Fn>
decltype(auto) dispatch_float(const char* op, const char* what, DType t, Fn&& fn) {
  switch (t) {
    case DType::f32: return fn(Type<float>{});
    case DType::bf16: return fn(Type<bf16>{});
    case DType::f16: return fn(Type<f16>{});
    default: detail::fail(op, {what, " must be float32, bfloat16 or float16, got ", name_of(t)});
  }
}

// Holds what make(Type<T>{}) returns for float, bf16 and f16.
template <class Make>
constexpr auto by_dtype(Make make) {
  return ByDtype<decltype(make(Type<float>{}))>{{make(Type<float>{}), make(Type<bf16>{}), make(Type<f16>{})}};
}

template <class Fn>
decltype(auto) dispatch_bool(bool b, Fn&& fn) {
  return b ? fn(std::true_type{}) : fn(std::false_type{});
}

}  // namespace tigon
