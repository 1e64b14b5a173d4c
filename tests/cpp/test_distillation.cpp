// The row pass of distillation heads: refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/divergence/distillation.h"

namespace tigon::test {
namespace {

const DivergenceKind kKinds[] = {DivergenceKind::forward_kl, DivergenceKind::reverse_kl, DivergenceKind::jsd,
                                 DivergenceKind::tvd};

struct Run {
  DistillationRows a;
  Table student, teacher, bias, teacher_bias, dstudent, labels, scale, loss, soft, hard, entropy;

  Run(DivergenceKind kind, DType teacher_type, DType gradient, int64_t rows, int64_t cols)
      : student(DType::f32, rows, cols, 3),
        teacher(teacher_type, rows, cols, 1),
        bias(Table::column(DType::f32, cols)),
        teacher_bias(Table::column(DType::f32, cols)),
        dstudent(gradient, rows, cols, 2),
        labels(Table::column(DType::i64, rows)),
        scale(Table::column(DType::f32, rows)),
        loss(Table::column(DType::f32, rows)),
        soft(Table::column(DType::f32, rows)),
        hard(Table::column(DType::f32, rows)),
        entropy(Table::column(DType::f32, rows)) {
    student.normal(1, 2.0), teacher.normal(2, 2.0), bias.normal(3), teacher_bias.normal(4);
    labels.fill([&](int64_t, int64_t r) { return r % 4 == 3 ? -100 : (r * 37) % cols; });
    scale.fill([](int64_t, int64_t r) { return 0.5 + 0.25 * double(r); });
    a.kind = kind, a.beta = 0.3f, a.soft_weight = 0.7f, a.hard_weight = 0.4f;
    a.student_side = {.logit_scale = 0.8f, .softcap = 5.0f, .temperature = 1.5f};
    a.teacher_side = {.logit_scale = 1.2f, .temperature = 2.5f};
  }
  DistillationRows rows() {
    DistillationRows call = a;
    call.student = student.matrix(), call.teacher = teacher.matrix(), call.dstudent = dstudent.matrix();
    call.student_side.bias = bias.vector(), call.teacher_side.bias = teacher_bias.vector();
    call.labels = labels.vector(), call.scale = scale.vector(), call.loss = loss.vector();
    call.soft = soft.vector(), call.hard = hard.vector(), call.entropy = entropy.vector();
    return call;
  }
  std::vector<Table> results() const { return {loss, soft, hard, entropy, dstudent}; }
};

TEST_CASE("the same bits everywhere") {
  for (DivergenceKind kind : kKinds)
    for (DType t : kFloats) {
      INFO("kind " << int(kind) << " " << text(t));
      check_same_everywhere([&](Context& ctx) {
        Run run(kind, t, t, 9, 5000);
        distillation_rows(ctx, run.rows());
        return run.results();
      });
    }
}

TEST_CASE("refusals write nothing") {
  Run run(DivergenceKind::jsd, DType::bf16, DType::bf16, 4, 8);
  Run untouched = run;
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
  for (size_t i = 0; i < run.results().size(); ++i) CHECK(run.results()[i] == untouched.results()[i]);
}

}  // namespace
}  // namespace tigon::test
