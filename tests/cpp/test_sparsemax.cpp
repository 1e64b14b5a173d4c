// Sparsemax in the core: gradients are slopes, refusals, bitwise promises.
#include "tigon/ops/sparsemax/sparsemax.h"

#include "table.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/sparsemax/sparsemax_math.inc"
}  // namespace oracle

namespace {

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

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(1);
  Run run(DType::f32, 3, 9, 0.3);
  run.both(*ctx);
  auto loss = [&] {
    sparsemax_fwd(*ctx, {.x = run.x.matrix(), .y = run.y.matrix()});
    return dot(run.y, run.dy);
  };
  check_slopes("dx", run.x, run.dx, loss, 1e-3);
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
