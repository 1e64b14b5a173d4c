// What the adaptors of linear_preference and linear_policy share: operands and options of the head, gradients, divisors.
#pragma once

#include "tigon/torch/linear_head.h"

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

// The gradients that `needs` asks for.
HeadGradients make_gradients(const char* op, LinearHead& head, const Tensor& hidden,
                             const TokenLossOptions& o);

// What either operator gives: what callers see, the loss first; then the reduction's factor and the gradients.
struct TokenLossResults {
  using Visible = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
  Visible visible;
  Tensor scale;
  HeadGradients gradients;
};

// The operators of a loss: with gradients, and <op>_infer without. `inputs` are the schema of Inputs and Formula.
void define_token_loss(Library& m, const std::string& op, const std::string& inputs,
                       const std::string& visible);

// TokenLossResults run(TokenLossOperands&, Inputs&, const Formula&, const TokenLossOptions&)
template <auto* run, class Inputs, class Formula>
auto token_loss_forward(TokenLossOperands t, Inputs in, Formula f, TokenLossOptions o) {
  TokenLossResults r = run(t, in, f, o);
  const HeadGradients& g = r.gradients;
  return std::tuple_cat(std::move(r.visible),
                        std::tuple(r.scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b));
}
template <auto* run, class Inputs, class Formula>
TokenLossResults::Visible token_loss_infer(TokenLossOperands t, Inputs in, Formula f, TokenLossOptions o) {
  o.needs = 0;
  return run(t, in, f, o).visible;
}
template <auto* run, class Inputs, class Formula>
void implement_token_loss(Library& m, const std::string& op) {
  implement_forward(m, op, boxed<&token_loss_forward<run, Inputs, Formula>>);
  m.impl((op + "_infer").c_str(), boxed<&token_loss_infer<run, Inputs, Formula>>);
}

}  // namespace tigon::torch_shim
