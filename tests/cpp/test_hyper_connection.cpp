// hyper_connection in the core: gradients are slopes, mixes, empty input, refusals, bitwise promises.
#include <array>

#include "table.h"
#include "tigon/ops/hyper_connection/hyper_connection.h"

namespace tigon::test {
namespace {

struct Run {
  int64_t tokens, n, cols, parts, m;
  HyperConnection options;
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
        options{.streams = n, .pre_eps = 1e-3f, .post_eps = 1e-3f, .iterations = 5},
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
            .options = options};
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
            .options = options};
  }
};

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(2);
  for (auto [n, parts] : {std::array<int64_t, 2>{4, 3}, {2, 3}, {3, 2}, {3, 1}}) {
    INFO("n " << n << " parts " << parts);
    Run run(DType::f32, 18, n, 5, parts);
    auto loss = [&] {
      hyper_connection_fwd(*ctx, run.forward());
      return dot(run.y, run.dy) + dot(run.pre, run.dpre) + (parts > 1 ? dot(run.post, run.dpost) : 0.0) +
             (parts > 2 ? dot(run.res, run.dres) : 0.0);
    };
    loss();
    hyper_connection_bwd(*ctx, run.backward());
    check_slopes("dx", run.x, run.dx, loss);
    check_slopes("dbase", run.base, run.dbase, loss);
    check_slopes("dscale", run.scale, run.dscale, loss);
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
};

TEST_CASE("gradients of mixes are slopes") {
  auto ctx = make_cpu_context(1);
  for (bool transposed : {false, true}) {
    MixRun r(DType::f32, 3, 2, 5, transposed);
    auto loss = [&] {
      hyper_connection_mix_fwd(*ctx, r.forward());
      return dot(r.y, r.dy);
    };
    hyper_connection_mix_bwd(*ctx, r.backward());
    check_slopes("dx", r.x, r.dx, loss);
    check_slopes("df", r.f, r.df, loss);
    check_slopes("dmix", r.mix, r.dmix, loss);
    check_slopes("dpost", r.post, r.dpost, loss);
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
  refused([](HyperConnectionFwd& a) { a.options.streams = 9; },
          "[hyper_connection] streams must be in [1, 8], got 9");
  refused([](HyperConnectionFwd& a) { a.options.streams = 5; },
          "[hyper_connection] x must have columns in 5 streams, got 32");
  refused([](HyperConnectionFwd& a) { a.weight.rows = 23; },
          "[hyper_connection] weight must have 4, 8 or 24 rows, got 23");
  refused([](HyperConnectionFwd& a) { a.scale.size = 2; }, "[hyper_connection] scale must be [3], got [2]");
  refused([](HyperConnectionFwd& a) { a.base.dtype = DType::bf16; },
          "[hyper_connection] base must be float32, got bfloat16");
  refused([](HyperConnectionFwd& a) { a.res.cols = 4; },
          "[hyper_connection] res must be [3, 16], got [3, 4]");
  refused([](HyperConnectionFwd& a) { a.options.iterations = 0; },
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
