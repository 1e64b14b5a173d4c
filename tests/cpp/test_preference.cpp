// Preference losses in the core: large scores, refusals.
#include "table.h"
#include "tigon/ops/preference/preference.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/preference/preference_math.inc"
}  // namespace oracle

namespace {

PreferenceFormula formula_of(PreferenceKind kind) {
  bool smooth =
      kind == PreferenceKind::logistic || kind == PreferenceKind::robust || kind == PreferenceKind::exo_pair;
  return {.kind = kind,
          .average = kind == PreferenceKind::orpo,
          .beta = 0.3,
          .label_smoothing = smooth ? 0.1 : 0.0,
          .gamma = kind == PreferenceKind::hinge ? 0.2 : 0.0,
          .tau = 0.4,
          .undesirable_weight = 2.0};
}
template <class Fn>
void each_kind(const Fn& fn) {
  for (int k = 0; k < kPreferenceKinds; ++k) fn(PreferenceKind(k));
}
oracle::PreferenceTerm term(const PreferenceFormula& f, double c, double r) {
  if (f.kind == PreferenceKind::kto) return oracle::preference_single(f, c, 0.4, r < -1.0);
  return oracle::preference_pair(f, c, r);
}

TEST_CASE("large scores overflow nowhere") {
  each_kind([](PreferenceKind kind) {
    PreferenceFormula f = formula_of(kind);
    for (double c : {-1e4, -1e-40, 0.0})
      for (double r : {-1e4, -1e-40, 0.0}) {
        INFO("kind " << int(kind) << " at " << c << ", " << r);
        oracle::PreferenceTerm t = term(f, c, r);
        bool tail = kind == PreferenceKind::discopop && c < r;  // e^-x itself
        CHECK((std::isfinite(t.loss) || tail));
        CHECK((std::isfinite(t.dchosen) || tail));
      }
  });
}

TEST_CASE("refusals") {
  constexpr int64_t kPairs = 5, kRows = 2 * kPairs * 7;
  auto ctx = make_cpu_context(1);
  Table log_prob = Table::column(DType::f32, kRows).normal(1), target = Table::column(DType::i64, kRows),
        answers = Table::column(DType::f32, 2 * kPairs).normal(2), loss = Table::column(DType::f32, kPairs),
        dlog_prob = log_prob, nll = loss, sums = answers, rewards = answers, untouched = loss;
  target.fill([](int64_t, int64_t i) { return i; });
  auto refused = [&](const char* message, auto&& change) {
    Preference a;
    a.formula = formula_of(PreferenceKind::logistic);
    a.formula.nll = 0.5;
    a.pairs = a.count = kPairs, a.tokens = 7;
    a.log_prob = log_prob.vector(), a.target = target.vector(), a.ref = answers.vector();
    a.dlog_prob = dlog_prob.vector(), a.loss = loss.vector(), a.nll = nll.vector();
    a.sums = sums.vector(), a.rewards = rewards.vector();
    change(a);
    CHECK_THROWS_WITH_AS(preference(*ctx, a), doctest::Contains(message), Error);
    CHECK(loss == untouched);
  };
  refused("beta must be > 0, got 0", [](Preference& a) { a.formula.beta = 0.0; });
  refused("label_smoothing must be in [0, 0.5], got 0.6",
          [](Preference& a) { a.formula.label_smoothing = 0.6; });
  refused("label_smoothing must be 0, got 0.1", [](Preference& a) { a.formula.kind = PreferenceKind::ipo; });
  refused("tau must be > 0", [](Preference& a) { a.formula.tau = 0.0; });
  refused("ref must be [10], got [9]", [](Preference& a) { a.ref.size = 9; });
  refused("ref must be none with orpo",
          [](Preference& a) { a.formula.kind = PreferenceKind::orpo, a.formula.label_smoothing = 0.0; });
  refused("groups must be in [0, 5), got 5 from 1", [](Preference& a) { a.first = 1; });
  refused("log_prob must be [70], got [69]", [](Preference& a) { a.log_prob.size = 69; });
  refused("nll must be wanted", [](Preference& a) { a.nll = {}; });
  refused("desirable must be [5], got [0]", [](Preference& a) {
    a.formula = formula_of(PreferenceKind::kto);
    a.log_prob.size = a.target.size = a.dlog_prob.size = 35, a.ref.size = a.sums.size = a.rewards.size = 5;
  });
}

}  // namespace
}  // namespace tigon::test
