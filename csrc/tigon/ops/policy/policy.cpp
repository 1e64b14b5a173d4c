#include "tigon/ops/policy/policy.h"

#include "tigon/base/op.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

constexpr const char* kOp = "policy";

void check_formula(const PolicyFormula& f) {
  TIGON_CHECK(kOp, int(f.kind) >= 0 && int(f.kind) <= 3, "kind must be in [0, 4), got ", int(f.kind));
  TIGON_CHECK(kOp, int(f.level) >= 0 && int(f.level) <= 2, "level must be in [0, 3), got ", int(f.level));
  TIGON_CHECK(kOp, int(f.estimator) >= 0 && int(f.estimator) <= 2, "kl estimator must be in [0, 3), got ",
              int(f.estimator));
  TIGON_CHECK(kOp, f.low >= 0.0 && f.high >= 0.0, "clip bounds must be >= 0, got ", f.low, " and ", f.high);
  TIGON_CHECK(kOp, f.delta >= 0.0, "delta must be > 0 (0: none), got ", f.delta);
  TIGON_CHECK(kOp, f.tau_positive > 0.0 && f.tau_negative > 0.0, "tau must be > 0, got ", f.tau_positive,
              " and ", f.tau_negative);
}

// Checks a factor: one number per row, or one per answer.
void check_factor(const char* name, const Vector& v, int64_t rows, int64_t answers) {
  TIGON_CHECK(kOp, v.size == rows || v.size == answers, name, " must be [", rows, "] or [", answers,
              "], got [", v.size, "]");
  require_dtype(kOp, name, v.dtype, DType::f32);
}

}  // namespace

void policy_check(const Policy& a) {
  check_formula(a.formula);
  int64_t rows = a.answers * a.tokens;
  TIGON_CHECK(kOp, a.answers >= 0 && a.tokens >= 0, "answers and tokens must be >= 0, got ", a.answers,
              " and ", a.tokens);
  TIGON_CHECK(kOp, a.first >= 0 && a.count >= 0 && a.first + a.count <= a.answers, "answers must be in [0, ",
              a.answers, "), got ", a.count, " from ", a.first);
  require_labels(kOp, "target", a.target, rows);
  check_factor("advantage", a.advantage, rows, a.answers);
  if (a.importance) check_factor("importance", a.importance, rows, a.answers);
  require_optional(kOp, "old", a.old, rows);
  require_optional(kOp, "ref", a.ref, rows);
  require_optional(kOp, "scale", a.scale, 1);
  require_optional(kOp, "entropy_scale", a.entropy_scale, 1);
  require_vector(kOp, "loss", a.loss, rows, DType::f32);
  require_optional(kOp, "kl", a.kl, rows);
  require_optional(kOp, "clipped", a.clipped, rows);
  TIGON_CHECK(kOp, a.ref || (a.formula.kl == 0.0 && !a.kl), "ref must be given with kl, got none");
}

void policy(Context& ctx, const Policy& a) {
  policy_check(a);
  int64_t rows = a.answers * a.tokens;
  require_dtype(kOp, "log_prob", a.log_prob.dtype, DType::f32);
  if (a.formula.coupled() && !a.position)
    TIGON_CHECK(kOp,
                a.base <= a.first * a.tokens && a.base + a.log_prob.size >= (a.first + a.count) * a.tokens,
                "log_prob must have whole answers at this level, got ", a.log_prob.size, " from ", a.base);
  require_optional(kOp, "entropy", a.entropy, a.log_prob.size);
  require_optional(kOp, "position", a.position, rows, DType::i64);
  require_optional(kOp, "dlog_prob", a.dlog_prob, a.log_prob.size);
  require_optional(kOp, "dentropy", a.dentropy, a.log_prob.size);
  TIGON_CHECK(kOp, a.entropy || (a.formula.entropy_factor == 0.0 && !a.dentropy),
              "entropy must be given for its term, got none");
  if (a.count == 0 || a.tokens == 0) return;
  TIGON_RUN(kOp, ctx, policy, a);
}

namespace {
// Computes 1 / divisor, or 1 / the count if no divisor is given.
void make_scale(Context& ctx, const Policy& a, const PolicyTotals::Divisor& by, bool tokens,
                const Vector& out) {
  const int64_t number = tokens ? a.answers * a.tokens : a.answers;
  cross_entropy_scale(ctx, {.target = a.target,
                            .ignore_index = a.ignore_index,
                            .mean = tokens && a.target && !by.given(),
                            .denominator = by.device,
                            .host_denominator = by.number.value_or(double(number)),
                            .scale = out});
}
}  // namespace

void policy_begin(Context& ctx, Policy& a, const PolicyTotals& totals) {
  auto vector = [&](int64_t size) {
    return Vector{.data = ctx.scratch_of<float>(size), .dtype = DType::f32, .size = size};
  };
  make_scale(ctx, a, totals.denominator, totals.normalise == PolicyNormalise::token, totals.scale);
  a.scale = totals.scale;
  if (a.formula.entropy_factor != 0.0 && totals.entropy_denominator.given()) {
    a.entropy_scale = vector(1);
    make_scale(ctx, a, totals.entropy_denominator, true, a.entropy_scale);
  }
  a.loss = vector(a.answers * a.tokens);
}

void policy_end(Context& ctx, const Policy& a, const PolicyTotals& totals) {
  cross_entropy_total(ctx, {.loss = a.loss, .total = totals.loss});
}

namespace {

// Defines PyTorch's operator: the loss of all answers.
struct PolicyLoss {
  Policy loss;
  PolicyTotals totals;

  void fields(Fields& f) {
    Policy& a = loss;
    f.flat("log_prob", a.log_prob, Role::input, &a.answers);
    f.flat("advantage", a.advantage, Role::input), f.flat("target", a.target), f.flat("old", a.old);
    f.flat("ref", a.ref), f.flat("importance", a.importance), f.flat("entropy", a.entropy);
    totals.fields(f, a.formula);
    f.option("ignore_index", a.ignore_index);
    f.number("loss", totals.loss);
    f.result_if(bool(a.ref), "kl", a.kl, a.log_prob);
    f.result_if(true, "clipped", a.clipped, a.log_prob);
    f.result_if(true, "dlog_prob", a.dlog_prob, a.log_prob, Role::statistics);
    f.result_if(bool(a.entropy), "dentropy", a.dentropy, a.log_prob, Role::statistics);
  }
};

void policy_loss(Context& ctx, const PolicyLoss& call) {
  Policy a = call.loss;
  PolicyTotals totals = call.totals;
  TIGON_CHECK(kOp, a.answers >= 0, "log_prob must be [answers, tokens], got ", -a.answers, " dimensions");
  a.count = a.answers, a.tokens = a.answers > 0 ? a.log_prob.size / a.answers : 0;
  totals.scale = {.data = ctx.scratch_of<float>(1), .size = 1};
  policy_begin(ctx, a, totals);
  policy(ctx, a);
  policy_end(ctx, a, totals);
}

TIGON_OPERATOR(policy_loss, PolicyLoss, "policy", forward)

}  // namespace

}  // namespace tigon
