// RoPE in the core, and behind norms of q and k: refusals.
#include "table.h"
#include "tigon/ops/rope/qk_norm_rope.h"
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
  Table q = Table(DType::f32, kBatch * kTokens * 3, 8).normal(1),
        k = Table(DType::f32, kBatch* kTokens, 8).normal(2), cos = Table(DType::f32, kTokens, 8).normal(3),
        sin = Table(DType::f32, kTokens, 8).normal(4), weight = Table(DType::f32, 1, 8).normal(5), q_out = q,
        k_out = k;

  Rope args() {
    return {.q = heads_of(q, 3),
            .k = heads_of(k, 1),
            .cos = table_of(cos, 1),
            .sin = table_of(sin, 1),
            .q_out = heads_of(q_out, 3),
            .k_out = heads_of(k_out, 1)};
  }
};

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run, untouched = run;
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
  refused([](Rope& a) { a.q_out = a.q, a.k_out = a.k, a.form.out = RopePairs::neighbours; },
          "[rope] result of q must have the strides, dtype and pairs of its input when it is its input");
  auto refused_norm = [&](auto change, const char* text) {
    QkNormRopeFwd a = {
        .rope = run.args(),
        .norm = {.q_weight = run.weight.vector(), .k_weight = run.weight.vector(), .eps = 1e-5f}};
    change(a);
    CHECK_THROWS_WITH_AS(qk_norm_rope_fwd(*ctx, a), text, Error);
  };
  using Norm = QkNormRopeFwd;
  refused_norm([](Norm& a) { a.norm.q_weight.size = 7; }, "[qk_norm_rope] q_weight must be [8], got [7]");
  refused_norm([](Norm& a) { a.norm.eps = -1; }, "[qk_norm_rope] eps must be >= 0, got -1");
  refused_norm([](Norm& a) { a.rope.q_out.heads = 2; },
               "[qk_norm_rope] q must be [2, 3, 5, 8], got [2, 2, 5, 8]");
  refused_norm([](Norm& a) { a.rope.form.out = RopePairs::neighbours; },
               "[qk_norm_rope] results must have the pairs of q");
  refused_norm([](Norm& a) { a.rope.cos.tokens = a.rope.sin.tokens = 4; },
               "[qk_norm_rope] cos must be [1, 1 or 2, 5, R], got [1, 1, 4, 8]");
  CHECK(run.q_out == untouched.q_out);
  CHECK(run.k_out == untouched.k_out);
}

}  // namespace
}  // namespace tigon::test
