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

TokenLossGradients make_gradients(const char* op, LinearHead& head, const Tensor& hidden,
                                  const TokenLossOptions& o) {
  enum Need : int64_t {
    of_hidden = 1,
    of_weight = 2,
    of_bias = 4,
    of_lora_a = 8,
    of_lora_b = 16,
    may_round = 32
  };
  int64_t v = head.weight.rows, h = head.weight.cols, r = head.lora_a.rows;
  int64_t rows = o.valid_rows >= 0 ? o.valid_rows : head.hidden.rows;
  int64_t whole = o.chunk_rows > 0 ? o.chunk_rows
                                   : linear_head_chunk_rows({.device = device_of(op, hidden),
                                                             .dtype = head.hidden.dtype,
                                                             .rows = rows,
                                                             .hidden = h,
                                                             .vocab = v,
                                                             .dweight = true});
  bool rounded = o.needs & of_weight && o.needs & may_round && rows <= whole;
  auto result = [&](Need need, std::initializer_list<int64_t> sizes, DType dtype = DType::f32) {
    return o.needs & need ? make(hidden, sizes, dtype) : nothing(hidden, DType::f32);
  };
  DType dtype = head.hidden.dtype;
  TokenLossGradients g = {.hidden = o.needs & of_hidden ? make_like(hidden, dtype) : nothing(hidden, dtype),
                          .weight = result(of_weight, {v, h}, linear_head_dweight(dtype, rounded)),
                          .bias = result(of_bias, {v}),
                          .lora_a = result(of_lora_a, {r, h}),
                          .lora_b = result(of_lora_b, {v, r})};
  if (o.needs & of_hidden) head.dhidden = rows_of(op, "dhidden", g.hidden);
  if (o.needs & of_weight) head.dweight = rows_of(op, "dweight", g.weight);
  if (o.needs & of_bias) head.dbias = vector_of(op, "dbias", g.bias);
  if (o.needs & of_lora_a) head.dlora_a = rows_of(op, "gradient of lora A", g.lora_a);
  if (o.needs & of_lora_b) head.dlora_b = rows_of(op, "gradient of lora B", g.lora_b);
  return g;
}

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

struct Results {
  Tensor loss, sums, rewards, nll, margin, scale;
  TokenLossGradients gradients;
};

Results run(TokenLossOperands& t, Inputs& in, const Formula& f, const TokenLossOptions& o) {
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
  Results r = {.loss = f32({}),
               .sums = f32({answers}),
               .rewards = f32({answers}),
               .nll = if_pairs({}),
               .margin = if_pairs({pairs}),
               .scale = f32({}),
               .gradients = make_gradients(kOp, a.head, hidden, o)};
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
  loss.sums = vector_of(kOp, "sums", r.sums);
  loss.rewards = vector_of(kOp, "rewards", r.rewards);
  if (!lone) loss.margin = vector_of(kOp, "margin", r.margin);
  a.totals = {.host_denominator = in.host_denominator.value_or(0.0),
              .has_host_denominator = in.host_denominator.has_value(),
              .scale = scalar_of(kOp, "scale", r.scale),
              .loss = scalar_of(kOp, "loss", r.loss)};
  if (in.denominator) a.totals.denominator = scalar_of(kOp, "denominator", *in.denominator);
  if (!lone) a.totals.nll = scalar_of(kOp, "nll", r.nll);
  auto ctx = make_context(hidden);
  linear_preference(*ctx, a);
  return r;
}

using Forward =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
Forward forward(TokenLossOperands t, Inputs in, Formula f, TokenLossOptions o) {
  Results r = run(t, in, f, o);
  const TokenLossGradients& g = r.gradients;
  return {r.loss,   r.sums,   r.rewards, r.nll,    r.margin, r.scale,
          g.hidden, g.weight, g.bias,    g.lora_a, g.lora_b};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> infer(TokenLossOperands t, Inputs in, Formula f,
                                                         TokenLossOptions o) {
  o.needs = 0;
  Results r = run(t, in, f, o);
  return {r.loss, r.sums, r.rewards, r.nll, r.margin};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs = std::string(TokenLossOperands::kSchema) + Inputs::kSchema + Formula::kSchema +
                             TokenLossOptions::kSchema;
  const std::string results = "Tensor loss, Tensor sums, Tensor rewards, Tensor nll, Tensor margin";
  define_forward(m, "linear_preference", inputs + " -> (" + results + ", " + kGradientResults + ")");
  define(m, "linear_preference_infer" + inputs + " -> (" + results + ")");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_preference", boxed<&forward>);
  m.impl("linear_preference_infer", boxed<&infer>);
}

}  // namespace tigon::torch_shim
