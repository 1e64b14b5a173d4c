#include "tigon/ops/drafter_loss/drafter_loss.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/loss_head/engine.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

constexpr const char* kOp = "drafter_loss";

void check_call(const DrafterLoss& a, const LinearHead& draft, const LinearHead& teacher) {
  loss_head_check(draft);
  loss_head_check(teacher);
  int64_t rows = teacher.hidden.rows, draft_rows = draft.hidden.rows, v = draft.weight.rows,
          v_t = teacher.weight.rows;
  require_dtype(kOp, "teacher_hidden", teacher.hidden.dtype, draft.hidden.dtype);
  TIGON_CHECK(kOp, rows == 0 ? draft_rows == 0 : draft_rows >= rows && draft_rows % rows == 0,
              "hidden must have a multiple of the teacher's ", rows, " rows, got ", draft_rows);
  require_optional(kOp, "draft_id", a.draft_id, v_t, DType::i32);
  TIGON_CHECK(kOp, a.draft_id || v == v_t, "draft_id must be given for a weight of ", v,
              " rows and a teacher's of ", v_t, ", got none");
  require_vector(kOp, "teacher_target", a.teacher_target, rows, DType::i64);
  for (const Vector* v_out : {&a.loss, &a.overlap, &a.counted})
    require_vector(kOp, "results", *v_out, draft_rows, DType::f32);
  TIGON_CHECK(kOp, int(a.kind) >= 0 && int(a.kind) < kDrafterKinds, "kind must be one of 0 to ",
              kDrafterKinds - 1, ", got ", int(a.kind));
  TIGON_CHECK(kOp, a.eta >= 0.0f, "eta must be >= 0, got ", a.eta);
}

// Handles the draft's rows of some rows of the teacher, whose logits it makes.
class DrafterPass final : public RowPass {
 public:
  DrafterPass(const DrafterLoss& a, const LinearHead& teacher, const LossHeadLabels& labels, int64_t steps)
      : a_(a), teacher_(teacher), labels_(labels), steps_(steps) {}

  int64_t part(Context& ctx, int64_t rows) override {
    return loss_head_limit(ctx, teacher_, rows / steps_, 0, false) * steps_;
  }
  void begin(LossHeadRun& run) override { teacher_rows_ = loss_head_rows(run.ctx, teacher_, labels_); }

  void memory(LossHeadRun& run) override {
    loss_ = run.result(a_.loss, a_.token_weight);
    overlap_ = run.result(a_.overlap), counted_ = run.result(a_.counted);
    if (run.a.head.wants_gradients()) factor_ = run.factor();
    if (run.spans.empty()) return;
    const int64_t v = a_.head.weight.rows, few = run.part / steps_;
    auto vector = [&](DType dtype) { return loss_head_vector(run.ctx, few, dtype); };
    workspace_ = loss_head_workspace(run.ctx, teacher_, teacher_rows_, {.chunk = few});
    if (a_.draft_id)
      pass_.columns = loss_head_matrix(run.ctx, few, v, loss_head_logit_stride(v), teacher_.hidden.dtype);
    pass_.draft_id = a_.draft_id, pass_.mask_outside = a_.mask_outside;
    pass_.max = vector(DType::f32), pass_.log_sum = vector(DType::f32), pass_.label = vector(DType::i64);
    if (a_.draft_id && (a_.overlap_outside || a_.soft_outside)) pass_.share = vector(DType::f32);
  }

  void rows(const LossHeadRun& run, const LossHeadPart& p) override {
    const int64_t count = p.count / steps_;
    LossHeadChunk c = loss_head_chunk(teacher_, teacher_rows_, workspace_, p.begin / steps_, count);
    loss_head_logits(run.ctx, teacher_, c);
    pass_.logits = c.logits;
    TIGON_RUN(kOp, run.ctx, drafter_teacher, pass_);
    auto of = [&](const Vector& v) { return loss_head_slice(v, p.begin, p.count); };
    const DrafterRows draft = {.draft = p.logits,
                               .teacher = rows_from(a_.draft_id ? pass_.columns : pass_.logits, 0, count),
                               .max = pass_.max,
                               .log_sum = pass_.log_sum,
                               .share = pass_.share,
                               .label = pass_.label,
                               .target = of(run.rows.labels),
                               .scale = of(factor_),
                               .loss = of(loss_),
                               .overlap = of(overlap_),
                               .counted = of(counted_),
                               .ignore_index = a_.labels.ignore_index,
                               .kind = a_.kind,
                               .eta = a_.eta,
                               .overlap_outside = a_.overlap_outside,
                               .soft_outside = a_.soft_outside,
                               .mask_outside = a_.mask_outside,
                               .gradient = run.a.head.wants_gradients()};
    TIGON_RUN(kOp, run.ctx, drafter_rows, draft);
  }

 private:
  const DrafterLoss& a_;
  const LinearHead& teacher_;
  const LossHeadLabels& labels_;  // labels of the teacher's rows
  const int64_t steps_;
  LossHeadRows teacher_rows_;
  Vector factor_, loss_, overlap_, counted_;  // of the rows worked on
  LossHeadWorkspace workspace_;
  DrafterTeacher pass_;
};

}  // namespace

LossHeadPlan drafter_loss_plan(const LossHeadSizes& sizes, const DrafterSizes& d) {
  if (DType(sizes.dtype) == DType::f64) return loss_head_plan(sizes);
  LossHeadSizes s = sizes;
  s.chunk_rows = std::max<int64_t>(loss_head_plan(s).chunk_rows / d.steps, 1) * d.steps;
  // Counts the teacher's rows of a part, as DrafterPass divides a chunk.
  const int64_t part = std::min(loss_head_chunk_rows({.cuda = s.cuda,
                                                      .dtype = s.dtype,
                                                      .worked = s.worked / d.steps,
                                                      .hidden = d.teacher_hidden,
                                                      .vocab = d.teacher_vocab,
                                                      .lean = 0}),
                                s.chunk_rows / d.steps);
  if (!s.train_hidden && !s.train_weight) s.chunk_rows = part * d.steps;
  LossHeadPlan plan = loss_head_plan(s);
  const int64_t size = int64_t(size_of(DType(s.dtype))), listed = s.worked < s.rows;
  const int64_t own = loss_head_logit_stride(s.vocab), whole = loss_head_logit_stride(d.teacher_vocab);
  int64_t more = part * ((whole + d.mapped * own + listed * d.teacher_hidden) * size + 20);
  // On the CPU this is what PyTorch's GEMM of the teacher takes above that of the draft.
  if (!s.cuda && size == 4) more += 4 * std::max<int64_t>(part * whole - s.chunk_rows * own, 0);
  more += 64 * (s.rows / d.steps);
  plan.workspace += more, plan.peak += more;
  return plan;
}

void drafter_loss(Context& ctx, const DrafterLoss& a) {
  LinearHead draft = a.head, teacher = {.op = kOp, .hidden = a.teacher_hidden, .weight = a.teacher_weight};
  draft.op = kOp, draft.wide_logits = false;
  check_call(a, draft, teacher);
  const int64_t steps = teacher.hidden.rows > 0 ? draft.hidden.rows / teacher.hidden.rows : 1;
  const int64_t valid = a.labels.valid_rows;
  const LossHeadLabels labels = {.target = a.teacher_target,
                                 .ignore_index = a.labels.ignore_index,
                                 .valid_rows = valid < 0 ? -1 : valid / steps};
  DrafterPass pass(a, teacher, labels, steps);
  loss_head_run(ctx,
                {.head = draft,
                 .labels = a.labels,
                 .reduction = a.reduction,
                 .mean_target = a.teacher_target,
                 .loss = a.loss,
                 .token_weight = a.token_weight,
                 .upstream = a.upstream,
                 .together = steps},
                pass);
}

namespace {

// Defines PyTorch's operators: the loss, and the gradients of per-row losses. The latter compute the logits
// again and fold each row's upstream gradient in.
template <bool rows_backward>
struct DrafterLossCall {
  DrafterLoss call;
  LossHeadFields head;

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
    LossHeadFields head = given.head;
    a.token_weight = head.token_weight;
    a.loss = head.losses(ctx, a.reduction, a.loss, a.head);
    for (Vector* v : {&a.overlap, &a.counted})
      *v = rows_backward ? loss_head_vector(ctx, a.head.hidden.rows) : head.take(v == &a.overlap ? 1 : 2);
    drafter_loss(ctx, a);
  }

 private:
  LogitFormula head_formula;  // is not used
};
using Forward = DrafterLossCall<false>;
using RowsBackward = DrafterLossCall<true>;

TIGON_CALL(Forward, "drafter_loss", forward)
TIGON_CALL(RowsBackward, "drafter_loss_rows", backward)

}  // namespace

}  // namespace tigon

// Is called by Python, through ctypes.
extern "C" TIGON_API void tigon_drafter_loss_plan(const tigon::LossHeadSizes* sizes, int64_t steps,
                                                  int64_t teacher_hidden, int64_t teacher_vocab,
                                                  int64_t mapped, tigon::LossHeadPlan* plan) {
  *plan = tigon::loss_head_plan_within(*sizes, [&](const tigon::LossHeadSizes& s) {
    return tigon::drafter_loss_plan(s, {steps, teacher_hidden, teacher_vocab, mapped});
  });
}
