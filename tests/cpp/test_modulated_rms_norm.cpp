// Modulated RMSNorm in the core: gradients are slopes, results that are absent, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"

namespace tigon::test {
namespace {

struct Case {
  int64_t rows, groups, cols;
  DType x, param;
  bool weighted;
  Rounding rounding;
  float offset;
};

std::vector<double> values(const Table& t) {
  std::vector<double> v;
  for (int64_t i = 0; i < t.rows() * t.cols(); ++i) v.push_back(t(i));
  return v;
}

struct Run {
  Table x, w, scale, shift, dy, y, rstd, dx, dw, dscale, dshift;

  explicit Run(const Case& k)
      : x(k.x, k.rows, k.cols, 3),
        w(k.param, 1, k.cols),
        scale(k.param, k.groups, k.cols, 7),
        shift(k.param, k.groups, k.cols, 1),
        dy(k.x, k.rows, k.cols, 1),
        y(k.x, k.rows, k.cols, 5),
        rstd(DType::f32, 1, k.rows),
        dx(k.x, k.rows, k.cols, 2),
        dw(k.param, 1, k.cols),
        dscale(k.param, k.groups, k.cols, 3),
        dshift(k.param, k.groups, k.cols) {
    x.normal(1), w.normal(2, 0.5, 1.0), scale.normal(3, 0.3), shift.normal(4, 0.3), dy.normal(5);
  }
  ModulatedRmsNormFwd forward(const Case& k) {
    return {.x = x.matrix(),
            .weight = k.weighted ? w.vector() : Vector{},
            .scale = scale.matrix(),
            .shift = shift.matrix(),
            .y = y.matrix(),
            .rstd = rstd.vector(),
            .eps = 1e-3f,
            .offset = k.offset,
            .rounding = k.rounding};
  }
  ModulatedRmsNormBwd backward(const Case& k) {
    return {.dy = dy.matrix(),
            .x = x.matrix(),
            .weight = k.weighted ? w.vector() : Vector{},
            .scale = scale.matrix(),
            .rstd = rstd.vector(),
            .dx = dx.matrix(),
            .dweight = k.weighted ? dw.vector() : Vector{},
            .dscale = dscale.matrix(),
            .dshift = dshift.matrix(),
            .offset = k.offset,
            .rounding = k.rounding};
  }
};

TEST_CASE("gradients are slopes: modulated_rms_norm") {
  auto ctx = make_cpu_context(1);
  for (int64_t groups : {2, 6}) {  // rows of their own have a formula of their own
    const Case k{6, groups, 5, DType::f32, DType::f32, true, Rounding::none, 1.0f};
    Run run(k);
    auto loss = [&] {
      modulated_rms_norm_fwd(*ctx, run.forward(k));
      return dot(run.y, run.dy);
    };
    loss();
    modulated_rms_norm_bwd(*ctx, run.backward(k));
    check_slopes("dx", run.x, run.dx, loss);
    check_slopes("dweight", run.w, run.dw, loss);
    check_slopes("dscale", run.scale, run.dscale, loss);
    check_slopes("dshift", run.shift, run.dshift, loss);
  }
}

TEST_CASE("modulated_rms_norm: the same bits for every instruction set and any number of threads") {
  for (DType x : kFloats)
    for (int64_t groups : {1, 4, 100}) {
      const Case k{100, groups, 37, x, x, true, Rounding::llama, 0.0f};
      INFO(text(x) << ", " << groups << " groups");
      check_same_everywhere([&](Context& ctx) {
        Run run(k);
        modulated_rms_norm_fwd(ctx, run.forward(k));
        modulated_rms_norm_bwd(ctx, run.backward(k));
        return std::vector<Table>{run.y, run.rstd, run.dx, run.dw, run.dscale, run.dshift};
      });
    }
}

TEST_CASE("modulated_rms_norm: no rows, and dx in dy's place") {
  const Case none{0, 3, 8, DType::bf16, DType::bf16, true, Rounding::llama, 0.0f};
  auto ctx = make_cpu_context(1);
  Run empty(none);
  modulated_rms_norm_fwd(*ctx, empty.forward(none));
  modulated_rms_norm_bwd(*ctx, empty.backward(none));
  for (const Table& t : {empty.dw, empty.dscale, empty.dshift})
    check_close("gradient", t, [](int64_t, int64_t) { return 0.0; }, [](int64_t, int64_t) { return 0.0; });
  const Case k{40, 2, 19, DType::f32, DType::f32, true, Rounding::llama, 0.0f};
  Run apart(k), in_place(k);
  for (Run* run : {&apart, &in_place}) modulated_rms_norm_fwd(*ctx, run->forward(k));
  modulated_rms_norm_bwd(*ctx, apart.backward(k));
  ModulatedRmsNormBwd a = in_place.backward(k);
  a.dx = a.dy;
  modulated_rms_norm_bwd(*ctx, a);
  CHECK(values(in_place.dy) == values(apart.dx));
  CHECK(in_place.dscale == apart.dscale);
}

TEST_CASE("modulated_rms_norm: refused calls name argument, expected and given, and write nothing") {
  const Case k{6, 3, 8, DType::f32, DType::f32, true, Rounding::llama, 0.0f};
  Run run(k);
  const Run untouched = run;
  Table half(DType::bf16, 6, 8);
  auto ctx = make_cpu_context(1);
  auto forward = [&](auto change, const char* text) {
    ModulatedRmsNormFwd a = run.forward(k);
    change(a);
    CHECK_THROWS_WITH_AS(modulated_rms_norm_fwd(*ctx, a), text, Error);
  };
  auto backward = [&](auto change, const char* text) {
    ModulatedRmsNormBwd a = run.backward(k);
    change(a);
    CHECK_THROWS_WITH_AS(modulated_rms_norm_bwd(*ctx, a), text, Error);
  };
  using Fwd = ModulatedRmsNormFwd;
  using Bwd = ModulatedRmsNormBwd;
  forward([&](Fwd& a) { a.scale.rows = 4; },
          "[modulated_rms_norm] scale must have a number of rows that divides 6, got 4");
  forward([&](Fwd& a) { a.scale.rows = 0; },
          "[modulated_rms_norm] scale must have a number of rows that divides 6, got 0");
  forward([&](Fwd& a) { a.scale.cols = 7; }, "[modulated_rms_norm] scale must be [3, 8], got [3, 7]");
  forward([&](Fwd& a) { a.scale.dtype = DType::f16; },
          "[modulated_rms_norm] scale must be float32 or float32, got float16");
  forward([&](Fwd& a) { a.shift.rows = 2; }, "[modulated_rms_norm] shift must be [3, 8], got [2, 8]");
  forward([&](Fwd& a) { a.weight.size = 7; }, "[modulated_rms_norm] weight must be [8], got [7]");
  forward([&](Fwd& a) { a.eps = -1.0f; }, "[modulated_rms_norm] eps must be >= 0, got -1");
  forward([&](Fwd& a) { a.y = half.matrix(); }, "[modulated_rms_norm] y must be float32, got bfloat16");
  backward([&](Bwd& a) { a.dy = half.matrix(); },
           "[modulated_rms_norm_bwd] dy must be float32, got bfloat16");
  backward([&](Bwd& a) { a.dscale.rows = 2; }, "[modulated_rms_norm_bwd] dscale must be [3, 8], got [2, 8]");
  backward([&](Bwd& a) { a.weight = {}; },
           "[modulated_rms_norm_bwd] dweight must be absent when weight is, got [8]");
  CHECK(run.y == untouched.y);
  CHECK(run.dx == untouched.dx);
  CHECK(run.dscale == untouched.dscale);
}

}  // namespace
}  // namespace tigon::test
