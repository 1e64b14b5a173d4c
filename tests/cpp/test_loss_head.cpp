// The engine of the linear_* ops: chunk plans, the list of rows, results of all rows, refusals.
#include <limits>

#include "table.h"
#include "tigon/ops/loss_head/loss_head.h"

namespace tigon::test {
namespace {

using Rows = std::vector<int64_t>;

struct Problem {
  int64_t rows = 13, size = 10, vocab = 21;
  Table hidden, weight, bias, target, dlogits, factor, dhidden, dweight, dbias;

  explicit Problem(DType t)
      : hidden(t, rows, size, 3),
        weight(t, vocab, size),
        bias(DType::f32, 1, vocab),
        target(DType::i64, 1, rows),
        dlogits(t, rows, vocab),
        factor(DType::f32, 1, rows),
        dhidden(t, rows, size, 2),
        dweight(DType::f32, vocab, size),
        dbias(DType::f32, 1, vocab) {
    hidden.normal(1), weight.normal(2), bias.normal(3), dlogits.normal(4), factor.normal(5);
    target.fill([&](int64_t, int64_t r) { return r % 5 == 2 ? -100.0 : double(r * 7 % vocab); });
  }
  bool counts(int64_t r) { return target(r) >= 0; }
  LinearHead head() {
    return {.op = "driver",
            .hidden = hidden.matrix(),
            .weight = weight.matrix(),
            .bias = bias.vector(),
            .dhidden = dhidden.matrix(),
            .dweight = dweight.matrix(),
            .dbias = dbias.vector()};
  }
};

std::vector<Rows> spans(const Rows& groups, int64_t limit) {
  Problem p(DType::f32);
  std::vector<Rows> all;
  for (const LossHeadSpan& s : loss_head_spans(p.head(), groups, limit))
    all.push_back({s.begin, s.count, s.group, s.groups});
  return all;
}

TEST_CASE("plan packs whole groups in order") {
  CHECK(spans({}, 8) == std::vector<Rows>{});
  CHECK(spans({8}, 8) == std::vector<Rows>{{0, 8, 0, 1}});
  CHECK(spans({3, 5, 1}, 8) == std::vector<Rows>{{0, 8, 0, 2}, {8, 1, 2, 1}});
  CHECK(spans({4, 5, 4}, 8) == std::vector<Rows>{{0, 4, 0, 1}, {4, 5, 1, 1}, {9, 4, 2, 1}});
  CHECK(spans({0, 8, 0, 0, 1, 0}, 8) == std::vector<Rows>{{0, 8, 0, 4}, {8, 1, 4, 2}});
  CHECK(spans({0, 0}, 8) == std::vector<Rows>{{0, 0, 0, 2}});
  CHECK(spans({2, 11, 2, 9, 2}, 8) ==
        std::vector<Rows>{{0, 2, 0, 1}, {2, 11, 1, 1}, {13, 11, 2, 2}, {24, 2, 4, 1}});
}

TEST_CASE("plan refuses what cannot be met") {
  Problem p(DType::f32);
  LinearHead head = p.head();
  CHECK_THROWS_WITH_AS(loss_head_spans(head, {3, -1}, 8),
                       "[driver] groups must have >= 0 rows, got -1 in group 1", Error);
  head.weight.rows = 1 << 18;  // 1 MiB a row
  CHECK(loss_head_spans(head, {1024}, 8).size() == 1);
  CHECK_THROWS_WITH_AS(loss_head_spans(head, {8, 1025}, 8),
                       "[driver] groups must have at most 1024 rows (logits of 1 GiB), got 1025 in group 1",
                       Error);
  CHECK(loss_head_spans(head, {1, 1025}, 1025).size() == 2);  // a limit of the caller's own
}

TEST_CASE("chunks by sizes alone") {
  LossHeadSizes s = {.cuda = 1, .worked = 8192, .hidden = 4096, .vocab = 128256, .train_weight = 1};
  CHECK(loss_head_whole_rows(s) == 9420);
  CHECK(loss_head_chunk_rows(s) == 8192);
  s.worked = 16384;
  CHECK(loss_head_chunk_rows(s) == 4096);
  s.train_weight = 0, s.lean = 0;
  CHECK(loss_head_chunk_rows(s) == 2048);
  s.lean = 1;
  CHECK(loss_head_chunk_rows(s) == 1024);
  s.cuda = 0, s.worked = 1280;
  CHECK(loss_head_chunk_rows(s) == 1280);
  s.worked = 1281;
  CHECK(loss_head_chunk_rows(s) == 768);
}

TEST_CASE("labels in advance stay in their sequence") {
  auto ctx = make_cpu_context(1);
  constexpr int64_t kRows = 12;
  Table target(DType::i64, 1, kRows), position_ids(DType::i64, 1, kRows);
  target.fill([](int64_t, int64_t r) { return double(100 + r); });
  position_ids.fill([](int64_t, int64_t r) { return double(r < 5 ? r : r < 6 ? 0 : r - 6); });  // 5, 1 and 6
  auto labels = [&](const LossHeadShift& by) {
    Vector out =
        loss_head_labels(*ctx, "driver", {.target = target.vector(), .ignore_index = -7, .shift = by}).target;
    return Rows(out.as<int64_t>(), out.as<int64_t>() + out.size);
  };
  CHECK(loss_head_labels(*ctx, "driver", {.target = target.vector()}).target.data == target.vector().data);
  CHECK(labels({.shift = 1}) == Rows{101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, -7});
  CHECK(labels({.shift = 2, .length = 4}) == Rows{102, 103, -7, -7, 106, 107, -7, -7, 110, 111, -7, -7});
  for (int64_t past : {int64_t(4), int64_t(5), std::numeric_limits<int64_t>::max()})
    CHECK(labels({.shift = past, .length = 4}) == Rows(kRows, -7));
  Vector packed = position_ids.vector();
  CHECK(labels({.shift = 1, .position_ids = packed}) ==
        Rows{101, 102, 103, 104, -7, -7, 107, 108, 109, 110, 111, -7});
  CHECK(labels({.shift = 3, .position_ids = packed}) ==
        Rows{103, 104, -7, -7, -7, -7, 109, 110, 111, -7, -7, -7});
  CHECK(labels({.shift = 3, .length = 6, .position_ids = packed}) ==
        Rows{103, 104, -7, -7, -7, -7, 109, 110, 111, -7, -7, -7});
  CHECK_THROWS_WITH_AS(labels({.shift = -1}), "[driver] shift must be >= 0, got -1", Error);
  CHECK_THROWS_WITH_AS(labels({.shift = 1, .length = 5}), "[driver] length must divide 12 rows, got 5",
                       Error);
  packed.size = 11;
  CHECK_THROWS_WITH_AS(labels({.shift = 1, .position_ids = packed}),
                       "[driver] position_ids must be [12], got [11]", Error);
}

TEST_CASE("results of the list reach all rows") {
  auto ctx = make_cpu_context(1);
  Problem p(DType::f32);
  LinearHead head = p.head();
  LossHeadRows rows = loss_head_rows(*ctx, head, {.target = p.target.vector(), .valid_rows = 10});
  REQUIRE(rows.listed);
  Table from = Table(DType::f32, 1, rows.count).normal(9), to(DType::f32, 1, p.rows),
        square(DType::f32, 1, p.rows);
  LossHeadResults results = {.target = p.target.vector(), .position = rows.position, .fault = rows.fault};
  results.add({.from = from.vector(), .to = to.vector()});
  results.add({.from = from.vector(), .to = {}});
  results.add({.from = from.vector(),
               .to = square.vector(),
               .factor = p.factor.vector(),
               .gain = 2.0f,
               .square = true});
  CHECK(results.count == 2);
  loss_head_results(*ctx, results);
  for (int64_t r = 0, i = 0; r < p.rows; ++r) {
    double x = p.counts(r) ? from(i++) : 0.0;
    CHECK(to(r) == x);
    CHECK(std::abs(square(r) - 2 * p.factor(r) * x * x) <= 1e-6 * std::abs(square(r)));
  }
  *rows.fault.as<float>() = NAN;
  loss_head_results(*ctx, results);
  for (int64_t r = 0; r < p.rows; ++r) CHECK(std::isnan(to(r)));
}

TEST_CASE("the engine refuses under its driver's name") {
  auto ctx = make_cpu_context(1);
  Problem p(DType::bf16);
  auto refused = [&](auto change, const char* message) {
    LinearHead head = p.head();
    change(head);
    CHECK_THROWS_WITH_AS(loss_head_check(head), doctest::Contains(message), Error);
  };
  refused([](LinearHead& a) { a.weight.cols = 9; }, "[driver] weight must be [21, 10], got [21, 9]");
  refused([](LinearHead& a) { a.bias.size = 20; }, "bias must be [21], got [20]");
  refused([](LinearHead& a) { a.lora_a = a.weight; }, "lora must have both A and B, got one");
  refused([](LinearHead& a) { a.dlora_a = a.weight; }, "lora must be given for its gradients, got none");
  refused([](LinearHead& a) { a.dhidden.rows = 3; }, "dhidden must be [13, 10], got [3, 10]");
  LinearHead head = p.head();
  head.dweight.dtype = DType::bf16;
  loss_head_check(head);
  loss_head_check_chunks(head, 1);
  CHECK_THROWS_WITH_AS(loss_head_check_chunks(head, 2), doctest::Contains("dweight must be float32"), Error);
  CHECK_THROWS_WITH_AS(
      loss_head_rows(*ctx, head, {.target = p.target.vector(), .valid_rows = 9}),
      doctest::Contains("valid_rows must be the number of labels that are not -100, 10, got 9"), Error);
  p.target.set(0, 3, 21);
  CHECK_THROWS_WITH_AS(loss_head_rows(*ctx, head, {.target = p.target.vector()}),
                       doctest::Contains("target must be in [0, 21) or -100 (ignored), got 21 in row 3"),
                       Error);
}

}  // namespace
}  // namespace tigon::test
