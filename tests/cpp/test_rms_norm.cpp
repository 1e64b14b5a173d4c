// RMSNorm in the core against the same formula in double, the formula against finite differences, refusals, bitwise promises.
#include "table.h"
#include "tigon/base/norm_scalars.h"
#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon::test {
namespace oracle {
#include "tigon/base/norm_math.inc"
#include "tigon/ops/rms_norm/rms_norm_math.inc"
}  // namespace oracle

namespace {

struct Case {
  int64_t rows, cols;
  DType x, weight;
  bool weighted;
  Rounding rounding;
  float offset, eps;
};

// The whole op in double on the stored inputs, h rounded to x's dtype where the contract says so.
struct Oracle {
  const Case& k;
  std::vector<double> x, w, dy;

  double rstd(int64_t r) const {
    double s = 0;
    for (int64_t c = 0; c < k.cols; ++c) s += x[size_t(r * k.cols + c)] * x[size_t(r * k.cols + c)];
    return 1.0 / std::sqrt(s / double(k.cols) + double(k.eps));
  }
  double h(int64_t r, int64_t c, double scale) const { return x[size_t(r * k.cols + c)] * scale; }
  double scaled(double v, int64_t c) const {
    if (!k.weighted) return v;
    const oracle::RmsNormForward<double, double> formula{{.offset = k.offset}};
    return formula.result(v, {w[size_t(c)]}, {0.0});
  }
  double y(int64_t r, int64_t c) const { return scaled(h(r, c, rstd(r)), c); }
  double g(int64_t r, int64_t c) const { return scaled(dy[size_t(r * k.cols + c)], c); }
  // mean of g * h, or of its magnitude
  double mean(int64_t r, double scale, bool magnitude) const {
    double s = 0;
    for (int64_t c = 0; c < k.cols; ++c) {
      double term = g(r, c) * h(r, c, scale);
      s += magnitude ? std::abs(term) : term;
    }
    return s / double(k.cols);
  }
  double dx(int64_t r, int64_t c) const {
    double scale = rstd(r);
    return oracle::norm_gradient(g(r, c), h(r, c, scale), mean(r, scale, false), scale);
  }
  double dweight(int64_t c, bool magnitude) const {
    double s = 0;
    for (int64_t r = 0; r < k.rows; ++r) {
      double term = dy[size_t(r * k.cols + c)] * h(r, c, rstd(r));
      s += magnitude ? std::abs(term) : term;
    }
    return s;
  }
  double loss() const {
    double s = 0;
    for (int64_t r = 0; r < k.rows; ++r)
      for (int64_t c = 0; c < k.cols; ++c) s += dy[size_t(r * k.cols + c)] * y(r, c);
    return s;
  }
};

std::vector<double> values(const Table& t) {
  std::vector<double> v;
  for (int64_t i = 0; i < t.rows() * t.cols(); ++i) v.push_back(t(i));
  return v;
}

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

void check_case(Context& ctx, const Case& k) {
  INFO(k.rows << " x " << k.cols << " x " << text(k.x) << " weight "
              << (k.weighted ? text(k.weight) : std::string("none")) << " rounding " << int(k.rounding)
              << " offset " << k.offset);
  Run run(k);
  rms_norm_fwd(ctx, run.forward(k));
  rms_norm_bwd(ctx, run.backward(k));
  Oracle o{k, values(run.x), values(run.w), values(run.dy)};

  // Sums over a row: at most cols/16 + 8 roundings in any chain of the lanes' tree, all terms of one sign or bounded by
  // their magnitude. h rounded to x's dtype first (llama) is one rounding of that type more.
  double chain = (double(k.cols) / 16 + 8) * 0x1p-24,
         h_rounding = k.rounding == Rounding::llama ? unit(k.x) : 0.0;
  check_close(
      "rstd", run.rstd, [&](int64_t, int64_t r) { return o.rstd(r); },
      [&](int64_t, int64_t r) { return chain * o.rstd(r); });
  check_close(
      "y", run.y, [&](int64_t r, int64_t c) { return o.y(r, c); },
      [&](int64_t r, int64_t c) {
        double size = std::abs(o.y(r, c)),
               absolute = h_rounding > 0 ? tiny(k.x) * std::abs(o.scaled(1.0, c)) : 0.0;
        return size * (1.001 * h_rounding + 1.001 * unit(run.y.dtype()) + chain) + tiny(run.y.dtype()) +
               absolute;
      });
  check_close(
      "dx", run.dx, [&](int64_t r, int64_t c) { return o.dx(r, c); },
      [&](int64_t r, int64_t c) {
        double scale = o.rstd(r);
        double size = scale * (std::abs(o.g(r, c)) + std::abs(o.h(r, c, scale)) * o.mean(r, scale, true));
        return 1.001 * unit(k.x) * std::abs(o.dx(r, c)) + 3 * chain * size + tiny(k.x);
      });
  if (k.weighted)
    check_close(
        "dweight", run.dw, [&](int64_t, int64_t c) { return o.dweight(c, false); },
        [&](int64_t, int64_t c) {
          double terms = o.dweight(c, true);
          return 1.001 * unit(k.weight) * std::abs(o.dweight(c, false)) +
                 terms * (h_rounding + chain + double(k.rows) * 0x1p-24) + tiny(k.weight);
        });
}

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (Rounding rounding : {Rounding::llama, Rounding::gemma, Rounding::none})
    for (DType x : kFloats) {
      // cols: one element, below a vector, two vectors and a tail, a real size. rows: past one task of 16.
      for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {33, 45}, {5, 1024}})
        check_case(*ctx, {rows, cols, x, x, true, rounding, 0.0f, 1e-6f});
      check_case(*ctx, {4, 40, x, DType::f32, true, rounding, 1.0f, 1e-5f});
      check_case(*ctx, {4, 40, x, x, false, rounding, 0.0f, 0.0f});
    }
}

TEST_CASE("the formula's gradients are its slopes") {
  Case k{3, 5, DType::f32, DType::f32, true, Rounding::none, 1.0f, 1e-3f};
  Run run(k);
  Oracle o{k, values(run.x), values(run.w), values(run.dy)};
  auto loss = [&] { return o.loss(); };
  for (int64_t r = 0; r < k.rows; ++r)
    for (int64_t c = 0; c < k.cols; ++c)
      CHECK(o.dx(r, c) == doctest::Approx(slope(&o.x[size_t(r * k.cols + c)], loss)).epsilon(1e-7));
  for (int64_t c = 0; c < k.cols; ++c)
    CHECK(o.dweight(c, false) == doctest::Approx(slope(&o.w[size_t(c)], loss)).epsilon(1e-7));
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

TEST_CASE("NaN stays in its row, zero rows are finite") {
  Case k{3, 20, DType::f32, DType::f32, false, Rounding::none, 0.0f, 1e-6f};
  Run run(k);
  run.x.set(0, 19, NAN);
  for (int64_t c = 0; c < 20; ++c) run.x.set(1, c, 0.0);
  auto ctx = make_cpu_context(1);
  rms_norm_fwd(*ctx, run.forward(k));
  CHECK(std::isnan(run.y(0, 0)));
  CHECK(run.y(1, 0) == 0.0);
  CHECK(std::isfinite(run.y(2, 0)));
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
