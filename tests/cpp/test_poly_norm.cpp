// PolyNorm in the core against the same formula in double, the formula against finite differences, refusals, bitwise promises.
#include "tigon/ops/poly_norm/poly_norm.h"

#include "table.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/poly_norm/poly_norm_math.inc"
}  // namespace oracle

namespace {

struct Run {
  Table x, w, b, dy, y, rstd, dx, dw, db;
  float eps = 1e-3f;

  Run(DType t, DType parameters, int64_t rows, int64_t cols)
      : x(t, rows, cols, 3),
        w(parameters, 1, 3),
        b(parameters, 1, 1),
        dy(t, rows, cols, 1),
        y(t, rows, cols, 5),
        rstd(DType::f32, rows, 3),
        dx(t, rows, cols, 2),
        dw(parameters, 1, 3),
        db(parameters, 1, 1) {
    x.normal(1), w.normal(2, 0.5, 1.0), b.normal(3), dy.normal(4);
  }
  PolyNormFwd forward() {
    return {.x = x.matrix(),
            .weight = w.vector(),
            .bias = b.vector(),
            .y = y.matrix(),
            .rstd = rstd.vector(),
            .eps = eps};
  }
  PolyNormBwd backward() {
    return {.dy = dy.matrix(),
            .x = x.matrix(),
            .weight = w.vector(),
            .rstd = rstd.vector(),
            .dx = dx.matrix(),
            .dweight = dw.vector(),
            .dbias = db.vector()};
  }
  void both(Context& ctx) {
    poly_norm_fwd(ctx, forward());
    poly_norm_bwd(ctx, backward());
  }
};

std::vector<double> values(const Table& t) {
  std::vector<double> v;
  for (int64_t i = 0; i < t.rows() * t.cols(); ++i) v.push_back(t(i));
  return v;
}

// The whole op in double on the stored inputs.
struct Oracle {
  int64_t rows, cols;
  double eps;
  std::vector<double> x, w, b, dy;

  explicit Oracle(const Run& run)
      : rows(run.x.rows()),
        cols(run.x.cols()),
        eps(double(run.eps)),
        x(values(run.x)),
        w(values(run.w)),
        b(values(run.b)),
        dy(values(run.dy)) {}

  struct Row {
    double rstd[3], slope[3], mean[3], products[4], p[3], q[3];
  };
  Row row(int64_t r) const {
    Row found{};
    double squares[3] = {};
    for (int64_t c = 0; c < cols; ++c) {
      oracle::poly_norm_add_squares(x[at(r, c)], squares);
      oracle::poly_norm_add_products(dy[at(r, c)], x[at(r, c)], found.products);
    }
    for (int k = 0; k < 3; ++k) {
      found.rstd[k] = 1.0 / std::sqrt(squares[k] / double(cols) + eps);
      found.slope[k] = w[size_t(2 - k)] * found.rstd[k];
      found.products[k] *= found.rstd[k];
      found.mean[k] = found.products[k] / double(cols);
    }
    oracle::poly_norm_dx_coefficients(found.slope, found.rstd, found.mean, found.p, found.q);
    return found;
  }
  size_t at(int64_t r, int64_t c) const { return size_t(r * cols + c); }
  double y(const Row& of, int64_t r, int64_t c) const {
    return oracle::poly_norm_y(x[at(r, c)], of.slope, b[0]);
  }
  double dx(const Row& of, int64_t r, int64_t c) const {
    return oracle::poly_norm_dx(dy[at(r, c)], x[at(r, c)], of.p, of.q);
  }
  // dweight, then dbias
  double parameter(int i) const {
    double s = 0.0;
    for (int64_t r = 0; r < rows; ++r) s += row(r).products[i == 3 ? 3 : 2 - i];
    return s;
  }
  double loss() const {
    double s = 0.0;
    for (int64_t r = 0; r < rows; ++r) {
      const Row of = row(r);
      for (int64_t c = 0; c < cols; ++c) s += dy[at(r, c)] * y(of, r, c);
    }
    return s;
  }
};

void check_case(Context& ctx, DType t, DType parameters, int64_t rows, int64_t cols) {
  INFO(rows << " x " << cols << " x " << text(t) << ", parameters " << text(parameters));
  Run run(t, parameters, rows, cols);
  run.both(ctx);
  Oracle o(run);
  std::vector<Oracle::Row> of;
  for (int64_t r = 0; r < rows; ++r) of.push_back(o.row(r));
  const double chain = (double(cols) / 16 + 16) * 0x1p-24;
  check_close(
      "rstd", run.rstd, [&](int64_t r, int64_t k) { return of[size_t(r)].rstd[k]; },
      [&](int64_t r, int64_t k) { return chain * of[size_t(r)].rstd[k]; });
  check_close(
      "y", run.y, [&](int64_t r, int64_t c) { return o.y(of[size_t(r)], r, c); },
      [&](int64_t r, int64_t c) {
        double size = std::abs(o.b[0]), power = 1.0;
        for (double slope : of[size_t(r)].slope)
          power *= std::abs(o.x[o.at(r, c)]), size += std::abs(slope) * power;
        return 1.001 * unit(t) * std::abs(o.y(of[size_t(r)], r, c)) + 2 * chain * size + tiny(t);
      });
  check_close(
      "dx", run.dx, [&](int64_t r, int64_t c) { return o.dx(of[size_t(r)], r, c); },
      [&](int64_t r, int64_t c) {
        const Oracle::Row& row = of[size_t(r)];
        const double v = std::abs(o.x[o.at(r, c)]);
        double size = 0.0, power = 1.0;
        for (int k = 0; k < 3; ++k, power *= v) {
          // dy * h summed in magnitude is at most |dy| times |h|, whose mean squares are about 1.
          const double mean = 2.0;
          size += (k + 1) * power * std::abs(row.slope[k]) *
                  (std::abs(o.dy[o.at(r, c)]) + power * v * row.rstd[k] * mean);
        }
        return 1.001 * unit(t) * std::abs(o.dx(row, r, c)) + 4 * chain * size + tiny(t);
      });
  const double sums = 64 * double(rows * cols) * 0x1p-24;
  auto check_parameter = [&](const char* name, const Table& got, int first) {
    check_close(
        name, got, [&](int64_t, int64_t i) { return o.parameter(first + int(i)); },
        [&](int64_t, int64_t i) {
          return 1.001 * unit(parameters) * std::abs(o.parameter(first + int(i))) + sums + tiny(parameters);
        });
  };
  check_parameter("dweight", run.dw, 0), check_parameter("dbias", run.db, 3);
}

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (DType t : kFloats)
    for (DType parameters : {t, DType::f32})
      for (auto [rows, cols] :
           {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {33, 45}, {5, 1024}, {2, 9001}, {1100, 5}})
        check_case(*ctx, t, parameters, rows, cols);
}

TEST_CASE("the formula's gradients are its slopes") {
  Run run(DType::f32, DType::f32, 3, 5);
  Oracle o(run);
  auto loss = [&] { return o.loss(); };
  for (int64_t r = 0; r < 3; ++r) {
    const Oracle::Row of = o.row(r);
    for (int64_t c = 0; c < 5; ++c)
      CHECK(o.dx(of, r, c) == doctest::Approx(slope(&o.x[o.at(r, c)], loss)).epsilon(1e-6));
  }
  for (int i = 0; i < 3; ++i)
    CHECK(o.parameter(i) == doctest::Approx(slope(&o.w[size_t(i)], loss)).epsilon(1e-7));
  CHECK(o.parameter(3) == doctest::Approx(slope(&o.b[0], loss)).epsilon(1e-7));
}

TEST_CASE("the same bits for every instruction set and any number of threads") {
  for (DType t : kFloats)
    for (int64_t cols : {1, 31, 257, 5000}) {
      INFO(text(t) << ", " << cols << " columns");
      check_same_everywhere([&](Context& ctx) {
        Run run(t, t, 100, cols);
        run.both(ctx);
        return std::vector<Table>{run.y, run.rstd, run.dx, run.dw, run.db};
      });
    }
}

TEST_CASE("in place, only what is asked for, no rows") {
  auto ctx = make_cpu_context(1);
  Run run(DType::bf16, DType::f32, 4, 40);
  run.both(*ctx);
  Run other = run;
  PolyNormBwd a = other.backward();
  a.dx = a.dy, a.dweight = {}, a.dbias = {};
  poly_norm_bwd(*ctx, a);
  for (int64_t i = 0; i < 160; ++i) CHECK(other.dy(i) == run.dx(i));
  CHECK((other.dw == run.dw && other.dx == run.dx));
  PolyNormBwd none = run.backward();
  none.dx = {};
  other = run;
  other.dw.normal(7), other.db.normal(8);
  none.dweight = other.dw.vector(), none.dbias = other.db.vector();
  poly_norm_bwd(*ctx, none);
  CHECK((other.dw == run.dw && other.db == run.db));
  PolyNormFwd infer = other.forward();
  infer.rstd = {};
  other.y.normal(9);
  poly_norm_fwd(*ctx, infer);
  CHECK(other.y == run.y);
  Run empty(DType::f32, DType::f32, 0, 8);
  empty.both(*ctx);
  auto zero = [](int64_t, int64_t) { return 0.0; };
  check_close("dweight", empty.dw, zero, zero), check_close("dbias", empty.db, zero, zero);
}

TEST_CASE("NaN stays in its row, zero rows and large entries are finite") {
  Run run(DType::f32, DType::f32, 4, 20);
  run.x.set(0, 19, NAN);
  for (int64_t c = 0; c < 20; ++c) run.x.set(1, c, 0.0), run.x.set(2, c, 1e6);
  auto ctx = make_cpu_context(1);
  run.both(*ctx);
  for (int64_t c = 0; c < 20; ++c) {
    CHECK((std::isnan(run.y(0, c)) && std::isnan(run.dx(0, c))));
    CHECK(run.y(1, c) == run.b(0));
    CHECK(run.y(2, c) == doctest::Approx(run.w(0) + run.w(1) + run.w(2) + run.b(0)));
    CHECK((std::isfinite(run.dx(1, c)) && std::isfinite(run.dx(2, c)) && std::isfinite(run.dx(3, c))));
  }
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run(DType::f32, DType::f32, 4, 8);
  Run untouched = run;
  Table two(DType::f32, 1, 2), half(DType::bf16, 1, 3), rows(DType::bf16, 4, 8);
  auto ctx = make_cpu_context(1);
  auto forward = [&](auto change, const char* text) {
    PolyNormFwd a = run.forward();
    change(a);
    CHECK_THROWS_WITH_AS(poly_norm_fwd(*ctx, a), text, Error);
  };
  auto backward = [&](auto change, const char* text) {
    PolyNormBwd a = run.backward();
    change(a);
    CHECK_THROWS_WITH_AS(poly_norm_bwd(*ctx, a), text, Error);
  };
  forward([&](PolyNormFwd& a) { a.weight = two.vector(); }, "[poly_norm] weight must be [3], got [2]");
  forward([&](PolyNormFwd& a) { a.bias = {}; }, "[poly_norm] bias must be [1], got [0]");
  forward([&](PolyNormFwd& a) { a.weight = half.vector(); },
          "[poly_norm] weight must be float32 or float32, got bfloat16");
  forward([&](PolyNormFwd& a) { a.eps = -1.0f; }, "[poly_norm] eps must be >= 0, got -1");
  forward([&](PolyNormFwd& a) { a.x.cols = 0; }, "[poly_norm] x must have at least one column, got 0");
  forward([&](PolyNormFwd& a) { a.y = rows.matrix(); }, "[poly_norm] y must be float32, got bfloat16");
  forward([&](PolyNormFwd& a) { a.rstd.size = 4; }, "[poly_norm] rstd must be [12], got [4]");
  backward([&](PolyNormBwd& a) { a.dy.cols = 7; }, "[poly_norm_bwd] dy must be [4, 8], got [4, 7]");
  backward([&](PolyNormBwd& a) { a.dx = rows.matrix(); }, "[poly_norm_bwd] dx must be float32, got bfloat16");
  backward([&](PolyNormBwd& a) { a.dweight = two.vector(); }, "[poly_norm_bwd] dweight must be [3], got [2]");
  CHECK((run.y == untouched.y && run.dx == untouched.dx && run.dw == untouched.dw));
}

}  // namespace
}  // namespace tigon::test
