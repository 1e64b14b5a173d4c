#include "tigon/ops/divergence/distillation.h"

#include <algorithm>
#include <cmath>

#include "tigon/base/op.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {

DivergenceBeta divergence_beta(DivergenceKind kind, double beta) {
  DivergenceBeta b = {.beta = float(beta), .factor = 1.0};
  if (kind != DivergenceKind::jsd || !(beta > 0.5 && beta < 1.0)) return b;
  b.beta = std::min(b.beta, std::nextafter(1.0f, 0.0f));
  b.factor = (1.0 - beta) / (1.0 - double(b.beta));
  return b;
}

namespace {

// Checks what both contracts say of a pair of rows. Their matrices and labels have been checked before.
template <class Rows>
void check_rows(const char* op, const Rows& a, DType teacher, DType dstudent) {
  int64_t rows = a.student.rows, cols = a.student.cols;
  TIGON_CHECK(op, cols >= 1, "student must have at least one column, got ", cols);
  require_matrix(op, "teacher", a.teacher, rows, cols, teacher);
  require_optional(op, "labels", a.labels, rows, DType::i64);
  require_scale(op, a.scale, rows);
  if (a.dstudent.data != nullptr) require_matrix(op, "dstudent", a.dstudent, rows, cols, dstudent);
  require_vector(op, "loss", a.loss, rows, DType::f32);
  TIGON_CHECK(op, int(a.kind) >= 0 && int(a.kind) < kDivergenceKinds, "kind must be one of 0 to ",
              kDivergenceKinds - 1, ", got ", int(a.kind));
  TIGON_CHECK(op, a.kind != DivergenceKind::jsd || (a.beta > 0.0f && a.beta < 1.0f),
              "beta must be in (0, 1), got ", a.beta);
}

void check_side(const char* op, const char* name, const DistillationSide& side, int64_t cols) {
  if (side.bias) require_vector(op, "bias", side.bias, cols, DType::f32);
  TIGON_CHECK(op, side.softcap >= 0.0f, name, " softcap must be > 0 or none, got ", side.softcap);
  TIGON_CHECK(op, side.temperature > 0.0f, name, " temperature must be > 0, got ", side.temperature);
}

// Calls run(a) with rows that begin where the context wants them.
template <class Rows, class Run>
void with_aligned_rows(Context& ctx, Rows a, const Run& run) {
  if (a.student.rows == 0) return;
  AlignedRows rows_of(ctx);
  for (Matrix* m : {&a.student, &a.teacher}) rows_of.read(*m);
  rows_of.write(a.dstudent);
  run(a);
  rows_of.finish();
}

}  // namespace

void divergence_rows(Context& ctx, const DivergenceRows& a) {
  const char* op = "divergence";
  require_float(op, "student", a.student.dtype);
  check_rows(op, a, a.student.dtype, a.student.dtype);
  if (a.dstudent.data != nullptr) require_rows_apart(op, "dstudent", a.dstudent, "student's", a.student);
  TIGON_CHECK(op, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
  TIGON_CHECK(op, !a.log_probs || a.temperature == 1.0f, "temperature must be 1 with log-probabilities, got ",
              a.temperature);
  with_aligned_rows(ctx, a,
                    [&](const DivergenceRows& aligned) { TIGON_RUN(op, ctx, divergence_rows, aligned); });
}

void distillation_rows(Context& ctx, const DistillationRows& a) {
  const char* op = "distillation";
  int64_t rows = a.student.rows;
  require_dtype(op, "student", a.student.dtype, DType::f32);
  require_float(op, "teacher", a.teacher.dtype);
  check_side(op, "student's", a.student_side, a.student.cols);
  check_side(op, "teacher's", a.teacher_side, a.student.cols);
  if (a.dstudent.data != nullptr) require_float(op, "dstudent", a.dstudent.dtype);
  check_rows(op, a, a.teacher.dtype, a.dstudent.dtype);
  TIGON_CHECK(op, a.labels || !a.has_hard(), "labels must be given for a hard loss, got none");
  require_optional(op, "soft", a.soft, rows);
  require_optional(op, "hard", a.hard, rows);
  require_optional(op, "entropy", a.entropy, rows);
  with_aligned_rows(ctx, a,
                    [&](const DistillationRows& aligned) { TIGON_RUN(op, ctx, distillation_rows, aligned); });
}

// The structs below are PyTorch's operators.
namespace {

struct DivergenceOperands {
  DivergenceRows rows;
  double beta = 0.5;

  void take_rows(Fields& f) {
    f.rows("student", rows.student);
    f.input("teacher", rows.teacher), f.optional("labels", rows.labels);
  }
  void take_options(Fields& f) {
    f.option("kind", rows.kind), f.option("beta", beta), f.option("temperature", rows.temperature);
    f.option("log_probs", rows.log_probs), f.option("ignore_index", rows.ignore_index);
    const DivergenceBeta rounded = divergence_beta(rows.kind, beta);
    rows.beta = rounded.beta, rows.factor = float(rounded.factor);
  }
};

// Computes the loss of every row, or one number, with its gradient in the same pass.
struct DivergenceLoss : DivergenceOperands {
  enum class Reduction : int8_t { none, sum, batchmean, mean } reduction = Reduction::none;
  Vector total;

  void fields(Fields& f) {
    take_rows(f);
    f.option("reduction", reduction);
    take_options(f);
    f.rows_or_number("loss", reduction == Reduction::none, rows.loss, rows.student.rows, total);
    f.result_over("dstudent", rows.dstudent, "student", rows.student, Role::gradient, Fields::kEvenRows);
  }
};

// Means divide by the number of rows that count, which is computed on the device if there are labels.
void loss(Context& ctx, const DivergenceLoss& call) {
  using Reduction = DivergenceLoss::Reduction;
  DivergenceRows a = call.rows;
  if (call.reduction == Reduction::none) return divergence_rows(ctx, a);
  a.loss = {.data = ctx.scratch_of<float>(a.student.rows), .size = a.student.rows};
  if (call.reduction == Reduction::mean) a.factor /= float(a.student.cols);
  if (call.reduction != Reduction::sum) {
    a.scale = {.data = ctx.scratch_of<float>(1), .size = 1};
    cross_entropy_scale(ctx, {.target = a.labels,
                              .ignore_index = a.ignore_index,
                              .mean = bool(a.labels),
                              .host_denominator = double(a.student.rows),
                              .scale = a.scale});
  }
  divergence_rows(ctx, a);
  cross_entropy_total(ctx, {.loss = a.loss, .scale = a.scale, .total = call.total});
}

// Computes the gradient of unreduced losses from the inputs.
struct DivergenceGradient : DivergenceOperands {
  void fields(Fields& f) {
    f.input("dloss", rows.scale);
    take_rows(f), take_options(f);
    f.result("dstudent", rows.dstudent, rows.student);
  }
};
void gradient(Context& ctx, const DivergenceGradient& call) {
  DivergenceRows a = call.rows;
  a.loss = {.data = ctx.scratch_of<float>(a.student.rows), .size = a.student.rows};
  divergence_rows(ctx, a);
}

TIGON_OPERATOR(loss, DivergenceLoss, "divergence", forward)
TIGON_OPERATOR(gradient, DivergenceGradient, "divergence", backward)

}  // namespace

}  // namespace tigon
