// The ops of one tensor at the numbers where a formula may fail: exact values under every instruction set, in
// vectors and tails.
#include "table.h"
#include "tigon/ops/mish/mish.h"
#include "tigon/ops/relu_squared/relu_squared.h"
#include "tigon/ops/silu/silu.h"

namespace tigon::test {
namespace {

struct Point {
  double x, y, dx;  // dx where dy is 1
};
void check_points(void (*forward)(Context&, const ActivationFwd&),
                  void (*backward)(Context&, const ActivationBwd&), const std::vector<Point>& points) {
  auto at = [&](int64_t c) { return points[size_t(c) % points.size()]; };
  for_each_isa([&](NamedIsa isa) {
    INFO(isa.name);
    auto ctx = make_cpu_context(1);
    Table x(DType::f32, 1, 23), dy(DType::f32, 1, 23), y(DType::f32, 1, 23), dx(DType::f32, 1, 23);
    x.fill([&](int64_t, int64_t c) { return at(c).x; });
    dy.fill([](int64_t, int64_t) { return 1.0; });
    forward(*ctx, {.x = x.matrix(), .y = y.matrix()});
    backward(*ctx, {.dy = dy.matrix(), .x = x.matrix(), .dx = dx.matrix()});
    check_exact("y", y, [&](int64_t, int64_t c) { return at(c).y; });
    check_exact("dx", dx, [&](int64_t, int64_t c) { return at(c).dx; });
  });
}

TEST_CASE("silu") {
  check_points(silu_fwd, silu_bwd,
               {{-0.0, 0.0, 0.5},
                {200.0, 200.0, 1.0},
                {-200.0, 0.0, 0.0},
                {float(1e30), float(1e30), 1.0},
                {INFINITY, INFINITY, NAN},
                {-INFINITY, NAN, NAN},
                {NAN, NAN, NAN}});
}
TEST_CASE("relu_squared") {
  check_points(relu_squared_fwd, relu_squared_bwd,
               {{-0.0, 0.0, 0.0},
                {INFINITY, INFINITY, INFINITY},
                {-INFINITY, 0.0, 0.0},
                {NAN, NAN, NAN},
                {-1.0, 0.0, 0.0}});
}
TEST_CASE("mish") {
  check_points(mish_fwd, mish_bwd,
               {{200.0, 200.0, 1.0}, {-INFINITY, NAN, NAN}, {INFINITY, INFINITY, NAN}, {NAN, NAN, NAN}});
}

}  // namespace
}  // namespace tigon::test
