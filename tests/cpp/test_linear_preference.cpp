// Losses of preferences on the streaming head, in the core: refusals before anything is written.
#include "table.h"
#include "tigon/ops/linear_preference/linear_preference.h"

namespace tigon::test {
namespace {

constexpr int64_t kAnswers = 6, kTokens = 5, kRows = kAnswers * kTokens, kHidden = 7, kVocab = 11;

struct Run {
  Table hidden = Table(DType::f32, kRows, kHidden).normal(1), dhidden{DType::f32, kRows, kHidden},
        weight = Table(DType::f32, kVocab, kHidden).normal(2, 0.5), target = Table::column(DType::i64, kRows),
        ref_hidden = Table(DType::f32, kRows, 4).normal(3),
        ref_weight = Table(DType::f32, kVocab, 4).normal(4, 0.5), scale = Table::column(DType::f32, 1),
        loss = scale, nll = scale, sums = Table::column(DType::f32, kAnswers), rewards = sums;

  Run() {
    target.fill([](int64_t, int64_t r) { return r * 7 % kVocab; });
  }
  LinearPreference preference() {
    LinearPreference a = {.head = {.op = "test",
                                   .hidden = hidden.matrix(),
                                   .weight = weight.matrix(),
                                   .dhidden = dhidden.matrix()},
                          .labels = {.target = target.vector()}};
    a.ref = {.op = "test", .hidden = ref_hidden.matrix(), .weight = ref_weight.matrix()};
    a.loss.formula.nll = 0.3;
    a.loss.pairs = kAnswers / 2, a.loss.tokens = kTokens, a.loss.target = target.vector();
    a.loss.sums = sums.vector(), a.loss.rewards = rewards.vector();
    a.totals = {.scale = scale.vector(), .loss = loss.vector(), .nll = nll.vector()};
    return a;
  }
};

TEST_CASE("refusals come before anything is written") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run;
    Table before = run.dhidden;
    LinearPreference a = run.preference();
    change(a);
    CHECK_THROWS_WITH_AS(linear_preference(*ctx, a), doctest::Contains(message), Error);
    CHECK(run.dhidden == before);
  };
  refused("hidden must have 4 answers of 5 tokens, got 30 rows",
          [](LinearPreference& a) { a.loss.pairs = 2; });
  refused("beta must be > 0", [](LinearPreference& a) { a.loss.formula.beta = -1.0; });
  refused("ref must have 30 rows, got 29", [](LinearPreference& a) { a.ref.hidden.rows = 29; });
  refused("ref must have 11 classes, got 10", [](LinearPreference& a) { a.ref.weight.rows = 10; });
  refused("temperature must be > 0", [](LinearPreference& a) { a.formula.temperature = 0.0f; });
  refused("chunk_rows must be >= 1", [](LinearPreference& a) { a.labels.chunk_rows = -1; });
  refused("valid_rows must be", [](LinearPreference& a) { a.labels.valid_rows = 3; });
}

}  // namespace
}  // namespace tigon::test
