#include "tigon/ops/drafter_loss/drafter_loss.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

constexpr const char* kOp = "drafter_loss";

void check_call(const DrafterLoss& a, const LinearHead& draft, const LinearHead& teacher) {
  linear_head_check(draft);
  linear_head_check(teacher);
  int64_t rows = teacher.hidden.rows, draft_rows = draft.hidden.rows, v = draft.weight.rows,
          v_t = teacher.weight.rows;
  require_dtype(kOp, "teacher_hidden", teacher.hidden.dtype, draft.hidden.dtype);
  TIGON_CHECK(kOp, rows == 0 ? draft_rows == 0 : draft_rows >= rows && draft_rows % rows == 0,
              "hidden must have a multiple of the teacher's ", rows, " rows, got ", draft_rows);
  require_optional(kOp, "draft_id", a.draft_id, v_t, DType::i32);
  TIGON_CHECK(kOp, a.draft_id || v == v_t, "draft_id must be given for a weight of ", v,
              " rows and a teacher's of ", v_t, ", got none");
  require_vector(kOp, "target", a.labels.target, draft_rows, DType::i64);
  require_vector(kOp, "teacher_target", a.teacher_target, rows, DType::i64);
  require_optional(kOp, "token_weight", a.token_weight, draft_rows);
  require_optional(kOp, "upstream", a.upstream, draft_rows);
  for (const Vector* v_out : {&a.loss, &a.overlap, &a.counted})
    require_vector(kOp, "results", *v_out, draft_rows, DType::f32);
  linear_head_check(kOp, a.reduction);
  TIGON_CHECK(kOp, int(a.kind) >= 0 && int(a.kind) < kDrafterKinds, "kind must be one of 0 to ",
              kDrafterKinds - 1, ", got ", int(a.kind));
  TIGON_CHECK(kOp, a.eta >= 0.0f, "eta must be >= 0, got ", a.eta);
  TIGON_CHECK(kOp, !draft.wants_gradients() || a.reduction.kind != Reduction::none || a.upstream,
              "upstream must be given for the gradients of per-row losses");
}

// The teacher's logits, of a few rows at a time, and what is kept of them.
struct TeacherPart {
  LinearHeadWorkspace workspace;
  DrafterTeacher pass;
};
TeacherPart make_part(Context& ctx, const DrafterLoss& a, const LinearHead& teacher,
                      const LinearHeadRows& rows, int64_t few) {
  TeacherPart t = {.workspace = linear_head_workspace(ctx, teacher, rows, {.chunk = few}),
                   .pass = {.draft_id = a.draft_id, .mask_outside = a.mask_outside}};
  int64_t v = a.head.weight.rows;
  if (a.draft_id)
    t.pass.columns = linear_head_matrix(ctx, few, v, linear_head_logit_stride(v), teacher.hidden.dtype);
  t.pass.max = linear_head_vector(ctx, few), t.pass.log_sum = linear_head_vector(ctx, few);
  t.pass.label = linear_head_vector(ctx, few, DType::i64);
  if (a.draft_id && (a.overlap_outside || a.soft_outside)) t.pass.share = linear_head_vector(ctx, few);
  return t;
}
void run_part(Context& ctx, const LinearHead& teacher, const LinearHeadRows& rows, TeacherPart& t,
              int64_t begin, int64_t count) {
  LinearHeadChunk c = linear_head_chunk(teacher, rows, t.workspace, begin, count);
  linear_head_logits(ctx, teacher, c);
  t.pass.logits = c.logits;
  TIGON_RUN(kOp, ctx, drafter_teacher, t.pass);
}

}  // namespace

void drafter_loss(Context& ctx, const DrafterLoss& a) {
  LinearHead draft = a.head, teacher = {.op = kOp, .hidden = a.teacher_hidden, .weight = a.teacher_weight};
  draft.op = kOp;
  check_call(a, draft, teacher);
  int64_t steps = teacher.hidden.rows > 0 ? draft.hidden.rows / teacher.hidden.rows : 1;
  LinearHeadLabels teacher_labels = {
      .target = a.teacher_target,
      .ignore_index = a.labels.ignore_index,
      .valid_rows = a.labels.valid_rows < 0 ? -1 : a.labels.valid_rows / steps};
  LinearHeadRows rows = linear_head_rows(ctx, draft, a.labels),
                 teacher_rows = linear_head_rows(ctx, teacher, teacher_labels);
  bool gradients = draft.wants_gradients();
  int64_t count = rows.count / steps;
  int64_t few = linear_head_limit(ctx, teacher, count, 0);
  int64_t chunk =
      std::max<int64_t>(linear_head_limit(ctx, draft, rows.count, a.labels.chunk_rows) / steps, 1);
  if (!gradients) chunk = std::min(chunk, few);
  few = std::min(few, chunk);
  linear_head_check_chunks(draft, (count + chunk - 1) / chunk);
  linear_head_scale(ctx, a.reduction, teacher_labels, {});
  linear_head_clear(ctx, draft, rows);
  Vector results[3] = {a.loss, a.overlap, a.counted};
  if (rows.listed)
    for (Vector& v : results) v = linear_head_vector(ctx, rows.count);
  Vector factor;
  if (gradients)
    factor = linear_head_factor(
        ctx, draft, a.labels, rows,
        {.token_weight = a.token_weight, .upstream = a.upstream, .scale = a.reduction.scale});
  if (count > 0) {
    LinearHeadWorkspace workspace = linear_head_workspace(ctx, draft, rows, {.chunk = chunk * steps});
    TeacherPart part = make_part(ctx, a, teacher, teacher_rows, few);
    for (int64_t begin = 0; begin < count; begin += chunk) {
      int64_t size = std::min(chunk, count - begin);
      LinearHeadChunk c = linear_head_chunk(draft, rows, workspace, begin * steps, size * steps);
      linear_head_logits(ctx, draft, c);
      for (int64_t first = 0; first < size; first += few) {
        int64_t n = std::min(few, size - first), at = (begin + first) * steps;
        run_part(ctx, teacher, teacher_rows, part, begin + first, n);
        auto of = [&](const Vector& v) { return linear_head_part(v, at, n * steps); };
        DrafterRows pass = {.draft = rows_from(c.logits, first * steps, n * steps),
                            .teacher = rows_from(a.draft_id ? part.pass.columns : part.pass.logits, 0, n),
                            .max = part.pass.max,
                            .log_sum = part.pass.log_sum,
                            .share = part.pass.share,
                            .label = part.pass.label,
                            .target = of(rows.labels),
                            .scale = of(factor),
                            .loss = of(results[0]),
                            .overlap = of(results[1]),
                            .counted = of(results[2]),
                            .ignore_index = a.labels.ignore_index,
                            .kind = a.kind,
                            .eta = a.eta,
                            .overlap_outside = a.overlap_outside,
                            .soft_outside = a.soft_outside,
                            .mask_outside = a.mask_outside,
                            .gradient = gradients};
        TIGON_RUN(kOp, ctx, drafter_rows, pass);
      }
      linear_head_gradients(ctx, draft, c, {.first = begin == 0});
    }
  }
  if (rows.listed || a.token_weight) {
    LinearHeadResults to = {.target = a.labels.target,
                            .ignore_index = a.labels.ignore_index,
                            .position = rows.position,
                            .fault = rows.fault};
    to.add({.from = results[0], .to = a.loss, .factor = a.token_weight});
    to.add({.from = results[1], .to = a.overlap});
    to.add({.from = results[2], .to = a.counted});
    linear_head_results(ctx, to);
  }
  linear_head_total(ctx, a.reduction, a.loss);
}

namespace {

// PyTorch's operators: the loss, and the gradients of per-row losses, whose logits are computed again with each row's upstream
// gradient folded in.
template <bool rows_backward>
struct DrafterLossCall {
  DrafterLoss call;
  LinearHeadFields head;

  void fields(Fields& f) {
    DrafterLoss& a = call;
    if (rows_backward) f.input("upstream", a.upstream), a.reduction.kind = Reduction::none;
    head.operands(f, a.head, a.labels, head_formula);
    f.input("teacher_hidden", a.teacher_hidden);
    f.input("teacher_weight", a.teacher_weight);
    f.input("teacher_target", a.teacher_target), f.optional("draft_id", a.draft_id);
    f.option("kind", a.kind), f.option("eta", a.eta), f.option("overlap_outside", a.overlap_outside);
    f.option("soft_outside", a.soft_outside), f.option("mask_outside", a.mask_outside);
    if (rows_backward) return head.gradients(f, a.head, a.labels);
    head.reduction(f, a.reduction);
    if (a.reduction.kind == Reduction::none) head.needs = 0;
    head.losses(f, a.reduction, a.loss, a.head);
    head.gradients(f, a.head, a.labels);
    head.outputs = 3, head.numbers(f, 3, a.head);
  }
  static void run(Context& ctx, const DrafterLossCall& given) {
    DrafterLoss a = given.call;
    LinearHeadFields head = given.head;
    a.token_weight = head.token_weight;
    a.loss = head.losses(ctx, a.reduction, a.loss, a.head);
    for (Vector* v : {&a.overlap, &a.counted})
      *v = rows_backward ? linear_head_vector(ctx, a.head.hidden.rows) : head.take(v == &a.overlap ? 1 : 2);
    drafter_loss(ctx, a);
  }

 private:
  LogitFormula head_formula;  // not looked at
};
using Forward = DrafterLossCall<false>;
using RowsBackward = DrafterLossCall<true>;
constexpr auto forward = Forward::run;
constexpr auto rows_backward = RowsBackward::run;

TIGON_OPERATOR(forward, Forward, "drafter_loss", forward)
TIGON_OPERATOR(rows_backward, RowsBackward, "drafter_loss_rows", backward)

}  // namespace

}  // namespace tigon
