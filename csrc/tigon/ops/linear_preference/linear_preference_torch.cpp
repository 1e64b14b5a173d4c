#include "tigon/ops/linear_preference/linear_preference_torch.h"

#include "tigon/ops/linear_preference/linear_preference.h"

namespace tigon::torch_shim {

LinearHead head_of(const char* op, TokenLossOperands& t, const TokenLossOptions& o) {
  check_same_device(op, "weight", t.weight, t.hidden);
  check_same_device(op, "target", t.labels, t.hidden);
  for (auto [name, x] : {std::pair{"bias", &t.bias}, {"lora A", &t.lora_a}, {"lora B", &t.lora_b}})
    if (*x) check_same_device(op, name, **x, t.hidden);
  LinearHead head = {
      .op = op, .hidden = rows_of(op, "hidden", t.hidden), .weight = rows_of(op, "weight", t.weight)};
  head.bias = vector_of(op, "bias", t.bias);
  if (t.lora_a) head.lora_a = rows_of(op, "lora A", *t.lora_a);
  if (t.lora_b) head.lora_b = rows_of(op, "lora B", *t.lora_b);
  head.lora_scale = float(o.lora_scale);
  return head;
}

HeadGradients make_gradients(const char* op, LinearHead& head, const Tensor& hidden,
                             const TokenLossOptions& o) {
  return make_gradients(op, head, hidden, o.needs,
                        one_chunk(head, o.chunk_rows, o.valid_rows, device_of(op, hidden)));
}

void define_token_loss(Library& m, const std::string& op, const std::string& inputs,
                       const std::string& visible) {
  const std::string arguments = TokenLossOperands::kSchema + inputs + TokenLossOptions::kSchema;
  define_forward(m, op,
                 arguments + " -> (" + visible +
                     ", Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias, Tensor dlora_a,"
                     " Tensor dlora_b)");
  define(m, op + "_infer" + arguments + " -> (" + visible + ")");
}

}  // namespace tigon::torch_shim

namespace tigon::torch_shim::linear_preference_torch {
namespace {

constexpr const char* kOp = "linear_preference";

struct Inputs {
  OptionalTensor ref_hidden, ref_weight, ref_bias, target, nll_target, ref, desirable, kl, denominator;
  std::optional<double> host_denominator;

  static constexpr const char* kSchema =
      "Tensor? ref_hidden, Tensor? ref_weight, Tensor? ref_bias, Tensor? target, Tensor? nll_target,"
      " Tensor? ref, Tensor? desirable, Tensor? kl, Tensor? denominator, float? host_denominator, ";
  static Inputs take(Stack& s) {
    return {s.take<OptionalTensor>(),       s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<OptionalTensor>(),       s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<OptionalTensor>(),       s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<std::optional<double>>()};
  }
};

struct Formula {
  PreferenceFormula formula;

  static constexpr const char* kSchema =
      "int kind, bool average, float beta, float label_smoothing, float gamma, float tau, float nll,"
      " float desirable_weight, float undesirable_weight, ";
  static Formula take(Stack& s) {
    return {{PreferenceKind(s.take<int64_t>()), s.take<bool>(), s.take<double>(), s.take<double>(),
             s.take<double>(), s.take<double>(), s.take<double>(), s.take<double>(), s.take<double>()}};
  }
};

TokenLossResults run(TokenLossOperands& t, Inputs& in, const Formula& f, const TokenLossOptions& o) {
  const Tensor& hidden = t.hidden;
  for (auto [name, x] : {std::pair{"ref", &in.ref_hidden},
                         {"ref", &in.ref_weight},
                         {"ref", &in.ref_bias},
                         {"target", &in.target},
                         {"nll_target", &in.nll_target},
                         {"ref", &in.ref},
                         {"desirable", &in.desirable},
                         {"kl", &in.kl},
                         {"denominator", &in.denominator}})
    if (*x) check_same_device(kOp, name, **x, hidden);
  bool lone = f.formula.kind == PreferenceKind::kto;
  int64_t answers = o.answers, pairs = lone ? answers : answers / 2;
  LinearPreference a = {.head = head_of(kOp, t, o)};
  auto f32 = [&](std::initializer_list<int64_t> sizes) { return make(hidden, sizes, DType::f32); };
  auto if_pairs = [&](std::initializer_list<int64_t> sizes) {
    return lone ? nothing(hidden, DType::f32) : f32(sizes);
  };
  Tensor total = f32({}), sums = f32({answers}), rewards = f32({answers}), nll = if_pairs({}),
         margin = if_pairs({pairs}), scale = f32({});
  HeadGradients gradients = make_gradients(kOp, a.head, hidden, o);
  if (in.ref_hidden) {
    a.ref = {.op = kOp,
             .hidden = rows_of(kOp, "ref", *in.ref_hidden),
             .weight = rows_of(kOp, "ref", *in.ref_weight)};
    a.ref.bias = vector_of(kOp, "ref", in.ref_bias);
  }
  a.labels = vector_of(kOp, "target", t.labels);
  a.ignore_index = o.ignore_index, a.valid_rows = o.valid_rows, a.chunk_rows = o.chunk_rows;
  a.softcap = float(o.softcap), a.logit_scale = float(o.logit_scale), a.temperature = float(o.temperature);
  Preference& loss = a.loss;
  loss.formula = f.formula, loss.pairs = pairs, loss.tokens = o.tokens(a.head.hidden.rows);
  loss.ignore_index = o.ignore_index;
  loss.target = in.target ? vector_of(kOp, "target", in.target) : a.labels;
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
  return {{total, sums, rewards, nll, margin}, scale, gradients};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_token_loss(m, kOp, std::string(Inputs::kSchema) + Formula::kSchema,
                    "Tensor loss, Tensor sums, Tensor rewards, Tensor nll, Tensor margin");
}
TIGON_TORCH_KERNELS(m) { implement_token_loss<&run, Inputs, Formula>(m, kOp); }

}  // namespace tigon::torch_shim::linear_preference_torch
