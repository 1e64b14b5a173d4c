// LoRA in the core: refusals.
#include "tigon/ops/lora_linear/lora_linear.h"

#include "table.h"

namespace tigon::test {
namespace {

constexpr int64_t kRows = 9, kIn = 21, kOut = 13, kRank = 8;

TEST_CASE("lora_linear: refused before anything is written") {
  Table x = Table(DType::f32, kRows, kIn).normal(1), weight = Table(DType::f32, kOut, kIn).normal(2),
        a = Table(DType::f32, kRank, kIn).normal(3), b = Table(DType::f32, kOut, kRank).normal(4),
        y{DType::f32, kRows, kOut}, t{DType::f32, kRows, kRank};
  const Table before = y;
  int64_t seed = 77;
  auto ctx = make_cpu_context();
  const LoraBase base = {.weight = weight.matrix(), .y = y.matrix()};
  LoraAdapter adapter = {.base = 0, .a = a.matrix(), .b = b.matrix(), .scale = 0.5f, .dropout = 0.4};
  LoraLinearFwd call{.x = x.matrix(), .bases = {&base, 1}, .adapters = {&adapter, 1}, .t = t.matrix()};
  CHECK_THROWS_WITH_AS(lora_linear_fwd(*ctx, call), "[lora_linear] seed must be [1], got [0]", Error);
  call.seed = {.data = &seed, .dtype = DType::i64, .size = 1};
  adapter.base = 1;
  CHECK_THROWS_WITH_AS(lora_linear_fwd(*ctx, call),
                       "[lora_linear] an adapter's linear must be in [0, 1), got 1", Error);
  adapter.base = 0, adapter.dropout = 1.0;
  CHECK_THROWS_WITH_AS(lora_linear_fwd(*ctx, call), "[lora_linear] dropout must be in [0, 1), got 1", Error);
  CHECK(y == before);
}

}  // namespace
}  // namespace tigon::test
