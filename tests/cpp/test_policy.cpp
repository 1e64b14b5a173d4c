// Policy losses in the core: refusals.
#include "table.h"
#include "tigon/ops/policy/policy.h"

namespace tigon::test {
namespace {

TEST_CASE("refusals") {
  constexpr int64_t kAnswers = 3, kRows = 3 * 11;
  auto ctx = make_cpu_context(1);
  Table numbers = Table::column(DType::f32, kRows).normal(1), target = Table::column(DType::i64, kRows),
        advantage = Table::column(DType::f32, kAnswers).normal(6), loss = Table::column(DType::f32, kRows),
        dlog_prob = loss, dentropy = loss, untouched = loss;
  target.fill([](int64_t, int64_t i) { return i; });
  auto refused = [&](const char* message, auto&& change) {
    Policy a;
    a.formula = {.kind = PolicyKind::clip, .level = PolicyLevel::sequence, .by_answer = true, .kl = 0.2};
    a.formula.entropy_factor = 0.1;
    a.answers = a.count = kAnswers, a.tokens = 11;
    a.log_prob = a.entropy = a.old = a.ref = numbers.vector(), a.target = target.vector();
    a.advantage = advantage.vector(), a.loss = loss.vector();
    a.dlog_prob = dlog_prob.vector(), a.dentropy = dentropy.vector();
    change(a);
    CHECK_THROWS_WITH_AS(policy(*ctx, a), doctest::Contains(message), Error);
    CHECK(loss == untouched);
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
