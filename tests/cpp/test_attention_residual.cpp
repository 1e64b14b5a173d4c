// Attention residuals in the core: gradients are slopes, results that are absent, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/attention_residual/attention_residual.h"

namespace tigon::test {
namespace {

struct Case {
  int64_t count, rows, cols;
  DType dtype, param;
};

constexpr float kEps = 1e-3f;

struct Run {
  Table v, q, w, dy, y, dv, dq, dw;

  explicit Run(const Case& k)
      : v(k.dtype, k.count * k.rows, k.cols, 3),
        q(k.param, 1, k.cols),
        w(k.param, 1, k.cols),
        dy(k.dtype, k.rows, k.cols, 1),
        y(k.dtype, k.rows, k.cols, 5),
        dv(k.dtype, k.count * k.rows, k.cols, 2),
        dq(k.param, 1, k.cols),
        dw(k.param, 1, k.cols) {
    v.normal(1), q.normal(2, 1.0 / std::sqrt(double(k.cols))), w.normal(3, 0.3, 1.0), dy.normal(4);
  }
  AttentionResidualFwd forward(const Case& k) {
    return {.values = v.matrix(),
            .count = k.count,
            .query = q.vector(),
            .norm_weight = w.vector(),
            .y = y.matrix(),
            .eps = kEps};
  }
  AttentionResidualBwd backward(const Case& k) {
    return {.dy = dy.matrix(),
            .values = v.matrix(),
            .count = k.count,
            .query = q.vector(),
            .norm_weight = w.vector(),
            .dvalues = dv.matrix(),
            .dquery = dq.vector(),
            .dnorm_weight = dw.vector(),
            .eps = kEps};
  }
};

TEST_CASE("gradients are slopes: attention_residual") {
  auto ctx = make_cpu_context(1);
  const Case k{3, 2, 5, DType::f32, DType::f32};
  Run run(k);
  auto loss = [&] {
    attention_residual_fwd(*ctx, run.forward(k));
    return dot(run.y, run.dy);
  };
  attention_residual_bwd(*ctx, run.backward(k));
  check_slopes("dvalues", run.v, run.dv, loss, 2e-3);
  check_slopes("dquery", run.q, run.dq, loss, 2e-3);
  check_slopes("dnorm_weight", run.w, run.dw, loss, 2e-3);
}

TEST_CASE("attention_residual: the same bits for every instruction set and any number of threads") {
  for (DType dtype : kFloats) {
    const Case k{11, 70, 37, dtype, dtype};
    INFO(text(dtype));
    check_same_everywhere([&](Context& ctx) {
      Run run(k);
      attention_residual_fwd(ctx, run.forward(k));
      attention_residual_bwd(ctx, run.backward(k));
      return std::vector<Table>{run.y, run.dv, run.dq, run.dw};
    });
  }
}

TEST_CASE("attention_residual: no rows, and only what is asked for") {
  auto ctx = make_cpu_context(1);
  const Case none{3, 0, 8, DType::bf16, DType::bf16};
  Run empty(none);
  attention_residual_fwd(*ctx, empty.forward(none));
  attention_residual_bwd(*ctx, empty.backward(none));
  for (const Table& t : {empty.dq, empty.dw})
    check_close("gradient", t, [](int64_t, int64_t) { return 0.0; }, [](int64_t, int64_t) { return 0.0; });
  const Case k{3, 4, 8, DType::f32, DType::f32};
  Run run(k), some(k);
  attention_residual_bwd(*ctx, run.backward(k));
  const Table untouched = some.dv;
  AttentionResidualBwd a = some.backward(k);
  a.dvalues = {}, a.dnorm_weight = {};
  attention_residual_bwd(*ctx, a);
  CHECK(some.dq == run.dq);
  CHECK(some.dv == untouched);
}

TEST_CASE("attention_residual: refused calls name argument, expected and given, and write nothing") {
  const Case k{3, 2, 8, DType::f32, DType::f32};
  Run run(k);
  const Run untouched = run;
  Table half(DType::bf16, 6, 8);
  auto ctx = make_cpu_context(1);
  using Fwd = AttentionResidualFwd;
  using Bwd = AttentionResidualBwd;
  auto forward = [&](auto change, const char* text) {
    Fwd a = run.forward(k);
    change(a);
    CHECK_THROWS_WITH_AS(attention_residual_fwd(*ctx, a), text, Error);
  };
  auto backward = [&](auto change, const char* text) {
    Bwd a = run.backward(k);
    change(a);
    CHECK_THROWS_WITH_AS(attention_residual_bwd(*ctx, a), text, Error);
  };
  forward([&](Fwd& a) { a.count = 0; }, "[attention_residual] values must be 1 to 1024, got 0");
  forward([&](Fwd& a) { a.count = 4; }, "[attention_residual] values must have a multiple of 4 rows, got 6");
  forward([&](Fwd& a) { a.query = {}; }, "[attention_residual] query must be [8], got none");
  forward([&](Fwd& a) { a.norm_weight.size = 7; }, "[attention_residual] norm_weight must be [8], got [7]");
  forward([&](Fwd& a) { a.eps = -1.0f; }, "[attention_residual] eps must be >= 0, got -1");
  forward([&](Fwd& a) { a.y.rows = 3; }, "[attention_residual] y must be [2, 8], got [3, 8]");
  backward([&](Bwd& a) { a.dy.cols = 7; }, "[attention_residual_bwd] dy must be [2, 8], got [2, 7]");
  backward([&](Bwd& a) { a.dvalues = half.matrix(); },
           "[attention_residual_bwd] dvalues must be float32, got bfloat16");
  backward([&](Bwd& a) { a.dquery.size = 9; }, "[attention_residual_bwd] dquery must be [8], got [9]");
  backward([&](Bwd& a) { a.dnorm_weight.dtype = DType::f16; },
           "[attention_residual_bwd] dnorm_weight must be float32, got float16");
  CHECK(run.y == untouched.y);
  CHECK(run.dv == untouched.dv);
  CHECK(run.dq == untouched.dq);
}

}  // namespace
}  // namespace tigon::test
