// RMSNorm in the core: gradients are slopes, results that are absent, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon::test {
namespace {

struct Case {
  int64_t rows, cols;
  DType x, weight;
  bool weighted;
  Rounding rounding;
  float offset, eps;
};

struct Run {
  Table x, w, dy, y, rstd, dx, dw;

  explicit Run(const Case& k)
      : x(k.x, k.rows, k.cols, 3),
        w(k.weight, 1, k.cols),
        dy(result(k), k.rows, k.cols, 1),
        y(result(k), k.rows, k.cols, 5),
        rstd(DType::f32, 1, k.rows),
        dx(k.x, k.rows, k.cols, 2),
        dw(k.weight, 1, k.cols) {
    x.normal(1), w.normal(2, 0.5, 1.0), dy.normal(3);
  }
  static DType result(const Case& k) { return rms_norm_result(k.x, k.weighted ? k.weight : k.x, k.rounding); }

  RmsNormFwd forward(const Case& k) {
    return {.x = x.matrix(),
            .weight = k.weighted ? w.vector() : Vector{},
            .y = y.matrix(),
            .rstd = rstd.vector(),
            .eps = k.eps,
            .offset = k.offset,
            .rounding = k.rounding};
  }
  RmsNormBwd backward(const Case& k) {
    return {.dy = dy.matrix(),
            .x = x.matrix(),
            .weight = k.weighted ? w.vector() : Vector{},
            .rstd = rstd.vector(),
            .dx = dx.matrix(),
            .dweight = k.weighted ? dw.vector() : Vector{},
            .offset = k.offset,
            .rounding = k.rounding};
  }
};

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(1);
  const Case k{3, 5, DType::f32, DType::f32, true, Rounding::none, 1.0f, 1e-3f};
  Run run(k);
  auto loss = [&] {
    rms_norm_fwd(*ctx, run.forward(k));
    return dot(run.y, run.dy);
  };
  loss();
  rms_norm_bwd(*ctx, run.backward(k));
  check_slopes("dx", run.x, run.dx, loss);
  check_slopes("dweight", run.w, run.dw, loss);
}

TEST_CASE("the same bits for every instruction set and any number of threads") {
  for (DType x : kFloats)
    for (int64_t cols : {1, 31, 257}) {
      Case k{100, cols, x, x, true, Rounding::llama, 0.0f, 1e-6f};
      INFO(text(x) << ", " << cols << " columns");
      check_same_everywhere([&](Context& ctx) {
        Run run(k);
        rms_norm_fwd(ctx, run.forward(k));
        rms_norm_bwd(ctx, run.backward(k));
        return std::vector<Table>{run.y, run.rstd, run.dx, run.dw};
      });
    }
}

TEST_CASE("no rows") {
  Case k{0, 8, DType::bf16, DType::bf16, true, Rounding::llama, 0.0f, 1e-6f};
  Run run(k);
  auto ctx = make_cpu_context(1);
  rms_norm_fwd(*ctx, run.forward(k));
  rms_norm_bwd(*ctx, run.backward(k));
  check_close("dweight", run.dw, [](int64_t, int64_t) { return 0.0; }, [](int64_t, int64_t) { return 0.0; });
}

TEST_CASE("only what is asked for") {
  Case k{4, 8, DType::f32, DType::f32, true, Rounding::llama, 0.0f, 1e-6f};
  Run run(k);
  auto ctx = make_cpu_context(1);
  rms_norm_fwd(*ctx, run.forward(k));
  RmsNormBwd none = run.backward(k);
  none.dx = {}, none.dweight = {};
  Table dx = run.dx, dw = run.dw;
  rms_norm_bwd(*ctx, none);
  CHECK(run.dx == dx);
  CHECK(run.dw == dw);
  RmsNormFwd forward = run.forward(k);
  forward.rstd = {};
  Table y = run.y, rstd = run.rstd;
  run.y.normal(4);
  rms_norm_fwd(*ctx, forward);
  CHECK(run.y == y);
  CHECK(run.rstd == rstd);
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Case k{4, 8, DType::f32, DType::f32, true, Rounding::llama, 0.0f, 1e-6f};
  Run run(k);
  Run untouched = run;
  Table other(DType::f32, 1, 9), half(DType::bf16, 4, 8), integer(DType::i64, 1, 8);
  auto ctx = make_cpu_context(1);
  auto forward = [&](auto change, const char* text) {
    RmsNormFwd a = run.forward(k);
    change(a);
    CHECK_THROWS_WITH_AS(rms_norm_fwd(*ctx, a), text, Error);
  };
  auto backward = [&](auto change, const char* text) {
    RmsNormBwd a = run.backward(k);
    change(a);
    CHECK_THROWS_WITH_AS(rms_norm_bwd(*ctx, a), text, Error);
  };
  forward([&](RmsNormFwd& a) { a.weight = other.vector(); }, "[rms_norm] weight must be [8], got [9]");
  forward([&](RmsNormFwd& a) { a.weight = integer.vector(); },
          "[rms_norm] weight must be float32 or float32, got int64");
  forward([&](RmsNormFwd& a) { a.eps = -1.0f; }, "[rms_norm] eps must be >= 0, got -1");
  forward([&](RmsNormFwd& a) { a.x.cols = 0; }, "[rms_norm] x must have at least one column, got 0");
  forward([&](RmsNormFwd& a) { a.x.dtype = DType::f64; },
          "[rms_norm] x must be float32, bfloat16 or float16, got float64");
  forward([&](RmsNormFwd& a) { a.y = half.matrix(); }, "[rms_norm] y must be float32, got bfloat16");
  forward([&](RmsNormFwd& a) { a.y.rows = 3; }, "[rms_norm] y must be [4, 8], got [3, 8]");
  forward([&](RmsNormFwd& a) { a.rstd.size = 5; }, "[rms_norm] rstd must be [4], got [5]");
  backward([&](RmsNormBwd& a) { a.dy.cols = 7; }, "[rms_norm_bwd] dy must be [4, 8], got [4, 7]");
  backward([&](RmsNormBwd& a) { a.dx = half.matrix(); }, "[rms_norm_bwd] dx must be float32, got bfloat16");
  backward([&](RmsNormBwd& a) { a.weight = {}; },
           "[rms_norm_bwd] dweight must be absent when weight is, got [8]");
  backward([&](RmsNormBwd& a) { a.dweight = other.vector(); }, "[rms_norm_bwd] dweight must be [8], got [9]");
  CHECK(run.y == untouched.y);
  CHECK(run.rstd == untouched.rstd);
  CHECK(run.dx == untouched.dx);
  CHECK(run.dw == untouched.dw);
}

}  // namespace
}  // namespace tigon::test
