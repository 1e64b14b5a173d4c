// What every op of one tensor (csrc/tigon/base/activation.h) is tested for.
#pragma once

#include "pointwise.h"
#include "tigon/base/activation.h"

namespace tigon::test {

struct Activation {
  std::string op;
  void (*forward)(Context&, const ActivationFwd&);
  void (*backward)(Context&, const ActivationBwd&);
  double (*y)(double x);  // the formula in double
  double (*dx)(double dy, double x);
  std::vector<double> slopes;  // where the formula is differentiated
  struct Point {
    double x, y, dx;
  };
  std::vector<Point> points;  // exact values for dy = 1
};

struct ActivationRun {
  Table x, dy, y, dx;

  ActivationRun(DType t, int64_t rows, int64_t cols)
      : x(t, rows, cols, 3), dy(t, rows, cols), y(t, rows, cols, 2), dx(t, rows, cols, 1) {
    x.normal(1, 3.0), dy.normal(2);
  }
  ActivationFwd forward() { return {.x = x.matrix(), .y = y.matrix()}; }
  ActivationBwd backward() { return {.dy = dy.matrix(), .x = x.matrix(), .dx = dx.matrix()}; }
  void both(Context& ctx, const Activation& a) { a.forward(ctx, forward()), a.backward(ctx, backward()); }
};

inline void check_slope(const Activation& a) {
  for (double at : a.slopes) {
    double x = at, dx = a.dx(1.7, x);
    auto loss = [&] { return 1.7 * a.y(x); };
    CHECK(dx == doctest::Approx(slope(&x, loss)).epsilon(1e-7).scale(1e3));
  }
}

// In vectors and tails, under every instruction set.
inline void check_points(const Activation& a) {
  auto at = [&](int64_t c) { return a.points[size_t(c) % a.points.size()]; };
  for_each_isa([&](NamedIsa isa) {
    INFO(isa.name);
    auto ctx = make_cpu_context(1);
    ActivationRun run(DType::f32, 1, 23);
    run.x.fill([&](int64_t, int64_t c) { return at(c).x; });
    run.dy.fill([](int64_t, int64_t) { return 1.0; });
    run.both(*ctx, a);
    check_exact("y", run.y, [&](int64_t, int64_t c) { return at(c).y; });
    check_exact("dx", run.dx, [&](int64_t, int64_t c) { return at(c).dx; });
  });
}

// The same bits for every instruction set and number of threads, and in place.
inline void check_bits(const Activation& a) {
  for (DType t : kFloats) {
    INFO(text(t));
    check_same_everywhere([&](Context& ctx) {
      ActivationRun run(t, 37, 500);
      run.both(ctx, a);
      return std::vector<Table>{run.y, run.dx};
    });
    auto ctx = make_cpu_context(2);
    ActivationRun apart(t, 3, 77), over(t, 3, 77);
    apart.both(*ctx, a);
    ActivationBwd b = over.backward();
    b.dx = b.dy;
    a.backward(*ctx, b);
    ActivationFwd f = over.forward();
    f.y = f.x;
    a.forward(*ctx, f);
    check_equal("dx over dy", over.dy, apart.dx);
    check_equal("y over x", over.x, apart.y);
  }
}

inline void check_refusals(const Activation& a) {
  ActivationRun run(DType::f32, 4, 8), half(DType::bf16, 4, 8);
  ActivationRun untouched = run;
  auto ctx = make_cpu_context(1);
  auto refuses = [&](const auto& call, const std::string& text) {
    CHECK_THROWS_WITH_AS(call(), text.c_str(), Error);
  };
  ActivationFwd f = run.forward();
  auto forward = [&] { a.forward(*ctx, f); };
  f.x.dtype = DType::f64;
  refuses(forward, "[" + a.op + "] x must be float32, bfloat16 or float16, got float64");
  f = run.forward(), f.y = half.y.matrix();
  refuses(forward, "[" + a.op + "] y must be float32, got bfloat16");
  ActivationBwd b = run.backward();
  auto backward = [&] { a.backward(*ctx, b); };
  b.dy.cols = 7;
  refuses(backward, "[" + a.op + "_bwd] dy must be [4, 8], got [4, 7]");
  b = run.backward(), b.dx.rows = 5;
  refuses(backward, "[" + a.op + "_bwd] dx must be [4, 8], got [5, 8]");
  CHECK(run.y == untouched.y);
  CHECK(run.dx == untouched.dx);
}

}  // namespace tigon::test
