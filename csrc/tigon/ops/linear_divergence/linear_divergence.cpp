#include "tigon/ops/linear_divergence/linear_divergence.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_divergence";

Matrix first_rows(Matrix m, int64_t rows) {
  m.rows = m.data ? rows : m.rows;
  return m;
}
Vector first_of(Vector v, int64_t size) {
  v.size = v ? size : v.size;
  return v;
}

LinearHead head_of(const LinearDivergence& a) {
  return {.op = kOp,
          .hidden = a.hidden,
          .weight = a.weight,
          .bias = a.bias,
          .lora_a = a.lora_a,
          .lora_b = a.lora_b,
          .lora_scale = a.lora_scale,
          .dhidden = a.dhidden,
          .dweight = a.dweight,
          .dbias = a.dbias,
          .dlora_a = a.dlora_a,
          .dlora_b = a.dlora_b};
}

// The two heads over their common classes.
struct Pair {
  LinearHead whole, student, teacher;
  int64_t vocab = 0;
  bool given = false;  // the teacher's logits
};
Pair pair_of(const LinearDivergence& a) {
  Pair p = {.whole = head_of(a), .given = a.teacher_logits.data != nullptr};
  int64_t rows = a.hidden.rows;
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
  if (a.bias) require_vector(kOp, "bias", a.bias, a.weight.rows, DType::f32);
  if (a.teacher_bias) require_vector(kOp, "teacher_bias", a.teacher_bias, teacher_vocab, DType::f32);
  p.vocab = std::min(a.weight.rows, teacher_vocab);
  p.student = p.whole;
  for (Matrix* m :
       {&p.student.weight, &p.student.lora_b, &p.student.dweight, &p.student.dlora_b, &p.teacher.weight})
    *m = first_rows(*m, p.vocab);
  p.student.bias = first_of(a.bias, p.vocab), p.student.dbias = first_of(a.dbias, p.vocab);
  return p;
}

void check_call(const LinearDivergence& a, const LinearHead& head) {
  int64_t rows = a.hidden.rows;
  require_vector(kOp, "target", a.target, rows, DType::i64);
  auto check = [&](const char* name, const Vector& v) {
    if (v) require_vector(kOp, name, v, rows, DType::f32);
  };
  check("token_weight", a.token_weight);
  check("upstream", a.upstream);
  check("soft", a.soft);
  check("hard", a.hard);
  check("entropy", a.entropy);
  require_vector(kOp, "loss", a.loss, rows, DType::f32);
  bool scalar = a.reduction != Reduction::none;
  if (scalar) {
    require_vector(kOp, "total", a.total, 1, DType::f32);
    require_vector(kOp, "scale", a.scale, 1, DType::f32);
  }
  TIGON_CHECK(kOp, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
  TIGON_CHECK(kOp, a.softcap >= 0.0f, "softcap must be > 0 or none, got ", a.softcap);
  TIGON_CHECK(kOp, a.teacher_softcap >= 0.0f, "teacher_softcap must be > 0 or none, got ", a.teacher_softcap);
  TIGON_CHECK(kOp, a.kind != DivergenceKind::jsd || (a.beta > 0.0f && a.beta < 1.0f),
              "beta must be in (0, 1), got ", a.beta);
  TIGON_CHECK(kOp, !head.wants_gradients() || scalar || a.upstream,
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
  if (!gradients) return v;
  Vector scale = a.upstream || !linear_head_scales_early(a.hidden.dtype) ? Vector{} : a.scale;
  v.factor = a.upstream ? a.upstream : scale;
  if (!a.token_weight && !(rows.listed && a.upstream)) return v;
  v.factor = linear_head_vector(ctx, rows.count);
  linear_head_factors(ctx, {.target = a.target,
                            .ignore_index = a.ignore_index,
                            .index = rows.index,
                            .token_weight = a.token_weight,
                            .upstream = a.upstream,
                            .scale = scale,
                            .out = v.factor});
  return v;
}
void write_results(Context& ctx, const LinearDivergence& a, const LinearHeadRows& rows, const Values& v) {
  if (!rows.listed && !a.token_weight) return;
  LinearHeadResults results = {
      .target = a.target, .ignore_index = a.ignore_index, .position = rows.position, .fault = rows.fault};
  results.add({.from = v.loss, .to = a.loss, .factor = a.token_weight});
  results.add({.from = v.soft, .to = a.soft});
  results.add({.from = v.hard, .to = a.hard});
  results.add({.from = v.entropy, .to = a.entropy});
  linear_head_results(ctx, results);
}

// Logits of a few rows of both sides.
struct Logits {
  Matrix student, teacher;
  LinearHeadWorkspace of_teacher;
};
Matrix new_logits(Context& ctx, int64_t rows, int64_t vocab, DType dtype) {
  int64_t stride = linear_head_logit_stride(vocab);
  void* data = ctx.scratch(size_of(dtype) * size_t(rows * stride));
  return {.data = data, .dtype = dtype, .rows = rows, .cols = vocab, .stride = stride};
}
Logits make_logits(Context& ctx, const LinearDivergence& a, const Pair& pair, const LinearHeadRows& rows,
                   int64_t count) {
  Logits l = {.student = new_logits(ctx, count, pair.vocab, DType::f32)};
  if (!pair.given) {
    l.teacher = new_logits(ctx, count, pair.vocab, DType::f32);
    l.of_teacher = linear_head_workspace(ctx, pair.teacher, rows, {.chunk = count, .logits = false});
  } else if (rows.listed) {
    l.teacher = new_logits(ctx, count, pair.vocab, a.teacher_logits.dtype);
  }
  return l;
}
// The teacher's logits of rows [begin, begin + count) of the list.
Matrix teacher_logits(Context& ctx, const LinearDivergence& a, const Pair& pair, const LinearHeadRows& rows,
                      const Logits& l, int64_t begin, int64_t count) {
  if (!pair.given) {
    LinearHeadChunk c = linear_head_chunk(pair.teacher, rows, l.of_teacher, begin, count);
    c.logits = first_rows(l.teacher, count);
    linear_head_logits(ctx, pair.teacher, c);
    return c.logits;
  }
  Matrix logits = a.teacher_logits;
  logits.cols = pair.vocab;
  if (!rows.listed) return rows_from(logits, begin, count);
  Matrix gathered = first_rows(l.teacher, count);
  linear_head_move(ctx,
                   {.from = logits, .to = gathered, .index = linear_head_part(rows.index, begin, count)});
  return gathered;
}

DistillationRows row_pass(const LinearDivergence& a, const Pair& pair) {
  return {.student_side = {.bias = pair.student.bias,
                           .logit_scale = a.logit_scale,
                           .softcap = a.softcap,
                           .temperature = a.temperature},
          .teacher_side = {.bias = first_of(a.teacher_bias, pair.vocab),
                           .logit_scale = a.teacher_logit_scale,
                           .softcap = a.teacher_softcap,
                           .temperature = a.temperature},
          .dstudent = {.dtype = a.hidden.dtype},
          .kind = a.kind,
          .ignore_index = a.ignore_index,
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

void linear_divergence(Context& ctx, const LinearDivergence& call) {
  LinearDivergence a = call;
  a.target = linear_head_labels(ctx, kOp, call.target, call.ignore_index, call.shift);
  Pair pair = pair_of(a);
  check_call(a, pair.student);
  LinearHeadRows rows = linear_head_rows(
      ctx, pair.student, {.target = a.target, .ignore_index = a.ignore_index, .valid_rows = a.valid_rows});
  bool gradients = pair.student.wants_gradients();
  int64_t few = linear_divergence_logit_rows(pair.vocab, pair.given ? 1 : 2);
  int64_t chunk = linear_head_limit(ctx, pair.whole, rows.count, a.chunk_rows);
  if (!gradients) chunk = std::min(chunk, few);
  linear_head_check_chunks(pair.student, (rows.count + chunk - 1) / chunk);
  if (a.reduction != Reduction::none)
    cross_entropy_scale(ctx, {.target = a.target,
                              .ignore_index = a.ignore_index,
                              .mean = a.reduction == Reduction::mean,
                              .denominator = a.denominator,
                              .host_denominator = a.host_denominator,
                              .has_host_denominator = a.has_host_denominator,
                              .scale = a.scale});
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
        part.logits = first_rows(logits.student, part.count);
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
  if (a.reduction != Reduction::none)
    cross_entropy_total(ctx, {.loss = a.loss, .scale = a.scale, .total = a.total});
}

}  // namespace tigon
