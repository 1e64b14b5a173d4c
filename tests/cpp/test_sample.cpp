// Draws in the core: refusals.
#include "tigon/ops/sample/sample.h"

#include "table.h"

namespace tigon::test {

TEST_CASE("sample: refusals") {
  auto ctx = make_cpu_context(1);
  Table x(DType::f32, 4, 8);
  x.normal(1);
  int64_t seed[3] = {}, ids[4] = {};
  Sample a = {.logits = x.matrix(),
              .seed = {seed, DType::i64, 3},
              .need_log_prob = false,
              .ids = {ids, DType::i64, 4}};
  CHECK_THROWS_WITH_AS(sample(*ctx, a), "[sample] seed must be [1] or [4], got [3]", Error);
  a.seed.size = 1;
  a.ids.size = 3;
  CHECK_THROWS_WITH_AS(sample(*ctx, a), "[sample] ids must be [4], got [3]", Error);
}

}  // namespace tigon::test
