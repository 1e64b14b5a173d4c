#include "tigon/ops/divergence/divergence.h"

#include <algorithm>
#include <cmath>

#include "tigon/base/aligned_rows.h"
#include "tigon/base/require.h"

namespace tigon {

DivergenceBeta divergence_beta(DivergenceKind kind, double beta) {
  DivergenceBeta b = {.beta = float(beta), .factor = 1.0};
  if (kind != DivergenceKind::jsd || !(beta > 0.5 && beta < 1.0)) return b;
  b.beta = std::min(b.beta, std::nextafter(1.0f, 0.0f));
  b.factor = (1.0 - beta) / (1.0 - double(b.beta));
  return b;
}

void divergence_rows(Context& ctx, const DivergenceRows& a) {
  const char* op = "divergence";
  int64_t rows = a.student.rows, cols = a.student.cols;
  require_float(op, "student", a.student.dtype);
  TIGON_CHECK(op, cols >= 1, "student must have at least one column, got ", cols);
  require_matrix(op, "teacher", a.teacher, rows, cols, a.student.dtype);
  require_optional(op, "labels", a.labels, rows, DType::i64);
  require_scale(op, a.scale, rows);
  if (a.dstudent.data != nullptr) {
    require_matrix(op, "dstudent", a.dstudent, rows, cols, a.student.dtype);
    TIGON_CHECK(op, a.dstudent.data != a.student.data || a.dstudent.stride == a.student.stride,
                "dstudent in place must have student's row stride ", a.student.stride, ", got ",
                a.dstudent.stride);
    TIGON_CHECK(op, rows <= 1 || a.dstudent.stride >= cols,
                "dstudent must have rows that do not overlap (stride >= ", cols, "), got stride ",
                a.dstudent.stride);
  }
  require_vector(op, "loss", a.loss, rows, DType::f32);
  TIGON_CHECK(op, int(a.kind) >= 0 && int(a.kind) < kDivergenceKinds, "kind must be one of 0 to ",
              kDivergenceKinds - 1, ", got ", int(a.kind));
  TIGON_CHECK(op, a.kind != DivergenceKind::jsd || (a.beta > 0.0f && a.beta < 1.0f),
              "beta must be in (0, 1), got ", a.beta);
  TIGON_CHECK(op, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
  TIGON_CHECK(op, !a.log_probs || a.temperature == 1.0f, "temperature must be 1 with log-probabilities, got ",
              a.temperature);
  if (rows == 0) return;
  DivergenceRows aligned = a;
  AlignedRows rows_of(ctx);
  for (Matrix* m : {&aligned.student, &aligned.teacher}) rows_of.read(*m);
  rows_of.write(aligned.dstudent);
  TIGON_RUN(op, ctx, divergence_rows, aligned);
  rows_of.finish();
}

}  // namespace tigon
