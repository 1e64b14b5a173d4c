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
  static constexpr const char* kNames[] = {"log_prob",  "target", "nll_target",  "ref",
                                           "desirable", "kl",     "denominator", "host_denominator"};
};

struct Results {
  Tensor loss, sums, rewards, nll, margin, dlog_prob;
};

Results run(Inputs& in, const PreferenceFormula& formula, int64_t ignore_index, bool need_gradient) {
  check_devices(kOp, in, in.log_prob);
  TIGON_CHECK(kOp, in.log_prob.dim() == 2, "log_prob must be [answers, tokens], got ", in.log_prob.dim(),
              " dimensions");
  bool lone = formula.kind == PreferenceKind::kto;
  int64_t answers = in.log_prob.size(0), tokens = in.log_prob.size(1), pairs = lone ? answers : answers / 2;
  TIGON_CHECK(kOp, lone || answers % 2 == 0, "log_prob must have chosen and rejected answers, got ", answers);
  auto of_answers = [&] { return make(in.log_prob, {answers}, DType::f32); };
  auto if_pairs = [&](std::initializer_list<int64_t> sizes) {
    return make_if(!lone, in.log_prob, sizes, DType::f32);
  };
  Results r{.loss = make(in.log_prob, {}, DType::f32),
            .sums = of_answers(),
            .rewards = of_answers(),
            .nll = if_pairs({}),
            .margin = if_pairs({pairs}),
            .dlog_prob = make_if(need_gradient, in.log_prob, {answers, tokens}, DType::f32)};
  auto ctx = make_context(in.log_prob);
  Preference a = {.formula = formula, .pairs = pairs, .tokens = tokens, .count = pairs};
  a.ignore_index = ignore_index;
  a.log_prob = flat(kOp, "log_prob", in.log_prob);
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
  if (need_gradient) a.dlog_prob = flat(kOp, "dlog_prob", r.dlog_prob);
  preference_begin(*ctx, a, totals);
  preference(*ctx, a);
  preference_end(*ctx, a, totals);
  return r;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(Inputs in, PreferenceFormula formula,
                                                                   int64_t ignore_index) {
  Results r = run(in, formula, ignore_index, true);
  return {r.loss, r.sums, r.rewards, r.nll, r.margin, r.dlog_prob};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> infer(Inputs in, PreferenceFormula formula,
                                                         int64_t ignore_index) {
  Results r = run(in, formula, ignore_index, false);
  return {r.loss, r.sums, r.rewards, r.nll, r.margin};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs = "(" + schema<Inputs, PreferenceFormula>() + ", int ignore_index)";
  const std::string results = "Tensor loss, Tensor sums, Tensor rewards, Tensor nll, Tensor margin";
  define_forward(m, "preference", inputs + " -> (" + results + ", Tensor dlog_prob)");
  define(m, "preference_infer" + inputs + " -> (" + results + ")");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "preference", boxed<&forward>);
  m.impl("preference_infer", boxed<&infer>);
}

}  // namespace tigon::torch_shim::preference_torch
