// Cross-entropy rows in the core against the contract's formula in double, that formula against finite differences,
// masked and broken rows, refusals, bitwise promises. The fused loss head against its parts.
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

// One row of the contract's formula, from logits as doubles.
struct Row {
  const Options& o;
  std::vector<double> logits, bias, weight;
  int64_t y;
  struct {
    double lse = NAN, pull = NAN, largest = NAN;
  } known = {};  // set by remember(), for as long as logits do not change

  void remember() { known = {lse(), pull(), largest()}; }

  double u(size_t c) const { return double(o.logit_scale) * (logits[c] + (o.biased ? bias[c] : 0.0)); }
  double z(size_t c) const { return o.softcap > 0 ? o.softcap * std::tanh(u(c) / o.softcap) : u(c); }
  double w(size_t c) const { return o.weighted ? weight[c] : 1.0; }
  double lse() const {
    if (!std::isnan(known.lse)) return known.lse;
    double m = -INFINITY, s = 0;
    for (size_t c = 0; c < logits.size(); ++c) m = std::max(m, z(c));
    for (size_t c = 0; c < logits.size(); ++c) s += std::exp(z(c) - m);
    return m + std::log(s);
  }
  double pull() const {  // what every probability is multiplied by
    if (!std::isnan(known.pull)) return known.pull;
    double smooth = 0;
    for (size_t c = 0; c < logits.size(); ++c) smooth += push(c);
    return (1 - o.smoothing) * w(size_t(y)) + smooth;
  }
  double push(size_t c) const { return o.smoothing / double(logits.size()) * w(c); }
  double target(size_t c) const { return c == size_t(y) ? (1 - o.smoothing) * w(c) : 0.0; }
  double loss() const {
    double l = lse(), s = (1 - o.smoothing) * w(size_t(y)) * (l - z(size_t(y))) + o.z_loss * l * l;
    for (size_t c = 0; c < logits.size(); ++c) s += push(c) * (l - z(c));
    return s;
  }
  double slope_of(size_t c) const {
    double t = o.softcap > 0 ? std::tanh(u(c) / o.softcap) : 0.0;
    return o.logit_scale * (1 - t * t);
  }
  double p(size_t c) const { return std::exp(z(c) - lse()); }
  double gradient(size_t c) const {
    return o.scale * slope_of(c) * (p(c) * (pull() + 2 * o.z_loss * lse()) - target(c) - push(c));
  }
  double gradient_size(size_t c) const {  // the same with every term taken by its magnitude
    return std::abs(o.scale * slope_of(c)) *
           (p(c) * (pull() + std::abs(2 * o.z_loss * lse())) + target(c) + push(c));
  }
  double largest() const {
    if (!std::isnan(known.largest)) return known.largest;
    double m = 0;
    for (size_t c = 0; c < logits.size(); ++c) m = std::max({m, std::abs(z(c)), std::abs(u(c))});
    return m;
  }
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
  Row row(int64_t r) const {
    Row row{o, {}, {}, {}, int64_t(target(r))};
    for (int64_t c = 0; c < cols; ++c)
      row.logits.push_back(logits(r, c)), row.bias.push_back(bias(c)), row.weight.push_back(weight(c));
    return row;
  }
};

const std::vector<Options> kOptions = {{},
                                       {.smoothing = 0.1f},
                                       {.softcap = 5.0f},
                                       {.logit_scale = 0.25f, .scale = 1.0 / 512},
                                       {.z_loss = 1e-2f},
                                       {.weighted = true, .biased = true},
                                       {.smoothing = 0.2f,
                                        .softcap = 30.0f,
                                        .logit_scale = 2.0f,
                                        .z_loss = 1e-3f,
                                        .weighted = true,
                                        .biased = true,
                                        .scale = -3.0}};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (DType t : kFloats)
    for (const Options& o : kOptions)
      for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 5}, {20, 33}, {2, 3000}}) {
        INFO(rows << " x " << cols << " " << text(t) << " smoothing " << o.smoothing << " softcap "
                  << o.softcap << " scale " << o.logit_scale << " z " << o.z_loss << " weights "
                  << o.weighted);
        Run run(t, rows, cols, o);
        cross_entropy_rows(*ctx, run.args());
        std::vector<Row> exact;
        for (int64_t r = 0; r < rows; ++r) exact.push_back(run.row(r)), exact.back().remember();
        // A sum over a row is a chain of cols/16 + a few additions; e^x, log and tanh are good to a few ulp; an absolute error
        // of 2^-24 |z| in the exponent is a relative one of e^z.
        double chain = (double(cols) / 16 + 32) * 0x1p-24;
        auto at = [&](int64_t r) -> const Row& { return exact[size_t(r)]; };
        auto room = [&](int64_t r) { return chain * (1 + at(r).largest()); };
        check_close(
            "lse", run.lse, [&](int64_t, int64_t r) { return at(r).lse(); },
            [&](int64_t, int64_t r) { return room(r); });
        check_close(
            "loss", run.loss, [&](int64_t, int64_t r) { return at(r).loss(); },
            [&](int64_t, int64_t r) {
              return room(r) * (at(r).pull() + 2 * o.z_loss * std::abs(at(r).lse()) + 1);
            });
        check_close(
            "target_logit", run.target_logit, [&](int64_t, int64_t r) { return at(r).z(size_t(at(r).y)); },
            [&](int64_t, int64_t r) { return room(r); });
        check_close(
            "dlogits", run.dlogits, [&](int64_t r, int64_t c) { return at(r).gradient(size_t(c)); },
            [&](int64_t r, int64_t c) {
              double slope = o.softcap > 0 ? 8 * 0x1p-24 * std::abs(o.scale) * o.logit_scale : 0.0;
              return 1.001 * unit(t) * std::abs(at(r).gradient(size_t(c))) + tiny(t) +
                     2 * room(r) * at(r).gradient_size(size_t(c)) + slope * 0x1p-10;
            });
        for (int64_t r = 0; r < rows; ++r) {
          double entropy = 0, best = -INFINITY;
          for (int64_t c = 0; c < cols; ++c)
            entropy += at(r).p(size_t(c)) * (at(r).lse() - at(r).z(size_t(c)));
          for (int64_t c = 0; c < cols; ++c) best = std::max(best, at(r).z(size_t(c)));
          CHECK(std::abs(run.entropy(r) - entropy) <= 4 * room(r) * (1 + at(r).largest()));
          CHECK(at(r).z(size_t(run.predicted(r))) >= best - room(r));
        }
      }
}

TEST_CASE("the formula's gradient is its slope") {
  for (const Options& o : kOptions) {
    Run run(DType::f32, 1, 6, o);
    Row row = run.row(0);
    for (size_t c = 0; c < 6; ++c)
      CHECK(row.gradient(c) ==
            doctest::Approx(slope(&row.logits[c], [&] { return o.scale * row.loss(); })).epsilon(1e-6));
  }
}

TEST_CASE("masked rows are zeros whatever scale is; broken rows are NaN, and only they") {
  Run run(DType::f32, 4, 40, {.scale = INFINITY});
  run.target.set(0, 0, -100);
  run.logits.set(1, 39, NAN);
  auto ctx = make_cpu_context(1);
  cross_entropy_rows(*ctx, run.args());
  CHECK(run.loss(0) == 0.0);
  CHECK(std::isnan(run.loss(1)));
  CHECK(std::isfinite(run.loss(2)));
  for (int64_t c = 0; c < 40; ++c) {
    CHECK(run.dlogits(0, c) == 0.0);
    CHECK(std::isnan(run.dlogits(1, c)));
  }
}

TEST_CASE("the same bits everywhere, in place too") {
  for (DType t : kFloats)
    for (const Options& o : {kOptions.front(), kOptions.back()}) {
      INFO(text(t));
      std::vector<Table> apart;
      check_same_everywhere([&](Context& ctx) {
        Run run(t, 9, 777, o);
        cross_entropy_rows(ctx, run.args());
        return apart = {run.dlogits, run.loss, run.lse, run.entropy, run.predicted};
      });
      auto ctx = make_cpu_context(1);
      Run over(t, 9, 777, o);
      CrossEntropyRows a = over.args();
      a.dlogits = a.logits;
      cross_entropy_rows(*ctx, a);
      check_close(
          "dlogits over logits", over.logits, [&](int64_t r, int64_t c) { return apart[0](r, c); },
          [](int64_t, int64_t) { return 0.0; });
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

// --- linear_cross_entropy: the chunk loop, against the products and rows it is made of. ---------------------------------------

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

TEST_CASE("linear_cross_entropy against double for every chunk size") {
  auto ctx = make_cpu_context(2);
  for (int64_t chunk : {0, 1, 3, 11, 100}) {
    INFO("chunk_rows " << chunk);
    Head head(DType::f32);
    linear_cross_entropy(*ctx, head.args(chunk));
    Options o{.biased = true, .scale = 1.0 / 8};  // 8 of 11 rows count
    std::vector<Row> exact;
    for (int64_t r = 0; r < head.rows; ++r) {
      Row row{o, {}, {}, {}, int64_t(head.target(r))};
      for (int64_t v = 0; v < head.vocab; ++v) {
        double z = 0;
        for (int64_t h = 0; h < head.hidden_size; ++h) z += head.hidden(r, h) * head.weight(v, h);
        row.logits.push_back(z), row.bias.push_back(head.bias(v)), row.weight.push_back(1.0);
      }
      exact.push_back(row);
    }
    auto counts = [&](int64_t r) { return exact[size_t(r)].y >= 0; };
    auto dlogit = [&](int64_t r, int64_t v, bool size) {
      const Row& row = exact[size_t(r)];
      return !counts(r) ? 0.0 : size ? row.gradient_size(size_t(v)) : row.gradient(size_t(v));
    };
    // Logits: hidden_size rounded products; a few ulp more in the row; then sums over the vocabulary or the rows.
    double work = double(head.hidden_size + head.vocab + head.rows + 32) * 0x1p-24 * 8;
    double total = 0;
    for (int64_t r = 0; r < head.rows; ++r) total += counts(r) ? exact[size_t(r)].loss() / 8 : 0.0;
    CHECK(std::abs(head.total(0) - total) <= work);
    auto sum = [&](int64_t n, bool size, auto term) {
      double s = 0;
      for (int64_t i = 0; i < n; ++i) s += size ? std::abs(term(i)) : term(i);
      return s;
    };
    auto dhidden = [&](int64_t r, int64_t h, bool size) {
      return sum(head.vocab, size, [&](int64_t v) { return dlogit(r, v, size) * head.weight(v, h); });
    };
    auto dweight = [&](int64_t v, int64_t h, bool size) {
      return sum(head.rows, size, [&](int64_t r) { return dlogit(r, v, size) * head.hidden(r, h); });
    };
    auto dbias = [&](int64_t, int64_t v, bool size) {
      return sum(head.rows, size, [&](int64_t r) { return dlogit(r, v, size); });
    };
    auto check = [&](const char* name, const Table& got, auto exact_value) {
      check_close(
          name, got, [&](int64_t r, int64_t c) { return exact_value(r, c, false); },
          [&](int64_t r, int64_t c) { return work * exact_value(r, c, true); });
    };
    check("dhidden", head.dhidden, dhidden);
    check("dweight", head.dweight, dweight);
    check("dbias", head.dbias, dbias);
  }
}

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

TEST_CASE("gradients of per-row losses do not depend on what was kept") {
  for (int64_t kept_rows : {0, 3, 8, 11})
    for (bool with_unit : {false, true})
      for (int64_t chunk : {0, 2}) {
        INFO("kept " << kept_rows << (with_unit ? " unit" : "") << " chunk " << chunk);
        Head direct(DType::f32), head(DType::f32);
        auto ctx = make_cpu_context(2);
        Table upstream = Table(DType::f32, 1, head.rows).normal(7),
              unit(DType::f32, head.rows, head.hidden_size), kept(DType::f32, kept_rows, head.vocab, 14);
        upstream.fill([&](int64_t, int64_t r) { return head.target(r) < 0 ? NAN : 0.25 * double(r) - 1; });
        auto arguments = [&](Head& h) {
          LinearCrossEntropy a = h.args(chunk);
          a.reduction.kind = Reduction::none;
          return a;
        };
        LinearCrossEntropy a = arguments(direct);
        a.upstream = upstream.vector();
        linear_cross_entropy(*ctx, a);  // with the upstream gradients folded into the logits'

        LinearCrossEntropy forward = arguments(head);
        forward.head.dhidden = forward.head.dweight = {}, forward.head.dbias = {};
        if (with_unit) forward.kept.unit = unit.matrix();
        if (kept_rows > 0) forward.kept.dlogits = kept.matrix();
        linear_cross_entropy(*ctx, forward);
        CHECK(head.loss == direct.loss);
        LinearCrossEntropy backward = arguments(head);
        backward.upstream = upstream.vector();
        backward.kept = forward.kept;
        if (with_unit && kept_rows >= 8) backward.head.weight.data = nullptr;  // 8 rows count
        linear_cross_entropy_rows_gradient(*ctx, backward);
        auto close = [](const char* name, const Table& got, const Table& want) {
          check_close(
              name, got, [&](int64_t r, int64_t c) { return want(r, c); },
              [&](int64_t r, int64_t c) { return 1e-5 + 1e-5 * std::abs(want(r, c)); });
        };
        close("dhidden", head.dhidden, direct.dhidden);
        close("dweight", head.dweight, direct.dweight);
        close("dbias", head.dbias, direct.dbias);
        if (with_unit && kept_rows < 8) {
          backward.head.weight.data = nullptr;
          CHECK_THROWS_WITH_AS(linear_cross_entropy_rows_gradient(*ctx, backward),
                               doctest::Contains("weight must be given"), Error);
        }
      }
}

TEST_CASE("linear_cross_entropy takes labels in advance") {
  auto ctx = make_cpu_context(1);
  Table position_ids(DType::i64, 1, 11);
  position_ids.fill([](int64_t, int64_t r) { return double(r < 4 ? r : r - 4); });
  for (int64_t shift : {0, 1, 2, 6, 7, 30}) {
    INFO("shift " << shift);
    Head by_hand(DType::bf16), given = by_hand;
    by_hand.target.fill([&](int64_t, int64_t r) {
      int64_t from = r + shift;
      return from < (r < 4 ? 4 : 11) ? given.target(from) : -100.0;
    });
    LinearCrossEntropy a = given.args(3), b = by_hand.args(3);
    a.labels.shift = {.shift = shift, .position_ids = position_ids.vector()};
    a.reduction.kind = b.reduction.kind = Reduction::sum;
    linear_cross_entropy(*ctx, a);
    linear_cross_entropy(*ctx, b);
    CHECK(given.loss == by_hand.loss);
    CHECK(given.total == by_hand.total);
    CHECK(given.dhidden == by_hand.dhidden);
    CHECK(given.dweight == by_hand.dweight);
    Table upstream = Table(DType::f32, 1, 11).normal(5);
    a.reduction.kind = b.reduction.kind = Reduction::none;
    a.upstream = b.upstream = upstream.vector();
    linear_cross_entropy_rows_gradient(*ctx, a);
    linear_cross_entropy_rows_gradient(*ctx, b);
    CHECK(given.dhidden == by_hand.dhidden);
    CHECK(given.dweight == by_hand.dweight);
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

TEST_CASE("finish scales by the upstream gradient and rounds once") {
  auto ctx = make_cpu_context(1);
  Table in = Table(DType::f32, 3, 20).normal(1), out(DType::bf16, 3, 20), dloss(DType::f32, 1, 1),
        scale(DType::f32, 1, 1);
  dloss.set(0, 0, -2.5), scale.set(0, 0, 0.125);
  linear_head_finish(
      *ctx, {.in = in.matrix(), .dloss = dloss.vector(), .scale = scale.vector(), .out = out.matrix()});
  check_close(
      "out", out, [&](int64_t r, int64_t c) { return in(r, c) * -2.5 * 0.125; },
      [&](int64_t r, int64_t c) {
        return 1.001 * unit(DType::bf16) * std::abs(in(r, c) * 2.5 * 0.125) + tiny(DType::bf16);
      });
}

}  // namespace
}  // namespace tigon::test
