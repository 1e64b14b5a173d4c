// Defines PyTorch's operators of cross-entropy and of log-probabilities.
#include <utility>

#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_cross_entropy";

struct Operands : LossHeadFields {
  LinearCrossEntropy call;
  int64_t vocab = 0, labels = -1;  // first dimensions of weight and of target (Fields::flat)

  void operands(Fields& f) {
    LinearHead& h = call.head;
    f.rows("hidden", h.hidden), f.stacked("weight", h.weight, vocab, h.weight.dtype);
    f.flat("target", call.labels.target, Role::input, &labels);
    parameters(f, h, call.labels, call.formula);
  }
  LossHeadPlan plan(const Fields& f) const {
    const LinearHead& h = call.head;
    return loss_head_plan({.cuda = f.on_cuda(),
                           .dtype = int64_t(h.hidden.dtype),
                           .weight_dtype = int64_t(h.hidden.dtype),
                           .rows = h.hidden.rows,
                           .worked = worked(h, call.labels),
                           .hidden = h.hidden.cols,
                           .vocab = h.weight.rows,
                           .lora_rank = (needs & (need_lora_a | need_lora_b)) != 0,
                           .train_hidden = (needs & need_hidden) != 0,
                           .train_weight = (needs & need_weight) != 0,
                           .train_bias = (needs & need_bias) != 0,
                           .main_grad = (needs & into_main_grad) != 0,
                           .chunk_rows = call.labels.chunk_rows,
                           .per_row = 1,
                           .keep_rows = keep_rows,
                           .unit = (needs & need_unit) != 0});
  }
  void kept(Fields& f, const LossHeadPlan& p, Role role) {
    const LinearHead& h = call.head;
    f.result_if(p.kept > 0, "kept", call.kept.dlogits, p.kept, loss_head_logit_stride(h.weight.rows),
                h.hidden.dtype, role);
  }
  LinearCrossEntropy arguments() const {
    LinearCrossEntropy a = call;
    a.head.op = kOp;
    a.class_weight = class_weight, a.token_weight = token_weight;
    a.label_smoothing = label_smoothing, a.z_loss = z_loss;
    a.kept.dlogits.cols = a.head.weight.rows, a.kept.are_logits = needs & keep_logits;
    TIGON_CHECK(kOp, labels >= -1, "target must have one dimension, got ", -labels);
    if (labels < 0) return a;
    a.several.labels = a.labels.target, a.labels.target = {};
    a.several.count = labels > 0 ? a.several.labels.size / labels : 1;
    return a;
  }
};

struct Forward : Operands {
  enum Output : int64_t { z_term = 1, log_prob = 2, lse = 4, entropy = 8, predicted = 16, only_label = 32 };

  void fields(Fields& f) {
    LinearCrossEntropyResults& r = call.results;
    operands(f), reduction(f, call.reduction), f.option("outputs", outputs);
    losses(f, call.reduction, r.loss, call.head);
    // Per-row losses make the gradients in their backward; dhidden belongs to an upstream gradient of 1.
    const bool one = call.reduction.kind != Reduction::none;
    const LossHeadPlan p = one ? LossHeadPlan{} : plan(f);
    LossHeadFields formed = *this;
    if (!one) formed.needs = p.unit ? int64_t(need_hidden) : 0;
    formed.gradients(f, call.head, call.labels);
    numbers(f, predicted - 1, call.head);
    f.result_if(outputs & predicted, "predicted", r.predicted, call.head.hidden.rows, DType::i64);
    kept(f, p, Role::result);
  }
  static void run(Context& ctx, const Forward& given) {
    LinearCrossEntropy a = given.arguments();
    LossHeadFields from = given;
    LinearCrossEntropyResults& r = a.results;
    r.loss = losses(ctx, a.reduction, r.loss, a.head);
    r.z_term = from.take(z_term), r.log_prob = from.take(log_prob);
    r.lse = from.take(lse), r.entropy = from.take(entropy);
    r.only_label = from.outputs & only_label;
    if (a.reduction.kind == Reduction::none) a.kept.unit = std::exchange(a.head.dhidden, {});
    linear_cross_entropy(ctx, a);
  }
};

// Computes the gradients of per-row losses. weight is [V, 0] if its values are not needed. With in_place
// dweight is added to main_grad, and with `finish` unit becomes dhidden in its own memory and kept logits
// become their gradients. What is written so is not returned.
template <bool in_place>
struct RowsBackward : Operands {
  Vector upstream;
  Matrix main_grad;
  bool finish = false;

  void fields(Fields& f) {
    LinearHead& h = call.head;
    Matrix &unit = call.kept.unit, &dlogits = call.kept.dlogits;
    f.flat("upstream", upstream, Role::input), f.optional("entropy_upstream", call.entropy_upstream);
    in_place ? f.updated("unit", unit) : f.optional("unit", unit);
    in_place ? f.updated("kept", dlogits) : f.optional("kept", dlogits);
    if (in_place) f.updated("main_grad", main_grad);
    operands(f);
    if (in_place) f.option("finish", finish);
    if (h.weight.cols == 0)
      h.weight = {.dtype = h.hidden.dtype, .rows = vocab, .cols = h.hidden.cols, .stride = h.hidden.cols};
    const bool some = dlogits.data, all = some && dlogits.rows >= worked(h, call.labels);
    LossHeadFields formed = *this;
    if (main_grad.data) formed.needs &= ~need_weight;
    if (finish && unit.data) formed.needs &= ~need_hidden;
    if (some && !all) formed.needs &= ~may_round;  // there are several chunks
    formed.gradients(
        f, h, (all && call.labels.chunk_rows == 0 && !(needs & keep_logits)) || whole(f, h, call.labels));
  }
  static void run(Context& ctx, const RowsBackward& given) {
    LinearCrossEntropy a = given.arguments();
    a.reduction.kind = Reduction::none;
    (a.several.labels ? a.several.upstream : a.upstream) = given.upstream;
    if (given.finish && a.kept.unit.data && given.needs & need_hidden) a.head.dhidden = a.kept.unit;
    a.kept.overwrite = given.finish && a.kept.are_logits;
    if (given.main_grad.data) a.head.dweight = given.main_grad, a.head.add_dweight = true;
    linear_cross_entropy_rows_gradient(ctx, a);
  }
};

// Computes the log-probability of each label, and the entropy of each distribution.
struct LogProb : Operands {
  Vector log_prob;
  bool entropy = false;

  void fields(Fields& f) {
    operands(f), f.option("entropy", entropy);
    f.result_if(true, "log_prob", log_prob, call.labels.target);
    f.result_if(entropy, "entropy", call.results.entropy, call.head.hidden.rows);
    const LossHeadPlan p = plan(f);
    f.result_if(p.unit, "unit", call.kept.unit, call.head.hidden, Role::statistics);
    kept(f, p, Role::statistics);
  }
  static void run(Context& ctx, const LogProb& given) {
    LinearCrossEntropy a = given.arguments();
    (a.several.labels ? a.several.log_prob : a.results.log_prob) = given.log_prob;
    a.reduction.kind = Reduction::none;
    a.results.loss = loss_head_vector(ctx, a.head.hidden.rows);
    linear_cross_entropy(ctx, a);
  }
};

constexpr auto rows_backward = RowsBackward<false>::run;
constexpr auto rows_backward_in_place = RowsBackward<true>::run;
TIGON_CALL(Forward, kOp, forward)
TIGON_OPERATOR(rows_backward, RowsBackward<false>, "linear_cross_entropy_rows_bwd", none)
TIGON_OPERATOR(rows_backward_in_place, RowsBackward<true>, "linear_cross_entropy_rows_bwd_", none)
TIGON_CALL(LogProb, "linear_log_prob", forward)

}  // namespace

}  // namespace tigon
