#include "tigon/ops/linear_preference/linear_policy.h"

#include "tigon/ops/linear_preference/linear_preference_torch.h"
#include "tigon/torch/policy.h"

namespace tigon::torch_shim::linear_policy_torch {
namespace {

constexpr const char* kOp = "linear_policy";

struct Inputs {
  Tensor advantage;
  OptionalTensor old, ref, importance;
  PolicyDivisors divisors;

  static Inputs take(Stack& s) {
    return {s.take<Tensor>(), s.take<OptionalTensor>(), s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<PolicyDivisors>()};
  }
};

TokenLossResults forward(Operands t, Formula f, Memory memory, int64_t answers, Inputs in,
                         PolicyOptions numbers, bool wants_entropy) {
  const Tensor& hidden = t.hidden;
  check_same_device(kOp, "advantage", in.advantage, hidden);
  for (auto [name, x] : {std::pair{"old", &in.old}, {"ref", &in.ref}, {"importance", &in.importance}})
    if (*x) check_same_device(kOp, name, **x, hidden);
  LinearPolicy a = {
      .head = head_of(kOp, t, f), .labels = labels_of(kOp, t, f, memory), .formula = f.logits()};
  int64_t rows = a.head.hidden.rows;
  auto rows_if = [&](bool wanted) {
    return wanted ? make(hidden, {rows}, DType::f32) : nothing(hidden, DType::f32);
  };
  Tensor loss = make(hidden, {}, DType::f32), scale = make(hidden, {}, DType::f32);
  Tensor log_prob = rows_if(true), entropy = rows_if(wants_entropy), kl = rows_if(in.ref.has_value()),
         clipped = rows_if(true);
  HeadGradients g = make_gradients(a.head, hidden, memory);
  auto flat = [&](const char* name, OptionalTensor& x) {
    if (!x) return Vector{};
    *x = to_contiguous(kOp, name, *x);
    return Vector{.data = data_of(kOp, name, *x), .dtype = dtype_of(kOp, name, *x), .size = x->numel()};
  };
  OptionalTensor advantage = in.advantage;
  a.log_prob = vector_of(kOp, "log_prob", log_prob);
  if (wants_entropy) a.entropy = vector_of(kOp, "entropy", entropy);
  Policy& p = a.loss;
  p.formula = numbers.formula, p.answers = answers, p.tokens = tokens_of(a.head, answers);
  p.advantage = flat("advantage", advantage), p.importance = flat("importance", in.importance);
  p.old = flat("old", in.old), p.ref = flat("ref", in.ref);
  if (in.ref) p.kl = vector_of(kOp, "kl", kl);
  p.clipped = vector_of(kOp, "clipped", clipped);
  a.totals = in.divisors.totals(kOp, numbers.normalise, hidden, scalar_of(kOp, "scale", scale),
                                scalar_of(kOp, "loss", loss));
  auto ctx = make_context(hidden);
  linear_policy(*ctx, a);
  return {loss, scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b, log_prob, entropy, kl, clipped};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_token_loss(m, kOp,
                    std::string("Tensor advantage, Tensor? old, Tensor? ref, Tensor? importance, ") +
                        PolicyDivisors::kSchema + PolicyOptions::kSchema + "bool wants_entropy",
                    ", Tensor log_prob, Tensor entropy, Tensor kl, Tensor clipped");
}
TIGON_TORCH_KERNELS(m) { implement_forward(m, kOp, boxed<&forward>); }

}  // namespace tigon::torch_shim::linear_policy_torch
