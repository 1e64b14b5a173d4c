// RoPE in the core: in place, its backward against its forward, refusals.
#include "table.h"
#include "tigon/ops/rope/rope.h"

namespace tigon::test {
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
};

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
  constexpr RopePairs kHalves = RopePairs::halves, kNeighbours = RopePairs::neighbours;
  for (auto [in, out] : {std::pair{kHalves, kHalves}, {kNeighbours, kNeighbours}, {kNeighbours, kHalves}})
    for (bool shared : {false, true})
      for (bool tail : {false, true}) {
        INFO(int(in) << int(out) << " shared " << shared << " tail " << tail);
        Run run(DType::f32, DType::f32, 24, 20, kBatch,
                {.in = in, .out = out, .shared = shared, .tail = tail});
        rope_fwd(*ctx, run.args());
        Table dy = Table(DType::f32, run.q.rows(), 24).normal(7), dx(DType::f32, run.q.rows(), 24);
        Rope a = run.args();
        a.q = heads_of(dy, 3), a.q_out = heads_of(dx, 3), a.k = a.k_out = {};
        rope_bwd(*ctx, a);
        CHECK(dot(run.q_out, dy) == doctest::Approx(dot(run.q, dx)).epsilon(1e-5));
      }
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
