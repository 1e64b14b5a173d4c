// Float8 in the core: refusals.
#include "tigon/ops/fp8_linear/fp8_linear.h"

#include <vector>

#include "table.h"

namespace tigon::test {
namespace {

struct Bytes {
  int64_t rows, cols;
  std::vector<uint8_t> bytes;
  std::vector<float> scales;
  Bytes(int64_t r, int64_t c) : rows(r), cols(c), bytes(size_t(r * c)), scales(size_t(r)) {}
  Matrix matrix() { return {bytes.data(), DType::e4m3, rows, cols, cols}; }
  Vector vector() { return {scales.data(), DType::f32, rows}; }
};

}  // namespace

TEST_CASE("float8: refusals") {
  auto ctx = make_cpu_context(1);
  Table x(DType::f32, 4, 24), y(DType::f32, 4, 16);
  x.normal(1);
  Bytes q(4, 24), w(16, 24);
  const Fp8LinearFwd call = {
      .xq = q.matrix(), .xs = q.vector(), .wq = w.matrix(), .ws = w.vector(), .y = y.matrix()};
  CHECK_THROWS_WITH_AS(fp8_linear_fwd(*ctx, call),
                       "[fp8_linear] weight must have columns by the multiple of 16, got 24", Error);
  CHECK_THROWS_WITH_AS(fp8_linear_bwd(*ctx, {.dy = y.matrix(), .need_dweight = false}),
                       "[fp8_linear_bwd] wt must be there with need_dx, got none", Error);
  Bytes wrong(3, 24);
  CHECK_THROWS_WITH_AS(fp8_quantize(*ctx, {.x = x.matrix(), .q = wrong.matrix(), .scales = wrong.vector()}),
                       "[fp8_quantize] q must be [4, 24], got [3, 24]", Error);
}

}  // namespace tigon::test
