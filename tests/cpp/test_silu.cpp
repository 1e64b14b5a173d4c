// x * sigmoid(x) in the core against the same formula in double, the formula against finite differences,
// refusals, bitwise promises.
#include "tigon/ops/silu/silu.h"

#include "activation.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/silu/silu_math.inc"
}  // namespace oracle

namespace {

const Activation kOp = {"silu", silu_fwd, silu_bwd, oracle::silu_y<double>, oracle::silu_dx<double>};

TEST_CASE("the formula's gradient is its slope") { check_slope(kOp, {-20.0, -1.2785, -0.3, 0.0, 0.7, 5.0}); }

TEST_CASE("far out, zeros, infinities, NaN") {
  check_points(kOp, {{-0.0, 0.0, 0.5},
                     {200.0, 200.0, 1.0},
                     {-200.0, 0.0, 0.0},
                     {float(1e30), float(1e30), 1.0},
                     {INFINITY, INFINITY, NAN},
                     {-INFINITY, NAN, NAN},
                     {NAN, NAN, NAN}});
}

TEST_CASE("the same bits everywhere, in place too") { check_bits(kOp); }

TEST_CASE("refusals write nothing") { check_refusals(kOp); }

}  // namespace
}  // namespace tigon::test
