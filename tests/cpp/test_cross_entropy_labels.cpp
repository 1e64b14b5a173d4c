// Several labels a row on the streaming head, in the core: gradients are slopes, refusals.
#include "table.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tigon::test {
namespace {

constexpr int64_t kRows = 7, kHidden = 5, kVocab = 9, kLabels = 4;

struct Run {
  Table hidden{DType::f32, kRows, kHidden}, weight{DType::f32, kVocab, kHidden},
      labels{Table::column(DType::i64, kRows* kLabels)}, upstream{Table::column(DType::f32, kRows* kLabels)},
      log_prob{Table::column(DType::f32, kRows* kLabels)}, loss{Table::column(DType::f32, kRows)},
      dhidden{DType::f32, kRows, kHidden}, dweight{DType::f32, kVocab, kHidden};

  Run() {
    hidden.normal(1), weight.normal(2), upstream.normal(3);
    labels.fill([](int64_t, int64_t i) {
      int64_t row = i / kLabels, k = i % kLabels;
      return row == 2 || i % 5 == 3 ? -100 : k == 2 ? row * 4 % kVocab : (row * 4 + k) % kVocab;
    });
  }
  LinearCrossEntropy call(int64_t chunk) {
    return {.head = {.hidden = hidden.matrix(), .weight = weight.matrix()},
            .labels = {.chunk_rows = chunk},
            .formula = {.softcap = 4.0f, .logit_scale = 0.8f, .temperature = 0.7f},
            .reduction = {.kind = Reduction::none},
            .several = {.labels = labels.vector(), .count = kLabels},
            .results = {.loss = loss.vector()}};
  }
};

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(2);
  for (int64_t chunk : {0, 3}) {
    INFO("chunk of " << chunk);
    Run run;
    auto loss = [&] {
      LinearCrossEntropy a = run.call(chunk);
      a.several.log_prob = run.log_prob.vector();
      linear_cross_entropy(*ctx, a);
      return -dot(run.log_prob, run.upstream);
    };
    LinearCrossEntropy b = run.call(chunk);
    b.several.upstream = run.upstream.vector();
    b.head.dhidden = run.dhidden.matrix(), b.head.dweight = run.dweight.matrix();
    linear_cross_entropy_rows_gradient(*ctx, b);
    check_slopes("dhidden", run.hidden, run.dhidden, loss);
    check_slopes("dweight", run.weight, run.dweight, loss);
  }
}

TEST_CASE("labels of a row are refused before anything is written") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run;
    Table before = run.log_prob;
    LinearCrossEntropy a = run.call(0);
    a.several.log_prob = run.log_prob.vector();
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
