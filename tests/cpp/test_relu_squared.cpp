// relu(x)^2 in the core against the same formula in double, the formula against finite differences, refusals,
// bitwise promises.
#include "tigon/ops/relu_squared/relu_squared.h"

#include "activation.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/relu_squared/relu_squared_math.inc"
}  // namespace oracle

namespace {

const Activation kOp = {"relu_squared", relu_squared_fwd, relu_squared_bwd, oracle::relu_squared_y<double>,
                        oracle::relu_squared_dx<double>};

TEST_CASE("the formula's gradient is its slope") { check_slope(kOp, {-20.0, -0.3, 0.0, 0.7, 5.0}); }

TEST_CASE("zeros, infinities, NaN") {
  check_points(kOp, {{-0.0, 0.0, 0.0},
                     {INFINITY, INFINITY, INFINITY},
                     {-INFINITY, 0.0, 0.0},
                     {NAN, NAN, NAN},
                     {-1.0, 0.0, 0.0}});
}

TEST_CASE("the same bits everywhere, in place too") { check_bits(kOp); }

TEST_CASE("refusals write nothing") { check_refusals(kOp); }

}  // namespace
}  // namespace tigon::test
