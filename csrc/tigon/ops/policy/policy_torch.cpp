#include "tigon/torch/policy.h"

namespace tigon::torch_shim::policy_torch {
namespace {

constexpr const char* kOp = "policy";

// Tensors are replaced by copies where a view does not fit, so they must outlive the call.
struct Inputs {
  Tensor log_prob, advantage;
  OptionalTensor target, old, ref, importance, entropy;
  PolicyDivisors divisors;

  static constexpr const char* kSchema =
      "(Tensor log_prob, Tensor advantage, Tensor? target, Tensor? old, Tensor? ref, Tensor? importance,"
      " Tensor? entropy, ";
  static Inputs take(Stack& s) {
    return {s.take<Tensor>(),         s.take<Tensor>(),         s.take<OptionalTensor>(),
            s.take<OptionalTensor>(), s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<OptionalTensor>(), s.take<PolicyDivisors>()};
  }
};

struct Formula {
  PolicyOptions numbers;
  int64_t ignore_index;

  static Formula take(Stack& s) { return {s.take<PolicyOptions>(), s.take<int64_t>()}; }
};

struct Results {
  Tensor loss, kl, clipped, dlog_prob, dentropy;
};

Results run(Inputs& in, const Formula& f, bool need_gradient) {
  const Tensor& like = in.log_prob;
  check_same_device(kOp, "advantage", in.advantage, like);
  for (auto [name, t] : {std::pair{"target", &in.target},
                         {"old", &in.old},
                         {"ref", &in.ref},
                         {"importance", &in.importance},
                         {"entropy", &in.entropy}})
    if (*t) check_same_device(kOp, name, **t, like);
  TIGON_CHECK(kOp, like.dim() == 2, "log_prob must be [answers, tokens], got ", like.dim(), " dimensions");
  int64_t answers = like.size(0), tokens = like.size(1);
  auto of_rows = [&](bool wanted) {
    return wanted ? make(like, {answers, tokens}, DType::f32) : nothing(like, DType::f32);
  };
  Results r{.loss = make(like, {}, DType::f32),
            .kl = of_rows(in.ref.has_value()),
            .clipped = of_rows(true),
            .dlog_prob = of_rows(need_gradient),
            .dentropy = of_rows(need_gradient && in.entropy)};
  auto flat = [&](const char* name, Tensor& t) {
    t = to_contiguous(kOp, name, t);
    return Vector{.data = data_of(kOp, name, t), .dtype = dtype_of(kOp, name, t), .size = t.numel()};
  };
  auto flat_or_none = [&](const char* name, OptionalTensor& t) { return t ? flat(name, *t) : Vector{}; };
  auto ctx = make_context(like);
  Policy a = {.formula = f.numbers.formula, .answers = answers, .tokens = tokens, .count = answers};
  a.log_prob = flat("log_prob", in.log_prob);
  a.entropy = flat_or_none("entropy", in.entropy);
  a.target = flat_or_none("target", in.target);
  a.ignore_index = f.ignore_index;
  a.advantage = flat("advantage", in.advantage);
  a.importance = flat_or_none("importance", in.importance);
  a.old = flat_or_none("old", in.old);
  a.ref = flat_or_none("ref", in.ref);
  a.clipped = flat("clipped", r.clipped);
  if (in.ref) a.kl = flat("kl", r.kl);
  if (need_gradient) a.dlog_prob = flat("dlog_prob", r.dlog_prob);
  if (need_gradient && in.entropy) a.dentropy = flat("dentropy", r.dentropy);
  Vector scale = {.data = ctx->scratch_of<float>(1), .dtype = DType::f32, .size = 1};
  PolicyTotals totals =
      in.divisors.totals(kOp, f.numbers.normalise, like, scale, scalar_of(kOp, "loss", r.loss));
  policy_begin(*ctx, a, totals);
  policy(*ctx, a);
  policy_end(*ctx, a, totals);
  return r;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(Inputs in, Formula f) {
  Results r = run(in, f, true);
  return {r.loss, r.kl, r.clipped, r.dlog_prob, r.dentropy};
}
std::tuple<Tensor, Tensor, Tensor> infer(Inputs in, Formula f) {
  Results r = run(in, f, false);
  return {r.loss, r.kl, r.clipped};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs =
      std::string(Inputs::kSchema) + PolicyDivisors::kSchema + PolicyOptions::kSchema + "int ignore_index)";
  define_forward(m, "policy",
                 inputs + " -> (Tensor loss, Tensor kl, Tensor clipped, Tensor dlog_prob, Tensor dentropy)");
  define(m, "policy_infer" + inputs + " -> (Tensor loss, Tensor kl, Tensor clipped)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "policy", boxed<&forward>);
  m.impl("policy_infer", boxed<&infer>);
}

}  // namespace tigon::torch_shim::policy_torch
