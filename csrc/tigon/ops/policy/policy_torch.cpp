#include "tigon/torch/policy.h"

namespace tigon::torch_shim::policy_torch {
namespace {

constexpr const char* kOp = "policy";

// Tensors are replaced by copies where a view does not fit, so they must outlive the call.
struct Inputs {
  Tensor log_prob, advantage;
  OptionalTensor target, old, ref, importance, entropy;
  static constexpr const char* kNames[] = {"log_prob", "advantage",  "target", "old",
                                           "ref",      "importance", "entropy"};
};

struct Results {
  Tensor loss, kl, clipped, dlog_prob, dentropy;
};

Results run(Inputs& in, const PolicyDivisors& divisors, const PolicyOptions& options, int64_t ignore_index,
            bool need_gradient) {
  const Tensor& like = in.log_prob;
  check_devices(kOp, in, like);
  TIGON_CHECK(kOp, like.dim() == 2, "log_prob must be [answers, tokens], got ", like.dim(), " dimensions");
  int64_t answers = like.size(0), tokens = like.size(1);
  auto of_rows = [&](bool wanted) { return make_if(wanted, like, {answers, tokens}, DType::f32); };
  Results r{.loss = make(like, {}, DType::f32),
            .kl = of_rows(in.ref.has_value()),
            .clipped = of_rows(true),
            .dlog_prob = of_rows(need_gradient),
            .dentropy = of_rows(need_gradient && in.entropy)};
  auto ctx = make_context(like);
  Policy a = {.formula = options.formula, .answers = answers, .tokens = tokens, .count = answers};
  a.log_prob = flat(kOp, "log_prob", in.log_prob);
  a.entropy = flat(kOp, "entropy", in.entropy);
  a.target = flat(kOp, "target", in.target);
  a.ignore_index = ignore_index;
  a.advantage = flat(kOp, "advantage", in.advantage);
  a.importance = flat(kOp, "importance", in.importance);
  a.old = flat(kOp, "old", in.old);
  a.ref = flat(kOp, "ref", in.ref);
  a.clipped = flat(kOp, "clipped", r.clipped);
  if (in.ref) a.kl = flat(kOp, "kl", r.kl);
  if (need_gradient) a.dlog_prob = flat(kOp, "dlog_prob", r.dlog_prob);
  if (need_gradient && in.entropy) a.dentropy = flat(kOp, "dentropy", r.dentropy);
  Vector scale = {.data = ctx->scratch_of<float>(1), .dtype = DType::f32, .size = 1};
  PolicyTotals totals = divisors.totals(kOp, options.normalise, like, scale, scalar_of(kOp, "loss", r.loss));
  policy_begin(*ctx, a, totals);
  policy(*ctx, a);
  policy_end(*ctx, a, totals);
  return r;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(Inputs in, PolicyDivisors divisors,
                                                           PolicyOptions options, int64_t ignore_index) {
  Results r = run(in, divisors, options, ignore_index, true);
  return {r.loss, r.kl, r.clipped, r.dlog_prob, r.dentropy};
}
std::tuple<Tensor, Tensor, Tensor> infer(Inputs in, PolicyDivisors divisors, PolicyOptions options,
                                         int64_t ignore_index) {
  Results r = run(in, divisors, options, ignore_index, false);
  return {r.loss, r.kl, r.clipped};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs =
      "(" + schema<Inputs, PolicyDivisors>() + ", " + PolicyOptions::kSchema + ", int ignore_index)";
  define_forward(m, "policy",
                 inputs + " -> (Tensor loss, Tensor kl, Tensor clipped, Tensor dlog_prob, Tensor dentropy)");
  define(m, "policy_infer" + inputs + " -> (Tensor loss, Tensor kl, Tensor clipped)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "policy", boxed<&forward>);
  m.impl("policy_infer", boxed<&infer>);
}

}  // namespace tigon::torch_shim::policy_torch
