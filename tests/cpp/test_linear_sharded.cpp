// The sharded head on threads against the unsharded one: uneven and empty shards, options, shares of the
// rows, bits.
#include "thread_communicator.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_sharded.h"

namespace tigon::test {
namespace {

using Columns = std::vector<int64_t>;
constexpr int64_t kRows = 24, kSize = 16, kRank = 3;

struct Options {
  float smoothing = 0, softcap = 0, z_loss = 0, logit_scale = 1, temperature = 1;
  bool weighted = false, biased = false, tokens = false, low_rank = false;
  Reduction reduction = Reduction::mean;
};

// Operands of all classes and rows.
struct Problem {
  int64_t vocab;
  DType type;
  Options o;
  Table hidden, weight, bias, class_weight, token_weight, upstream, target, lora_a, lora_b;

  Problem(DType t, int64_t vocab, Options options)
      : vocab(vocab),
        type(t),
        o(options),
        hidden(t, kRows, kSize),
        weight(t, vocab, kSize),
        bias(DType::f32, 1, vocab),
        class_weight(DType::f32, 1, vocab),
        token_weight(DType::f32, 1, kRows),
        upstream(DType::f32, 1, kRows),
        target(DType::i64, 1, kRows),
        lora_a(t, kRank, kSize),
        lora_b(t, vocab, kRank) {
    lora_a.normal(7, 0.4), lora_b.normal(8, 0.4);
    hidden.normal(1), weight.normal(2, 0.4), bias.normal(3), token_weight.normal(5), upstream.normal(6);
    class_weight.fill([](int64_t, int64_t c) { return 0.5 + double(c % 5) / 4; });
    target.fill([&](int64_t, int64_t r) { return r % 7 == 3 ? -100.0 : double(r * 11 % vocab); });
  }

  LinearCrossEntropy call() {
    LinearCrossEntropy a = {
        .head = {.lora_scale = 0.5f},
        .labels = {.target = target.vector(), .chunk_rows = 8},
        .formula = {.softcap = o.softcap, .logit_scale = o.logit_scale, .temperature = o.temperature},
        .reduction = {.kind = o.reduction},
        .label_smoothing = o.smoothing,
        .z_loss = o.z_loss};
    if (o.low_rank) a.head.lora_a = lora_a.matrix(), a.head.lora_b = lora_b.matrix();
    if (o.weighted) a.class_weight = class_weight.vector();
    if (o.tokens) a.token_weight = token_weight.vector();
    if (o.reduction == Reduction::none) a.upstream = upstream.vector();
    return a;
  }
};

// Results of one rank, or of a call on all classes.
struct Results {
  Table loss, total, scale, z_term, log_prob, lse, entropy, dhidden, dweight, dbias, dlora_a, dlora_b;

  Results(DType t, int64_t rows, int64_t columns)
      : loss(DType::f32, 1, kRows),
        total(DType::f32, 1, 1),
        scale(DType::f32, 1, 1),
        z_term(DType::f32, 1, kRows),
        log_prob(DType::f32, 1, kRows),
        lse(DType::f32, 1, kRows),
        entropy(DType::f32, 1, kRows),
        dhidden(t, rows, kSize),
        dweight(DType::f32, columns, kSize),
        dbias(DType::f32, 1, columns),
        dlora_a(DType::f32, kRank, kSize),
        dlora_b(DType::f32, columns, kRank) {}

  void into(LinearCrossEntropy& a) {
    a.results = {.loss = loss.vector(),
                 .z_term = z_term.vector(),
                 .log_prob = log_prob.vector(),
                 .lse = lse.vector(),
                 .entropy = entropy.vector()};
    if (a.reduction.kind != Reduction::none)
      a.reduction.total = total.vector(), a.reduction.scale = scale.vector();
    a.head.dhidden = dhidden.matrix(), a.head.dweight = dweight.matrix(), a.head.dbias = dbias.vector();
    if (a.head.lora_a.data) a.head.dlora_a = dlora_a.matrix(), a.head.dlora_b = dlora_b.matrix();
  }
};

Results unsharded(Problem& p) {
  Results r(p.type, kRows, p.vocab);
  auto ctx = make_cpu_context(1);
  LinearCrossEntropy a = p.call();
  a.head.hidden = p.hidden.matrix(), a.head.weight = p.weight.matrix();
  if (p.o.biased) a.head.bias = p.bias.vector();
  r.into(a);
  linear_cross_entropy(*ctx, a);
  return r;
}

std::vector<Results> sharded(Problem& p, const Columns& columns, bool shares) {
  const int ranks = int(columns.size());
  const int64_t rows = shares ? kRows / ranks : kRows;
  std::vector<Results> results;
  std::vector<float> weights(columns.size(), 0.0f);
  Columns first(columns.size(), 0);
  float sum = 0.0f;
  for (size_t r = 0; r < columns.size(); ++r) {
    results.emplace_back(p.type, rows, columns[r]);
    first[r] = r > 0 ? first[r - 1] + columns[r - 1] : 0;
    for (int64_t c = first[r]; c < first[r] + columns[r]; ++c)
      weights[r] += p.o.weighted ? float(p.class_weight(c)) : 1.0f;
    sum += weights[r];
  }
  on_ranks(ranks, [&](ThreadCommunicator& ranks_) {
    const size_t r = size_t(ranks_.rank());
    auto ctx = make_cpu_context(1);
    LinearCrossEntropySharded call = {
        .head = p.call(),
        .first_class = first[r],
        .classes = p.vocab,
        .sequence_parallel = shares,
        .shard_weight = {.data = weights.data(), .size = int64_t(weights.size())},
        .weight_sum = {.data = &sum, .size = 1}};
    LinearHead& head = call.head.head;
    head.hidden = shares ? rows_from(p.hidden.matrix(), int64_t(r) * rows, rows) : p.hidden.matrix();
    head.weight = rows_from(p.weight.matrix(), first[r], columns[r]);
    if (p.o.biased) head.bias = {.data = p.bias.vector().as<float>() + first[r], .size = columns[r]};
    if (p.o.low_rank) head.lora_b = rows_from(p.lora_b.matrix(), first[r], columns[r]);
    results[r].into(call.head);
    linear_cross_entropy_sharded(*ctx, ranks_, call);
  });
  return results;
}

double largest(const Table& t) {
  double m = 0.0;
  for (int64_t i = 0; i < t.rows() * t.cols(); ++i) m = std::max(m, std::abs(t(i)));
  return m;
}

void compare(Problem& p, const Columns& columns, bool shares) {
  Results want = unsharded(p);
  std::vector<Results> got = sharded(p, columns, shares), again = sharded(p, columns, shares);
  // Logits are the same numbers wherever they are computed; sums are not added in the same order.
  auto near = [&](const char* name, const Table& have, const Table& all, int64_t first, double units) {
    const double room = units * largest(all);
    check_close(
        name, have, [&](int64_t r, int64_t c) { return all(first + r, c); },
        [&](int64_t, int64_t) { return room; });
  };
  int64_t column = 0;
  for (size_t r = 0; r < columns.size(); ++r) {
    Results& g = got[r];
    for (auto member :
         {&Results::loss, &Results::log_prob, &Results::lse, &Results::entropy, &Results::z_term}) {
      near("rows", g.*member, want.*member, 0, 8 * unit(DType::f32));
      CHECK(g.*member == got[0].*member);  // the same bits on all ranks
    }
    if (p.o.reduction != Reduction::none) {
      near("total", g.total, want.total, 0, 8 * unit(DType::f32));
      CHECK(g.total == got[0].total);
    }
    const double rounding = 4 * unit(p.type) + 8 * unit(DType::f32);
    near("dhidden", g.dhidden, want.dhidden, shares ? int64_t(r) * g.dhidden.rows() : 0, rounding);
    near("dweight", g.dweight, want.dweight, column, rounding);
    if (p.o.low_rank) {  // t is rounded for each rank's classes
      near("dlora_a", g.dlora_a, want.dlora_a, 0, rounding);
      near("dlora_b", g.dlora_b, want.dlora_b, column, rounding);
      CHECK(g.dlora_a == got[0].dlora_a);
      CHECK(g.dlora_a == again[r].dlora_a);
      CHECK(g.dlora_b == again[r].dlora_b);
    }
    Table dbias(DType::f32, 1, columns[r]);
    dbias.fill([&](int64_t, int64_t c) { return want.dbias(column + c); });
    check_close(
        "dbias", g.dbias, [&](int64_t, int64_t c) { return dbias(c); },
        [&](int64_t, int64_t) { return rounding * largest(want.dbias); });
    for (auto member : {&Results::loss, &Results::dhidden, &Results::dweight, &Results::dbias})
      CHECK(g.*member == again[r].*member);
    column += columns[r];
  }
}

const Columns kShards[] = {{21, 20}, {41, 0}, {0, 17, 24}, {16, 9, 1, 15}};

TEST_CASE("a sharded head is the unsharded one") {
  const Options all[] = {
      {},
      {.reduction = Reduction::sum},
      {.tokens = true, .reduction = Reduction::none},
      {.smoothing = 0.2f, .z_loss = 0.01f},
      {.smoothing = 0.1f, .softcap = 5.0f, .logit_scale = 1.5f, .weighted = true, .biased = true},
      {.low_rank = true},
      {.smoothing = 0.3f,
       .z_loss = 0.1f,
       .temperature = 0.7f,
       .weighted = true,
       .biased = true,
       .tokens = true,
       .low_rank = true,
       .reduction = Reduction::none},
  };
  for (DType t : kFloats)
    for (const Options& o : all)
      for (const Columns& columns : kShards)
        for (bool shares : {false, true}) {
          CAPTURE(text(t));
          CAPTURE(columns.size());
          CAPTURE(columns[0]);
          CAPTURE(shares);
          CAPTURE(o.smoothing);
          Problem p(t, 41, o);
          compare(p, columns, shares);
        }
}

TEST_CASE("labels of no class and NaN are NaN rows on all ranks") {
  Problem p(DType::f32, 41, {});
  p.target.set(0, 4, 41), p.target.set(0, 5, -3);
  p.weight.set(30, 2, NAN);
  for (const Results& r : sharded(p, {20, 21}, false))
    for (int64_t i = 0; i < kRows; ++i) CHECK((i % 7 == 3 ? r.loss(i) == 0.0 : std::isnan(r.loss(i))));
  Problem q(DType::f32, 41, {});
  q.target.set(0, 4, 41), q.target.set(0, 5, -3);
  for (const Results& r : sharded(q, {20, 21}, false))
    for (int64_t i = 0; i < kRows; ++i) {
      CHECK(std::isnan(r.loss(i)) == (i == 4 || i == 5));
      CHECK(std::isnan(r.dhidden(i, 0)) == (i == 4 || i == 5));
    }
}

TEST_CASE("a sharded head refuses what it does not do") {
  Problem p(DType::f32, 41, {});
  auto ctx = make_cpu_context(1);
  ThreadGroup group(1);
  ThreadCommunicator alone(group, 0);
  Results r(DType::f32, kRows, 41);
  LinearCrossEntropySharded call = {.head = p.call(), .classes = 40};
  call.head.head.hidden = p.hidden.matrix(), call.head.head.weight = p.weight.matrix();
  r.into(call.head);
  CHECK_THROWS_WITH_AS(
      linear_cross_entropy_sharded(*ctx, alone, call),
      "[linear_cross_entropy_sharded] first_class must leave room for 41 of 40 classes, got 0", Error);
  call.classes = 41, call.head.labels.valid_rows = 3;
  CHECK_THROWS_WITH_AS(linear_cross_entropy_sharded(*ctx, alone, call),
                       "[linear_cross_entropy_sharded] valid_rows must be -1, got 3", Error);
}

}  // namespace
}  // namespace tigon::test
