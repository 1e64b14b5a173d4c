#include "tigon/ops/linear_preference/linear_policy.h"

#include "tigon/ops/linear_preference/linear_preference_torch.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "linear_policy";
enum Normalise : int64_t { by_token = 0, by_answer = 1, by_length = 2 };

struct Inputs {
  Tensor advantage;
  OptionalTensor old, ref, importance, denominator, entropy_denominator;
  std::optional<double> host_denominator, host_entropy_denominator;

  static constexpr const char* kSchema =
      "Tensor advantage, Tensor? old, Tensor? ref, Tensor? importance, Tensor? denominator,"
      " Tensor? entropy_denominator, float? host_denominator, float? host_entropy_denominator, ";
  static Inputs take(Stack& s) {
    return {s.take<Tensor>(),
            s.take<OptionalTensor>(),
            s.take<OptionalTensor>(),
            s.take<OptionalTensor>(),
            s.take<OptionalTensor>(),
            s.take<OptionalTensor>(),
            s.take<std::optional<double>>(),
            s.take<std::optional<double>>()};
  }
};

struct Formula {
  PolicyFormula formula;
  int64_t normalise;
  bool entropy;  // wanted

  static constexpr const char* kSchema =
      "int kind, int level, int normalise, float low, float high, float delta, float tau_positive,"
      " float tau_negative, float k_positive, float lambda_positive, float k_negative, float lambda_negative,"
      " int estimator, float kl, bool kl_corrected, float entropy_factor, bool entropy, ";
  static Formula take(Stack& s) {
    Formula f;
    PolicyFormula& p = f.formula;
    p.kind = PolicyKind(s.take<int64_t>()), p.level = PolicyLevel(s.take<int64_t>());
    f.normalise = s.take<int64_t>(), p.by_answer = f.normalise == Normalise::by_answer;
    for (double* number : {&p.low, &p.high, &p.delta, &p.tau_positive, &p.tau_negative, &p.k_positive,
                           &p.lambda_positive, &p.k_negative, &p.lambda_negative})
      *number = s.take<double>();
    p.estimator = PolicyKl(s.take<int64_t>()), p.kl = s.take<double>(), p.kl_corrected = s.take<bool>();
    p.entropy_factor = s.take<double>(), f.entropy = s.take<bool>();
    return f;
  }
};

struct Results {
  Tensor loss, log_prob, entropy, kl, clipped, scale;
  TokenLossGradients gradients;
};

Results run(TokenLossOperands& t, Inputs& in, const Formula& f, const TokenLossOptions& o) {
  const Tensor& hidden = t.hidden;
  check_same_device(kOp, "advantage", in.advantage, hidden);
  for (auto [name, x] : {std::pair{"old", &in.old},
                         {"ref", &in.ref},
                         {"importance", &in.importance},
                         {"denominator", &in.denominator},
                         {"entropy_denominator", &in.entropy_denominator}})
    if (*x) check_same_device(kOp, name, **x, hidden);
  LinearPolicy a = {.head = head_of(kOp, t, o)};
  int64_t rows = a.head.hidden.rows;
  auto of_rows = [&](bool wanted) {
    return wanted ? make(hidden, {rows}, DType::f32) : nothing(hidden, DType::f32);
  };
  Results r = {.loss = make(hidden, {}, DType::f32),
               .log_prob = of_rows(true),
               .entropy = of_rows(f.entropy),
               .kl = of_rows(in.ref.has_value()),
               .clipped = of_rows(true),
               .scale = make(hidden, {}, DType::f32),
               .gradients = make_gradients(kOp, a.head, hidden, o)};
  auto flat = [&](const char* name, OptionalTensor& x) {
    if (!x) return Vector{};
    *x = to_contiguous(kOp, name, *x);
    return Vector{.data = data_of(kOp, name, *x), .dtype = dtype_of(kOp, name, *x), .size = x->numel()};
  };
  OptionalTensor advantage = in.advantage;
  a.labels = vector_of(kOp, "target", t.labels);
  a.ignore_index = o.ignore_index, a.valid_rows = o.valid_rows, a.chunk_rows = o.chunk_rows;
  a.softcap = float(o.softcap), a.logit_scale = float(o.logit_scale), a.temperature = float(o.temperature);
  a.log_prob = vector_of(kOp, "log_prob", r.log_prob);
  if (f.entropy) a.entropy = vector_of(kOp, "entropy", r.entropy);
  Policy& loss = a.loss;
  loss.formula = f.formula, loss.answers = o.answers, loss.tokens = o.tokens(rows);
  loss.advantage = flat("advantage", advantage), loss.importance = flat("importance", in.importance);
  loss.old = flat("old", in.old), loss.ref = flat("ref", in.ref);
  if (in.ref) loss.kl = vector_of(kOp, "kl", r.kl);
  loss.clipped = vector_of(kOp, "clipped", r.clipped);
  auto divisor = [&](const OptionalTensor& device, std::optional<double> number) {
    PolicyTotals::Divisor d = {.number = number.value_or(0.0), .has_number = number.has_value()};
    if (device) d.device = scalar_of(kOp, "denominator", *device);
    return d;
  };
  a.totals = {.denominator = divisor(in.denominator, in.host_denominator),
              .count_tokens = f.normalise == Normalise::by_token,
              .entropy_denominator = divisor(in.entropy_denominator, in.host_entropy_denominator),
              .scale = scalar_of(kOp, "scale", r.scale),
              .loss = scalar_of(kOp, "loss", r.loss)};
  auto ctx = make_context(hidden);
  linear_policy(*ctx, a);
  return r;
}

using Forward =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
Forward forward(TokenLossOperands t, Inputs in, Formula f, TokenLossOptions o) {
  Results r = run(t, in, f, o);
  const TokenLossGradients& g = r.gradients;
  return {r.loss,   r.log_prob, r.entropy, r.kl,     r.clipped, r.scale,
          g.hidden, g.weight,   g.bias,    g.lora_a, g.lora_b};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> infer(TokenLossOperands t, Inputs in, Formula f,
                                                         TokenLossOptions o) {
  o.needs = 0;
  Results r = run(t, in, f, o);
  return {r.loss, r.log_prob, r.entropy, r.kl, r.clipped};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs = std::string(TokenLossOperands::kSchema) + Inputs::kSchema + Formula::kSchema +
                             TokenLossOptions::kSchema;
  const std::string results = "Tensor loss, Tensor log_prob, Tensor entropy, Tensor kl, Tensor clipped";
  define_forward(m, "linear_policy", inputs + " -> (" + results + ", " + kGradientResults + ")");
  define(m, "linear_policy_infer" + inputs + " -> (" + results + ")");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_policy", boxed<&forward>);
  m.impl("linear_policy_infer", boxed<&infer>);
}

}  // namespace tigon::torch_shim
