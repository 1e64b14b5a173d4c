// Policy losses in the core: slopes of the formulas against finite differences, parts of
// answers and lists of rows, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/policy/policy.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/policy/policy_rows.inc"

#include "tigon/ops/policy/policy_math.inc"
}  // namespace oracle

namespace {

const PolicyKind kKinds[] = {PolicyKind::clip, PolicyKind::cispo, PolicyKind::sapo, PolicyKind::vespo};
const PolicyLevel kLevels[] = {PolicyLevel::token, PolicyLevel::sequence, PolicyLevel::sum};

oracle::PolicyTerm<double> surrogate(PolicyKind kind, const oracle::PolicyNumbers& o, double ratio,
                                     double log_prob, double advantage) {
  switch (kind) {
    case PolicyKind::clip:
      return oracle::policy_surrogate<PolicyKind::clip>(o, ratio, log_prob, advantage, 0.9, 1.1);
    case PolicyKind::cispo:
      return oracle::policy_surrogate<PolicyKind::cispo>(o, ratio, log_prob, advantage, 0.9, 1.1);
    case PolicyKind::sapo:
      return oracle::policy_surrogate<PolicyKind::sapo>(o, ratio, log_prob, advantage, 0.9, 1.1);
    default: return oracle::policy_surrogate<PolicyKind::vespo>(o, ratio, log_prob, advantage, 0.9, 1.1);
  }
}

TEST_CASE("slopes are those of the surrogates") {
  for (PolicyKind kind : kKinds)
    for (double delta : {0.0, 1.5})
      for (double d : {-0.7, -0.1, 0.05, 0.3, 0.9})
        for (double advantage : {-1.3, 0.6}) {
          INFO("kind " << int(kind) << " log ratio " << d << " advantage " << advantage << " delta "
                       << delta);
          PolicyFormula f = {.kind = kind, .delta = delta};
          oracle::PolicyNumbers o = oracle::policy_numbers(f);
          double at = d, l = -1.7;
          auto t = surrogate(kind, o, std::exp(d), l, advantage);
          bool constant = kind == PolicyKind::cispo;  // its factor has no gradient
          double of_ratio = slope(&at, [&] { return surrogate(kind, o, std::exp(at), l, advantage).loss; });
          double direct = slope(&l, [&] { return surrogate(kind, o, std::exp(d), l, advantage).loss; });
          CHECK(t.of_ratio == doctest::Approx(constant ? 0.0 : of_ratio).epsilon(1e-6).scale(1e-3));
          CHECK(t.direct == doctest::Approx(direct).epsilon(1e-6).scale(1e-3));
        }
}

TEST_CASE("divergences and their slopes") {
  for (PolicyKl kind : {PolicyKl::k1, PolicyKl::k2, PolicyKl::k3})
    for (double q : {-3.0, -0.49, -1e-3, 1e-3, 0.3, 0.51, 2.0}) {
      INFO("estimator " << int(kind) << " at " << q);
      double at = q, exact[] = {-q, q * q / 2, std::expm1(q) - q};
      auto e = oracle::policy_kl(kind, q);
      CHECK(e.value == doctest::Approx(exact[int(kind)]).epsilon(2e-7));
      double by_q = slope(&at, [&] { return oracle::policy_kl(kind, at).value; });
      CHECK(e.slope == doctest::Approx(-by_q).epsilon(1e-5));
    }
}

// Three answers of eleven tokens.
struct Run {
  static constexpr int64_t kAnswers = 3, kTokens = 11, kRows = kAnswers * kTokens;
  Policy a;
  Table log_prob, entropy, target, advantage, importance, old, ref, scale;
  Table dlog_prob, dentropy, loss, kl, clipped;

  Run(PolicyKind kind, PolicyLevel level)
      : log_prob(Table::column(DType::f32, kRows)),
        entropy(log_prob),
        target(Table::column(DType::i64, kRows)),
        advantage(Table::column(DType::f32, kAnswers)),
        importance(log_prob),
        old(log_prob),
        ref(log_prob),
        scale(Table::column(DType::f32, 1)),
        dlog_prob(log_prob),
        dentropy(log_prob),
        loss(log_prob),
        kl(log_prob),
        clipped(log_prob) {
    log_prob.normal(1).fill([this](int64_t, int64_t i) { return -std::abs(log_prob(i)); });
    entropy.normal(2), old.normal(3, 0.05), ref.normal(4, 0.3), importance.normal(5, 0.1, 1.0);
    for (Table* t : {&old, &ref}) t->fill([&](int64_t, int64_t i) { return (*t)(i) + log_prob(i); });
    target.fill([](int64_t, int64_t i) { return i % 4 == 1 || i / kTokens == 1 ? -100 : i; });
    advantage.normal(6);
    scale.set(0, 0, 0.25);
    a.formula = {.kind = kind, .level = level, .by_answer = true, .kl = 0.2, .kl_corrected = true};
    a.formula.entropy_factor = 0.1;
    a.answers = kAnswers, a.tokens = kTokens, a.count = kAnswers;
    a.log_prob = log_prob.vector(), a.entropy = entropy.vector(), a.target = target.vector();
    a.advantage = advantage.vector(), a.importance = importance.vector(), a.old = old.vector();
    a.ref = ref.vector(), a.scale = scale.vector();
    a.dlog_prob = dlog_prob.vector(), a.dentropy = dentropy.vector(), a.loss = loss.vector();
    a.kl = kl.vector(), a.clipped = clipped.vector();
  }
  std::vector<Table> results() const { return {dlog_prob, dentropy, loss, kl, clipped}; }
};
template <class Fn>
void each_form(const Fn& fn) {
  for (PolicyKind kind : kKinds)
    for (PolicyLevel level : kLevels) {
      INFO("kind " << int(kind) << " level " << int(level));
      fn(kind, level);
    }
}

TEST_CASE("parts of answers and lists of rows are the whole call") {
  auto ctx = make_cpu_context(1);
  each_form([&](PolicyKind kind, PolicyLevel level) {
    Run whole(kind, level), parts(kind, level);
    policy(*ctx, whole.a);
    Table position = Table::column(DType::i64, Run::kRows);
    int64_t places = 0;
    std::vector<int64_t> begin = {0};
    for (int64_t row = 0; row < Run::kRows; ++row) {
      position.set(0, row, parts.target(row) >= 0 ? double(places++) : -1.0);
      if ((row + 1) % Run::kTokens == 0) begin.push_back(places);
    }
    // Tokens alone may be cut anywhere.
    bool coupled = parts.a.formula.coupled();
    std::vector<std::pair<int64_t, int64_t>> spans = {{0, begin[2]}, {begin[2], places}};
    if (!coupled) spans = {{0, 5}, {5, 6}, {6, places}};
    for (auto [base, end] : spans) {
      int64_t size = end - base;
      Table listed = Table::column(DType::f32, size), entropy = listed, dlog_prob = listed, dentropy = listed;
      for (int64_t row = 0; row < Run::kRows; ++row) {
        int64_t place = int64_t(position(row)) - base;
        if (position(row) < 0 || place < 0 || place >= size) continue;
        listed.set(0, place, parts.log_prob(row)), entropy.set(0, place, parts.entropy(row));
      }
      Policy a = parts.a;
      if (coupled) a.first = base == 0 ? 0 : 2, a.count = base == 0 ? 2 : 1;
      a.base = base, a.position = position.vector();
      a.log_prob = listed.vector(), a.entropy = entropy.vector();
      a.dlog_prob = dlog_prob.vector(), a.dentropy = dentropy.vector();
      policy(*ctx, a);
      CHECK(dlog_prob.guards_intact());
      for (int64_t row = 0; row < Run::kRows; ++row) {
        int64_t place = int64_t(position(row)) - base;
        if (position(row) < 0 || place < 0 || place >= size) continue;
        CHECK(dlog_prob(place) == whole.dlog_prob(row));
        CHECK(dentropy(place) == whole.dentropy(row));
      }
    }
    CHECK(parts.loss == whole.loss);
    CHECK(parts.kl == whole.kl);
    CHECK(parts.clipped == whole.clipped);
  });
}

TEST_CASE("the same bits for any number of threads and instruction set") {
  each_form([](PolicyKind kind, PolicyLevel level) {
    check_same_everywhere([&](Context& ctx) {
      Run run(kind, level);
      policy(ctx, run.a);
      return run.results();
    });
  });
}

TEST_CASE("refusals") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run(PolicyKind::clip, PolicyLevel::sequence);
    Table before = run.loss;
    change(run.a);
    CHECK_THROWS_WITH_AS(policy(*ctx, run.a), doctest::Contains(message), Error);
    CHECK(run.loss == before);
  };
  refused("clip bounds must be >= 0", [](Policy& a) { a.formula.low = -0.1; });
  refused("tau must be > 0", [](Policy& a) { a.formula.tau_negative = 0.0; });
  refused("delta must be > 0", [](Policy& a) { a.formula.delta = -1.0; });
  refused("advantage must be [33] or [3], got [4]", [](Policy& a) { a.advantage.size = 4; });
  refused("old must be [33], got [3]", [](Policy& a) { a.old.size = 3; });
  refused("log_prob must have whole answers", [](Policy& a) {
    a.base = 1, a.log_prob.size = a.entropy.size = a.dlog_prob.size = a.dentropy.size = 32;
  });
  refused("ref must be given with kl", [](Policy& a) { a.ref = {}; });
  refused("entropy must be given", [](Policy& a) { a.entropy = {}; });
}

}  // namespace
}  // namespace tigon::test
