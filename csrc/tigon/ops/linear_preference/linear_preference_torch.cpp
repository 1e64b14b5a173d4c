#include "tigon/ops/linear_preference/linear_preference_torch.h"

#include "tigon/ops/linear_preference/linear_preference.h"

namespace tigon::torch_shim::linear_preference_torch {
namespace {

constexpr const char* kOp = "linear_preference";

struct Reference {
  OptionalTensor hidden, weight, bias;
  static constexpr const char* kNames[] = {"ref_hidden", "ref_weight", "ref_bias"};
};
struct Inputs {
  OptionalTensor target, nll_target, ref, desirable, kl, denominator;
  std::optional<double> host_denominator;
  static constexpr const char* kNames[] = {"target",      "nll_target",      "ref", "desirable", "kl",
                                           "denominator", "host_denominator"};
};

TokenLossResults forward(Operands t, Formula f, Memory memory, int64_t answers, Reference reference,
                         Inputs in, PreferenceFormula numbers) {
  const Tensor& hidden = t.hidden;
  for (const OptionalTensor* x : {&reference.hidden, &reference.weight, &reference.bias})
    if (*x) check_same_device(kOp, "ref", **x, hidden);
  check_devices(kOp, in, hidden);
  bool lone = numbers.kind == PreferenceKind::kto;
  int64_t pairs = lone ? answers : answers / 2;
  LinearPreference a = {
      .head = head_of(kOp, t, f), .labels = labels_of(kOp, t, f, memory), .formula = f.logits()};
  auto f32 = [&](std::initializer_list<int64_t> sizes) { return make(hidden, sizes, DType::f32); };
  auto if_pairs = [&](std::initializer_list<int64_t> sizes) {
    return make_if(!lone, hidden, sizes, DType::f32);
  };
  Tensor total = f32({}), sums = f32({answers}), rewards = f32({answers}), nll = if_pairs({}),
         margin = if_pairs({pairs}), scale = f32({});
  HeadGradients g = make_gradients(a.head, hidden, memory);
  if (reference.hidden)
    a.ref = {.op = kOp,
             .hidden = rows_of(kOp, "ref", reference.hidden),
             .weight = rows_of(kOp, "ref", reference.weight),
             .bias = vector_of(kOp, "ref", reference.bias)};
  Preference& loss = a.loss;
  loss.formula = numbers, loss.pairs = pairs, loss.tokens = tokens_of(a.head, answers);
  loss.ignore_index = f.ignore_index;
  loss.target = in.target ? vector_of(kOp, "target", in.target) : a.labels.target;
  loss.nll_target = vector_of(kOp, "nll_target", in.nll_target);
  loss.ref = vector_of(kOp, "ref", in.ref);
  loss.desirable = vector_of(kOp, "desirable", in.desirable);
  if (in.kl) loss.kl = scalar_of(kOp, "kl", *in.kl);
  loss.sums = vector_of(kOp, "sums", sums);
  loss.rewards = vector_of(kOp, "rewards", rewards);
  if (!lone) loss.margin = vector_of(kOp, "margin", margin);
  a.totals = {.host_denominator = in.host_denominator.value_or(0.0),
              .has_host_denominator = in.host_denominator.has_value(),
              .scale = scalar_of(kOp, "scale", scale),
              .loss = scalar_of(kOp, "loss", total)};
  if (in.denominator) a.totals.denominator = scalar_of(kOp, "denominator", *in.denominator);
  if (!lone) a.totals.nll = scalar_of(kOp, "nll", nll);
  auto ctx = make_context(hidden);
  linear_preference(*ctx, a);
  return {total, scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b, sums, rewards, nll, margin};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_token_loss(m, kOp, schema<Reference, Inputs, PreferenceFormula>(),
                    ", Tensor sums, Tensor rewards, Tensor nll, Tensor margin");
}
TIGON_TORCH_KERNELS(m) { implement_forward(m, kOp, boxed<&forward>); }

}  // namespace tigon::torch_shim::linear_preference_torch

// For Python, through ctypes.
extern "C" TIGON_API void tigon_linear_preference_memory(const tigon::LinearHeadSizes* sizes, int64_t answers,
                                                         int64_t tokens, tigon::LinearHeadPlan* plan) {
  *plan = tigon::linear_preference_memory(*sizes, answers, tokens);
}
