// The divergences in the core: in place, refusals.
#include "table.h"
#include "tigon/ops/divergence/divergence.h"

namespace tigon::test {
namespace {

const DivergenceKind kKinds[] = {DivergenceKind::forward_kl, DivergenceKind::reverse_kl, DivergenceKind::jsd,
                                 DivergenceKind::tvd};

struct Run {
  DivergenceRows a;
  Table student, teacher, dstudent, labels, loss;

  Run(DivergenceKind kind, DType t, int64_t rows, int64_t cols)
      : student(t, rows, cols, 3),
        teacher(t, rows, cols, 1),
        dstudent(t, rows, cols, 2),
        labels(Table::column(DType::i64, rows)),
        loss(Table::column(DType::f32, rows)) {
    student.normal(1, 2.0), teacher.normal(2, 2.0);
    labels.fill([](int64_t, int64_t r) { return r % 4 == 3 ? -100 : r; });
    a.kind = kind, a.beta = 0.3f, a.temperature = 1.5f, a.factor = 0.25f;
  }
  DivergenceRows rows() {
    DivergenceRows call = a;
    call.student = student.matrix(), call.teacher = teacher.matrix(), call.dstudent = dstudent.matrix();
    call.labels = labels.vector(), call.loss = loss.vector();
    return call;
  }
};

TEST_CASE("in place") {
  for (DivergenceKind kind : kKinds)
    for (DType t : kFloats) {
      INFO("kind " << int(kind) << " " << text(t));
      auto ctx = make_cpu_context(2);
      Run apart(kind, t, 5, 77), over(kind, t, 5, 77);
      divergence_rows(*ctx, apart.rows());
      DivergenceRows a = over.rows();
      a.dstudent = a.student;
      divergence_rows(*ctx, a);
      CHECK(over.loss == apart.loss);
      check_close(
          "dstudent over student", over.student, [&](int64_t r, int64_t c) { return apart.dstudent(r, c); },
          [](int64_t, int64_t) { return 0.0; });
    }
}

TEST_CASE("refusals write nothing") {
  Run run(DivergenceKind::jsd, DType::f32, 4, 8);
  Run untouched = run;
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

}  // namespace
}  // namespace tigon::test
