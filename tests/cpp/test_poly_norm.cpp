// PolyNorm in the core: gradients are slopes, results that are absent, refusals, bitwise promises.
#include "tigon/ops/poly_norm/poly_norm.h"

#include "table.h"

namespace tigon::test {
namespace {

struct Run {
  Table x, w, b, dy, y, rstd, dx, dw, db;
  float eps = 1e-3f;

  Run(DType t, DType parameters, int64_t rows, int64_t cols)
      : x(t, rows, cols, 3),
        w(parameters, 1, 3),
        b(parameters, 1, 1),
        dy(t, rows, cols, 1),
        y(t, rows, cols, 5),
        rstd(DType::f32, rows, 3),
        dx(t, rows, cols, 2),
        dw(parameters, 1, 3),
        db(parameters, 1, 1) {
    x.normal(1), w.normal(2, 0.5, 1.0), b.normal(3), dy.normal(4);
  }
  PolyNormFwd forward() {
    return {.x = x.matrix(),
            .weight = w.vector(),
            .bias = b.vector(),
            .y = y.matrix(),
            .rstd = rstd.vector(),
            .eps = eps};
  }
  PolyNormBwd backward() {
    return {.dy = dy.matrix(),
            .x = x.matrix(),
            .weight = w.vector(),
            .rstd = rstd.vector(),
            .dx = dx.matrix(),
            .dweight = dw.vector(),
            .dbias = db.vector()};
  }
  void both(Context& ctx) {
    poly_norm_fwd(ctx, forward());
    poly_norm_bwd(ctx, backward());
  }
};

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(1);
  Run run(DType::f32, DType::f32, 3, 5);
  run.both(*ctx);
  auto loss = [&] {
    poly_norm_fwd(*ctx, run.forward());
    return dot(run.y, run.dy);
  };
  check_slopes("dx", run.x, run.dx, loss, 2e-3);
  check_slopes("dweight", run.w, run.dw, loss);
  check_slopes("dbias", run.b, run.db, loss);
}

TEST_CASE("the same bits for every instruction set and any number of threads") {
  for (DType t : kFloats)
    for (int64_t cols : {1, 31, 257, 5000}) {
      INFO(text(t) << ", " << cols << " columns");
      check_same_everywhere([&](Context& ctx) {
        Run run(t, t, 100, cols);
        run.both(ctx);
        return std::vector<Table>{run.y, run.rstd, run.dx, run.dw, run.db};
      });
    }
}

TEST_CASE("in place, only what is asked for, no rows") {
  auto ctx = make_cpu_context(1);
  Run run(DType::bf16, DType::f32, 4, 40);
  run.both(*ctx);
  Run other = run;
  PolyNormBwd a = other.backward();
  a.dx = a.dy, a.dweight = {}, a.dbias = {};
  poly_norm_bwd(*ctx, a);
  for (int64_t i = 0; i < 160; ++i) CHECK(other.dy(i) == run.dx(i));
  CHECK((other.dw == run.dw && other.dx == run.dx));
  PolyNormBwd none = run.backward();
  none.dx = {};
  other = run;
  other.dw.normal(7), other.db.normal(8);
  none.dweight = other.dw.vector(), none.dbias = other.db.vector();
  poly_norm_bwd(*ctx, none);
  CHECK((other.dw == run.dw && other.db == run.db));
  PolyNormFwd infer = other.forward();
  infer.rstd = {};
  other.y.normal(9);
  poly_norm_fwd(*ctx, infer);
  CHECK(other.y == run.y);
  Run empty(DType::f32, DType::f32, 0, 8);
  empty.both(*ctx);
  auto zero = [](int64_t, int64_t) { return 0.0; };
  check_close("dweight", empty.dw, zero, zero), check_close("dbias", empty.db, zero, zero);
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run(DType::f32, DType::f32, 4, 8);
  Run untouched = run;
  Table two(DType::f32, 1, 2), half(DType::bf16, 1, 3), rows(DType::bf16, 4, 8);
  auto ctx = make_cpu_context(1);
  auto forward = [&](auto change, const char* text) {
    PolyNormFwd a = run.forward();
    change(a);
    CHECK_THROWS_WITH_AS(poly_norm_fwd(*ctx, a), text, Error);
  };
  auto backward = [&](auto change, const char* text) {
    PolyNormBwd a = run.backward();
    change(a);
    CHECK_THROWS_WITH_AS(poly_norm_bwd(*ctx, a), text, Error);
  };
  forward([&](PolyNormFwd& a) { a.weight = two.vector(); }, "[poly_norm] weight must be [3], got [2]");
  forward([&](PolyNormFwd& a) { a.bias = {}; }, "[poly_norm] bias must be [1], got [0]");
  forward([&](PolyNormFwd& a) { a.weight = half.vector(); },
          "[poly_norm] weight must be float32 or float32, got bfloat16");
  forward([&](PolyNormFwd& a) { a.eps = -1.0f; }, "[poly_norm] eps must be >= 0, got -1");
  forward([&](PolyNormFwd& a) { a.x.cols = 0; }, "[poly_norm] x must have at least one column, got 0");
  forward([&](PolyNormFwd& a) { a.y = rows.matrix(); }, "[poly_norm] y must be float32, got bfloat16");
  forward([&](PolyNormFwd& a) { a.rstd.size = 4; }, "[poly_norm] rstd must be [12], got [4]");
  backward([&](PolyNormBwd& a) { a.dy.cols = 7; }, "[poly_norm_bwd] dy must be [4, 8], got [4, 7]");
  backward([&](PolyNormBwd& a) { a.dx = rows.matrix(); }, "[poly_norm_bwd] dx must be float32, got bfloat16");
  backward([&](PolyNormBwd& a) { a.dweight = two.vector(); }, "[poly_norm_bwd] dweight must be [3], got [2]");
  CHECK((run.y == untouched.y && run.dx == untouched.dx && run.dw == untouched.dw));
}

}  // namespace
}  // namespace tigon::test
