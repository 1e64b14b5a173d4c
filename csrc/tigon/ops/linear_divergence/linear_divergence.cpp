#include "tigon/ops/linear_divergence/linear_divergence.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_divergence";

Vector first_of(Vector v, int64_t size) {
  v.size = v ? size : v.size;
  return v;
}

// The two heads over their common classes.
struct Pair {
  LinearHead whole, student, teacher;
  int64_t vocab = 0;
  bool given = false;  // the teacher's logits
};
Pair pair_of(const LinearDivergence& a) {
  Pair p = {.whole = a.head, .given = a.teacher_logits.data != nullptr};
  p.whole.op = kOp;
  int64_t rows = a.head.hidden.rows;
  linear_head_check(p.whole);
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
    linear_head_check(p.teacher);
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

void check_call(const LinearDivergence& a, const LinearHead& head) {
  int64_t rows = a.head.hidden.rows;
  require_vector(kOp, "target", a.labels.target, rows, DType::i64);
  auto check = [&](const char* name, const Vector& v) {
    if (v) require_vector(kOp, name, v, rows, DType::f32);
  };
  check("token_weight", a.token_weight);
  check("upstream", a.upstream);
  check("soft", a.soft);
  check("hard", a.hard);
  check("entropy", a.entropy);
  require_vector(kOp, "loss", a.loss, rows, DType::f32);
  linear_head_check(kOp, a.reduction);
  linear_head_check(kOp, a.formula);
  TIGON_CHECK(kOp, a.teacher_formula.softcap >= 0.0f, "teacher_softcap must be > 0 or none, got ",
              a.teacher_formula.softcap);
  TIGON_CHECK(kOp, a.kind != DivergenceKind::jsd || (a.beta > 0.0f && a.beta < 1.0f),
              "beta must be in (0, 1), got ", a.beta);
  TIGON_CHECK(kOp, !head.wants_gradients() || a.reduction.kind != Reduction::none || a.upstream,
              "upstream must be given for the gradients of per-row losses");
}

// What the row pass reads and writes for the rows worked on.
struct Values {
  Vector factor, loss, soft, hard, entropy;
};
Values make_values(Context& ctx, const LinearDivergence& a, const LinearHeadRows& rows, bool gradients) {
  Values v = {.loss = a.loss, .soft = a.soft, .hard = a.hard, .entropy = a.entropy};
  if (rows.listed)
    for (Vector* of : {&v.loss, &v.soft, &v.hard, &v.entropy})
      if (*of) *of = linear_head_vector(ctx, rows.count);
  if (gradients)
    v.factor = linear_head_factor(
        ctx, a.head, a.labels, rows,
        {.token_weight = a.token_weight, .upstream = a.upstream, .scale = a.reduction.scale});
  return v;
}
void write_results(Context& ctx, const LinearDivergence& a, const LinearHeadRows& rows, const Values& v) {
  if (!rows.listed && !a.token_weight) return;
  LinearHeadResults results = {.target = a.labels.target,
                               .ignore_index = a.labels.ignore_index,
                               .position = rows.position,
                               .fault = rows.fault};
  results.add({.from = v.loss, .to = a.loss, .factor = a.token_weight});
  results.add({.from = v.soft, .to = a.soft});
  results.add({.from = v.hard, .to = a.hard});
  results.add({.from = v.entropy, .to = a.entropy});
  linear_head_results(ctx, results);
}

// Logits of a few rows of both sides.
struct Logits {
  Matrix student, teacher;
  LinearHeadWorkspace teacher_workspace;
};
Logits make_logits(Context& ctx, const LinearDivergence& a, const Pair& pair, const LinearHeadRows& rows,
                   int64_t count) {
  int64_t stride = linear_head_logit_stride(pair.vocab);
  Logits l = {.student = linear_head_matrix(ctx, count, pair.vocab, stride, DType::f32)};
  if (!pair.given) {
    l.teacher = linear_head_matrix(ctx, count, pair.vocab, stride, DType::f32);
    l.teacher_workspace = linear_head_workspace(ctx, pair.teacher, rows, {.chunk = count, .logits = false});
  } else if (rows.listed) {
    l.teacher = linear_head_matrix(ctx, count, pair.vocab, stride, a.teacher_logits.dtype);
  }
  return l;
}
// The teacher's logits of rows [begin, begin + count) of the list.
Matrix teacher_logits(Context& ctx, const LinearDivergence& a, const Pair& pair, const LinearHeadRows& rows,
                      const Logits& l, int64_t begin, int64_t count) {
  if (!pair.given) {
    LinearHeadChunk c = linear_head_chunk(pair.teacher, rows, l.teacher_workspace, begin, count);
    c.logits = rows_from(l.teacher, 0, count);
    linear_head_logits(ctx, pair.teacher, c);
    return c.logits;
  }
  Matrix logits = a.teacher_logits;
  logits.cols = pair.vocab;
  if (!rows.listed) return rows_from(logits, begin, count);
  Matrix gathered = rows_from(l.teacher, 0, count);
  linear_head_move(ctx,
                   {.from = logits, .to = gathered, .index = linear_head_part(rows.index, begin, count)});
  return gathered;
}

DistillationRows row_pass(const LinearDivergence& a, const Pair& pair) {
  auto side = [&](const LogitFormula& f, const Vector& bias) -> decltype(DistillationRows::student_side) {
    return {.bias = bias,
            .logit_scale = f.logit_scale,
            .softcap = f.softcap,
            .temperature = a.formula.temperature};
  };
  return {.student_side = side(a.formula, pair.student.bias),
          .teacher_side = side(a.teacher_formula, first_of(a.teacher_bias, pair.vocab)),
          .dstudent = {.dtype = a.head.hidden.dtype},
          .kind = a.kind,
          .ignore_index = a.labels.ignore_index,
          .beta = a.beta,
          .factor = a.factor,
          .soft_weight = a.soft_weight,
          .hard_weight = a.hard_weight};
}

// Classes that the teacher does not have.
void clear_padding(Context& ctx, const LinearHead& whole, int64_t vocab) {
  int64_t more = whole.weight.rows - vocab;
  auto zero = [&](const Matrix& m) {
    if (more > 0 && m.data)
      on_device(
          kOp, ctx, [&] { cpu::linear_head_zero(ctx, m); }, TIGON_ON_CUDA(cuda::linear_head_zero(ctx, m)));
  };
  if (whole.dweight.data) zero(rows_from(whole.dweight, vocab, more));
  if (whole.dlora_b.data) zero(rows_from(whole.dlora_b, vocab, more));
  if (whole.dbias) zero({.data = whole.dbias.as<float>() + vocab, .rows = 1, .cols = more, .stride = more});
}

}  // namespace

int64_t linear_divergence_logit_rows(int64_t vocab, int sides) {
  constexpr int64_t kBytes = int64_t(1) << 30, kLeast = 512;
  return std::max(kLeast, kBytes / (4 * sides * std::max<int64_t>(vocab, 1)) / 128 * 128);
}

LinearHeadPlan linear_divergence_memory(const LinearHeadSizes& s, int64_t teacher_hidden) {
  LinearHeadPlan plan = linear_head_memory(s);
  if (DType(s.dtype) == DType::f64) return plan;
  int64_t size = int64_t(size_of(DType(s.dtype))), stride = linear_head_logit_stride(s.vocab);
  int64_t sides = teacher_hidden > 0 ? 2 : 1;
  int64_t few = std::min(linear_divergence_logit_rows(s.vocab, int(sides)), plan.chunk_rows);
  int64_t more = 4 * few * stride * sides;
  if (s.worked < s.rows) more += few * size * (sides == 1 ? stride : teacher_hidden);
  if (!s.cuda)  // pieces of the operands in f32, for products that are not rounded
    more +=
        4 * (few + 8192) * std::max(s.hidden, teacher_hidden) + 4 * few * std::min<int64_t>(s.vocab, 8192);
  if (!s.train_hidden && !s.train_weight && !s.train_bias && s.lora_rank == 0)  // no gradient of the logits
    more -= plan.chunk_rows * stride * size;
  plan.workspace += more, plan.peak += more;
  return plan;
}

void linear_divergence(Context& ctx, const LinearDivergence& call) {
  LinearDivergence a = call;
  a.labels = linear_head_labels(ctx, kOp, call.labels);
  Pair pair = pair_of(a);
  check_call(a, pair.student);
  LinearHeadRows rows = linear_head_rows(ctx, pair.student, a.labels);
  bool gradients = pair.student.wants_gradients();
  int64_t few = linear_divergence_logit_rows(pair.vocab, pair.given ? 1 : 2);
  int64_t chunk = linear_head_limit(ctx, pair.whole, rows.count, a.labels.chunk_rows);
  if (!gradients) chunk = std::min(chunk, few);
  linear_head_check_chunks(pair.student, (rows.count + chunk - 1) / chunk);
  linear_head_scale(ctx, a.reduction, a.labels, {});
  linear_head_clear(ctx, pair.student, rows);
  clear_padding(ctx, pair.whole, pair.vocab);
  Values values = make_values(ctx, a, rows, gradients);
  if (rows.count > 0) {
    LinearHeadWorkspace workspace =
        linear_head_workspace(ctx, pair.student, rows, {.chunk = chunk, .logits = gradients});
    few = std::min(few, chunk);
    Logits logits = make_logits(ctx, a, pair, rows, few);
    for (int64_t begin = 0; begin < rows.count; begin += chunk) {
      LinearHeadChunk c =
          linear_head_chunk(pair.student, rows, workspace, begin, std::min(chunk, rows.count - begin));
      for (int64_t first = 0; first < c.count; first += few) {
        LinearHeadChunk part = linear_head_slice(c, first, std::min(few, c.count - first));
        auto of = [&](const Vector& v) { return linear_head_part(v, part.begin, part.count); };
        DistillationRows pass = row_pass(a, pair);
        if (gradients) pass.dstudent = part.logits;
        part.logits = rows_from(logits.student, 0, part.count);
        linear_head_logits(ctx, pair.student, part);
        pass.student = part.logits;
        pass.teacher = teacher_logits(ctx, a, pair, rows, logits, part.begin, part.count);
        pass.labels = of(rows.labels), pass.scale = of(values.factor), pass.loss = of(values.loss);
        pass.soft = of(values.soft), pass.hard = of(values.hard), pass.entropy = of(values.entropy);
        distillation_rows(ctx, pass);
      }
      c.gathered = true;
      linear_head_gradients(ctx, pair.student, c, {.first = begin == 0});
    }
  }
  write_results(ctx, a, rows, values);
  linear_head_total(ctx, a.reduction, a.loss);
}

namespace {

// PyTorch's operators: the loss, and the gradients of per-row losses, whose logits are computed again with each row's upstream
// gradient folded in.
template <bool rows_backward>
struct LinearDivergenceCall {
  enum Output : int64_t { soft = 1, hard = 2, entropy = 4, all = 7 };
  LinearDivergence call;
  LinearHeadFields head;
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
    LinearHeadFields head = given.head;
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
constexpr auto forward = Forward::run;
constexpr auto rows_backward = RowsBackward::run;

TIGON_OPERATOR(forward, Forward, "linear_divergence", forward)
TIGON_OPERATOR(rows_backward, RowsBackward, "linear_divergence_rows", backward)

}  // namespace

}  // namespace tigon

// For Python, through ctypes.
extern "C" TIGON_API void tigon_linear_divergence_memory(const tigon::LinearHeadSizes* sizes,
                                                         int64_t teacher_hidden,
                                                         tigon::LinearHeadPlan* plan) {
  *plan = tigon::linear_divergence_memory(*sizes, teacher_hidden);
}
