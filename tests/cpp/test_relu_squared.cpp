// relu(x)^2 in the core against the same formula in double, the formula against finite differences, refusals,
// bitwise promises.
#include "tests/cpp/pointwise.h"
#include "tigon/ops/relu_squared/relu_squared.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/relu_squared/relu_squared_math.inc"
}  // namespace oracle

namespace {

struct Run {
  Table x, dy, y, dx;

  Run(DType t, int64_t rows, int64_t cols)
      : x(t, rows, cols, 3), dy(t, rows, cols), y(t, rows, cols, 2), dx(t, rows, cols, 1) {
    x.normal(1, 3.0), dy.normal(2);
  }
  ReluSquaredFwd forward() { return {.x = x.matrix(), .y = y.matrix()}; }
  ReluSquaredBwd backward() { return {.dy = dy.matrix(), .x = x.matrix(), .dx = dx.matrix()}; }
};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for_each_size([&](DType t, int64_t rows, int64_t cols) {
    Run run(t, rows, cols);
    relu_squared_fwd(*ctx, run.forward());
    relu_squared_bwd(*ctx, run.backward());
    auto y = [&](int64_t r, int64_t c) { return oracle::relu_squared_y(run.x(r, c)); };
    auto dx = [&](int64_t r, int64_t c) { return oracle::relu_squared_dx(run.dy(r, c), run.x(r, c)); };
    auto rounded_once = [&](double v) { return std::abs(v) * unit(t) + tiny(t); };
    check_close("y", run.y, y, [&](int64_t r, int64_t c) { return rounded_once(y(r, c)); });
    check_close("dx", run.dx, dx, [&](int64_t r, int64_t c) { return rounded_once(dx(r, c)); });
  });
}

TEST_CASE("the formula's gradient is its slope") {
  for (double at : {-20.0, -0.3, 0.0, 0.7, 5.0}) {
    double x = at, dx = oracle::relu_squared_dx(1.7, x);
    auto loss = [&] { return 1.7 * oracle::relu_squared_y(x); };
    CHECK(dx == doctest::Approx(slope(&x, loss)).epsilon(1e-7).scale(1e3));
  }
}

TEST_CASE("zeros, infinities, NaN, in vectors and tails") {
  double xs[5] = {-0.0, INFINITY, -INFINITY, NAN, -1.0};
  double ys[5] = {0.0, INFINITY, 0.0, NAN, 0.0};
  for_each_isa([&](NamedIsa isa) {
    INFO(isa.name);
    auto ctx = make_cpu_context(1);
    Run run(DType::f32, 1, 23);
    run.x.fill([&](int64_t, int64_t c) { return xs[c % 5]; });
    run.dy.fill([](int64_t, int64_t) { return 1.0; });
    relu_squared_fwd(*ctx, run.forward());
    relu_squared_bwd(*ctx, run.backward());
    auto expected = [&](int64_t, int64_t c) { return ys[c % 5]; };
    check_exact("y", run.y, expected);
    check_exact("dx", run.dx, expected);
  });
}

TEST_CASE("the same bits everywhere, in place too") {
  for (DType t : kFloats) {
    INFO(text(t));
    check_same_everywhere([&](Context& ctx) {
      Run run(t, 37, 500);
      relu_squared_fwd(ctx, run.forward());
      relu_squared_bwd(ctx, run.backward());
      return std::vector<Table>{run.y, run.dx};
    });
    auto ctx = make_cpu_context(2);
    Run apart(t, 3, 77), over(t, 3, 77);
    relu_squared_bwd(*ctx, apart.backward());
    relu_squared_fwd(*ctx, apart.forward());
    ReluSquaredBwd b = over.backward();
    b.dx = b.dy;
    relu_squared_bwd(*ctx, b);
    ReluSquaredFwd f = over.forward();
    f.y = f.x;
    relu_squared_fwd(*ctx, f);
    check_equal("dx over dy", over.dy, apart.dx);
    check_equal("y over x", over.x, apart.y);
  }
}

TEST_CASE("refusals write nothing") {
  Run run(DType::f32, 4, 8), half(DType::bf16, 4, 8);
  Run untouched = run;
  auto ctx = make_cpu_context(1);
  ReluSquaredFwd f = run.forward();
  f.x.dtype = DType::f64;
  CHECK_THROWS_WITH_AS(relu_squared_fwd(*ctx, f),
                       "[relu_squared] x must be float32, bfloat16 or float16, got float64", Error);
  f = run.forward(), f.y = half.y.matrix();
  CHECK_THROWS_WITH_AS(relu_squared_fwd(*ctx, f), "[relu_squared] y must be float32, got bfloat16", Error);
  ReluSquaredBwd b = run.backward();
  b.dy.cols = 7;
  CHECK_THROWS_WITH_AS(relu_squared_bwd(*ctx, b), "[relu_squared_bwd] dy must be [4, 8], got [4, 7]", Error);
  b = run.backward(), b.dx.rows = 5;
  CHECK_THROWS_WITH_AS(relu_squared_bwd(*ctx, b), "[relu_squared_bwd] dx must be [4, 8], got [5, 8]", Error);
  CHECK(run.y == untouched.y);
  CHECK(run.dx == untouched.dx);
}

}  // namespace
}  // namespace tigon::test
