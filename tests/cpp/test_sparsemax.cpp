// Sparsemax in the core against tau by sorting in double, the formula against finite differences, refusals, bitwise promises.
#include "tigon/ops/sparsemax/sparsemax.h"

#include <algorithm>
#include <numeric>

#include "table.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/sparsemax/sparsemax_math.inc"
}  // namespace oracle

namespace {

// One row in double, tau by sorting (algorithm 1 of the paper).
struct Oracle {
  std::vector<double> z, dy;
  double tau = 0.0;

  Oracle(const Table& x, const Table& upstream, int64_t r) {
    for (int64_t c = 0; c < x.cols(); ++c) z.push_back(x(r, c)), dy.push_back(upstream(r, c));
    const double top = *std::max_element(z.begin(), z.end());
    for (double& v : z) v -= top;
    find_tau();
  }
  void find_tau() {
    std::vector<double> sorted = z;
    std::sort(sorted.rbegin(), sorted.rend());
    double sum = -1.0;
    for (size_t k = 0; k < sorted.size() && double(k) * sorted[k] > sum; ++k)
      sum += sorted[k], tau = sum / double(k + 1);
  }
  double y(size_t c) const { return oracle::sparsemax_y(z[c], tau, 0.0); }
  double mean() const {
    double sum = 0.0, size = 0.0;
    for (size_t c = 0; c < z.size(); ++c)
      if (z[c] > tau) sum += dy[c], size += 1.0;
    return sum / size;
  }
  double dx(size_t c) const { return oracle::sparsemax_dx(dy[c], y(c), mean()); }
  double loss() {
    find_tau();
    double s = 0.0;
    for (size_t c = 0; c < z.size(); ++c) s += dy[c] * y(c);
    return s;
  }
};

struct Run {
  Table x, dy, y, dx;
  Run(DType t, int64_t rows, int64_t cols, double scale)
      : x(t, rows, cols, 3), dy(t, rows, cols, 1), y(t, rows, cols, 5), dx(t, rows, cols, 2) {
    x.normal(1, scale), dy.normal(2);
  }
  void both(Context& ctx) {
    sparsemax_fwd(ctx, {.x = x.matrix(), .y = y.matrix()});
    sparsemax_bwd(ctx, {.dy = dy.matrix(), .y = y.matrix(), .dx = dx.matrix()});
  }
};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (DType t : kFloats)
    for (double scale : {1e-3, 0.3, 30.0})
      for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {33, 45}, {5, 1024}, {2, 9001}}) {
        INFO(rows << " x " << cols << " x " << text(t) << ", scale " << scale);
        Run run(t, rows, cols, scale);
        run.both(*ctx);
        std::vector<Oracle> o;
        for (int64_t r = 0; r < rows; ++r) o.emplace_back(run.x, run.dy, r);
        // z - tau, both at most 1, and tau is a quotient of sums.
        check_close(
            "y", run.y, [&](int64_t r, int64_t c) { return o[size_t(r)].y(size_t(c)); },
            [&](int64_t r, int64_t c) {
              return 1.001 * unit(t) * o[size_t(r)].y(size_t(c)) + 8 * 0x1p-24 + 2 * tiny(t);
            });
        check_close(
            "dx", run.dx, [&](int64_t r, int64_t c) { return o[size_t(r)].dx(size_t(c)); },
            [&](int64_t r, int64_t c) {
              return 1.001 * unit(t) * std::abs(o[size_t(r)].dx(size_t(c))) + 64 * 0x1p-24 + tiny(t);
            });
      }
}

TEST_CASE("the formula's gradient is its slope") {
  Run run(DType::f32, 3, 9, 0.3);
  for (int64_t r = 0; r < 3; ++r) {
    Oracle o(run.x, run.dy, r);
    for (size_t c = 0; c < 9; ++c) {
      const double dx = o.dx(c);
      CHECK(dx == doctest::Approx(slope(&o.z[c], [&] { return o.loss(); })).epsilon(1e-7));
      o.find_tau();
    }
  }
}

TEST_CASE("the same bits for every instruction set and any number of threads, in place too") {
  for (DType t : kFloats)
    for (int64_t cols : {1, 31, 257, 5000}) {
      INFO(text(t) << ", " << cols << " columns");
      check_same_everywhere([&](Context& ctx) {
        Run run(t, 40, cols, 0.1), other(t, 40, cols, 0.1);
        run.both(ctx);
        sparsemax_fwd(ctx, {.x = other.x.matrix(), .y = other.x.matrix()});
        sparsemax_bwd(ctx, {.dy = other.dy.matrix(), .y = run.y.matrix(), .dx = other.dy.matrix()});
        int64_t off = 0;
        for (int64_t i = 0; i < 40 * cols; ++i) off += other.x(i) != run.y(i) || other.dy(i) != run.dx(i);
        CHECK(off == 0);
        return std::vector<Table>{run.y, run.dx};
      });
    }
}

TEST_CASE("masked entries, ties, NaN, infinities, no columns") {
  Run run(DType::f16, 6, 20, 1.0);
  auto row = [&](int64_t r, double first, double rest) {
    for (int64_t c = 0; c < 20; ++c) run.x.set(r, c, c == 0 ? first : rest);
  };
  row(0, 0.0, -INFINITY), row(1, -INFINITY, -INFINITY), row(2, INFINITY, 0.0), row(3, NAN, 0.0);
  row(4, 0.0, -1.0), row(5, 2.0, 2.0);
  auto ctx = make_cpu_context(1);
  run.both(*ctx);
  for (int64_t c = 0; c < 20; ++c) {
    CHECK(run.y(0, c) == (c == 0 ? 1.0 : 0.0));
    for (int64_t r : {1, 2, 3}) CHECK((std::isnan(run.y(r, c)) && std::isnan(run.dx(r, c))));
    CHECK(run.y(4, c) == (c == 0 ? 1.0 : 0.0));  // entries that equal tau are outside of the support
    CHECK(run.dx(4, c) == 0.0);
    CHECK(run.y(5, c) == doctest::Approx(0.05).epsilon(1e-3));
  }
  Run none(DType::f32, 3, 0, 1.0);
  none.both(*ctx);
}

TEST_CASE("entries of the support stay positive in f16") {
  Table x(DType::f16, 1, 3), y(DType::f16, 1, 3);
  x.set(0, 0, 0.0), x.set(0, 1, -1.0 + 0x1p-11), x.set(0, 2, -2.0);
  auto ctx = make_cpu_context(1);
  sparsemax_fwd(*ctx, {.x = x.matrix(), .y = y.matrix()});
  CHECK(y(0, 1) == 0x1p-12);
  for (int64_t c = 0; c < 3; ++c) CHECK((y(0, c) > 0.0) == (c < 2));
  CHECK(oracle::sparsemax_y(0x1p-30, 0.0, double(kLeastF16)) == 0x1p-24);
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run(DType::f32, 4, 8, 1.0);
  Table half(DType::bf16, 4, 8), wide(DType::f64, 4, 8);
  const Table y = run.y, dx = run.dx;
  auto ctx = make_cpu_context(1);
  CHECK_THROWS_WITH_AS(sparsemax_fwd(*ctx, {.x = run.x.matrix(), .y = half.matrix()}),
                       "[sparsemax] y must be float32, got bfloat16", Error);
  CHECK_THROWS_WITH_AS(sparsemax_fwd(*ctx, {.x = wide.matrix(), .y = wide.matrix()}),
                       "[sparsemax] x must be float32, bfloat16 or float16, got float64", Error);
  Matrix less = run.dx.matrix();
  less.cols = 7;
  CHECK_THROWS_WITH_AS(sparsemax_bwd(*ctx, {.dy = run.dy.matrix(), .y = run.y.matrix(), .dx = less}),
                       "[sparsemax_bwd] dx must be [4, 8], got [4, 7]", Error);
  CHECK((run.y == y && run.dx == dx));
}

}  // namespace
}  // namespace tigon::test
