#include "tigon/ops/divergence/distillation.h"

#include "tigon/base/aligned_rows.h"
#include "tigon/base/require.h"

namespace tigon {
namespace {

constexpr const char* kOp = "distillation";

void check_side(const char* name, const DistillationSide& side, int64_t cols) {
  if (side.bias) require_vector(kOp, "bias", side.bias, cols, DType::f32);
  TIGON_CHECK(kOp, side.softcap >= 0.0f, name, " softcap must be > 0 or none, got ", side.softcap);
  TIGON_CHECK(kOp, side.temperature > 0.0f, name, " temperature must be > 0, got ", side.temperature);
}

}  // namespace

void distillation_rows(Context& ctx, const DistillationRows& a) {
  int64_t rows = a.student.rows, cols = a.student.cols;
  TIGON_CHECK(kOp, cols >= 1, "student must have at least one column, got ", cols);
  require_dtype(kOp, "student", a.student.dtype, DType::f32);
  require_float(kOp, "teacher", a.teacher.dtype);
  require_matrix(kOp, "teacher", a.teacher, rows, cols, a.teacher.dtype);
  check_side("student's", a.student_side, cols);
  check_side("teacher's", a.teacher_side, cols);
  require_optional(kOp, "labels", a.labels, rows, DType::i64);
  TIGON_CHECK(kOp, a.labels || !a.has_hard(), "labels must be given for a hard loss, got none");
  require_scale(kOp, a.scale, rows);
  if (a.dstudent.data != nullptr) {
    require_float(kOp, "dstudent", a.dstudent.dtype);
    require_matrix(kOp, "dstudent", a.dstudent, rows, cols, a.dstudent.dtype);
  }
  require_vector(kOp, "loss", a.loss, rows, DType::f32);
  require_optional(kOp, "soft", a.soft, rows);
  require_optional(kOp, "hard", a.hard, rows);
  require_optional(kOp, "entropy", a.entropy, rows);
  TIGON_CHECK(kOp, int(a.kind) >= 0 && int(a.kind) < kDivergenceKinds, "kind must be one of 0 to ",
              kDivergenceKinds - 1, ", got ", int(a.kind));
  TIGON_CHECK(kOp, a.kind != DivergenceKind::jsd || (a.beta > 0.0f && a.beta < 1.0f),
              "beta must be in (0, 1), got ", a.beta);
  if (rows == 0) return;
  DistillationRows aligned = a;
  AlignedRows rows_of(ctx);
  for (Matrix* m : {&aligned.student, &aligned.teacher}) rows_of.read(*m);
  rows_of.write(aligned.dstudent);
  TIGON_RUN(kOp, ctx, distillation_rows, aligned);
  rows_of.finish();
}

}  // namespace tigon
