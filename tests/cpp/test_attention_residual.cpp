// Attention residuals in the core against the same formula in double, finite differences, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/attention_residual/attention_residual.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/attention_residual/attention_residual_math.inc"
}  // namespace oracle

namespace {

struct Case {
  int64_t count, rows, cols;
  DType dtype, param;
};

constexpr float kEps = 1e-3f;

// The whole op in double on the stored inputs, one row at a time.
struct Oracle {
  Case k;
  std::vector<double> v, q, w, dy;

  double& value(int64_t n, int64_t r, int64_t c) { return v[size_t((n * k.rows + r) * k.cols + c)]; }
  double key(int64_t c) const { return q[size_t(c)] * w[size_t(c)]; }
  struct Row {
    std::vector<oracle::AttentionScore<double>> scores;
    std::vector<double> alpha;
    std::vector<oracle::AttentionSlope<double>> slopes;
  };
  Row row(int64_t r) {
    Row found;
    std::vector<double> upstream;
    double total = 0, mean = 0;
    for (int64_t n = 0; n < k.count; ++n) {
      double square = 0, dot = 0, e = 0;
      for (int64_t c = 0; c < k.cols; ++c) {
        square += value(n, r, c) * value(n, r, c) / double(k.cols);
        dot += key(c) * value(n, r, c);
        e += dy[size_t(r * k.cols + c)] * value(n, r, c);
      }
      found.scores.push_back(oracle::attention_score(square, dot, double(kEps)));
      found.alpha.push_back(std::exp(found.scores.back().score));
      total += found.alpha.back(), upstream.push_back(e);
    }
    for (size_t n = 0; n < upstream.size(); ++n) mean += (found.alpha[n] /= total) * upstream[n];
    for (size_t n = 0; n < upstream.size(); ++n)
      found.slopes.push_back(
          oracle::attention_slope(found.scores[n], found.alpha[n], upstream[n], mean, 1.0 / double(k.cols)));
    return found;
  }
  double y(const Row& of, int64_t r, int64_t c) {
    double s = 0;
    for (int64_t n = 0; n < k.count; ++n) s += of.alpha[size_t(n)] * value(n, r, c);
    return s;
  }
  double dvalue(const Row& of, int64_t n, int64_t r, int64_t c) {
    return oracle::attention_dv(dy[size_t(r * k.cols + c)], value(n, r, c), key(c), of.alpha[size_t(n)],
                                of.slopes[size_t(n)].slope, of.slopes[size_t(n)].pull);
  }
  double u(int64_t c) {
    double s = 0;
    for (int64_t r = 0; r < k.rows; ++r) {
      const Row of = row(r);
      for (int64_t n = 0; n < k.count; ++n) s += of.slopes[size_t(n)].slope * value(n, r, c);
    }
    return s;
  }
  double loss() {
    double s = 0;
    for (int64_t r = 0; r < k.rows; ++r) {
      const Row of = row(r);
      for (int64_t c = 0; c < k.cols; ++c) s += dy[size_t(r * k.cols + c)] * y(of, r, c);
    }
    return s;
  }
};

std::vector<double> values(const Table& t) {
  std::vector<double> v;
  for (int64_t i = 0; i < t.rows() * t.cols(); ++i) v.push_back(t(i));
  return v;
}

struct Run {
  Table v, q, w, dy, y, dv, dq, dw;

  explicit Run(const Case& k)
      : v(k.dtype, k.count * k.rows, k.cols, 3),
        q(k.param, 1, k.cols),
        w(k.param, 1, k.cols),
        dy(k.dtype, k.rows, k.cols, 1),
        y(k.dtype, k.rows, k.cols, 5),
        dv(k.dtype, k.count * k.rows, k.cols, 2),
        dq(k.param, 1, k.cols),
        dw(k.param, 1, k.cols) {
    v.normal(1), q.normal(2, 1.0 / std::sqrt(double(k.cols))), w.normal(3, 0.3, 1.0), dy.normal(4);
  }
  AttentionResidualFwd forward(const Case& k) {
    return {.values = v.matrix(),
            .count = k.count,
            .query = q.vector(),
            .norm_weight = w.vector(),
            .y = y.matrix(),
            .eps = kEps};
  }
  AttentionResidualBwd backward(const Case& k) {
    return {.dy = dy.matrix(),
            .values = v.matrix(),
            .count = k.count,
            .query = q.vector(),
            .norm_weight = w.vector(),
            .dvalues = dv.matrix(),
            .dquery = dq.vector(),
            .dnorm_weight = dw.vector(),
            .eps = kEps};
  }
};

void check_case(Context& ctx, const Case& k) {
  INFO(k.count << " values of " << k.rows << " rows, " << k.cols << " columns, " << text(k.dtype)
               << ", parameters " << text(k.param));
  Run run(k);
  attention_residual_fwd(ctx, run.forward(k));
  attention_residual_bwd(ctx, run.backward(k));
  Oracle o{k, values(run.v), values(run.q), values(run.w), values(run.dy)};
  // Numbers of about one, sums of up to `count` terms: a few tens of ulp, and the rounding of the result.
  const double few = 64 * 0x1p-24;
  auto room = [&](DType t, double want, double size) {
    return 1.001 * unit(t) * std::abs(want) + few * size + tiny(t);
  };
  for (int64_t r = 0; r < k.rows; ++r) {
    const Oracle::Row of = o.row(r);
    for (int64_t c = 0; c < k.cols; ++c) {
      const double want = o.y(of, r, c);
      CHECK(std::abs(run.y(r, c) - want) <= room(k.dtype, want, 4.0));
      for (int64_t n = 0; n < k.count; ++n) {
        const double dv = o.dvalue(of, n, r, c);
        const auto slope = of.slopes[size_t(n)];
        const double size = 4.0 + std::abs(slope.slope * o.key(c)) + std::abs(slope.pull) * 4.0;
        CHECK(std::abs(run.dv(n * k.rows + r, c) - dv) <=
              room(k.dtype, dv, size + 4.0 * std::sqrt(double(k.cols))));
      }
    }
  }
  for (int64_t c = 0; c < k.cols; ++c) {
    const double u = o.u(c), size = double(k.rows) * std::sqrt(double(k.cols)) * 16.0;
    CHECK(std::abs(run.dq(0, c) - o.w[size_t(c)] * u) <= room(k.param, o.w[size_t(c)] * u, size));
    CHECK(std::abs(run.dw(0, c) - o.q[size_t(c)] * u) <= room(k.param, o.q[size_t(c)] * u, size));
  }
  for (const Table* t : {&run.y, &run.dv, &run.dq, &run.dw}) CHECK(t->guards_intact());
}

TEST_CASE("attention_residual against double") {
  auto ctx = make_cpu_context(2);
  for (DType dtype : kFloats) {
    for (auto [count, rows, cols] :
         {std::array<int64_t, 3>{1, 1, 1}, {2, 3, 7}, {3, 33, 45}, {19, 4, 40}, {4, 2, 1100}})
      check_case(*ctx, {count, rows, cols, dtype, dtype});
    check_case(*ctx, {3, 5, 40, dtype, DType::f32});
  }
}

TEST_CASE("the formula's gradients are its slopes: attention_residual") {
  const Case k{3, 2, 5, DType::f32, DType::f32};
  Run run(k);
  Oracle o{k, values(run.v), values(run.q), values(run.w), values(run.dy)};
  auto loss = [&] { return o.loss(); };
  auto check = [&](double gradient, double& of) {
    CHECK(gradient == doctest::Approx(slope(&of, loss)).epsilon(1e-6));
  };
  for (int64_t r = 0; r < k.rows; ++r)
    for (int64_t n = 0; n < k.count; ++n)
      for (int64_t c = 0; c < k.cols; ++c) check(o.dvalue(o.row(r), n, r, c), o.value(n, r, c));
  for (int64_t c = 0; c < k.cols; ++c) {
    check(o.w[size_t(c)] * o.u(c), o.q[size_t(c)]);
    check(o.q[size_t(c)] * o.u(c), o.w[size_t(c)]);
  }
}

TEST_CASE("attention_residual: the same bits for every instruction set and any number of threads") {
  for (DType dtype : kFloats) {
    const Case k{11, 70, 37, dtype, dtype};
    INFO(text(dtype));
    check_same_everywhere([&](Context& ctx) {
      Run run(k);
      attention_residual_fwd(ctx, run.forward(k));
      attention_residual_bwd(ctx, run.backward(k));
      return std::vector<Table>{run.y, run.dv, run.dq, run.dw};
    });
  }
}

TEST_CASE("attention_residual: no rows, and only what is asked for") {
  auto ctx = make_cpu_context(1);
  const Case none{3, 0, 8, DType::bf16, DType::bf16};
  Run empty(none);
  attention_residual_fwd(*ctx, empty.forward(none));
  attention_residual_bwd(*ctx, empty.backward(none));
  for (const Table& t : {empty.dq, empty.dw})
    check_close("gradient", t, [](int64_t, int64_t) { return 0.0; }, [](int64_t, int64_t) { return 0.0; });
  const Case k{3, 4, 8, DType::f32, DType::f32};
  Run run(k), some(k);
  attention_residual_bwd(*ctx, run.backward(k));
  const Table untouched = some.dv;
  AttentionResidualBwd a = some.backward(k);
  a.dvalues = {}, a.dnorm_weight = {};
  attention_residual_bwd(*ctx, a);
  CHECK(some.dq == run.dq);
  CHECK(some.dv == untouched);
}

TEST_CASE("attention_residual: refused calls name argument, expected and given, and write nothing") {
  const Case k{3, 2, 8, DType::f32, DType::f32};
  Run run(k);
  const Run untouched = run;
  Table half(DType::bf16, 6, 8);
  auto ctx = make_cpu_context(1);
  using Fwd = AttentionResidualFwd;
  using Bwd = AttentionResidualBwd;
  auto forward = [&](auto change, const char* text) {
    Fwd a = run.forward(k);
    change(a);
    CHECK_THROWS_WITH_AS(attention_residual_fwd(*ctx, a), text, Error);
  };
  auto backward = [&](auto change, const char* text) {
    Bwd a = run.backward(k);
    change(a);
    CHECK_THROWS_WITH_AS(attention_residual_bwd(*ctx, a), text, Error);
  };
  forward([&](Fwd& a) { a.count = 0; }, "[attention_residual] values must be 1 to 1024, got 0");
  forward([&](Fwd& a) { a.count = 4; }, "[attention_residual] values must have a multiple of 4 rows, got 6");
  forward([&](Fwd& a) { a.query = {}; }, "[attention_residual] query must be [8], got none");
  forward([&](Fwd& a) { a.norm_weight.size = 7; }, "[attention_residual] norm_weight must be [8], got [7]");
  forward([&](Fwd& a) { a.eps = -1.0f; }, "[attention_residual] eps must be >= 0, got -1");
  forward([&](Fwd& a) { a.y.rows = 3; }, "[attention_residual] y must be [2, 8], got [3, 8]");
  backward([&](Bwd& a) { a.dy.cols = 7; }, "[attention_residual_bwd] dy must be [2, 8], got [2, 7]");
  backward([&](Bwd& a) { a.dvalues = half.matrix(); },
           "[attention_residual_bwd] dvalues must be float32, got bfloat16");
  backward([&](Bwd& a) { a.dquery.size = 9; }, "[attention_residual_bwd] dquery must be [8], got [9]");
  backward([&](Bwd& a) { a.dnorm_weight.dtype = DType::f16; },
           "[attention_residual_bwd] dnorm_weight must be float32, got float16");
  CHECK(run.y == untouched.y);
  CHECK(run.dv == untouched.dv);
  CHECK(run.dq == untouched.dq);
}

}  // namespace
}  // namespace tigon::test
