#include "tigon/ops/linear_divergence/linear_divergence.h"
#include "tigon/torch/linear_head.h"

namespace tigon::torch_shim::linear_divergence_torch {
namespace {

constexpr const char* kOp = "linear_divergence";

// Bits of `outputs`, as in python/tigon/ops/loss_head/linear_divergence.py.
enum Output : int64_t { out_soft = 1, out_hard = 2, out_entropy = 4 };

// The teacher, and the divergence from it.
struct Teacher {
  Tensor teacher;
  OptionalTensor weight, bias;
  DivergenceKind kind;
  double beta;
  float soft_weight, hard_weight, softcap, logit_scale;
  static constexpr const char* kNames[] = {
      "teacher",     "teacher_weight",  "teacher_bias",       "kind", "beta", "soft_weight",
      "hard_weight", "teacher_softcap", "teacher_logit_scale"};
};

LinearDivergence arguments(Operands& t, const Formula& f, const Memory& m, Teacher& from) {
  check_devices(kOp, from, t.hidden);
  DivergenceBeta beta = divergence_beta(from.kind, from.beta);
  Matrix teacher = rows_of(kOp, "teacher", from.teacher);
  return {.head = head_of(kOp, t, f),
          .labels = labels_of(kOp, t, f, m),
          .formula = f.logits(),
          .teacher_formula = {.softcap = from.softcap, .logit_scale = from.logit_scale},
          .teacher_hidden = from.weight ? teacher : Matrix{},
          .teacher_weight = rows_of(kOp, "teacher_weight", from.weight),
          .teacher_bias = vector_of(kOp, "teacher_bias", from.bias),
          .teacher_logits = from.weight ? Matrix{} : teacher,
          .token_weight = vector_of(kOp, "token_weight", t.token_weight),
          .kind = from.kind,
          .beta = beta.beta,
          .factor = float(beta.factor),
          .soft_weight = from.soft_weight,
          .hard_weight = from.hard_weight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> run(
    Operands& operands, const Formula& formula, Memory memory, Teacher& teacher, const Reduced& by,
    OptionalTensor upstream, int64_t outputs) {
  const Tensor& hidden = operands.hidden;
  LinearDivergence a = arguments(operands, formula, memory, teacher);
  LossTensors t(kOp, hidden, a.head.hidden.rows, by);
  a.reduction = t.reduction, a.loss = vector_of(kOp, "loss", t.losses);
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  RowNumbers numbers(kOp, hidden, a.head.hidden.rows, outputs, out_soft | out_hard | out_entropy);
  a.soft = numbers.take(out_soft), a.hard = numbers.take(out_hard), a.entropy = numbers.take(out_entropy);
  if (!t.scalar && !upstream) memory.needs = 0;
  HeadGradients g = make_gradients(a.head, hidden, memory);
  auto ctx = make_context(hidden);
  linear_divergence(*ctx, a);
  return {t.loss(), t.scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b, numbers.numbers};
}

auto forward(Operands operands, Formula formula, Memory memory, Teacher teacher, Reduced by,
             int64_t outputs) {
  return run(operands, formula, memory, teacher, by, {}, outputs);
}
// Gradients of per-row losses: the logits are computed again, with each row's upstream gradient folded in.
FiveGradients rows_backward(Tensor upstream, Operands operands, Formula formula, Memory memory,
                            Teacher teacher) {
  auto [loss, scale, dhidden, dweight, dbias, dlora_a, dlora_b, rows] =
      run(operands, formula, memory, teacher, {.reduction = int64_t(Reduction::none)}, upstream, 0);
  return {dhidden, dweight, dbias, dlora_a, dlora_b};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "linear_divergence",
                 "(" + head_schema<Teacher, Reduced>() + ", int outputs) -> (Tensor loss, Tensor scale, " +
                     kFiveGradients + ", Tensor rows)");
  define(m, "linear_divergence_rows_bwd(Tensor upstream, " + head_schema<Teacher>() + ") -> (" +
                kFiveGradients + ")");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_divergence", boxed<&forward>);
  m.impl("linear_divergence_rows_bwd", boxed<&rows_backward>);
}

}  // namespace tigon::torch_shim::linear_divergence_torch

// For Python, through ctypes.
extern "C" TIGON_API void tigon_linear_divergence_memory(const tigon::LinearHeadSizes* sizes,
                                                         int64_t teacher_hidden,
                                                         tigon::LinearHeadPlan* plan) {
  *plan = tigon::linear_divergence_memory(*sizes, teacher_hidden);
}
