// qk_norm_rope in the core: it is rms_norm and rope in turn, its gradients are slopes, refusals, bitwise
// promises.
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

TEST_CASE("rms_norm and rope in turn, bit for bit") {
  auto ctx = make_cpu_context(2);
  for (DType x : kFloats)
    for (Rounding rounding : {Rounding::llama, Rounding::gemma, Rounding::none})
      for (auto [cols, rotated] : {std::pair<int64_t, int64_t>{64, 64}, {40, 10}, {7, 6}, {1000, 1000}}) {
        INFO(text(x) << " D " << cols << " R " << rotated << " rounding " << int(rounding));
        Run run(x, cols, rotated), turn(x, cols, rotated);
        qk_norm_rope_fwd(*ctx, run.forward(rounding, 0.5f));
        Table n(x, kTokens * kHeads, cols), rstd = Table::column(DType::f32, kTokens * kHeads);
        rms_norm_fwd(*ctx, {.x = turn.q.matrix(),
                            .weight = turn.weight.vector(),
                            .y = n.matrix(),
                            .rstd = rstd.vector(),
                            .eps = 1e-5f,
                            .offset = 0.5f,
                            .rounding = rounding});
        rope_fwd(*ctx, turn.rope(n, turn.y));
        CHECK(run.y == turn.y);
      }
}

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(1);
  Run run(DType::f32, 12, 8, {.in = RopePairs::neighbours, .out = RopePairs::neighbours, .tail = true});
  qk_norm_rope_bwd(*ctx, run.backward(Rounding::gemma, 1.0f));
  auto loss = [&] {
    qk_norm_rope_fwd(*ctx, run.forward(Rounding::gemma, 1.0f));
    return dot(run.y, run.dy);
  };
  check_slopes("dx", run.q, run.dx, loss);
  Table dweight(DType::f32, 1, 12);
  dweight.fill([&](int64_t, int64_t c) { return run.dweight(0, c); });
  check_slopes("dweight", run.weight, dweight, loss);
  for (int64_t c = 0; c < 12; ++c) CHECK(run.dweight(1, c) == 0.0);  // there is no k
}

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
