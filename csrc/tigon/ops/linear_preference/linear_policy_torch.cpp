#include "tigon/ops/linear_preference/linear_policy.h"

#include "tigon/ops/linear_preference/linear_preference_torch.h"
#include "tigon/torch/policy.h"

namespace tigon::torch_shim::linear_policy_torch {
namespace {

constexpr const char* kOp = "linear_policy";

struct Inputs {
  Tensor advantage;
  OptionalTensor old, ref, importance;
  static constexpr const char* kNames[] = {"advantage", "old", "ref", "importance"};
};

TokenLossResults forward(Operands t, Formula f, Memory memory, int64_t answers, Inputs in,
                         PolicyDivisors divisors, PolicyOptions numbers, bool wants_entropy) {
  const Tensor& hidden = t.hidden;
  check_devices(kOp, in, hidden);
  LinearPolicy a = {
      .head = head_of(kOp, t, f), .labels = labels_of(kOp, t, f, memory), .formula = f.logits()};
  int64_t rows = a.head.hidden.rows;
  auto rows_if = [&](bool wanted) { return make_if(wanted, hidden, {rows}, DType::f32); };
  Tensor loss = make(hidden, {}, DType::f32), scale = make(hidden, {}, DType::f32);
  Tensor log_prob = rows_if(true), entropy = rows_if(wants_entropy), kl = rows_if(in.ref.has_value()),
         clipped = rows_if(true);
  HeadGradients g = make_gradients(a.head, hidden, memory);
  a.log_prob = vector_of(kOp, "log_prob", log_prob);
  if (wants_entropy) a.entropy = vector_of(kOp, "entropy", entropy);
  Policy& p = a.loss;
  p.formula = numbers.formula, p.answers = answers, p.tokens = tokens_of(a.head, answers);
  p.advantage = flat(kOp, "advantage", in.advantage);
  p.importance = flat(kOp, "importance", in.importance);
  p.old = flat(kOp, "old", in.old), p.ref = flat(kOp, "ref", in.ref);
  if (in.ref) p.kl = vector_of(kOp, "kl", kl);
  p.clipped = vector_of(kOp, "clipped", clipped);
  a.totals = divisors.totals(kOp, numbers.normalise, hidden, scalar_of(kOp, "scale", scale),
                             scalar_of(kOp, "loss", loss));
  auto ctx = make_context(hidden);
  linear_policy(*ctx, a);
  return {loss, scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b, log_prob, entropy, kl, clipped};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_token_loss(m, kOp,
                    schema<Inputs, PolicyDivisors>() + ", " + PolicyOptions::kSchema + ", bool wants_entropy",
                    ", Tensor log_prob, Tensor entropy, Tensor kl, Tensor clipped");
}
TIGON_TORCH_KERNELS(m) { implement_forward(m, kOp, boxed<&forward>); }

}  // namespace tigon::torch_shim::linear_policy_torch
