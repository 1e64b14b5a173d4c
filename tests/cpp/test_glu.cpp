// The gated linear units in the core: in place, refusals.
#include "tigon/ops/glu/glu.h"

#include "table.h"

namespace tigon::test {
namespace {

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
};

TEST_CASE("in place") {
  for (const GluOptions& o : kOptions)
    for (DType t : kFloats) {
      INFO(int(o.kind) << " " << text(t));
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
