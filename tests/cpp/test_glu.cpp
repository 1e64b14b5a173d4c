// SwiGLU in the core against the same formula in double, the formula against finite differences, refusals, bitwise promises.
#include "tests/cpp/table.h"
#include "tigon/ops/swiglu/swiglu.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/swiglu/swiglu_math.inc"
}  // namespace oracle

namespace {

struct Run {
  Table gate, up, dy, y, dgate, dup;

  Run(DType t, int64_t rows, int64_t cols)
      : gate(t, rows, cols, 3),
        up(t, rows, cols, 1),
        dy(t, rows, cols),
        y(t, rows, cols, 2),
        dgate(t, rows, cols, 1),
        dup(t, rows, cols, 4) {
    gate.normal(1, 3.0), up.normal(2), dy.normal(3);
  }
  SwigluFwd forward() { return {.gate = gate.matrix(), .up = up.matrix(), .y = y.matrix()}; }
  SwigluBwd backward() {
    return {.dy = dy.matrix(),
            .gate = gate.matrix(),
            .up = up.matrix(),
            .dgate = dgate.matrix(),
            .dup = dup.matrix()};
  }
  double exact_dgate(int64_t r, int64_t c) const {
    double dg, du;
    oracle::swiglu_gradients(dy(r, c), gate(r, c), up(r, c), dg, du);
    return dg;
  }
  double exact_dup(int64_t r, int64_t c) const {
    double dg, du;
    oracle::swiglu_gradients(dy(r, c), gate(r, c), up(r, c), dg, du);
    return du;
  }
};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (DType t : kFloats)
    // One element, a tail alone, vectors and a tail, more rows than a task takes.
    for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {5, 77}, {40, 1000}}) {
      INFO(rows << " x " << cols << " " << text(t));
      Run run(t, rows, cols);
      swiglu_fwd(*ctx, run.forward());
      swiglu_bwd(*ctx, run.backward());
      // sigmoid 2.5 ulp and at most five roundings after it, all relative; dgate's 1 + gate * (1 - s) cancels for gate
      // near -1.28, where its terms are of size 1.3.
      double work = 10 * 0x1p-24;
      auto bound = [&](double v, double cancelled) {
        return std::abs(v) * (1.001 * unit(t) + work) + tiny(t) + work * cancelled;
      };
      check_close(
          "y", run.y, [&](int64_t r, int64_t c) { return oracle::swiglu_y(run.gate(r, c), run.up(r, c)); },
          [&](int64_t r, int64_t c) { return bound(oracle::swiglu_y(run.gate(r, c), run.up(r, c)), 0); });
      check_close(
          "dup", run.dup, [&](int64_t r, int64_t c) { return run.exact_dup(r, c); },
          [&](int64_t r, int64_t c) { return bound(run.exact_dup(r, c), 0); });
      check_close(
          "dgate", run.dgate, [&](int64_t r, int64_t c) { return run.exact_dgate(r, c); },
          [&](int64_t r, int64_t c) {
            double s = oracle::sigmoid(run.gate(r, c));
            return bound(run.exact_dgate(r, c), std::abs(run.dy(r, c) * run.up(r, c)) * s *
                                                    (1 + std::abs(run.gate(r, c)) * (1 - s)));
          });
    }
}

TEST_CASE("the formula's gradients are its slopes") {
  for (double gate : {-20.0, -1.2785, -0.3, 0.0, 0.7, 5.0})
    for (double up : {-2.0, 0.5}) {
      double g = gate, u = up, dg, du;
      oracle::swiglu_gradients(1.7, g, u, dg, du);
      auto loss = [&] { return 1.7 * oracle::swiglu_y(g, u); };
      CHECK(dg == doctest::Approx(slope(&g, loss)).epsilon(1e-7));
      CHECK(du == doctest::Approx(slope(&u, loss)).epsilon(1e-7));
    }
}

TEST_CASE("far out: no NaN where the limit exists") {
  Run run(DType::f32, 1, 4);
  double gates[4] = {-200.0, 200.0, INFINITY, NAN};
  run.gate.fill([&](int64_t, int64_t c) { return gates[c]; });
  run.up.fill([](int64_t, int64_t) { return 1.0; });
  auto ctx = make_cpu_context(1);
  swiglu_fwd(*ctx, run.forward());
  CHECK(run.y(0) == 0.0);
  CHECK(run.y(1) == 200.0);
  CHECK(run.y(2) == INFINITY);
  CHECK(std::isnan(run.y(3)));
}

TEST_CASE("the same bits everywhere, in place too") {
  for (DType t : kFloats) {
    INFO(text(t));
    check_same_everywhere([&](Context& ctx) {
      Run run(t, 37, 500);
      swiglu_fwd(ctx, run.forward());
      swiglu_bwd(ctx, run.backward());
      return std::vector<Table>{run.y, run.dgate, run.dup};
    });
    auto ctx = make_cpu_context(2);
    Run apart(t, 3, 77), over(t, 3, 77);
    swiglu_bwd(*ctx, apart.backward());
    SwigluBwd a = over.backward();
    a.dgate = a.gate, a.dup = a.up;
    swiglu_bwd(*ctx, a);
    auto expect = [](const Table& t) { return [&](int64_t r, int64_t c) { return t(r, c); }; };
    auto exactly = [](int64_t, int64_t) { return 0.0; };
    check_close("dgate over gate", over.gate, expect(apart.dgate), exactly);
    check_close("dup over up", over.up, expect(apart.dup), exactly);
  }
}

TEST_CASE("only what is asked for, and refusals write nothing") {
  Run run(DType::f32, 4, 8), half(DType::bf16, 4, 8);
  Run untouched = run;
  auto ctx = make_cpu_context(1);
  SwigluBwd b = run.backward();
  b.dgate = {}, b.dup = {};
  swiglu_bwd(*ctx, b);
  SwigluFwd f = run.forward();
  f.up.cols = 7;
  CHECK_THROWS_WITH_AS(swiglu_fwd(*ctx, f), "[swiglu] up must be [4, 8], got [4, 7]", Error);
  f = run.forward(), f.gate.dtype = DType::f64;
  CHECK_THROWS_WITH_AS(swiglu_fwd(*ctx, f), "[swiglu] gate must be float32, bfloat16 or float16, got float64",
                       Error);
  f = run.forward(), f.y = half.y.matrix();
  CHECK_THROWS_WITH_AS(swiglu_fwd(*ctx, f), "[swiglu] y must be float32, got bfloat16", Error);
  b = run.backward(), b.dup.rows = 5;
  CHECK_THROWS_WITH_AS(swiglu_bwd(*ctx, b), "[swiglu_bwd] dup must be [4, 8], got [5, 8]", Error);
  CHECK(run.y == untouched.y);
  CHECK(run.dgate == untouched.dgate);
  CHECK(run.dup == untouched.dup);
}

}  // namespace
}  // namespace tigon::test
