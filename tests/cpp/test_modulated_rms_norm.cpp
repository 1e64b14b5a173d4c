// Modulated RMSNorm in the core against the same formula in double, finite differences, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_scalars.h"

namespace tigon::test {
namespace oracle {
template <class X>
double round_to(double x) {
  return x;
}
#include "tigon/base/norm_math.inc"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_math.inc"
}  // namespace oracle

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

// The whole op in double on the stored inputs; rounding of h is left to the bounds.
struct Oracle {
  const Case& k;
  std::vector<double> x, w, scale, shift, dy;

  size_t at(int64_t r, int64_t c) const { return size_t(r * k.cols + c); }
  int64_t group(int64_t r) const { return r / (k.rows / k.groups); }
  double rstd(int64_t r) const {
    double s = 0;
    for (int64_t c = 0; c < k.cols; ++c) s += x[at(r, c)] * x[at(r, c)];
    return 1.0 / std::sqrt(s / double(k.cols) + 1e-3f);
  }
  double h(int64_t r, int64_t c) const { return x[at(r, c)] * rstd(r); }
  double shifted(int64_t c) const { return k.weighted ? double(k.offset) + w[size_t(c)] : 1.0; }
  double weight(int64_t g, int64_t c) const { return oracle::modulated_weight(shifted(c), scale[at(g, c)]); }
  double y(int64_t r, int64_t c) const {
    oracle::ModulatedRmsNormForward<double, double> formula{{{.offset = k.weighted ? k.offset : 0.0f}}};
    const int64_t g = group(r);
    return formula.result(h(r, c), {k.weighted ? w[size_t(c)] : 1.0, scale[at(g, c)], shift[at(g, c)]},
                          {0.0});
  }
  double dx(int64_t r, int64_t c) const {
    double mean = 0;
    for (int64_t i = 0; i < k.cols; ++i)
      mean += dy[at(r, i)] * weight(group(r), i) * h(r, i) / double(k.cols);
    return oracle::norm_gradient(dy[at(r, c)] * weight(group(r), c), h(r, c), mean, rstd(r));
  }
  // Sums over the rows of a group, or of the terms' magnitudes.
  double u(int64_t g, int64_t c, bool magnitude = false) const {
    double s = 0;
    for (int64_t r = 0; r < k.rows; ++r)
      if (group(r) == g) s += magnitude ? std::abs(dy[at(r, c)] * h(r, c)) : dy[at(r, c)] * h(r, c);
    return s;
  }
  double dscale(int64_t g, int64_t c, bool magnitude = false) const {
    return (magnitude ? std::abs(shifted(c)) : shifted(c)) * u(g, c, magnitude);
  }
  double dshift(int64_t g, int64_t c, bool magnitude = false) const {
    double s = 0;
    for (int64_t r = 0; r < k.rows; ++r)
      if (group(r) == g) s += magnitude ? std::abs(dy[at(r, c)]) : dy[at(r, c)];
    return s;
  }
  double dweight(int64_t c, bool magnitude = false) const {
    double s = 0;
    for (int64_t g = 0; g < k.groups; ++g) {
      double factor = 1.0 + scale[at(g, c)];
      s += (magnitude ? std::abs(factor) : factor) * u(g, c, magnitude);
    }
    return s;
  }
  double loss() const {
    double s = 0;
    for (int64_t r = 0; r < k.rows; ++r)
      for (int64_t c = 0; c < k.cols; ++c) s += dy[at(r, c)] * y(r, c);
    return s;
  }
};

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
  Oracle oracle_of(const Case& k) const {
    return {k, values(x), values(w), values(scale), values(shift), values(dy)};
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

void check_case(Context& ctx, const Case& k) {
  INFO(k.rows << " rows, " << k.groups << " groups, " << k.cols << " columns, " << text(k.x)
              << ", parameters " << text(k.param) << ", weight " << k.weighted << ", rounding "
              << int(k.rounding));
  Run run(k);
  modulated_rms_norm_fwd(ctx, run.forward(k));
  modulated_rms_norm_bwd(ctx, run.backward(k));
  const Oracle o = run.oracle_of(k);
  const double chain = (double(k.cols) / 16 + 8) * 0x1p-24, rows = double(k.rows) * 0x1p-24,
               h_rounding = k.rounding == Rounding::llama ? 1.001 * unit(k.x) : 0.0;
  check_close(
      "y", run.y, [&](int64_t r, int64_t c) { return o.y(r, c); },
      [&](int64_t r, int64_t c) {
        double product = std::abs(o.h(r, c) * o.weight(o.group(r), c)),
               shift = std::abs(o.shift[o.at(o.group(r), c)]);
        return (product + shift) * (chain + 4 * 0x1p-24) + product * h_rounding +
               1.001 * unit(k.x) * std::abs(o.y(r, c)) +
               (h_rounding > 0 ? tiny(k.x) * std::abs(o.weight(o.group(r), c)) : 0.0) + tiny(k.x);
      });
  check_close(
      "dx", run.dx, [&](int64_t r, int64_t c) { return o.dx(r, c); },
      [&](int64_t r, int64_t c) {
        double size = 0;
        for (int64_t i = 0; i < k.cols; ++i)
          size += std::abs(o.dy[o.at(r, i)] * o.weight(o.group(r), i) * o.h(r, i)) / double(k.cols);
        size =
            o.rstd(r) * (std::abs(o.dy[o.at(r, c)] * o.weight(o.group(r), c)) + std::abs(o.h(r, c)) * size);
        return 1.001 * unit(k.x) * std::abs(o.dx(r, c)) + 4 * chain * size + tiny(k.x);
      });
  auto rounded = [&](double sum, double magnitude, double of_terms) {
    return 1.001 * unit(k.param) * std::abs(sum) + magnitude * (of_terms + chain + rows) + tiny(k.param);
  };
  check_close(
      "dscale", run.dscale, [&](int64_t g, int64_t c) { return o.dscale(g, c); },
      [&](int64_t g, int64_t c) { return rounded(o.dscale(g, c), o.dscale(g, c, true), h_rounding); });
  check_close(
      "dshift", run.dshift, [&](int64_t g, int64_t c) { return o.dshift(g, c); },
      [&](int64_t g, int64_t c) { return rounded(o.dshift(g, c), o.dshift(g, c, true), 0.0); });
  if (k.weighted)
    check_close(
        "dweight", run.dw, [&](int64_t, int64_t c) { return o.dweight(c); },
        [&](int64_t, int64_t c) { return rounded(o.dweight(c), o.dweight(c, true), h_rounding); });
}

TEST_CASE("modulated_rms_norm against double") {
  auto ctx = make_cpu_context(2);
  for (Rounding rounding : {Rounding::llama, Rounding::gemma, Rounding::none})
    for (DType x : kFloats) {
      // One group in several parts; a group a row; more groups than tasks; one element.
      for (auto [rows, groups, cols] :
           {std::array<int64_t, 3>{70, 1, 45}, {66, 2, 7}, {5, 5, 40}, {130, 65, 5}, {1, 1, 1}})
        check_case(*ctx, {rows, groups, cols, x, x, true, rounding, 0.0f});
      check_case(*ctx, {6, 3, 40, x, DType::f32, true, rounding, 1.0f});
      check_case(*ctx, {6, 3, 40, x, x, false, rounding, 1.0f});
    }
}

TEST_CASE("the formula's gradients are its slopes: modulated_rms_norm") {
  const Case k{6, 2, 5, DType::f32, DType::f32, true, Rounding::none, 1.0f};
  Oracle o = Run(k).oracle_of(k);
  auto loss = [&] { return o.loss(); };
  auto check = [&](double gradient, double& of) {
    CHECK(gradient == doctest::Approx(slope(&of, loss)).epsilon(1e-7));
  };
  for (int64_t c = 0; c < k.cols; ++c) {
    for (int64_t r = 0; r < k.rows; ++r) check(o.dx(r, c), o.x[o.at(r, c)]);
    for (int64_t g = 0; g < k.groups; ++g) {
      check(o.dscale(g, c), o.scale[o.at(g, c)]);
      check(o.dshift(g, c), o.shift[o.at(g, c)]);
    }
    check(o.dweight(c), o.w[size_t(c)]);
  }
}

TEST_CASE("the formula for a row of scale each is the general one") {
  const Case k{3, 3, 5, DType::f32, DType::f32, true, Rounding::none, 1.0f};
  const Oracle o = Run(k).oracle_of(k);
  const oracle::ModulatedRmsNormRowsBackward<double, double> rows{{.offset = k.offset}};
  for (int64_t r = 0; r < k.rows; ++r)
    for (int64_t c = 0; c < k.cols; ++c) {
      const double in[2] = {o.x[o.at(r, c)], o.scale[o.at(r, c)]}, dy = o.dy[o.at(r, c)];
      double out[3];
      rows.results(o.dx(r, c), dy, o.h(r, c), o.shifted(c), in, out);
      CHECK(out[0] == o.dx(r, c));
      CHECK(out[1] == doctest::Approx(o.dscale(r, c)));
      CHECK(out[2] == o.dshift(r, c));
      CHECK(rows.upstream(dy, in) * o.shifted(c) == doctest::Approx(dy * o.weight(r, c)));
      CHECK(rows.value(in) == in[0]);
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
