#include "tigon/ops/linear_divergence/linear_divergence.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/loss_head/engine.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_divergence";

Vector first_of(Vector v, int64_t size) {
  v.size = v ? size : v.size;
  return v;
}

// Holds the two heads over their common classes.
struct Pair {
  LinearHead whole, student, teacher;
  int64_t vocab = 0;
  bool given = false;  // true if the teacher's logits are given
};
Pair pair_of(const LinearDivergence& a) {
  Pair p = {.whole = a.head, .given = a.teacher_logits.data != nullptr};
  p.whole.op = kOp, p.whole.wide_logits = false;  // they are f32 in any case
  int64_t rows = a.head.hidden.rows;
  loss_head_check(p.whole);
  TIGON_CHECK(kOp, p.given != (a.teacher_weight.data != nullptr),
              "teacher must be hidden states and a weight, or logits, got ", p.given ? "both" : "neither");
  int64_t teacher_vocab = p.given ? a.teacher_logits.cols : a.teacher_weight.rows;
  TIGON_CHECK(kOp, teacher_vocab >= 1, "teacher must have at least one class, got ", teacher_vocab);
  if (p.given) {
    require_float(kOp, "teacher", a.teacher_logits.dtype);
    require_matrix(kOp, "teacher", a.teacher_logits, rows, teacher_vocab, a.teacher_logits.dtype);
  } else {
    p.teacher = {.op = kOp, .hidden = a.teacher_hidden, .weight = a.teacher_weight};
    require_matrix(kOp, "teacher_hidden", a.teacher_hidden, rows, a.teacher_hidden.cols,
                   a.teacher_hidden.dtype);
    loss_head_check(p.teacher);
  }
  const Vector& bias = a.head.bias;
  if (bias) require_vector(kOp, "bias", bias, a.head.weight.rows, DType::f32);
  if (a.teacher_bias) require_vector(kOp, "teacher_bias", a.teacher_bias, teacher_vocab, DType::f32);
  p.vocab = std::min(a.head.weight.rows, teacher_vocab);
  p.student = p.whole;
  for (Matrix* m :
       {&p.student.weight, &p.student.lora_b, &p.student.dweight, &p.student.dlora_b, &p.teacher.weight})
    *m = rows_from(*m, 0, p.vocab);
  p.student.bias = first_of(bias, p.vocab), p.student.dbias = first_of(a.head.dbias, p.vocab);
  return p;
}

void check_call(const LinearDivergence& a) {
  int64_t rows = a.head.hidden.rows;
  require_optional(kOp, "soft", a.soft, rows);
  require_optional(kOp, "hard", a.hard, rows);
  require_optional(kOp, "entropy", a.entropy, rows);
  require_vector(kOp, "loss", a.loss, rows, DType::f32);
  loss_head_check(kOp, a.formula);
  TIGON_CHECK(kOp, a.teacher_formula.softcap >= 0.0f, "teacher_softcap must be > 0 or none, got ",
              a.teacher_formula.softcap);
  TIGON_CHECK(kOp, a.kind != DivergenceKind::jsd || (a.beta > 0.0f && a.beta < 1.0f),
              "beta must be in (0, 1), got ", a.beta);
}

// Computes the divergence of rows from the teacher's. The engine has made the logits of the rows.
class DivergencePass final : public RowPass {
 public:
  DivergencePass(const LinearDivergence& a, const Pair& pair) : a_(a), pair_(pair) {}

  int64_t part(Context&, int64_t) override {
    return linear_divergence_logit_rows(pair_.vocab, pair_.given ? 1 : 2);
  }

  void memory(LossHeadRun& run) override {
    clear_padding(run.ctx);
    loss_ = run.result(a_.loss, a_.token_weight);
    soft_ = run.result(a_.soft), hard_ = run.result(a_.hard), entropy_ = run.result(a_.entropy);
    if (pair_.student.wants_gradients()) factor_ = run.factor();
    const int64_t stride = loss_head_logit_stride(pair_.vocab);
    if (run.rows.count == 0 || (pair_.given && !run.rows.listed)) return;
    const DType dtype = pair_.given ? a_.teacher_logits.dtype : DType::f32;
    teacher_ = loss_head_matrix(run.ctx, run.part, pair_.vocab, stride, dtype);
    if (!pair_.given)
      workspace_ =
          loss_head_workspace(run.ctx, pair_.teacher, run.rows, {.chunk = run.part, .logits = false});
  }

  void rows(const LossHeadRun& run, const LossHeadPart& p) override {
    auto of = [&](const Vector& v) { return loss_head_slice(v, p.begin, p.count); };
    distillation_rows(
        run.ctx, {.student = p.logits,
                  .teacher = teacher_logits(run, p),
                  .student_side = side(a_.formula, pair_.student.bias),
                  .teacher_side = side(a_.teacher_formula, first_of(a_.teacher_bias, pair_.vocab)),
                  .labels = of(run.rows.labels),
                  .scale = of(factor_),
                  .dstudent = pair_.student.wants_gradients() ? p.to : Matrix{.dtype = a_.head.hidden.dtype},
                  .loss = of(loss_),
                  .soft = of(soft_),
                  .hard = of(hard_),
                  .entropy = of(entropy_),
                  .kind = a_.kind,
                  .ignore_index = a_.labels.ignore_index,
                  .beta = a_.beta,
                  .factor = a_.factor,
                  .soft_weight = a_.soft_weight,
                  .hard_weight = a_.hard_weight});
  }

 private:
  DistillationSide side(const LogitFormula& f, const Vector& bias) const {
    return {.bias = bias,
            .logit_scale = f.logit_scale,
            .softcap = f.softcap,
            .temperature = a_.formula.temperature};
  }

  Matrix teacher_logits(const LossHeadRun& run, const LossHeadPart& p) const {
    if (!pair_.given) {
      LossHeadChunk c = loss_head_chunk(pair_.teacher, run.rows, workspace_, p.begin, p.count);
      c.logits = rows_from(teacher_, 0, p.count);
      loss_head_logits(run.ctx, pair_.teacher, c);
      return c.logits;
    }
    Matrix logits = a_.teacher_logits;
    logits.cols = pair_.vocab;
    if (!run.rows.listed) return rows_from(logits, p.begin, p.count);
    const Matrix gathered = rows_from(teacher_, 0, p.count);
    loss_head_move(
        run.ctx,
        {.from = logits, .to = gathered, .index = loss_head_slice(run.rows.index, p.begin, p.count)});
    return gathered;
  }

  // Clears the gradients of classes that the teacher does not have.
  void clear_padding(Context& ctx) const {
    const LinearHead& whole = pair_.whole;
    const int64_t vocab = pair_.vocab, more = whole.weight.rows - vocab;
    auto zero = [&](const Matrix& m) {
      if (more > 0 && m.data) TIGON_RUN(kOp, ctx, loss_head_zero, m);
    };
    if (whole.dweight.data) zero(rows_from(whole.dweight, vocab, more));
    if (whole.dlora_b.data) zero(rows_from(whole.dlora_b, vocab, more));
    if (whole.dbias) zero({.data = whole.dbias.as<float>() + vocab, .rows = 1, .cols = more, .stride = more});
  }

  const LinearDivergence& a_;
  const Pair& pair_;
  Vector factor_, loss_, soft_, hard_, entropy_;  // of the rows worked on
  Matrix teacher_;                                // memory for the logits of a part
  LossHeadWorkspace workspace_;
};

}  // namespace

int64_t linear_divergence_logit_rows(int64_t vocab, int sides) {
  constexpr int64_t kBytes = int64_t(1) << 30, kLeast = 512;
  return std::max(kLeast, kBytes / (4 * sides * std::max<int64_t>(vocab, 1)) / 128 * 128);
}

LossHeadPlan linear_divergence_plan(const LossHeadSizes& s, int64_t teacher_hidden) {
  LossHeadPlan plan = loss_head_plan(s);
  if (DType(s.dtype) == DType::f64) return plan;
  int64_t size = int64_t(size_of(DType(s.dtype))), stride = loss_head_logit_stride(s.vocab);
  int64_t sides = teacher_hidden > 0 ? 2 : 1;
  int64_t few = std::min(linear_divergence_logit_rows(s.vocab, int(sides)), plan.chunk_rows);
  int64_t more = 4 * few * stride * sides;
  if (s.worked < s.rows) more += few * size * (sides == 1 ? stride : teacher_hidden);
  if (!s.cuda)  // pieces of the operands in f32, for GEMMs that are not rounded
    more +=
        4 * (few + 8192) * std::max(s.hidden, teacher_hidden) + 4 * few * std::min<int64_t>(s.vocab, 8192);
  if (!s.train_hidden && !s.train_weight && !s.train_bias && s.lora_rank == 0)  // no gradient of the logits
    more -= plan.chunk_rows * stride * size;
  plan.workspace += more, plan.peak += more;
  return plan;
}

void linear_divergence(Context& ctx, const LinearDivergence& call) {
  LinearDivergence a = call;
  a.labels = loss_head_labels(ctx, kOp, call.labels);
  const Pair pair = pair_of(a);
  check_call(a);
  DivergencePass pass(a, pair);
  loss_head_run(ctx,
                {.head = pair.student,
                 .labels = a.labels,
                 .reduction = a.reduction,
                 .loss = a.loss,
                 .token_weight = a.token_weight,
                 .upstream = a.upstream,
                 .classes = pair.whole.weight.rows,
                 .f32_logits = true},
                pass);
}

namespace {

// Defines PyTorch's operators: the loss, and the gradients of per-row losses. The latter compute the logits
// again and fold each row's upstream gradient in.
template <bool rows_backward>
struct LinearDivergenceCall {
  enum Output : int64_t { soft = 1, hard = 2, entropy = 4, all = 7 };
  LinearDivergence call;
  LossHeadFields head;
  Matrix teacher;
  double beta = 0.5;

  void fields(Fields& f) {
    LinearDivergence& a = call;
    if (rows_backward) f.input("upstream", a.upstream), a.reduction.kind = Reduction::none;
    head.operands(f, a.head, a.labels, a.formula);
    f.input("teacher", teacher), f.optional("teacher_weight", a.teacher_weight);
    f.optional("teacher_bias", a.teacher_bias);
    f.option("kind", a.kind), f.option("beta", beta);
    f.option("soft_weight", a.soft_weight), f.option("hard_weight", a.hard_weight);
    f.option("teacher_softcap", a.teacher_formula.softcap);
    f.option("teacher_logit_scale", a.teacher_formula.logit_scale);
    if (rows_backward) return head.gradients(f, a.head, a.labels);
    head.reduction(f, a.reduction);
    f.option("outputs", head.outputs);
    if (a.reduction.kind == Reduction::none) head.needs = 0;
    head.losses(f, a.reduction, a.loss, a.head);
    head.gradients(f, a.head, a.labels);
    head.numbers(f, all, a.head);
  }
  static void run(Context& ctx, const LinearDivergenceCall& given) {
    LinearDivergence a = given.call;
    LossHeadFields head = given.head;
    a.head.op = kOp;
    (a.teacher_weight.data ? a.teacher_hidden : a.teacher_logits) = given.teacher;
    a.token_weight = head.token_weight;
    const DivergenceBeta beta = divergence_beta(a.kind, given.beta);
    a.beta = beta.beta, a.factor = float(beta.factor);
    a.loss = head.losses(ctx, a.reduction, a.loss, a.head);
    a.soft = head.take(soft), a.hard = head.take(hard), a.entropy = head.take(entropy);
    linear_divergence(ctx, a);
  }
};
using Forward = LinearDivergenceCall<false>;
using RowsBackward = LinearDivergenceCall<true>;

TIGON_CALL(Forward, "linear_divergence", forward)
TIGON_CALL(RowsBackward, "linear_divergence_rows", backward)

}  // namespace

}  // namespace tigon

// Is called by Python, through ctypes.
extern "C" TIGON_API void tigon_linear_divergence_plan(const tigon::LossHeadSizes* sizes,
                                                       int64_t teacher_hidden, tigon::LossHeadPlan* plan) {
  *plan = tigon::loss_head_plan_within(*sizes, [&](const tigon::LossHeadSizes& s) {
    return tigon::linear_divergence_plan(s, teacher_hidden);
  });
}
