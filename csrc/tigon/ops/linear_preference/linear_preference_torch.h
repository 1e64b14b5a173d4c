// What the adaptors of linear_preference and linear_policy share: operands and options of the head, gradients, divisors.
#pragma once

#include "tigon/ops/linear_head/linear_head.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

// Tensors are replaced by copies where a view does not fit, so they must outlive the call of the core.
struct TokenLossOperands {
  Tensor hidden, weight, labels;
  OptionalTensor bias, lora_a, lora_b;

  static constexpr const char* kSchema =
      "(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? lora_a, Tensor? lora_b, ";
  static TokenLossOperands take(Stack& s) {
    return {s.take<Tensor>(),         s.take<Tensor>(),         s.take<Tensor>(),
            s.take<OptionalTensor>(), s.take<OptionalTensor>(), s.take<OptionalTensor>()};
  }
};

struct TokenLossOptions {
  double softcap, logit_scale, temperature, lora_scale;
  int64_t ignore_index, chunk_rows, valid_rows, answers, needs;

  static constexpr const char* kSchema =
      "float softcap, float logit_scale, float temperature, float lora_scale, int ignore_index,"
      " int chunk_rows, int valid_rows, int answers, int needs)";
  static TokenLossOptions take(Stack& s) {
    return {s.take<double>(),  s.take<double>(),  s.take<double>(),  s.take<double>(), s.take<int64_t>(),
            s.take<int64_t>(), s.take<int64_t>(), s.take<int64_t>(), s.take<int64_t>()};
  }
  int64_t tokens(int64_t rows) const { return answers > 0 ? rows / answers : 0; }
};

LinearHead head_of(const char* op, TokenLossOperands& t, const TokenLossOptions& o);

// Gradients that are wanted, as `needs` says (its bits are those of python/tigon/ops/loss_head/operands.py).
struct TokenLossGradients {
  Tensor hidden, weight, bias, lora_a, lora_b;
};
TokenLossGradients make_gradients(const char* op, LinearHead& head, const Tensor& hidden,
                                  const TokenLossOptions& o);

constexpr const char* kGradientResults =
    "Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias, Tensor dlora_a, Tensor dlora_b";

}  // namespace tigon::torch_shim
