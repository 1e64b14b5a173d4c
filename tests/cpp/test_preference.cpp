// Preference losses in the core: slopes against finite differences of the formula, the call against sums by
// hand, lists of rows and ranges of groups, refusals, bitwise promises.
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

TEST_CASE("slopes are those of the losses") {
  each_kind([](PreferenceKind kind) {
    PreferenceFormula f = formula_of(kind);
    for (double at : {-9.0, -1.2, -0.05})
      for (double other : {-4.0, -0.7}) {
        INFO("kind " << int(kind) << " at " << at << ", " << other);
        double c = at, r = other;
        oracle::PreferenceTerm t = term(f, c, r);
        CHECK(t.dchosen == doctest::Approx(slope(&c, [&] { return term(f, c, r).loss; })).epsilon(1e-6));
        CHECK(t.drejected == doctest::Approx(slope(&r, [&] { return term(f, c, r).loss; })).epsilon(1e-6));
      }
  });
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

// Five pairs of seven tokens, some of which do not count.
struct Run {
  static constexpr int64_t kPairs = 5, kTokens = 7;
  Preference a;
  int64_t answers, rows;
  Table log_prob, target, ref, desirable, dlog_prob, loss, nll, sums, rewards, margin, scale, nll_scale;

  explicit Run(PreferenceKind kind)
      : answers(kind == PreferenceKind::kto ? kPairs : 2 * kPairs),
        rows(answers * kTokens),
        log_prob(Table::column(DType::f32, rows)),
        target(Table::column(DType::i64, rows)),
        ref(Table::column(DType::f32, answers)),
        desirable(DType::u8, 1, kPairs),
        dlog_prob(Table::column(DType::f32, rows)),
        loss(Table::column(DType::f32, kPairs)),
        nll(Table::column(DType::f32, kPairs)),
        sums(Table::column(DType::f32, answers)),
        rewards(Table::column(DType::f32, answers)),
        margin(Table::column(DType::f32, kPairs)),
        scale(Table::column(DType::f32, 1)),
        nll_scale(Table::column(DType::f32, 1)) {
    bool lone = kind == PreferenceKind::kto;
    log_prob.normal(1).fill([this](int64_t, int64_t i) { return -std::abs(log_prob(i)); });
    target.fill([](int64_t, int64_t i) { return i % 3 == 1 || i / kTokens == 2 ? -100 : i; });
    ref.normal(2, 2.0, -4.0);
    std::memset(desirable.matrix().data, 0, kPairs);
    static_cast<uint8_t*>(desirable.matrix().data)[1] = 1;
    scale.set(0, 0, 0.2), nll_scale.set(0, 0, 0.125);
    a.formula = formula_of(kind);
    a.formula.nll = lone ? 0.0 : 0.5;
    a.pairs = kPairs, a.tokens = kTokens, a.count = kPairs;
    a.log_prob = log_prob.vector(), a.target = target.vector();
    if (kind != PreferenceKind::orpo) a.ref = ref.vector();
    a.scale = scale.vector(), a.nll_scale = nll_scale.vector();
    a.dlog_prob = dlog_prob.vector(), a.loss = loss.vector(), a.sums = sums.vector();
    a.rewards = rewards.vector();
    if (lone)
      a.desirable = {.data = desirable.matrix().data, .dtype = DType::u8, .size = kPairs};
    else
      a.nll = nll.vector(), a.margin = margin.vector();
  }
  std::vector<Table> results() const { return {dlog_prob, loss, sums, rewards}; }
};

TEST_CASE("pairs by range and rows by list are the whole call") {
  auto ctx = make_cpu_context(1);
  each_kind([&](PreferenceKind kind) {
    INFO("kind " << int(kind));
    Run whole(kind), parts(kind);
    preference(*ctx, whole.a);
    // The list has the rows of a pair together: chosen, then rejected.
    Table position = Table::column(DType::i64, parts.rows);
    std::vector<int64_t> begin;
    int64_t places = 0;
    for (int64_t p = 0; p < Run::kPairs; ++p) {
      begin.push_back(places);
      for (int64_t answer = p; answer < parts.answers; answer += Run::kPairs)
        for (int64_t t = 0; t < Run::kTokens; ++t) {
          int64_t row = answer * Run::kTokens + t;
          position.set(0, row, parts.target(row) >= 0 ? double(places++) : -1.0);
        }
    }
    begin.push_back(places);
    for (auto [first, end] : {std::pair<int64_t, int64_t>{0, 2}, {2, 3}, {3, 5}}) {
      int64_t base = begin[size_t(first)], size = begin[size_t(end)] - base;
      Table listed = Table::column(DType::f32, size), gradient = Table::column(DType::f32, size);
      for (int64_t row = 0; row < parts.rows; ++row) {
        int64_t place = int64_t(position(row)) - base;
        if (place >= 0 && place < size) listed.set(0, place, parts.log_prob(row));
      }
      Preference a = parts.a;
      a.first = first, a.count = end - first, a.base = base, a.position = position.vector();
      a.log_prob = listed.vector(), a.dlog_prob = gradient.vector();
      preference(*ctx, a);
      CHECK(gradient.guards_intact());
      for (int64_t row = 0; row < parts.rows; ++row) {
        int64_t place = int64_t(position(row)) - base;
        if (place >= 0 && place < size) CHECK(gradient(place) == whole.dlog_prob(row));
      }
    }
    CHECK(parts.loss == whole.loss);
    CHECK(parts.sums == whole.sums);
    CHECK(parts.rewards == whole.rewards);
  });
}

TEST_CASE("the same bits for any number of threads") {
  each_kind([](PreferenceKind kind) {
    check_same_everywhere([&](Context& ctx) {
      Run run(kind);
      preference(ctx, run.a);
      return run.results();
    });
  });
}

TEST_CASE("refusals") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run(PreferenceKind::logistic);
    Table before = run.loss;
    change(run.a);
    CHECK_THROWS_WITH_AS(preference(*ctx, run.a), doctest::Contains(message), Error);
    CHECK(run.loss == before);
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
