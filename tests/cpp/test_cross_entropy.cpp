// Cross-entropy rows in the core: in place, refusals.
// The fused loss head: the same bits whichever gradients are wanted, refusals.
#include "table.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tigon::test {
namespace {

struct Options {
  float smoothing = 0, softcap = 0, logit_scale = 1, z_loss = 0;
  bool weighted = false, biased = false;
  double scale = 1;
};

struct Run {
  int64_t rows, cols;
  Options o;
  Table logits, bias, weight, target, scale, dlogits, loss, lse, target_logit, entropy, predicted;

  Run(DType t, int64_t rows, int64_t cols, Options options)
      : rows(rows),
        cols(cols),
        o(options),
        logits(t, rows, cols, 3),
        bias(DType::f32, 1, cols),
        weight(DType::f32, 1, cols),
        target(DType::i64, 1, rows),
        scale(DType::f32, 1, 1),
        dlogits(t, rows, cols, 1),
        loss(DType::f32, 1, rows),
        lse(DType::f32, 1, rows),
        target_logit(DType::f32, 1, rows),
        entropy(DType::f32, 1, rows),
        predicted(DType::i64, 1, rows) {
    logits.normal(1, 4.0), bias.normal(2), scale.fill([&](int64_t, int64_t) { return o.scale; });
    weight.fill([](int64_t, int64_t c) { return 0.5 + double(c % 3); });
    target.fill([&](int64_t, int64_t r) { return double((r * 7919 + cols - 1) % cols); });
  }
  CrossEntropyRows args() {
    return {.logits = logits.matrix(),
            .target = target.vector(),
            .bias = o.biased ? bias.vector() : Vector{},
            .class_weight = o.weighted ? weight.vector() : Vector{},
            .scale = scale.vector(),
            .dlogits = dlogits.matrix(),
            .loss = loss.vector(),
            .lse = lse.vector(),
            .target_logit = target_logit.vector(),
            .entropy = entropy.vector(),
            .predicted = predicted.vector(),
            .logit_scale = o.logit_scale,
            .softcap = o.softcap,
            .label_smoothing = o.smoothing,
            .z_loss = o.z_loss};
  }
};

const Options kOptions = {.smoothing = 0.2f,
                          .softcap = 30.0f,
                          .logit_scale = 2.0f,
                          .z_loss = 1e-3f,
                          .weighted = true,
                          .biased = true,
                          .scale = -3.0};

TEST_CASE("in place") {
  for (DType t : kFloats) {
    INFO(text(t));
    auto ctx = make_cpu_context(1);
    Run apart(t, 9, 777, kOptions), over = apart;
    cross_entropy_rows(*ctx, apart.args());
    CrossEntropyRows a = over.args();
    a.dlogits = a.logits;
    cross_entropy_rows(*ctx, a);
    for (int64_t i = 0; i < 9 * 777; ++i) CHECK(over.logits(i) == apart.dlogits(i));
  }
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run(DType::f32, 4, 8, {});
  Run untouched = run;
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

TEST_CASE("linear_cross_entropy gives the same bits everywhere, whichever gradients are wanted") {
  for (DType t : kFloats) {
    INFO(text(t));
    std::vector<Table> all;
    check_same_everywhere([&](Context& ctx) {
      Head head(t);
      linear_cross_entropy(ctx, head.args(4));
      return all = {head.total, head.loss, head.dhidden, head.dweight, head.dbias};
    });
    auto ctx = make_cpu_context(1);
    for (int wanted = 0; wanted < 8; ++wanted) {
      Head head(t);
      LinearCrossEntropy a = head.args(4);
      if (!(wanted & 1)) a.head.dhidden = {};
      if (!(wanted & 2)) a.head.dweight = {};
      if (!(wanted & 4)) a.head.dbias = {};
      linear_cross_entropy(*ctx, a);
      Head fresh(t);
      CHECK(head.total == all[0]);
      CHECK(head.dhidden == (wanted & 1 ? all[2] : fresh.dhidden));
      CHECK(head.dweight == (wanted & 2 ? all[3] : fresh.dweight));
      CHECK(head.dbias == (wanted & 4 ? all[4] : fresh.dbias));
    }
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
