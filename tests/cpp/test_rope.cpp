// RoPE in the core against the rotation in double, its backward against its forward, strides, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/rope/rope.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/rope/rope_math.inc"
}  // namespace oracle

namespace {

constexpr int64_t kBatch = 2, kTokens = 5;

// One tensor of heads in memory order [batch, tokens, heads, cols], as a projection leaves it: a Table of
// batch * tokens * heads rows.
RopeHeads heads_of(Table& t, int64_t heads) {
  int64_t stride = t.matrix().stride;
  return {.data = t.matrix().data,
          .dtype = t.dtype(),
          .batch = kBatch,
          .heads = heads,
          .tokens = kTokens,
          .cols = t.cols(),
          .batch_stride = kTokens * heads * stride,
          .head_stride = stride,
          .token_stride = heads * stride};
}
RopeTable table_of(Table& t, int64_t batch) {
  int64_t stride = t.matrix().stride;
  return {.data = t.matrix().data,
          .dtype = t.dtype(),
          .batch = batch,
          .tokens = kTokens,
          .cols = t.cols(),
          .batch_stride = kTokens * stride,
          .token_stride = stride};
}

struct Run {
  int64_t q_heads = 3, k_heads = 1, table_batch;
  RopeForm form;
  Table q, k, cos, sin, q_out, k_out;

  Run(DType x, DType table, int64_t cols, int64_t rotated, int64_t batch, RopeForm form = {})
      : table_batch(batch),
        form(form),
        q(x, kBatch * kTokens * 3, cols, 2),
        k(x, kBatch * kTokens, cols),
        cos(table, batch * kTokens, form.shared ? rotated / 2 : rotated, 1),
        sin(table, batch * kTokens, form.shared ? rotated / 2 : rotated),
        q_out(promote(x, table), kBatch * kTokens * 3, cols),
        k_out(promote(x, table), kBatch * kTokens, cols, 3) {
    q.normal(1), k.normal(2), cos.normal(3), sin.normal(4);  // any numbers: the halves need not be alike
  }
  Rope args() {
    return {.q = heads_of(q, q_heads),
            .k = heads_of(k, k_heads),
            .cos = table_of(cos, table_batch),
            .sin = table_of(sin, table_batch),
            .q_out = heads_of(q_out, q_heads),
            .k_out = heads_of(k_out, k_heads),
            .form = form};
  }
  int64_t table_row(int64_t row, int64_t heads) const {
    int64_t token = row / heads % kTokens, batch = row / heads / kTokens;
    return (table_batch == 1 ? 0 : batch) * kTokens + token;
  }
  // Column of the first or second of a pair, in halves or among neighbours.
  int64_t column(RopePairs pairs, int64_t i, bool second, int64_t half) const {
    return pairs == RopePairs::halves ? i + (second ? half : 0) : 2 * i + second;
  }
  // Row `row` of the rotated x, and the size of the terms that make it.
  double rotated(const Table& x, int64_t heads, int64_t row, int64_t c, bool size, bool backward) const {
    int64_t half = form.shared ? cos.cols() : cos.cols() / 2, t = table_row(row, heads);
    int64_t start = form.tail ? x.cols() - 2 * half : 0, at = c - start;
    if (at < 0 || at >= 2 * half) return x(row, c);
    RopePairs from = backward ? form.out : form.in, to = backward ? form.in : form.out;
    bool second = to == RopePairs::halves ? at >= half : at % 2;
    int64_t i = to == RopePairs::halves ? at % half : at / 2;
    double x1 = x(row, start + column(from, i, false, half)),
           x2 = x(row, start + column(from, i, true, half));
    auto entry = [&](const Table& table, bool of_second) {
      return table(t, form.shared ? i : column(form.out, i, of_second, half));
    };
    double c1 = entry(cos, second), s1 = backward ? -entry(sin, !second) : entry(sin, second);
    if (size) return std::abs(second ? x2 : x1) * std::abs(c1) + std::abs(second ? x1 : x2) * std::abs(s1);
    return second ? oracle::rope_second(x1, x2, c1, s1) : oracle::rope_first(x1, x2, c1, s1);
  }
};

void check_rotation(Run& run, Table& in, Table& out, int64_t heads, bool backward, const char* name) {
  DType t = out.dtype();
  check_close(
      name, out, [&](int64_t r, int64_t c) { return run.rotated(in, heads, r, c, false, backward); },
      [&](int64_t r, int64_t c) {  // two roundings in fp32, one to the result
        double want = run.rotated(in, heads, r, c, false, backward);
        return 1.001 * unit(t) * std::abs(want) + 2 * 0x1p-24 * run.rotated(in, heads, r, c, true, backward) +
               tiny(t);
      });
}

void check_both_ways(Context& ctx, DType x, DType table, int64_t cols, int64_t rotated, int64_t batch,
                     RopeForm form) {
  Run run(x, table, cols, rotated, batch, form);
  rope_fwd(ctx, run.args());
  check_rotation(run, run.q, run.q_out, 3, false, "q");
  check_rotation(run, run.k, run.k_out, 1, false, "k");
  Run back(x, table, cols, rotated, batch, form);
  Rope a = back.args();
  back.q_out.normal(5), back.k_out.normal(6);
  std::swap(a.q, a.q_out), std::swap(a.k, a.k_out);
  rope_bwd(ctx, a);
  check_rotation(back, back.q_out, back.q, 3, true, "dq");
  check_rotation(back, back.k_out, back.k, 1, true, "dk");
}

TEST_CASE("against double, forward and backward") {
  auto ctx = make_cpu_context(2);
  for (DType x : kFloats)
    for (DType table : {x, DType::f32})
      for (auto [cols, rotated] :
           {std::pair<int64_t, int64_t>{2, 2}, {10, 10}, {70, 70}, {64, 16}, {33, 10}, {8, 0}})
        for (int64_t batch : {int64_t(1), kBatch}) {
          INFO(text(x) << " tables " << text(table) << " D " << cols << " R " << rotated << " table batch "
                       << batch);
          check_both_ways(*ctx, x, table, cols, rotated, batch, {});
        }
}

TEST_CASE("pairs, shared tables and tails against double") {
  constexpr RopePairs kHalves = RopePairs::halves, kNeighbours = RopePairs::neighbours;
  auto ctx = make_cpu_context(2);
  for (DType x : kFloats)
    for (auto [in, out] : {std::pair{kHalves, kHalves}, {kNeighbours, kNeighbours}, {kNeighbours, kHalves}})
      for (bool shared : {false, true})
        for (bool tail : {false, true})
          for (auto [cols, rotated] : {std::pair<int64_t, int64_t>{70, 70}, {33, 10}, {2200, 2100}}) {
            INFO(text(x) << " D " << cols << " R " << rotated << " shared " << shared << " tail " << tail
                         << " pairs " << int(in) << int(out));
            check_both_ways(*ctx, x, x, cols, rotated, 1,
                            {.in = in, .out = out, .shared = shared, .tail = tail});
          }
}

TEST_CASE("positions and sections choose rows of tables") {
  auto ctx = make_cpu_context(2);
  constexpr int64_t kHalf = 6, kRows = 9;
  Run run(DType::f32, DType::f32, 2 * kHalf, 2 * kHalf, 1, {.shared = true});
  Table cos = Table(DType::f32, kRows, kHalf).normal(8), sin = Table(DType::f32, kRows, kHalf).normal(9);
  Table ids(DType::i64, 3, kBatch * kTokens);
  ids.fill([](int64_t axis, int64_t token) { return (axis * 5 + token * 2) % kRows; });
  Rope a = run.args();
  for (auto [table, of] : {std::pair{&a.cos, &cos}, {&a.sin, &sin}})
    *table = {.data = of->matrix().data, .tokens = kRows, .cols = kHalf, .token_stride = kHalf};
  a.positions = {.data = ids.matrix().data,
                 .dtype = DType::i64,
                 .axes = 3,
                 .batch = kBatch,
                 .tokens = kTokens,
                 .cols = 1,
                 .axis_stride = kBatch * kTokens,
                 .batch_stride = kTokens,
                 .token_stride = 1};
  for (bool mixed : {false, true}) {
    a.form.sections = {.time = 3, .height = 1, .width = 2, .mixed = mixed};
    rope_fwd(*ctx, a);
    const int axes[2][kHalf] = {{0, 0, 0, 1, 2, 2}, {0, 1, 2, 0, 0, 2}};
    check_close(
        "q", run.q_out,
        [&](int64_t r, int64_t c) {
          int64_t token = r / 3, i = c % kHalf, row = int64_t(ids(axes[mixed][i], token));
          double x1 = run.q(r, i), x2 = run.q(r, i + kHalf);
          return c < kHalf ? oracle::rope_first(x1, x2, cos(row, i), sin(row, i))
                           : oracle::rope_second(x1, x2, cos(row, i), sin(row, i));
        },
        [](int64_t, int64_t) { return 1e-6; });
  }
  ids.set(2, 7, double(kRows));
  Table untouched = run.q_out;
  CHECK_THROWS_WITH_AS(rope_fwd(*ctx, a), "[rope] positions must be in [0, 9), got 9", Error);
  CHECK(run.q_out == untouched);
}

TEST_CASE("in place") {
  auto ctx = make_cpu_context(2);
  for (RopePairs pairs : {RopePairs::halves, RopePairs::neighbours}) {
    RopeForm form{.in = pairs, .out = pairs};
    Run out(DType::bf16, DType::bf16, 70, 44, 1, form), in = out;
    rope_fwd(*ctx, out.args());
    Rope a = in.args();
    a.q_out = a.q, a.k_out = a.k;
    rope_fwd(*ctx, a);
    for (int64_t i = 0; i < in.q.rows() * in.q.cols(); ++i) CHECK(in.q(i) == out.q_out(i));
    a.form.out = pairs == RopePairs::halves ? RopePairs::neighbours : RopePairs::halves;
    CHECK_THROWS_AS(rope_fwd(*ctx, a), Error);
  }
}

TEST_CASE("the backward is the transposed forward") {  // <rope(x), dy> = <x, rope_bwd(dy)>: the op is linear
  auto ctx = make_cpu_context(1);
  Run run(DType::f32, DType::f32, 24, 20, kBatch);
  rope_fwd(*ctx, run.args());
  Table dy = Table(DType::f32, run.q.rows(), 24).normal(7), dx(DType::f32, run.q.rows(), 24);
  Rope a = run.args();
  a.q = heads_of(dy, 3), a.q_out = heads_of(dx, 3), a.k = a.k_out = {};
  rope_bwd(*ctx, a);
  double forward = 0, backward = 0;
  for (int64_t i = 0; i < dy.rows() * dy.cols(); ++i)
    forward += run.q_out(i) * dy(i), backward += run.q(i) * dx(i);
  CHECK(forward == doctest::Approx(backward).epsilon(1e-5));
}

TEST_CASE("q or k alone, and nothing") {
  auto ctx = make_cpu_context(1);
  Run both(DType::bf16, DType::bf16, 16, 16, 1), alone(DType::bf16, DType::bf16, 16, 16, 1);
  rope_fwd(*ctx, both.args());
  Rope a = alone.args();
  Table untouched = alone.q_out;
  a.q = a.q_out = {};
  rope_fwd(*ctx, a);
  CHECK(alone.k_out == both.k_out);
  CHECK(alone.q_out == untouched);
  a.k = a.k_out = {};
  rope_fwd(*ctx, a);
}

TEST_CASE("the same bits everywhere") {
  for (DType x : kFloats)
    check_same_everywhere([&](Context& ctx) {
      Run run(x, x, 70, 66, kBatch);
      rope_fwd(ctx, run.args());
      return std::vector<Table>{run.q_out, run.k_out};
    });
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run(DType::f32, DType::f32, 8, 8, 1);
  Run untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* text) {
    Rope a = run.args();
    change(a);
    CHECK_THROWS_WITH_AS(rope_fwd(*ctx, a), text, Error);
  };
  refused([](Rope& a) { a.sin.cols = 6; }, "[rope] sin must be [1, 1, 5, 8], got [1, 1, 5, 6]");
  refused([](Rope& a) { a.cos.cols = a.sin.cols = 7; },
          "[rope] cos must have an even number of columns, got 7");
  refused([](Rope& a) { a.cos.cols = a.sin.cols = 10; }, "[rope] cos must have at most 8 columns, got 10");
  refused([](Rope& a) { a.cos.tokens = a.sin.tokens = 4; },
          "[rope] cos must be [1, 1 or 2, 5, R], got [1, 1, 4, 8]");
  refused([](Rope& a) { a.sin.dtype = DType::f16; }, "[rope] sin must be float32, got float16");
  refused([](Rope& a) { a.q.dtype = DType::i64; },
          "[rope] q must be float32, bfloat16 or float16, got int64");
  refused([](Rope& a) { a.k.tokens = a.k_out.tokens = 4; },
          "[rope] cos must be [1, 1 or 2, 4, R], got [1, 1, 5, 8]");
  refused([](Rope& a) { a.q_out.heads = 2; }, "[rope] result of q must be [2, 3, 5, 8], got [2, 2, 5, 8]");
  CHECK(run.q_out == untouched.q_out);
  CHECK(run.k_out == untouched.k_out);
}

}  // namespace
}  // namespace tigon::test
