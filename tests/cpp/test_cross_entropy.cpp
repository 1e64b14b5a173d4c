// Cross-entropy rows in the core: refusals. The fused loss head: the same bits everywhere, refusals.
#include "table.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tigon::test {
namespace {

struct Run {
  Table logits = Table(DType::f32, 4, 8).normal(1, 4.0), target = Table::column(DType::i64, 4),
        dlogits{DType::f32, 4, 8}, loss = Table::column(DType::f32, 4);

  Run() {
    target.fill([](int64_t, int64_t r) { return r; });
  }
  CrossEntropyRows args() {
    return {.logits = logits.matrix(),
            .target = target.vector(),
            .dlogits = dlogits.matrix(),
            .loss = loss.vector()};
  }
};

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run, untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* text) {
    CrossEntropyRows a = run.args();
    change(a);
    CHECK_THROWS_WITH_AS(cross_entropy_rows(*ctx, a), doctest::Contains(text), Error);
  };
  refused([](CrossEntropyRows& a) { a.target.size = 3; }, "[cross_entropy] target must be [4], got [3]");
  refused([](CrossEntropyRows& a) { a.target.dtype = DType::i32; }, "target must be int64, got int32");
  refused([](CrossEntropyRows& a) { a.label_smoothing = 1.5f; },
          "label_smoothing must be in [0, 1], got 1.5");
  refused([](CrossEntropyRows& a) { a.softcap = -1.0f; }, "softcap must be");
  refused([](CrossEntropyRows& a) { a.dlogits.cols = 7; }, "dlogits must be [4, 8], got [4, 7]");
  run.target.set(0, 3, 8), untouched.target = run.target;
  refused([](CrossEntropyRows&) {}, "target");
  CHECK(run.dlogits == untouched.dlogits);
  CHECK(run.loss == untouched.loss);
}

// --- linear_cross_entropy: the chunk loop -------------------------------------------------------------

struct Head {
  int64_t rows = 11, hidden_size = 24, vocab = 50;
  Table hidden, weight, bias, target, loss, total, scale, dhidden, dweight, dbias;

  explicit Head(DType t)
      : hidden(t, rows, hidden_size, 4),
        weight(t, vocab, hidden_size, 2),
        bias(DType::f32, 1, vocab),
        target(DType::i64, 1, rows),
        loss(DType::f32, 1, rows),
        total(DType::f32, 1, 1),
        scale(DType::f32, 1, 1),
        dhidden(t, rows, hidden_size, 1),
        dweight(DType::f32, vocab, hidden_size),
        dbias(DType::f32, 1, vocab) {
    hidden.normal(1), weight.normal(2, 0.3), bias.normal(3);
    target.fill([&](int64_t, int64_t r) { return r % 4 == 1 ? -100.0 : double(r * 13 % vocab); });
  }
  LinearCrossEntropy args(int64_t chunk_rows) {
    return {.head = {.hidden = hidden.matrix(),
                     .weight = weight.matrix(),
                     .bias = bias.vector(),
                     .dhidden = dhidden.matrix(),
                     .dweight = dweight.matrix(),
                     .dbias = dbias.vector()},
            .labels = {.target = target.vector(), .chunk_rows = chunk_rows},
            .reduction = {.total = total.vector(), .scale = scale.vector()},
            .results = {.loss = loss.vector()}};
  }
};

TEST_CASE("linear_cross_entropy gives the same bits everywhere") {
  for (DType t : kFloats) {
    INFO(text(t));
    check_same_everywhere([&](Context& ctx) {
      Head head(t);
      linear_cross_entropy(ctx, head.args(4));
      return std::vector<Table>{head.total, head.loss, head.dhidden, head.dweight, head.dbias};
    });
  }
}

TEST_CASE("linear_cross_entropy refuses by name") {
  Head head(DType::f32);
  Head untouched = head;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* text) {
    LinearCrossEntropy a = head.args(0);
    change(a);
    CHECK_THROWS_WITH_AS(linear_cross_entropy(*ctx, a), doctest::Contains(text), Error);
  };
  refused([](LinearCrossEntropy& a) { a.head.weight.cols = 23; },
          "[linear_cross_entropy] weight must be [50, 24], got [50, 23]");
  refused([](LinearCrossEntropy& a) { a.head.weight.dtype = DType::bf16; },
          "weight must be float32, got bfloat16");
  refused([](LinearCrossEntropy& a) { a.labels.target.size = 10; }, "target must be [11], got [10]");
  refused([](LinearCrossEntropy& a) { a.head.bias.size = 49; }, "bias must be [50], got [49]");
  refused([](LinearCrossEntropy& a) { a.labels.chunk_rows = -1; }, "chunk_rows must be >= 1");
  refused([](LinearCrossEntropy& a) { a.labels.shift.shift = -2; },
          "[linear_cross_entropy] shift must be >= 0, got -2");
  refused([](LinearCrossEntropy& a) { a.head.dweight.dtype = DType::bf16; },
          "dweight must be float32, got bfloat16");
  CHECK(head.loss == untouched.loss);
  CHECK(head.dhidden == untouched.dhidden);
  CHECK(head.dweight == untouched.dweight);
}

}  // namespace
}  // namespace tigon::test
