// Statistics of similarities in the core: refusals before anything is written.
#include "table.h"
#include "tigon/ops/contrastive/contrastive.h"

namespace tigon::test {
namespace {

constexpr int64_t kQueries = 5, kDocuments = 7, kSize = 6, kPicks = 2;

struct Run {
  Table q{DType::f32, kQueries, kSize}, d{DType::f32, kDocuments, kSize},
      scale = Table::column(DType::f32, 1);
  Table guide_q{DType::bf16, kQueries, 4}, guide_d{DType::bf16, kDocuments, 4};
  Table labels{DType::i64, kQueries, kPicks}, limit = Table::column(DType::f32, kQueries);
  Table row_lse = Table::column(DType::f64, kQueries), col_lse = Table::column(DType::f64, kDocuments),
        picked = Table::column(DType::f32, kQueries* kPicks);

  Run() {
    q.normal(1), d.normal(2), guide_q.normal(3), guide_d.normal(4);
    scale.fill([](int64_t, int64_t) { return 0.4; });
    limit.fill([](int64_t, int64_t) { return 1.5; });
    labels.fill([](int64_t r, int64_t k) { return k == 0 ? r : r == 3 ? r : -100; });  // one twice
  }
  ContrastiveScores scores() {
    return {.q = q.matrix(),
            .d = d.matrix(),
            .scale = scale.vector(),
            .labels = labels.matrix(),
            .limit = limit.vector(),
            .guide_q = guide_q.matrix(),
            .guide_d = guide_d.matrix()};
  }
};

TEST_CASE("refusals come before anything is written") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run;
    const Table before = run.row_lse;
    ContrastiveFwd a{run.scores(), run.row_lse.vector(), run.col_lse.vector(), run.picked.vector()};
    change(a);
    CHECK_THROWS_WITH_AS(contrastive_fwd(*ctx, a), doctest::Contains(message), Error);
    CHECK(run.row_lse == before);
  };
  refused("guides must be floats", [](ContrastiveFwd& a) { a.guide_q.dtype = a.guide_d.dtype = DType::i64; });
  refused("guide_q and guide_d must be given together", [](ContrastiveFwd& a) { a.guide_d = {}; });
  refused("at least one row", [](ContrastiveFwd& a) { a.d.rows = 0; });
  refused("limit", [](ContrastiveFwd& a) { a.limit.size = 4; });
}

}  // namespace
}  // namespace tigon::test
