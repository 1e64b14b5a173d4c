// Draws in the core: tokens and log-probabilities of small rows, rows by themselves, refusals.
#include "tigon/ops/sample/sample.h"

#include <cmath>
#include <vector>

#include "table.h"

namespace tigon::test {
namespace {

struct Draws {
  std::vector<int64_t> ids;
  std::vector<float> log_prob;
};
Draws draw(Sample a, std::vector<int64_t> seed) {
  auto ctx = make_cpu_context(2);
  Draws found = {std::vector<int64_t>(size_t(a.logits.rows), -7),
                 std::vector<float>(size_t(a.logits.rows), NAN)};
  a.seed = {seed.data(), DType::i64, int64_t(seed.size())};
  a.ids = {found.ids.data(), DType::i64, a.logits.rows};
  a.log_prob = {found.log_prob.data(), DType::f32, a.logits.rows};
  sample(*ctx, a);
  return found;
}

}  // namespace

TEST_CASE("sample: tokens that are left, and their probabilities") {
  Table x(DType::f32, 300, 37);
  x.normal(1);
  const Matrix logits = x.matrix();
  const Draws all = draw({.logits = logits}, {5}), few = draw({.logits = logits, .top_k = 3}, {5});
  const Draws one = draw({.logits = logits, .temperature = 0.0f}, {5});
  for (int64_t t = 0; t < logits.rows; ++t) {
    const float* z = logits.row<float>(t);
    double sum = 0.0;
    int64_t larger = 0, best = 0;
    for (int64_t c = 0; c < logits.cols; ++c) {
      sum += std::exp(double(z[c]));
      larger += z[c] > z[few.ids[size_t(t)]];
      best = z[c] > z[best] ? c : best;
    }
    CHECK(larger < 3);
    CHECK(one.ids[size_t(t)] == best);
    CHECK(std::abs(all.log_prob[size_t(t)] - (z[all.ids[size_t(t)]] - std::log(sum))) < 1e-5);
  }
}

TEST_CASE("sample: a row's draw depends on its own seed, or on its number") {
  Table x(DType::bf16, 40, 501);
  x.normal(2);
  const Matrix logits = x.matrix(), later = {logits.row<bf16>(20), logits.dtype, 20, 501, logits.stride};
  std::vector<int64_t> seeds(40);
  for (size_t i = 0; i < 40; ++i) seeds[i] = int64_t(i) * 31 - 7;
  const Draws by_seed = draw({.logits = logits, .top_p = 0.9f}, seeds);
  const Draws of_seeds = draw({.logits = later, .top_p = 0.9f}, {seeds.begin() + 20, seeds.end()});
  const Draws by_number = draw({.logits = logits}, {9}),
              of_numbers = draw({.logits = later, .first_row = 20}, {9});
  for (size_t i = 0; i < 20; ++i) {
    CHECK(by_seed.ids[20 + i] == of_seeds.ids[i]);
    CHECK(by_number.ids[20 + i] == of_numbers.ids[i]);
  }
}

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
