// The ops of one tensor in the core: the formulas against finite differences, exact values, refusals, bitwise
// promises.
#include "activation.h"

#include "tigon/ops/mish/mish.h"
#include "tigon/ops/relu_squared/relu_squared.h"
#include "tigon/ops/silu/silu.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/mish/mish_math.inc"
#include "tigon/ops/relu_squared/relu_squared_math.inc"
#include "tigon/ops/silu/silu_math.inc"
}  // namespace oracle

namespace {

#define TIGON_ACTIVATION(op) #op, op##_fwd, op##_bwd, oracle::op##_y<double>, oracle::op##_dx<double>
const Activation kOps[] = {
    {TIGON_ACTIVATION(silu),
     {-20.0, -1.2785, -0.3, 0.0, 0.7, 5.0},
     {{-0.0, 0.0, 0.5},
      {200.0, 200.0, 1.0},
      {-200.0, 0.0, 0.0},
      {float(1e30), float(1e30), 1.0},
      {INFINITY, INFINITY, NAN},
      {-INFINITY, NAN, NAN},
      {NAN, NAN, NAN}}},
    {TIGON_ACTIVATION(relu_squared),
     {-20.0, -0.3, 0.0, 0.7, 5.0},
     {{-0.0, 0.0, 0.0},
      {INFINITY, INFINITY, INFINITY},
      {-INFINITY, 0.0, 0.0},
      {NAN, NAN, NAN},
      {-1.0, 0.0, 0.0}}},
    {TIGON_ACTIVATION(mish),
     {-20.0, -1.1925, -0.3, 0.0, 0.7, 5.0},
     {{200.0, 200.0, 1.0}, {-INFINITY, NAN, NAN}, {INFINITY, INFINITY, NAN}, {NAN, NAN, NAN}}},
};

template <class Check>
void for_each_op(const Check& check) {
  for (const Activation& op : kOps) {
    INFO(op.op);
    check(op);
  }
}

TEST_CASE("the formula's gradient is its slope") { for_each_op(check_slope); }
TEST_CASE("far out, zeros, infinities, NaN") { for_each_op(check_points); }
TEST_CASE("the same bits everywhere, in place too") { for_each_op(check_bits); }
TEST_CASE("refusals write nothing") { for_each_op(check_refusals); }

}  // namespace
}  // namespace tigon::test
