#include "tigon/ops/preference/preference.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::preference_torch {
namespace {

constexpr const char* kOp = "preference";

// Tensors are replaced by copies where a view does not fit, so they must outlive the call.
struct Inputs {
  Tensor log_prob;
  OptionalTensor target, nll_target, ref, desirable, kl, denominator;
  std::optional<double> host_denominator;

  static constexpr const char* kSchema =
      "(Tensor log_prob, Tensor? target, Tensor? nll_target, Tensor? ref, Tensor? desirable, Tensor? kl,"
      " Tensor? denominator, float? host_denominator, ";
  static Inputs take(Stack& s) {
    return {s.take<Tensor>(),         s.take<OptionalTensor>(),       s.take<OptionalTensor>(),
            s.take<OptionalTensor>(), s.take<OptionalTensor>(),       s.take<OptionalTensor>(),
            s.take<OptionalTensor>(), s.take<std::optional<double>>()};
  }
};

struct Formula {
  PreferenceFormula formula;
  int64_t ignore_index;

  static constexpr const char* kSchema =
      "int kind, bool average, float beta, float label_smoothing, float gamma, float tau, float nll,"
      " float desirable_weight, float undesirable_weight, int ignore_index)";
  static Formula take(Stack& s) {
    return {{PreferenceKind(s.take<int64_t>()), s.take<bool>(), s.take<double>(), s.take<double>(),
             s.take<double>(), s.take<double>(), s.take<double>(), s.take<double>(), s.take<double>()},
            s.take<int64_t>()};
  }
};

struct Results {
  Tensor loss, sums, rewards, nll, margin, dlog_prob;
};

Results run(Inputs& in, const Formula& f, bool need_gradient) {
  for (auto [name, t] : {std::pair{"target", &in.target},
                         {"nll_target", &in.nll_target},
                         {"ref", &in.ref},
                         {"desirable", &in.desirable},
                         {"kl", &in.kl},
                         {"denominator", &in.denominator}})
    if (*t) check_same_device(kOp, name, **t, in.log_prob);
  TIGON_CHECK(kOp, in.log_prob.dim() == 2, "log_prob must be [answers, tokens], got ", in.log_prob.dim(),
              " dimensions");
  bool lone = f.formula.kind == PreferenceKind::kto;
  int64_t answers = in.log_prob.size(0), tokens = in.log_prob.size(1), pairs = lone ? answers : answers / 2;
  TIGON_CHECK(kOp, lone || answers % 2 == 0, "log_prob must have chosen and rejected answers, got ", answers);
  in.log_prob = to_contiguous(kOp, "log_prob", in.log_prob);
  auto of_answers = [&] { return make(in.log_prob, {answers}, DType::f32); };
  auto if_pairs = [&](std::initializer_list<int64_t> sizes) {
    return lone ? nothing(in.log_prob, DType::f32) : make(in.log_prob, sizes, DType::f32);
  };
  Results r{
      .loss = make(in.log_prob, {}, DType::f32),
      .sums = of_answers(),
      .rewards = of_answers(),
      .nll = if_pairs({}),
      .margin = if_pairs({pairs}),
      .dlog_prob = need_gradient ? make_like(in.log_prob, DType::f32) : nothing(in.log_prob, DType::f32)};
  auto ctx = make_context(in.log_prob);
  Preference a = {.formula = f.formula, .pairs = pairs, .tokens = tokens, .count = pairs};
  a.ignore_index = f.ignore_index;
  a.log_prob = {.data = data_of(kOp, "log_prob", in.log_prob),
                .dtype = dtype_of(kOp, "log_prob", in.log_prob),
                .size = answers * tokens};
  a.target = vector_of(kOp, "target", in.target);
  a.nll_target = vector_of(kOp, "nll_target", in.nll_target);
  a.ref = vector_of(kOp, "ref", in.ref);
  a.desirable = vector_of(kOp, "desirable", in.desirable);
  if (in.kl) a.kl = scalar_of(kOp, "kl", *in.kl);
  PreferenceTotals totals = {.host_denominator = in.host_denominator.value_or(0.0),
                             .has_host_denominator = in.host_denominator.has_value(),
                             .scale = {.data = ctx->scratch_of<float>(1), .dtype = DType::f32, .size = 1},
                             .loss = scalar_of(kOp, "loss", r.loss)};
  if (in.denominator) totals.denominator = scalar_of(kOp, "denominator", *in.denominator);
  if (!lone) totals.nll = scalar_of(kOp, "nll", r.nll);
  if (!lone) a.margin = vector_of(kOp, "margin", r.margin);
  a.sums = vector_of(kOp, "sums", r.sums);
  a.rewards = vector_of(kOp, "rewards", r.rewards);
  if (need_gradient) a.dlog_prob = {.data = data_of(kOp, "dlog_prob", r.dlog_prob), .size = answers * tokens};
  preference_begin(*ctx, a, totals);
  preference(*ctx, a);
  preference_end(*ctx, a, totals);
  return r;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(Inputs in, Formula f) {
  Results r = run(in, f, true);
  return {r.loss, r.sums, r.rewards, r.nll, r.margin, r.dlog_prob};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> infer(Inputs in, Formula f) {
  Results r = run(in, f, false);
  return {r.loss, r.sums, r.rewards, r.nll, r.margin};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs = std::string(Inputs::kSchema) + Formula::kSchema;
  const std::string results = "Tensor loss, Tensor sums, Tensor rewards, Tensor nll, Tensor margin";
  define_forward(m, "preference", inputs + " -> (" + results + ", Tensor dlog_prob)");
  define(m, "preference_infer" + inputs + " -> (" + results + ")");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "preference", boxed<&forward>);
  m.impl("preference_infer", boxed<&infer>);
}

}  // namespace tigon::torch_shim::preference_torch
