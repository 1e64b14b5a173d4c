// qk_norm_rope in the core: refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/rope/qk_norm_rope.h"

namespace tigon::test {
namespace {

constexpr int64_t kTokens = 5, kHeads = 3;

struct Run {
  int64_t cols;
  RopeForm form;
  Table q, weight, cos, sin, y, dy, dx, dweight;

  Run(DType x, int64_t cols, int64_t rotated, RopeForm form = {})
      : cols(cols),
        form(form),
        q(x, kTokens * kHeads, cols, 3),
        weight(x, 1, cols),
        cos(x, kTokens, rotated),
        sin(x, kTokens, rotated),
        y(x, kTokens * kHeads, cols),
        dy(x, kTokens * kHeads, cols),
        dx(x, kTokens * kHeads, cols, 1),
        dweight(x, 2, cols) {
    q.normal(1), weight.normal(2, 0.3, 1.0), cos.normal(3), sin.normal(4), dy.normal(5);
  }
  RopeHeads heads(Table& t, int64_t count = kHeads) const {
    int64_t stride = t.matrix().stride;
    return {.data = t.matrix().data,
            .dtype = t.dtype(),
            .batch = 1,
            .heads = count,
            .tokens = kTokens,
            .cols = t.cols(),
            .head_stride = stride,
            .token_stride = kHeads * stride};
  }
  Rope rope(Table& in, Table& out) {
    auto table = [](Table& t) {
      return RopeTable{.data = t.matrix().data,
                       .dtype = t.dtype(),
                       .tokens = kTokens,
                       .cols = t.cols(),
                       .token_stride = t.matrix().stride};
    };
    return {.q = heads(in), .cos = table(cos), .sin = table(sin), .q_out = heads(out), .form = form};
  }
  QkNorm norm(Rounding rounding, float offset) {
    return {.q_weight = weight.vector(), .eps = 1e-5f, .offset = offset, .rounding = rounding};
  }
  QkNormRopeFwd forward(Rounding rounding = Rounding::llama, float offset = 0.0f) {
    return {.rope = rope(q, y), .norm = norm(rounding, offset)};
  }
  QkNormRopeBwd backward(Rounding rounding = Rounding::llama, float offset = 0.0f) {
    return {.rope = rope(dy, dx), .q = heads(q), .norm = norm(rounding, offset), .dweight = dweight.matrix()};
  }
};

TEST_CASE("the same bits everywhere") {
  for (DType x : kFloats)
    check_same_everywhere([&](Context& ctx) {
      Run run(x, 70, 66);
      qk_norm_rope_fwd(ctx, run.forward());
      qk_norm_rope_bwd(ctx, run.backward());
      return std::vector<Table>{run.y, run.dx, run.dweight};
    });
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run(DType::f32, 8, 8);
  Run untouched = run;
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
