// hyper_connection in the core: values and slopes of a double-precision oracle, mixes, empty input, refusals, bitwise promises.
#include <array>

#include "table.h"
#include "tigon/ops/hyper_connection/hyper_connection.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/hyper_connection/hyper_connection_math.inc"
}  // namespace oracle
namespace {

// One token of the oracle; coefficients are pre, post and res in turn.
struct OracleToken {
  double r;
  std::vector<double> products, bases, scales, values;
  int n;
  double rstd() const { return r; }
  double product(int j) const { return products[size_t(j)]; }
  double base(int j) const { return bases[size_t(j)]; }
  double scale(int g) const { return scales[size_t(g)]; }
  void pre(int i, double v) { values[size_t(i)] = v; }
  void post(int i, double v) { values[size_t(n + i)] = v; }
  void res(int i, double v) { values[size_t(2 * n + i)] = v; }
};

struct Run {
  int64_t tokens, n, cols, parts, m;
  HyperConnection how;
  Table x, weight, base, scale, y, pre, post, res, product, rstd;
  Table dy, dpre, dpost, dres, dx, dweight, dbase, dscale;

  Run(DType dtype, int64_t tokens, int64_t n, int64_t cols, int64_t parts)
      : tokens(tokens),
        n(n),
        cols(cols),
        parts(parts),
        m(parts == 1   ? n
          : parts == 2 ? 2 * n
                       : 2 * n + n * n),
        how{.streams = n, .pre_eps = 1e-3f, .post_eps = 1e-3f, .iterations = 5},
        x(dtype, tokens, n * cols, 3),
        weight(DType::f32, m, n * cols, 1),
        base(DType::f32, 1, m),
        scale(DType::f32, 1, parts),
        y(dtype, tokens, cols, 2),
        pre(DType::f32, tokens, n),
        post(DType::f32, tokens, n),
        res(DType::f32, tokens, n * n),
        product(DType::f32, tokens, m),
        rstd(DType::f32, 1, tokens),
        dy(dtype, tokens, cols),
        dpre(DType::f32, tokens, n),
        dpost(DType::f32, tokens, n),
        dres(DType::f32, tokens, n * n),
        dx(dtype, tokens, n * cols, 1),
        dweight(DType::f32, m, n * cols),
        dbase(DType::f32, 1, m),
        dscale(DType::f32, 1, parts) {
    x.normal(1), weight.normal(2, 0.3), base.normal(3), scale.normal(4, 0.3, 1.0);
    dy.normal(5), dpre.normal(6), dpost.normal(7), dres.normal(8);
  }
  HyperConnectionFwd forward() {
    return {.x = x.matrix(),
            .weight = weight.matrix(),
            .base = base.vector(),
            .scale = scale.vector(),
            .y = y.matrix(),
            .pre = pre.matrix(),
            .post = parts > 1 ? post.matrix() : Matrix{},
            .res = parts > 2 ? res.matrix() : Matrix{},
            .product = product.matrix(),
            .rstd = rstd.vector(),
            .how = how};
  }
  HyperConnectionBwd backward() {
    return {.dy = dy.matrix(),
            .dpre = dpre.matrix(),
            .dpost = parts > 1 ? dpost.matrix() : Matrix{},
            .dres = parts > 2 ? dres.matrix() : Matrix{},
            .x = x.matrix(),
            .weight = weight.matrix(),
            .base = base.vector(),
            .scale = scale.vector(),
            .product = product.matrix(),
            .rstd = rstd.vector(),
            .dx = dx.matrix(),
            .dweight = dweight.matrix(),
            .dbase = dbase.vector(),
            .dscale = dscale.vector(),
            .how = how};
  }

  // The oracle's coefficients of a token.
  template <int N = 0>
  std::vector<double> coefficients(int64_t t) const {
    OracleToken o{0, {}, {}, {}, std::vector<double>(size_t(m)), int(n)};
    double square = 0;
    for (int64_t k = 0; k < n * cols; ++k) square += x(t, k) * x(t, k);
    o.r = 1 / std::sqrt(square / double(n * cols) + double(how.norm_eps));
    for (int64_t j = 0; j < m; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < n * cols; ++k) sum += x(t, k) * weight(j, k);
      o.products.push_back(sum), o.bases.push_back(base(0, j));
    }
    for (int64_t g = 0; g < parts; ++g) o.scales.push_back(scale(0, g));
    oracle::hc_forward<N, double>(int(parts), how, o);
    return o.values;
  }
  // The sum of all results times their upstream gradients.
  double loss() const {
    double sum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<double> c = coefficients(t);
      for (int64_t i = 0; i < n; ++i) {
        sum += c[size_t(i)] * dpre(t, i) + (parts > 1 ? c[size_t(n + i)] * dpost(t, i) : 0.0);
        for (int64_t k = 0; k < cols; ++k) sum += c[size_t(i)] * x(t, i * cols + k) * dy(t, k);
      }
      for (int64_t i = 0; i < m - 2 * n; ++i) sum += c[size_t(2 * n + i)] * dres(t, i);
    }
    return sum;
  }
};

TEST_CASE("values are the oracle's") {
  auto ctx = make_cpu_context(2);
  for (DType dtype : kFloats)
    for (auto [n, cols, parts] :
         {std::array<int64_t, 3>{4, 33, 3}, {1, 5, 3}, {8, 16, 3}, {3, 7, 2}, {4, 20, 1}}) {
      INFO(text(dtype) << " n " << n << " C " << cols << " parts " << parts);
      Run run(dtype, 19, n, cols, parts);
      hyper_connection_fwd(*ctx, run.forward());
      std::vector<std::vector<double>> want;
      for (int64_t t = 0; t < run.tokens; ++t) want.push_back(run.coefficients(t));
      auto part = [&](const char* name, const Table& got, int64_t first) {
        check_close(
            name, got, [&](int64_t t, int64_t i) { return want[size_t(t)][size_t(first + i)]; },
            [](int64_t, int64_t) { return 2e-5; });
      };
      part("pre", run.pre, 0);
      if (parts > 1) part("post", run.post, n);
      if (parts > 2) part("res", run.res, 2 * n);
      auto mixed = [&](int64_t t, int64_t k) {
        double sum = 0;
        for (int64_t i = 0; i < n; ++i) sum += want[size_t(t)][size_t(i)] * run.x(t, i * cols + k);
        return sum;
      };
      check_close("y", run.y, mixed,
                  [&](int64_t t, int64_t k) { return 1e-4 + 2 * unit(dtype) * std::abs(mixed(t, k)); });
    }
}

TEST_CASE("a number of streams known at compile time changes nothing") {
  Run run(DType::f32, 3, 4, 9, 3);
  for (int64_t t = 0; t < 3; ++t) CHECK(run.coefficients<4>(t) == run.coefficients<0>(t));
}

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(2);
  for (auto [n, parts] : {std::array<int64_t, 2>{4, 3}, {2, 3}, {3, 2}, {3, 1}}) {
    INFO("n " << n << " parts " << parts);
    Run run(DType::f32, 18, n, 5, parts);
    hyper_connection_fwd(*ctx, run.forward());
    hyper_connection_bwd(*ctx, run.backward());
    auto check = [&](Table& of, const Table& gradient, int64_t r, int64_t c) {
      double kept = of(r, c), step = 1e-3;
      of.set(r, c, kept + step);
      double up = run.loss(), high = of(r, c);
      of.set(r, c, kept - step);
      double slope = (up - run.loss()) / (high - of(r, c));
      of.set(r, c, kept);
      CHECK(gradient(r, c) == doctest::Approx(slope).epsilon(1e-3).scale(1.0));
    };
    for (int64_t c = 0; c < n * 5; ++c) check(run.x, run.dx, 17, c), check(run.weight, run.dweight, n - 1, c);
    for (int64_t j = 0; j < run.m; ++j) check(run.base, run.dbase, 0, j);
    for (int64_t g = 0; g < parts; ++g) check(run.scale, run.dscale, 0, g);
    CHECK(run.dx.guards_intact());
  }
}

struct MixRun {
  Table x, f, mix, post, y, dy, dx, df, dmix, dpost;
  int64_t n, outs;
  bool transposed;
  MixRun(DType dtype, int64_t n, int64_t outs, int64_t cols, bool transposed)
      : x(dtype, 7, n * cols, 3),
        f(dtype, 7, cols),
        mix(DType::f32, 7, outs * n, 1),
        post(DType::f32, 7, outs),
        y(dtype, 7, outs * cols, 2),
        dy(dtype, 7, outs * cols),
        dx(dtype, 7, n * cols),
        df(dtype, 7, cols, 1),
        dmix(DType::f32, 7, outs * n, 2),
        dpost(DType::f32, 7, outs),
        n(n),
        outs(outs),
        transposed(transposed) {
    x.normal(1), f.normal(2), mix.normal(3), post.normal(4), dy.normal(5);
  }
  HyperConnectionMixFwd forward() {
    return {.x = x.matrix(),
            .f = f.matrix(),
            .mix = mix.matrix(),
            .post = post.matrix(),
            .y = y.matrix(),
            .streams = n,
            .outs = outs,
            .transposed = transposed};
  }
  HyperConnectionMixBwd backward() {
    return {.dy = dy.matrix(),
            .x = x.matrix(),
            .f = f.matrix(),
            .mix = mix.matrix(),
            .post = post.matrix(),
            .dx = dx.matrix(),
            .df = df.matrix(),
            .dmix = dmix.matrix(),
            .dpost = dpost.matrix(),
            .streams = n,
            .outs = outs,
            .transposed = transposed};
  }
  int64_t at(int64_t o, int64_t i) const { return transposed ? i * outs + o : o * n + i; }
};

TEST_CASE("mixes and their gradients") {
  auto ctx = make_cpu_context(2);
  for (DType dtype : kFloats)
    for (bool transposed : {false, true})
      for (auto [n, outs, cols] : {std::array<int64_t, 3>{4, 4, 37}, {3, 1, 16}, {1, 8, 5}}) {
        INFO(text(dtype) << " n " << n << " outs " << outs << " transposed " << transposed);
        MixRun r(dtype, n, outs, cols, transposed);
        hyper_connection_mix_fwd(*ctx, r.forward());
        hyper_connection_mix_bwd(*ctx, r.backward());
        auto bound = [&](int64_t, int64_t) { return 20 * unit(dtype) + 1e-4; };
        check_close(
            "y", r.y,
            [&](int64_t t, int64_t c) {
              int64_t o = c / cols, k = c % cols;
              double sum = r.post(t, o) * r.f(t, k);
              for (int64_t i = 0; i < n; ++i) sum += r.mix(t, r.at(o, i)) * r.x(t, i * cols + k);
              return sum;
            },
            bound);
        check_close(
            "dx", r.dx,
            [&](int64_t t, int64_t c) {
              double sum = 0;
              for (int64_t o = 0; o < outs; ++o)
                sum += r.mix(t, r.at(o, c / cols)) * r.dy(t, o * cols + c % cols);
              return sum;
            },
            bound);
        check_close(
            "df", r.df,
            [&](int64_t t, int64_t k) {
              double sum = 0;
              for (int64_t o = 0; o < outs; ++o) sum += r.post(t, o) * r.dy(t, o * cols + k);
              return sum;
            },
            bound);
        auto dot = [&](int64_t t, int64_t o, const Table& with, int64_t first) {
          double sum = 0;
          for (int64_t k = 0; k < cols; ++k) sum += r.dy(t, o * cols + k) * with(t, first + k);
          return sum;
        };
        auto fine = [](int64_t, int64_t) { return 1e-4; };
        check_close(
            "dmix", r.dmix,
            [&](int64_t t, int64_t c) {
              int64_t o = transposed ? c % outs : c / n, i = transposed ? c / outs : c % n;
              return dot(t, o, r.x, i * cols);
            },
            fine);
        check_close("dpost", r.dpost, [&](int64_t t, int64_t o) { return dot(t, o, r.f, 0); }, fine);
      }
}

TEST_CASE("without a mix the streams are kept, without f nothing is added") {
  auto ctx = make_cpu_context(1);
  MixRun r(DType::bf16, 4, 4, 21, false);
  HyperConnectionMixFwd a = r.forward();
  a.mix = a.f = a.post = {};
  hyper_connection_mix_fwd(*ctx, a);
  for (int64_t i = 0; i < 7 * 84; ++i) CHECK(r.y(i) == r.x(i));
}

TEST_CASE("no tokens: gradients of parameters are zero") {
  auto ctx = make_cpu_context(1);
  Run run(DType::f32, 0, 4, 5, 3);
  hyper_connection_fwd(*ctx, run.forward());
  hyper_connection_bwd(*ctx, run.backward());
  for (int64_t i = 0; i < run.m * 20; ++i) CHECK(run.dweight(i) == 0.0);
  for (int64_t i = 0; i < run.m; ++i) CHECK(run.dbase(i) == 0.0);
  for (int64_t i = 0; i < 3; ++i) CHECK(run.dscale(i) == 0.0);
}

TEST_CASE("the same bits everywhere") {
  for (DType dtype : kFloats)
    check_same_everywhere([&](Context& ctx) {
      Run run(dtype, 70, 4, 37, 3);
      hyper_connection_fwd(ctx, run.forward());
      hyper_connection_bwd(ctx, run.backward());
      MixRun mix(dtype, 4, 4, 37, true);
      hyper_connection_mix_fwd(ctx, mix.forward());
      hyper_connection_mix_bwd(ctx, mix.backward());
      return std::vector<Table>{run.y,      run.pre, run.post, run.res, run.dx,   run.dweight, run.dbase,
                                run.dscale, mix.y,   mix.dx,   mix.df,  mix.dmix, mix.dpost};
    });
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  Run run(DType::f32, 3, 4, 8, 3);
  Run untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* text) {
    HyperConnectionFwd a = run.forward();
    change(a);
    CHECK_THROWS_WITH_AS(hyper_connection_fwd(*ctx, a), text, Error);
  };
  refused([](HyperConnectionFwd& a) { a.how.streams = 9; },
          "[hyper_connection] streams must be in [1, 8], got 9");
  refused([](HyperConnectionFwd& a) { a.how.streams = 5; },
          "[hyper_connection] x must have columns in 5 streams, got 32");
  refused([](HyperConnectionFwd& a) { a.weight.rows = 23; },
          "[hyper_connection] weight must have 4, 8 or 24 rows, got 23");
  refused([](HyperConnectionFwd& a) { a.scale.size = 2; }, "[hyper_connection] scale must be [3], got [2]");
  refused([](HyperConnectionFwd& a) { a.base.dtype = DType::bf16; },
          "[hyper_connection] base must be float32, got bfloat16");
  refused([](HyperConnectionFwd& a) { a.res.cols = 4; },
          "[hyper_connection] res must be [3, 16], got [3, 4]");
  refused([](HyperConnectionFwd& a) { a.how.iterations = 0; },
          "[hyper_connection] iterations must be >= 1, got 0");
  CHECK(run.y == untouched.y);
  CHECK(run.pre == untouched.pre);
  MixRun mix(DType::f32, 4, 4, 8, false);
  HyperConnectionMixFwd a = mix.forward();
  a.post = {};
  CHECK_THROWS_WITH_AS(hyper_connection_mix_fwd(*ctx, a),
                       "[hyper_connection_mix] f and post must be given together", Error);
  a = mix.forward(), a.mix = {}, a.outs = 3;
  CHECK_THROWS_WITH_AS(hyper_connection_mix_fwd(*ctx, a),
                       "[hyper_connection_mix] outs must be 4 without a mix, got 3", Error);
}

}  // namespace
}  // namespace tigon::test
