// The router in the core: ties, groups, refusals. What it has in common with other ops: test_fields.cpp.
#include "tigon/ops/route/route.h"

#include "table.h"

namespace tigon::test {
namespace {

struct Run {
  RouteOptions options;
  Table logits = Table(DType::f32, 4, 12).normal(1, 2.0), weights{DType::f32, 4, 3}, ids{DType::i64, 4, 3},
        aux{DType::f32, 1, 1}, daux = aux, dlogits = logits;

  void forward(Context& ctx) {
    route_fwd(
        ctx,
        {.logits = logits.matrix(), .weights = weights.matrix(), .ids = ids.matrix(), .options = options});
  }
};

TEST_CASE("the choice: best first, ties by index, groups") {
  auto ctx = make_cpu_context(1);
  Table logits(DType::f32, 3, 8), weights(DType::f32, 3, 3), ids(DType::i64, 3, 3);
  const double rows[3][8] = {{0.0, 2.0, -0.0, 2.0, 0.0, 1.0, 2.0, 1.0},
                             {-INFINITY, -INFINITY, -INFINITY, 1.0, -INFINITY, -INFINITY, -INFINITY, 0.0},
                             {1.0, 5.0, NAN, 2.0, 7.0, NAN, 1.0, 3.0}};
  logits.fill([&](int64_t r, int64_t c) { return rows[r][c]; });
  auto chosen = [&](const RouteOptions& options, const double (&want)[3][3]) {
    route_fwd(
        *ctx,
        {.logits = logits.matrix(), .weights = weights.matrix(), .ids = ids.matrix(), .options = options});
    for (int64_t r = 0; r < 3; ++r)
      for (int64_t c = 0; c < 3; ++c) CHECK(ids(r, c) == want[r][c]);
  };
  chosen({}, {{1, 3, 6}, {3, 7, 0}, {2, 5, 4}});
  for (int64_t c = 0; c < 3; ++c) CHECK(std::isnan(weights(2, c)));
  CHECK((weights(1, 0) > weights(1, 1) && weights(1, 2) == 0.0));
  chosen({.num_groups = 4, .top_groups = 2}, {{1, 3, 0}, {3, 7, 2}, {2, 5, 4}});
  chosen({.score = RouteScore::sigmoid,
          .num_groups = 2,
          .top_groups = 1,
          .group_score = RouteGroupScore::sum_of_two},
         {{1, 3, 0}, {3, 0, 1}, {2, 1, 3}});
}

TEST_CASE("refused calls name argument, expected and given, and write nothing") {
  auto ctx = make_cpu_context(1);
  Run run;
  const Table weights = run.weights, ids = run.ids;
  auto refused = [&](RouteOptions options, const char* text) {
    run.options = options;
    CHECK_THROWS_WITH_AS(run.forward(*ctx), doctest::Contains(text), Error);
  };
  refused({.num_groups = 5}, "num_groups must divide 12, got 5");
  refused({.num_groups = 4, .top_groups = 5}, "top_groups must be in [1, 4], got 5");
  refused({.num_groups = 12, .top_groups = 2}, "top_k must be at most 2");
  refused({.num_groups = 12, .top_groups = 4, .group_score = RouteGroupScore::sum_of_two},
          "group_score must be max for groups of one expert");
  refused({.scale = INFINITY}, "scale must be finite");
  Table wide(DType::f32, 2, 1025), most(DType::f64, 4, 12), short_ids(DType::i64, 3, 3);
  CHECK_THROWS_WITH_AS(
      route_fwd(*ctx, {.logits = wide.matrix(), .weights = run.weights.matrix(), .ids = run.ids.matrix()}),
      doctest::Contains("logits must have 1 to 1024 columns, got 1025"), Error);
  CHECK_THROWS_WITH_AS(
      route_fwd(*ctx, {.logits = most.matrix(), .weights = run.weights.matrix(), .ids = run.ids.matrix()}),
      doctest::Contains("logits must be float32, bfloat16 or float16, got float64"), Error);
  CHECK_THROWS_WITH_AS(
      route_fwd(*ctx,
                {.logits = run.logits.matrix(), .weights = run.weights.matrix(), .ids = short_ids.matrix()}),
      doctest::Contains("ids must have 4 rows, got 3"), Error);
  CHECK_THROWS_WITH_AS(route_fwd(*ctx, {.logits = run.logits.matrix(),
                                        .weights = run.weights.matrix(),
                                        .ids = run.ids.matrix(),
                                        .aux = run.aux.vector()}),
                       doctest::Contains("z must be [1], got [0]"), Error);
  CHECK_THROWS_WITH_AS(route_bwd(*ctx, {.logits = run.logits.matrix(),
                                        .ids = run.ids.matrix(),
                                        .daux = run.daux.vector(),
                                        .dlogits = run.dlogits.matrix()}),
                       doctest::Contains("balance must be [13], got [0]"), Error);
  CHECK(run.weights == weights);
  CHECK(run.ids == ids);
}

}  // namespace
}  // namespace tigon::test
