#include "tigon/ops/preference/preference.h"

#include <algorithm>

#include "tigon/base/op.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

constexpr const char* kOp = "preference";

// Checks the range of label_smoothing for the kinds that have one; it must be 0 for all others.
void check_formula(const PreferenceFormula& f) {
  double eps = f.label_smoothing;
  TIGON_CHECK(kOp, int(f.kind) >= 0 && int(f.kind) < kPreferenceKinds, "kind must be in [0, ",
              kPreferenceKinds, "), got ", int(f.kind));
  TIGON_CHECK(kOp, f.beta > 0.0, "beta must be > 0, got ", f.beta);
  TIGON_CHECK(kOp, f.tau > 0.0, "tau must be > 0, got ", f.tau);
  switch (f.kind) {
    case PreferenceKind::logistic:
      TIGON_CHECK(kOp, eps >= 0.0 && eps <= 0.5, "label_smoothing must be in [0, 0.5], got ", eps);
      return;
    case PreferenceKind::robust:
      TIGON_CHECK(kOp, eps >= 0.0 && eps < 0.5, "label_smoothing must be in [0, 0.5), got ", eps);
      return;
    case PreferenceKind::exo_pair:
      TIGON_CHECK(kOp, eps > 0.0 && eps <= 0.5, "label_smoothing must be in (0, 0.5], got ", eps);
      return;
    default: TIGON_CHECK(kOp, eps == 0.0, "label_smoothing must be 0, got ", eps);
  }
}

}  // namespace

void preference_check(const Preference& a) {
  check_formula(a.formula);
  bool lone = a.formula.kind == PreferenceKind::kto;
  int64_t answers = lone ? a.pairs : 2 * a.pairs, rows = answers * a.tokens;
  TIGON_CHECK(kOp, a.pairs >= 0 && a.tokens >= 0, "pairs and tokens must be >= 0, got ", a.pairs, " and ",
              a.tokens);
  TIGON_CHECK(kOp, a.first >= 0 && a.count >= 0 && a.first + a.count <= a.pairs, "groups must be in [0, ",
              a.pairs, "), got ", a.count, " from ", a.first);
  require_labels(kOp, "target", a.target, rows);
  require_labels(kOp, "nll_target", a.nll_target, a.pairs * a.tokens);
  require_optional(kOp, "ref", a.ref, answers);
  TIGON_CHECK(kOp, !a.ref || a.formula.kind != PreferenceKind::orpo, "ref must be none with orpo, got one");
  require_optional(kOp, "kl", a.kl, 1);
  require_optional(kOp, "scale", a.scale, 1);
  require_optional(kOp, "nll_scale", a.nll_scale, 1);
  require_optional(kOp, "nll", a.nll, a.pairs);
  require_optional(kOp, "sums", a.sums, answers);
  require_optional(kOp, "rewards", a.rewards, answers);
  require_optional(kOp, "margin", a.margin, a.pairs);
  require_vector(kOp, "loss", a.loss, a.pairs, DType::f32);
  if (lone) require_vector(kOp, "desirable", a.desirable, a.pairs, DType::u8);
  TIGON_CHECK(kOp, !lone || (!a.margin && !a.nll), "margin and nll must not be asked of kto");
  TIGON_CHECK(kOp, a.nll || a.formula.nll == 0.0, "nll must be wanted with a factor of it, ", a.formula.nll);
}

void preference(Context& ctx, const Preference& a) {
  preference_check(a);
  int64_t rows = (a.formula.kind == PreferenceKind::kto ? 1 : 2) * a.pairs * a.tokens;
  require_dtype(kOp, "log_prob", a.log_prob.dtype, DType::f32);
  // Single answers are those of the call. A list of pairs is given whenever a call does not have all of them.
  int64_t in_order = a.formula.kind == PreferenceKind::kto ? a.count * a.tokens : rows - a.base;
  if (!a.position) require_vector(kOp, "log_prob", a.log_prob, in_order, DType::f32);
  require_optional(kOp, "position", a.position, rows, DType::i64);
  require_optional(kOp, "ref_log_prob", a.ref_log_prob, a.log_prob.size);
  require_optional(kOp, "dlog_prob", a.dlog_prob, a.log_prob.size);
  if (a.count == 0) return;
  TIGON_RUN(kOp, ctx, preference, a);
}

void preference_begin(Context& ctx, Preference& a, const PreferenceTotals& totals) {
  auto vector = [&](int64_t size) {
    return Vector{.data = ctx.scratch_of<float>(size), .dtype = DType::f32, .size = size};
  };
  cross_entropy_scale(ctx, {.denominator = totals.denominator,
                            .host_denominator = totals.host_denominator.value_or(double(a.pairs)),
                            .scale = totals.scale});
  a.scale = totals.scale;
  a.loss = vector(a.pairs);
  if (a.formula.kind == PreferenceKind::kto) return;
  Vector counted = a.nll_target ? a.nll_target : a.target;
  if (counted) counted.size = a.pairs * a.tokens;
  a.nll = vector(a.pairs);
  a.nll_scale = vector(1);
  cross_entropy_scale(ctx, {.target = counted,
                            .ignore_index = a.ignore_index,
                            .mean = bool(counted),
                            .host_denominator = double(a.pairs * a.tokens),
                            .scale = a.nll_scale});
}

void preference_end(Context& ctx, const Preference& a, const PreferenceTotals& totals) {
  cross_entropy_total(ctx, {.loss = a.loss, .total = totals.loss});
  if (a.nll) cross_entropy_total(ctx, {.loss = a.nll, .total = totals.nll});
}

namespace {

// Defines PyTorch's operator: the loss of all groups.
struct PreferenceLoss {
  Preference loss;
  PreferenceTotals totals;
  int64_t answers = 0;

  void fields(Fields& f) {
    Preference& a = loss;
    f.flat("log_prob", a.log_prob, Role::input, &answers);
    totals.fields(f, a);
    f.option("ignore_index", a.ignore_index);
    const bool lone = a.formula.kind == PreferenceKind::kto;
    const int64_t rows = std::max<int64_t>(answers, 0);
    a.pairs = a.count = lone ? rows : rows / 2;
    f.number("loss", totals.loss);
    f.result("sums", a.sums, rows, DType::f32), f.result("rewards", a.rewards, rows, DType::f32);
    f.number_if(!lone, "nll", totals.nll);
    f.result_if(!lone, "margin", a.margin, a.pairs);
    f.result_if(true, "dlog_prob", a.dlog_prob, a.log_prob, Role::statistics);
  }
};

void preference_loss(Context& ctx, const PreferenceLoss& call) {
  Preference a = call.loss;
  PreferenceTotals totals = call.totals;
  const int64_t answers = call.answers;
  TIGON_CHECK(kOp, answers >= 0, "log_prob must be [answers, tokens], got ", -answers, " dimensions");
  TIGON_CHECK(kOp, a.formula.kind == PreferenceKind::kto || answers % 2 == 0,
              "log_prob must have chosen and rejected answers, got ", answers);
  a.tokens = answers > 0 ? a.log_prob.size / answers : 0;
  totals.scale = {.data = ctx.scratch_of<float>(1), .size = 1};
  preference_begin(ctx, a, totals);
  preference(ctx, a);
  preference_end(ctx, a, totals);
}

TIGON_OPERATOR(preference_loss, PreferenceLoss, "preference", forward)

}  // namespace

}  // namespace tigon
