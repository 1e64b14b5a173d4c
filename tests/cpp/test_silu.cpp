// x * sigmoid(x) in the core against the same formula in double, the formula against finite differences, refusals,
// bitwise promises.
#include "tests/cpp/pointwise.h"
#include "tigon/ops/silu/silu.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/silu/silu_math.inc"
}  // namespace oracle

namespace {

struct Run {
  Table x, dy, y, dx;

  Run(DType t, int64_t rows, int64_t cols)
      : x(t, rows, cols, 3), dy(t, rows, cols), y(t, rows, cols, 2), dx(t, rows, cols, 1) {
    x.normal(1, 3.0), dy.normal(2);
  }
  SiluFwd forward() { return {.x = x.matrix(), .y = y.matrix()}; }
  SiluBwd backward() { return {.dy = dy.matrix(), .x = x.matrix(), .dx = dx.matrix()}; }
};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for_each_size([&](DType t, int64_t rows, int64_t cols) {
    Run run(t, rows, cols);
    silu_fwd(*ctx, run.forward());
    silu_bwd(*ctx, run.backward());
    auto y = [&](int64_t r, int64_t c) { return oracle::silu_y(run.x(r, c)); };
    auto dx = [&](int64_t r, int64_t c) { return oracle::silu_dx(run.dy(r, c), run.x(r, c)); };
    // Sigmoid 2.5 ulp and at most five roundings after it; the slope cancels where it crosses 0, between terms below 1.3.
    auto bound = [&](double v, double cancelled) {
      return std::abs(v) * (1.001 * unit(t) + 10 * 0x1p-24) + tiny(t) + 10 * 0x1p-24 * cancelled;
    };
    check_close("y", run.y, y, [&](int64_t r, int64_t c) { return bound(y(r, c), 0); });
    check_close("dx", run.dx, dx,
                [&](int64_t r, int64_t c) { return bound(dx(r, c), 1.3 * std::abs(run.dy(r, c))); });
  });
}

TEST_CASE("the formula's gradient is its slope") {
  for (double at : {-20.0, -1.2785, -0.3, 0.0, 0.7, 5.0}) {
    double x = at, dx = oracle::silu_dx(1.7, x);
    auto loss = [&] { return 1.7 * oracle::silu_y(x); };
    CHECK(dx == doctest::Approx(slope(&x, loss)).epsilon(1e-7).scale(1e3));
  }
}

TEST_CASE("far out, zeros, infinities, NaN, in vectors and tails") {
  double xs[7] = {-0.0, 200.0, -200.0, 1e30, INFINITY, -INFINITY, NAN};
  double ys[7] = {0.0, 200.0, 0.0, float(1e30), INFINITY, NAN, NAN};
  double dxs[7] = {0.5, 1.0, 0.0, 1.0, NAN, NAN, NAN};
  for_each_isa([&](NamedIsa isa) {
    INFO(isa.name);
    auto ctx = make_cpu_context(1);
    Run run(DType::f32, 1, 23);
    run.x.fill([&](int64_t, int64_t c) { return xs[c % 7]; });
    run.dy.fill([](int64_t, int64_t) { return 1.0; });
    silu_fwd(*ctx, run.forward());
    silu_bwd(*ctx, run.backward());
    check_exact("y", run.y, [&](int64_t, int64_t c) { return ys[c % 7]; });
    check_exact("dx", run.dx, [&](int64_t, int64_t c) { return dxs[c % 7]; });
  });
}

TEST_CASE("the same bits everywhere, in place too") {
  for (DType t : kFloats) {
    INFO(text(t));
    check_same_everywhere([&](Context& ctx) {
      Run run(t, 37, 500);
      silu_fwd(ctx, run.forward());
      silu_bwd(ctx, run.backward());
      return std::vector<Table>{run.y, run.dx};
    });
    auto ctx = make_cpu_context(2);
    Run apart(t, 3, 77), over(t, 3, 77);
    silu_bwd(*ctx, apart.backward());
    silu_fwd(*ctx, apart.forward());
    SiluBwd b = over.backward();
    b.dx = b.dy;
    silu_bwd(*ctx, b);
    SiluFwd f = over.forward();
    f.y = f.x;
    silu_fwd(*ctx, f);
    check_equal("dx over dy", over.dy, apart.dx);
    check_equal("y over x", over.x, apart.y);
  }
}

TEST_CASE("refusals write nothing") {
  Run run(DType::f32, 4, 8), half(DType::bf16, 4, 8);
  Run untouched = run;
  auto ctx = make_cpu_context(1);
  SiluFwd f = run.forward();
  f.x.dtype = DType::f64;
  CHECK_THROWS_WITH_AS(silu_fwd(*ctx, f), "[silu] x must be float32, bfloat16 or float16, got float64",
                       Error);
  f = run.forward(), f.y = half.y.matrix();
  CHECK_THROWS_WITH_AS(silu_fwd(*ctx, f), "[silu] y must be float32, got bfloat16", Error);
  SiluBwd b = run.backward();
  b.dy.cols = 7;
  CHECK_THROWS_WITH_AS(silu_bwd(*ctx, b), "[silu_bwd] dy must be [4, 8], got [4, 7]", Error);
  b = run.backward(), b.dx.rows = 5;
  CHECK_THROWS_WITH_AS(silu_bwd(*ctx, b), "[silu_bwd] dx must be [4, 8], got [5, 8]", Error);
  CHECK(run.y == untouched.y);
  CHECK(run.dx == untouched.dx);
}

}  // namespace
}  // namespace tigon::test
