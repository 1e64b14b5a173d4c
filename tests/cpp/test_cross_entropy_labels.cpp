// Several labels a row on the streaming head, in the core: refusals.
#include "table.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tigon::test {
namespace {

constexpr int64_t kRows = 7, kHidden = 5, kVocab = 9, kLabels = 4;

struct Run {
  Table hidden = Table(DType::f32, kRows, kHidden).normal(1),
        weight = Table(DType::f32, kVocab, kHidden).normal(2),
        labels = Table::column(DType::i64, kRows* kLabels),
        log_prob = Table::column(DType::f32, kRows* kLabels), loss = Table::column(DType::f32, kRows);

  Run() {
    labels.fill([](int64_t, int64_t i) { return i % 5 == 3 ? -100 : i % kVocab; });
  }
  LinearCrossEntropy call() {
    return {.head = {.hidden = hidden.matrix(), .weight = weight.matrix()},
            .reduction = {.kind = Reduction::none},
            .several = {.labels = labels.vector(), .count = kLabels, .log_prob = log_prob.vector()},
            .results = {.loss = loss.vector()}};
  }
};

TEST_CASE("labels of a row are refused before anything is written") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run;
    Table before = run.log_prob;
    LinearCrossEntropy a = run.call();
    change(run, a);
    CHECK_THROWS_WITH_AS(linear_cross_entropy(*ctx, a), doctest::Contains(message), Error);
    CHECK(run.log_prob == before);
  };
  refused("target must be in [0, 9) or -100 (ignored), got 9 in row 1",
          [](Run& run, LinearCrossEntropy&) { run.labels.set(0, 5, 9.0); });
  refused("valid_rows must be", [](Run&, LinearCrossEntropy& a) { a.labels.valid_rows = 5; });
  refused("several labels a row", [](Run&, LinearCrossEntropy& a) { a.label_smoothing = 0.1f; });
  refused("target must have at least one label", [](Run&, LinearCrossEntropy& a) { a.several.count = 0; });
}

}  // namespace
}  // namespace tigon::test
