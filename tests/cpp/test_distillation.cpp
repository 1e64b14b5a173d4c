// The row pass of distillation heads: refusals.
#include "table.h"
#include "tigon/ops/divergence/distillation.h"

namespace tigon::test {
namespace {

struct Run {
  static constexpr int64_t kRows = 4, kCols = 8;
  Table student{DType::f32, kRows, kCols}, teacher{DType::bf16, kRows, kCols},
      dstudent{DType::bf16, kRows, kCols};
  Table labels = Table::column(DType::i64, kRows), loss = Table::column(DType::f32, kRows);

  Run() {
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

TEST_CASE("refusals write nothing") {
  Run run, untouched = run;
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
