// qk_norm_rope in the core: refusals.
#include "table.h"
#include "tigon/ops/rope/qk_norm_rope.h"

namespace tigon::test {
namespace {

constexpr int64_t kTokens = 5, kHeads = 3, kCols = 8;

struct Run {
  Table q{DType::f32, kTokens * kHeads, kCols}, y = q, weight{DType::f32, 1, kCols},
                                                cos{DType::f32, kTokens, kCols}, sin = cos;

  RopeHeads heads(Table& t) {
    return {.data = t.matrix().data,
            .dtype = t.dtype(),
            .batch = 1,
            .heads = kHeads,
            .tokens = kTokens,
            .cols = kCols,
            .head_stride = kCols,
            .token_stride = kHeads * kCols};
  }
  RopeTable table(Table& t) {
    return {
        .data = t.matrix().data, .dtype = t.dtype(), .tokens = kTokens, .cols = kCols, .token_stride = kCols};
  }
  QkNormRopeFwd forward() {
    return {.rope = {.q = heads(q), .cos = table(cos), .sin = table(sin), .q_out = heads(y)},
            .norm = {.q_weight = weight.vector(), .eps = 1e-5f}};
  }
};

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run, untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* text) {
    QkNormRopeFwd a = run.forward();
    change(a);
    CHECK_THROWS_WITH_AS(qk_norm_rope_fwd(*ctx, a), text, Error);
  };
  refused([](QkNormRopeFwd& a) { a.norm.q_weight.size = 7; }, "[qk_norm_rope] q_weight must be [8], got [7]");
  refused([](QkNormRopeFwd& a) { a.norm.eps = -1; }, "[qk_norm_rope] eps must be >= 0, got -1");
  refused([](QkNormRopeFwd& a) { a.rope.q_out.heads = 2; },
          "[qk_norm_rope] q must be [1, 3, 5, 8], got [1, 2, 5, 8]");
  refused([](QkNormRopeFwd& a) { a.rope.form.out = RopePairs::neighbours; },
          "[qk_norm_rope] results must have the pairs of q");
  refused([](QkNormRopeFwd& a) { a.rope.cos.tokens = a.rope.sin.tokens = 4; },
          "[qk_norm_rope] cos must be [1, 1 or 1, 5, R], got [1, 1, 4, 8]");
  CHECK(run.y == untouched.y);
}

}  // namespace
}  // namespace tigon::test
