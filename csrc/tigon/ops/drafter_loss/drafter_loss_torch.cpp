#include "tigon/ops/drafter_loss/drafter_loss.h"
#include "tigon/torch/linear_head.h"

namespace tigon::torch_shim::drafter_loss_torch {
namespace {

constexpr const char* kOp = "drafter_loss";

// The teacher, and the loss against it.
struct Teacher {
  Tensor hidden, weight, target;
  OptionalTensor draft_id;
  DrafterKind kind;
  float eta;
  bool overlap_outside, soft_outside, mask_outside;
  static constexpr const char* kNames[] = {"teacher_hidden",  "teacher_weight", "teacher_target",
                                           "draft_id",        "kind",           "eta",
                                           "overlap_outside", "soft_outside",   "mask_outside"};
};

DrafterLoss arguments(Operands& t, const Formula& f, const Memory& m, Teacher& from) {
  check_devices(kOp, from, t.hidden);
  return {.head = head_of(kOp, t, f),
          .labels = labels_of(kOp, t, f, m),
          .teacher_hidden = rows_of(kOp, "teacher_hidden", from.hidden),
          .teacher_weight = rows_of(kOp, "teacher_weight", from.weight),
          .teacher_target = vector_of(kOp, "teacher_target", from.target),
          .draft_id = vector_of(kOp, "draft_id", from.draft_id),
          .token_weight = vector_of(kOp, "token_weight", t.token_weight),
          .kind = from.kind,
          .eta = from.eta,
          .overlap_outside = from.overlap_outside,
          .soft_outside = from.soft_outside,
          .mask_outside = from.mask_outside};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> run(
    Operands& operands, const Formula& formula, Memory memory, Teacher& teacher, const Reduced& by,
    OptionalTensor upstream) {
  const Tensor& hidden = operands.hidden;
  DrafterLoss a = arguments(operands, formula, memory, teacher);
  LossTensors t(kOp, hidden, a.head.hidden.rows, by);
  a.reduction = t.reduction, a.loss = vector_of(kOp, "loss", t.losses);
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  RowNumbers numbers(kOp, hidden, a.head.hidden.rows, 3, 3);
  a.overlap = numbers.take(1), a.counted = numbers.take(2);
  if (!t.scalar && !upstream) memory.needs = 0;
  HeadGradients g = make_gradients(a.head, hidden, memory);
  auto ctx = make_context(hidden);
  drafter_loss(*ctx, a);
  return {t.loss(), t.scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b, numbers.numbers};
}

auto forward(Operands operands, Formula formula, Memory memory, Teacher teacher, Reduced by) {
  return run(operands, formula, memory, teacher, by, {});
}
// Gradients of per-row losses: the logits are computed again, with each row's upstream gradient folded in.
FiveGradients rows_backward(Tensor upstream, Operands operands, Formula formula, Memory memory,
                            Teacher teacher) {
  auto [loss, scale, dhidden, dweight, dbias, dlora_a, dlora_b, rows] =
      run(operands, formula, memory, teacher, {.reduction = int64_t(Reduction::none)}, upstream);
  return {dhidden, dweight, dbias, dlora_a, dlora_b};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "drafter_loss",
                 "(" + head_schema<Teacher, Reduced>() + ") -> (Tensor loss, Tensor scale, " +
                     kFiveGradients + ", Tensor rows)");
  define(m, "drafter_loss_rows_bwd(Tensor upstream, " + head_schema<Teacher>() + ") -> (" + kFiveGradients +
                ")");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "drafter_loss", boxed<&forward>);
  m.impl("drafter_loss_rows_bwd", boxed<&rows_backward>);
}

}  // namespace tigon::torch_shim::drafter_loss_torch
