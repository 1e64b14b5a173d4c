// RoPE in the core against the rotation in double, its backward against its forward, strides, refusals, bitwise promises.
#include "tests/cpp/table.h"
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
  Table q, k, cos, sin, q_out, k_out;

  Run(DType x, DType table, int64_t cols, int64_t rotated, int64_t batch)
      : table_batch(batch),
        q(x, kBatch * kTokens * 3, cols, 2),
        k(x, kBatch * kTokens, cols),
        cos(table, batch * kTokens, rotated, 1),
        sin(table, batch * kTokens, rotated),
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
            .k_out = heads_of(k_out, k_heads)};
  }
  int64_t table_row(int64_t row, int64_t heads) const {
    int64_t token = row / heads % kTokens, batch = row / heads / kTokens;
    return (table_batch == 1 ? 0 : batch) * kTokens + token;
  }
  // Row `row` of the rotated x, and the size of the terms that make it.
  double rotated(const Table& x, int64_t heads, int64_t row, int64_t c, bool size, bool backward) const {
    int64_t half = cos.cols() / 2, t = table_row(row, heads);
    if (c >= 2 * half) return x(row, c);
    double x1 = x(row, c % half), x2 = x(row, c % half + half);
    double c1 = cos(t, c), s1 = sin(t, c < half ? c : c);
    if (backward) s1 = -sin(t, c < half ? c + half : c - half);
    if (size)
      return std::abs(x1) * std::abs(c < half ? c1 : s1) + std::abs(x2) * std::abs(c < half ? s1 : c1);
    return c < half ? oracle::rope_first(x1, x2, c1, s1) : oracle::rope_second(x1, x2, c1, s1);
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

TEST_CASE("against double, forward and backward") {
  auto ctx = make_cpu_context(2);
  for (DType x : kFloats)
    for (DType table : {x, DType::f32})
      for (auto [cols, rotated] :
           {std::pair<int64_t, int64_t>{2, 2}, {10, 10}, {70, 70}, {64, 16}, {33, 10}, {8, 0}})
        for (int64_t batch : {int64_t(1), kBatch}) {
          INFO(text(x) << " tables " << text(table) << " D " << cols << " R " << rotated << " table batch "
                       << batch);
          Run run(x, table, cols, rotated, batch);
          rope_fwd(*ctx, run.args());
          check_rotation(run, run.q, run.q_out, 3, false, "q");
          check_rotation(run, run.k, run.k_out, 1, false, "k");
          Run back(x, table, cols, rotated, batch);
          Rope a = back.args();
          back.q_out.normal(5), back.k_out.normal(6);
          std::swap(a.q, a.q_out), std::swap(a.k, a.k_out);
          rope_bwd(*ctx, a);
          check_rotation(back, back.q_out, back.q, 3, true, "dq");
          check_rotation(back, back.k_out, back.k, 1, true, "dk");
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
  refused([](Rope& a) { a.sin.cols = 6; }, "[rope] sin must be [1, 5, 8], got [1, 5, 6]");
  refused([](Rope& a) { a.cos.cols = a.sin.cols = 7; },
          "[rope] cos must have an even number of columns, got 7");
  refused([](Rope& a) { a.cos.cols = a.sin.cols = 10; }, "[rope] cos must have at most 8 columns, got 10");
  refused([](Rope& a) { a.cos.tokens = a.sin.tokens = 4; },
          "[rope] cos must be [1 or 2, 5, R], got [1, 4, 8]");
  refused([](Rope& a) { a.sin.dtype = DType::f16; }, "[rope] sin must be float32, got float16");
  refused([](Rope& a) { a.q.dtype = DType::i64; },
          "[rope] q must be float32, bfloat16 or float16, got int64");
  refused([](Rope& a) { a.k.tokens = a.k_out.tokens = 4; },
          "[rope] cos must be [1 or 2, 4, R], got [1, 5, 8]");
  refused([](Rope& a) { a.q_out.heads = 2; }, "[rope] result of q must be [2, 3, 5, 8], got [2, 2, 5, 8]");
  CHECK(run.q_out == untouched.q_out);
  CHECK(run.k_out == untouched.k_out);
}

}  // namespace
}  // namespace tigon::test
