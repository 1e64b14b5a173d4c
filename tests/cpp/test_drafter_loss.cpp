// A drafter's losses in the core: refusals before anything is written.
#include "table.h"
#include "tigon/ops/drafter_loss/drafter_loss.h"

namespace tigon::test {
namespace {

constexpr int64_t kRows = 5, kSteps = 2, kAll = kRows * kSteps, kHidden = 7, kVocab = 6, kTeacher = 11;

struct Run {
  Table hidden{DType::f32, kAll, kHidden}, weight{DType::f32, kVocab, kHidden};
  Table states{DType::f32, kRows, 4}, head{DType::f32, kTeacher, 4};
  Table target = Table::column(DType::i64, kAll), rows = Table::column(DType::i64, kRows);
  Table dhidden{DType::f32, kAll, kHidden}, dweight{DType::f32, kVocab, kHidden};
  Table scalars{DType::f32, 1, 2}, results{DType::f32, 3, kAll};
  std::vector<int32_t> ids = {-1, 3, -1, 0, 5, -1, 1, 2, -1, 4, -1};

  Run() {
    hidden.normal(1), weight.normal(2, 0.5), states.normal(3), head.normal(4, 0.5);
    target.fill([](int64_t, int64_t r) { return r / kSteps == 2 ? -100 : 0; });
    rows.fill([](int64_t, int64_t r) { return r == 2 ? -100 : 0; });
  }
  Vector part(Table& t, int64_t first, int64_t size) {
    return {.data = t.matrix().row<float>(0) + first, .dtype = DType::f32, .size = size};
  }
  DrafterLoss call() {
    return {.head = {.hidden = hidden.matrix(),
                     .weight = weight.matrix(),
                     .dhidden = dhidden.matrix(),
                     .dweight = dweight.matrix()},
            .labels = {.target = target.vector()},
            .reduction = {.total = part(scalars, 0, 1), .scale = part(scalars, 1, 1)},
            .teacher_hidden = states.matrix(),
            .teacher_weight = head.matrix(),
            .teacher_target = rows.vector(),
            .draft_id = {.data = ids.data(), .dtype = DType::i32, .size = kTeacher},
            .loss = part(results, 0, kAll),
            .overlap = part(results, kAll, kAll),
            .counted = part(results, 2 * kAll, kAll),
            .kind = DrafterKind::lk,
            .overlap_outside = true};
  }
};

TEST_CASE("refusals come before anything is written") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run;
    Table before = run.dhidden;
    DrafterLoss a = run.call();
    change(a);
    CHECK_THROWS_WITH_AS(drafter_loss(*ctx, a), doctest::Contains(message), Error);
    CHECK(run.dhidden == before);
  };
  refused("draft_id must be given", [](DrafterLoss& a) { a.draft_id = {}; });
  refused("hidden must have a multiple of", [](DrafterLoss& a) { a.teacher_hidden.rows = 4; });
  refused("eta must be >= 0", [](DrafterLoss& a) { a.eta = -1.0f; });
  refused("chunk_rows must be >= 1", [](DrafterLoss& a) { a.labels.chunk_rows = -1; });
}

}  // namespace
}  // namespace tigon::test
