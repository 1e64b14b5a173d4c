// Adaptors of ops of one tensor (tigon/base/activation.h).
#pragma once

#include "tigon/base/activation.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

inline Tensor activation_forward(const char* op, void (*run)(Context&, const ActivationFwd&), Tensor& x) {
  Matrix rows = rows_of(op, "x", x);
  Tensor y = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  run(*ctx, {.x = rows, .y = rows_of(op, "y", y)});
  return y;
}

inline Tensor activation_backward(const char* op, void (*run)(Context&, const ActivationBwd&), Tensor& dy,
                                  Tensor& x) {
  check_same_device(op, "dy", dy, x);
  Matrix d = rows_of(op, "dy", dy), rows = rows_of(op, "x", x);
  Tensor dx = make_like(x, rows.dtype);
  auto ctx = make_context(x);
  run(*ctx, {.dy = d, .x = rows, .dx = rows_of(op, "dx", dx)});
  return dx;
}

inline void define_activation(Library& m, const std::string& op) {
  define_forward(m, op, "(Tensor x) -> Tensor");
  define(m, op + "_bwd(Tensor dy, Tensor x) -> Tensor");
}

}  // namespace tigon::torch_shim
