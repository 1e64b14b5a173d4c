// The divergences in the core: refusals.
#include "table.h"
#include "tigon/ops/divergence/distillation.h"
#include "tigon/ops/divergence/divergence.h"

namespace tigon::test {
namespace {

struct Run {
  Table student = Table(DType::f32, 4, 8).normal(1, 2.0), teacher = Table(DType::f32, 4, 8).normal(2, 2.0),
        dstudent{DType::f32, 4, 8}, labels = Table::column(DType::i64, 4),
        loss = Table::column(DType::f32, 4);

  DivergenceRows rows() {
    return {.student = student.matrix(),
            .teacher = teacher.matrix(),
            .labels = labels.vector(),
            .dstudent = dstudent.matrix(),
            .loss = loss.vector(),
            .kind = DivergenceKind::jsd,
            .beta = 0.3f,
            .temperature = 1.5f};
  }
};

TEST_CASE("refusals write nothing") {
  Run run, untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* message) {
    DivergenceRows a = run.rows();
    change(a);
    CHECK_THROWS_WITH_AS(divergence_rows(*ctx, a), message, Error);
  };
  refused([](DivergenceRows& a) { a.teacher.cols = 7; }, "[divergence] teacher must be [4, 8], got [4, 7]");
  refused([](DivergenceRows& a) { a.loss.size = 3; }, "[divergence] loss must be [4], got [3]");
  refused([](DivergenceRows& a) { a.beta = 1.0f; }, "[divergence] beta must be in (0, 1), got 1");
  refused([](DivergenceRows& a) { a.temperature = 0.0f; }, "[divergence] temperature must be > 0, got 0");
  refused([](DivergenceRows& a) { a.log_probs = true; },
          "[divergence] temperature must be 1 with log-probabilities, got 1.5");
  refused([](DivergenceRows& a) { a.labels.dtype = DType::f32; },
          "[divergence] labels must be int64, got float32");
  CHECK(run.loss == untouched.loss);
  CHECK(run.dstudent == untouched.dstudent);
}

// The row pass of distillation heads.
struct Distilled {
  static constexpr int64_t kRows = 4, kCols = 8;
  Table student{DType::f32, kRows, kCols}, teacher{DType::bf16, kRows, kCols},
      dstudent{DType::bf16, kRows, kCols};
  Table labels = Table::column(DType::i64, kRows), loss = Table::column(DType::f32, kRows);

  Distilled() {
    student.normal(1, 2.0), teacher.normal(2, 2.0);
    labels.fill([](int64_t, int64_t r) { return r; });
  }
  DistillationRows rows() {
    return {.student = student.matrix(),
            .teacher = teacher.matrix(),
            .labels = labels.vector(),
            .dstudent = dstudent.matrix(),
            .loss = loss.vector(),
            .kind = DivergenceKind::jsd,
            .beta = 0.3f,
            .soft_weight = 0.7f,
            .hard_weight = 0.4f};
  }
};

TEST_CASE("refusals of distillation write nothing") {
  Distilled run, untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* message) {
    DistillationRows a = run.rows();
    change(a);
    CHECK_THROWS_WITH_AS(distillation_rows(*ctx, a), message, Error);
  };
  using A = DistillationRows;
  refused([](A& a) { a.student.dtype = DType::bf16; },
          "[distillation] student must be float32, got bfloat16");
  refused([](A& a) { a.teacher.cols = 7; }, "[distillation] teacher must be [4, 8], got [4, 7]");
  refused([](A& a) { a.labels = {}; }, "[distillation] labels must be given for a hard loss, got none");
  refused([](A& a) { a.beta = 0.0f; }, "[distillation] beta must be in (0, 1), got 0");
  refused([](A& a) { a.teacher_side.temperature = 0.0f; },
          "[distillation] teacher's temperature must be > 0, got 0");
  refused([](A& a) { a.student_side.softcap = -1.0f; },
          "[distillation] student's softcap must be > 0 or none, got -1");
  run.labels.set(0, 2, 8.0);
  refused([](A&) {}, "[distillation] labels must be in [0, 8) or -100 (ignored), got 8 in row 2");
  CHECK(run.loss == untouched.loss);
  CHECK(run.dstudent == untouched.dstudent);
}

}  // namespace
}  // namespace tigon::test
