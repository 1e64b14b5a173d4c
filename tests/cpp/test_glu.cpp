// The gated linear units in the core against the same formulas in double, the formulas against finite differences, refusals,
// bitwise promises.
#include "tigon/ops/glu/glu.h"

#include "pointwise.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/glu/glu_math.inc"
}  // namespace oracle

namespace {

struct Gradients {
  double dgate, dup;
};
template <GluKind K>
Gradients gradients(double dy, double gate, double up, const GluOptions& o) {
  Gradients g;
  oracle::glu_gradients<K>(dy, gate, up, o, g.dgate, g.dup);
  return g;
}

// The formula of a kind by number.
double exact_y(double gate, double up, const GluOptions& o) {
  switch (o.kind) {
    case GluKind::swiglu: return oracle::glu_y<GluKind::swiglu>(gate, up, o);
    case GluKind::geglu: return oracle::glu_y<GluKind::geglu>(gate, up, o);
    case GluKind::geglu_tanh: return oracle::glu_y<GluKind::geglu_tanh>(gate, up, o);
    case GluKind::reglu: return oracle::glu_y<GluKind::reglu>(gate, up, o);
    case GluKind::relu_squared: return oracle::glu_y<GluKind::relu_squared>(gate, up, o);
    case GluKind::swiglu_clamped: return oracle::glu_y<GluKind::swiglu_clamped>(gate, up, o);
    default: return oracle::glu_y<GluKind::swiglu_oai>(gate, up, o);
  }
}
Gradients exact_gradients(double dy, double gate, double up, const GluOptions& o) {
  switch (o.kind) {
    case GluKind::swiglu: return gradients<GluKind::swiglu>(dy, gate, up, o);
    case GluKind::geglu: return gradients<GluKind::geglu>(dy, gate, up, o);
    case GluKind::geglu_tanh: return gradients<GluKind::geglu_tanh>(dy, gate, up, o);
    case GluKind::reglu: return gradients<GluKind::reglu>(dy, gate, up, o);
    case GluKind::relu_squared: return gradients<GluKind::relu_squared>(dy, gate, up, o);
    case GluKind::swiglu_clamped: return gradients<GluKind::swiglu_clamped>(dy, gate, up, o);
    default: return gradients<GluKind::swiglu_oai>(dy, gate, up, o);
  }
}

// One kind with options that are not the default ones.
const GluOptions kOptions[] = {{.kind = GluKind::swiglu},
                               {.kind = GluKind::swiglu, .gate_multiplier = 0.75f, .down_multiplier = -1.5f},
                               {.kind = GluKind::geglu},
                               {.kind = GluKind::geglu_tanh},
                               {.kind = GluKind::reglu},
                               {.kind = GluKind::relu_squared},
                               {.kind = GluKind::swiglu_clamped, .limit = 1.25f},
                               {.kind = GluKind::swiglu_oai},
                               {.kind = GluKind::swiglu_oai, .alpha = 0.5f, .limit = 1.25f}};
bool interleaved(const GluOptions& o) { return o.kind == GluKind::swiglu_oai; }

struct Run {
  GluOptions options;
  Table gate, up, dy, y, dgate, dup;  // interleaved: gate and dgate hold both
  int64_t wide;

  Run(const GluOptions& o, DType t, int64_t rows, int64_t cols)
      : options(o),
        gate(t, rows, interleaved(o) ? 2 * cols : cols, 3),
        up(t, rows, cols, 1),
        dy(t, rows, cols),
        y(t, rows, cols, 2),
        dgate(t, rows, gate.cols(), 1),
        dup(t, rows, cols, 4),
        wide(interleaved(o) ? 2 : 1) {
    gate.normal(1, 3.0), up.normal(2), dy.normal(3);
  }
  GluFwd forward() {
    return {
        .gate = gate.matrix(), .up = wide == 2 ? Matrix{} : up.matrix(), .y = y.matrix(), .options = options};
  }
  GluBwd backward() {
    return {.dy = dy.matrix(),
            .gate = gate.matrix(),
            .up = wide == 2 ? Matrix{} : up.matrix(),
            .dgate = dgate.matrix(),
            .dup = wide == 2 ? Matrix{} : dup.matrix(),
            .options = options};
  }
  // What belongs to point (r, c) of y.
  double gate_at(int64_t r, int64_t c) const { return gate(r, wide * c); }
  double up_at(int64_t r, int64_t c) const { return wide == 2 ? gate(r, 2 * c + 1) : up(r, c); }
  double exact(int64_t r, int64_t c) const { return exact_y(gate_at(r, c), up_at(r, c), options); }
  Gradients exact_slopes(int64_t r, int64_t c) const {
    return exact_gradients(dy(r, c), gate_at(r, c), up_at(r, c), options);
  }
};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (const GluOptions& o : kOptions)
    for_each_size([&](DType t, int64_t rows, int64_t cols) {
      INFO(name_of(o.kind) << " " << int(o.kind));
      Run run(o, t, rows, cols);
      glu_fwd(*ctx, run.forward());
      glu_bwd(*ctx, run.backward());
      // Sigmoid and exponential 2.5 ulp and at most five roundings after them; slopes cancel where they cross 0, between
      // terms below 1.3. An exponential turns the absolute error of its argument, up to five roundings of constants and
      // products, into a relative one.
      auto work = [&](int64_t r, int64_t c) {
        double x = run.gate_at(r, c), argument = 0.0;
        if (o.kind == GluKind::geglu) argument = x * x / 2;
        if (o.kind == GluKind::geglu_tanh) argument = 1.6 * std::abs(x) * (1 + 0.045 * x * x);
        if (o.kind == GluKind::swiglu_oai) argument = std::abs(o.alpha * x);
        return (10 + 5 * argument) * 0x1p-24;
      };
      auto bound = [&](int64_t r, int64_t c, double v, double cancelled) {
        return std::abs(v) * (1.001 * unit(t) + work(r, c)) + tiny(t) + 10 * 0x1p-24 * cancelled +
               0x1p-143;  // subnormal factors
      };
      auto dgate = [&](int64_t r, int64_t c) { return run.exact_slopes(r, c).dgate; };
      auto dup = [&](int64_t r, int64_t c) { return run.exact_slopes(r, c).dup; };
      auto gate_bound = [&](int64_t r, int64_t c) {
        double factor = o.kind == GluKind::swiglu_oai ? 1 + std::abs(run.up_at(r, c)) : run.up_at(r, c);
        return bound(r, c, dgate(r, c), 1.3 * std::abs(run.dy(r, c) * factor));
      };
      auto up_bound = [&](int64_t r, int64_t c) { return bound(r, c, dup(r, c), 0); };
      check_close(
          "y", run.y, [&](int64_t r, int64_t c) { return run.exact(r, c); },
          [&](int64_t r, int64_t c) {
            // up + 1 cancels near up = -1
            double cancelled = o.kind == GluKind::swiglu_oai ? std::abs(run.gate_at(r, c)) : 0.0;
            return bound(r, c, run.exact(r, c), cancelled);
          });
      if (run.wide == 1) {
        check_close("dgate", run.dgate, dgate, gate_bound);
        check_close("dup", run.dup, dup, up_bound);
      } else {
        check_close(
            "dgate_up", run.dgate,
            [&](int64_t r, int64_t c) { return c % 2 == 0 ? dgate(r, c / 2) : dup(r, c / 2); },
            [&](int64_t r, int64_t c) { return c % 2 == 0 ? gate_bound(r, c / 2) : up_bound(r, c / 2); });
      }
    });
}

TEST_CASE("the formulas' gradients are their slopes") {
  for (const GluOptions& o : kOptions)
    for (double gate : {-20.0, -1.2785, -0.3, 0.7, 5.0})
      for (double up : {-2.0, 0.5, 9.0}) {
        INFO(int(o.kind) << " at " << gate << ", " << up);
        double g = gate, u = up;
        Gradients d = exact_gradients(1.7, g, u, o);
        auto loss = [&] { return 1.7 * exact_y(g, u, o); };
        CHECK(d.dgate == doctest::Approx(slope(&g, loss)).epsilon(1e-6));
        CHECK(d.dup == doctest::Approx(slope(&u, loss)).epsilon(1e-6));
      }
}

TEST_CASE("far out: no NaN where the limit exists") {
  for (const GluOptions& o : kOptions) {
    if (is_clamped(o.kind) || o.gate_multiplier != 1.0f || o.kind == GluKind::relu_squared) continue;
    INFO(int(o.kind));
    Run run(o, DType::f32, 1, 6);
    double gates[6] = {-200.0, 200.0, INFINITY, NAN, -1e30, 1e30};
    run.gate.fill([&](int64_t, int64_t c) { return gates[c]; });
    run.up.fill([](int64_t, int64_t) { return 1.0; });
    run.dy.fill([](int64_t, int64_t) { return 1.0; });
    auto ctx = make_cpu_context(1);
    glu_fwd(*ctx, run.forward());
    glu_bwd(*ctx, run.backward());
    double ys[6] = {0.0, 200.0, INFINITY, NAN, 0.0, float(1e30)};
    check_exact("y", run.y, [&](int64_t, int64_t c) { return ys[c]; });
    for (int c : {0, 4}) CHECK(run.dgate(0, c) == 0.0);
    for (int c : {1, 5}) CHECK(run.dgate(0, c) == 1.0);
  }
}

TEST_CASE("the same bits everywhere, in place too") {
  for (const GluOptions& o : kOptions)
    for (DType t : kFloats) {
      INFO(int(o.kind) << " " << text(t));
      check_same_everywhere([&](Context& ctx) {
        Run run(o, t, 37, 500);
        glu_fwd(ctx, run.forward());
        glu_bwd(ctx, run.backward());
        return std::vector<Table>{run.y, run.dgate, run.dup};
      });
      auto ctx = make_cpu_context(2);
      Run apart(o, t, 3, 77), over(o, t, 3, 77);
      glu_bwd(*ctx, apart.backward());
      GluBwd a = over.backward();
      a.dgate = a.gate, a.dup = a.up;
      glu_bwd(*ctx, a);
      check_equal("dgate over gate", over.gate, apart.dgate);
      if (over.wide == 1) check_equal("dup over up", over.up, apart.dup);
    }
}

TEST_CASE("only what is asked for, and refusals write nothing") {
  Run run({}, DType::f32, 4, 8), half({}, DType::bf16, 4, 8);
  Run wide({.kind = GluKind::swiglu_oai}, DType::f32, 4, 8);
  Run untouched = run, untouched_wide = wide;
  auto ctx = make_cpu_context(1);
  GluBwd b = run.backward();
  b.dgate = {}, b.dup = {};
  glu_bwd(*ctx, b);
  GluFwd f = run.forward();
  f.up.cols = 7;
  CHECK_THROWS_WITH_AS(glu_fwd(*ctx, f), "[swiglu] up must be [4, 8], got [4, 7]", Error);
  f = run.forward(), f.gate.dtype = DType::f64;
  CHECK_THROWS_WITH_AS(glu_fwd(*ctx, f), "[swiglu] gate must be float32, bfloat16 or float16, got float64",
                       Error);
  f = run.forward(), f.y = half.y.matrix();
  CHECK_THROWS_WITH_AS(glu_fwd(*ctx, f), "[swiglu] y must be float32, got bfloat16", Error);
  f = run.forward(), f.options.kind = GluKind(9);
  CHECK_THROWS_WITH_AS(glu_fwd(*ctx, f), "[glu] kind must be one of 0 to 6, got 9", Error);
  b = run.backward(), b.dup.rows = 5;
  CHECK_THROWS_WITH_AS(glu_bwd(*ctx, b), "[swiglu_bwd] dup must be [4, 8], got [5, 8]", Error);
  f = wide.forward(), f.y.cols = 7;
  CHECK_THROWS_WITH_AS(glu_fwd(*ctx, f), "[swiglu_oai] y must be [4, 8], got [4, 7]", Error);
  f = wide.forward(), f.gate.cols = 15;
  CHECK_THROWS_WITH_AS(glu_fwd(*ctx, f), "[swiglu_oai] gate_up must have an even number of columns, got 15",
                       Error);
  f = wide.forward(), f.options.limit = 0.0f;
  CHECK_THROWS_WITH_AS(glu_fwd(*ctx, f), "[swiglu_oai] limit must be > 0, got 0", Error);
  b = wide.backward(), b.dgate.cols = 8;
  CHECK_THROWS_WITH_AS(glu_bwd(*ctx, b), "[swiglu_oai_bwd] dgate_up must be [4, 16], got [4, 8]", Error);
  for (auto [now, before] : {std::pair{&run, &untouched}, {&wide, &untouched_wide}}) {
    CHECK(now->y == before->y);
    CHECK(now->dgate == before->dgate);
    CHECK(now->dup == before->dup);
  }
}

}  // namespace
}  // namespace tigon::test
