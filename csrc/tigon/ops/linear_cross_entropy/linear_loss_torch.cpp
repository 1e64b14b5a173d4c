#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.h"

namespace tigon::torch_shim::linear_loss_torch {
namespace {

constexpr const char* kOp = kLossHead;

// Log-probability of each label, and the entropy of each distribution.
struct Statistics {
  Tensor log_prob, entropy;
};
Statistics make_statistics(LinearCrossEntropy& a, const Tensor& hidden, bool entropy) {
  int64_t rows = a.hidden.rows;
  Statistics r{.log_prob = a.labels ? make(hidden, {rows, a.label_count}, DType::f32)
                                    : make(hidden, {rows}, DType::f32),
               .entropy = entropy ? make(hidden, {a.hidden.rows}, DType::f32) : nothing(hidden, DType::f32)};
  if (a.labels)
    a.label_log_prob = flat(kOp, "log_prob", r.log_prob);
  else
    a.log_prob = vector_of(kOp, "log_prob", r.log_prob);
  if (entropy) a.entropy = vector_of(kOp, "entropy", r.entropy);
  return r;
}

struct Lora {
  OptionalTensor a, b;
  double scale = 1.0;

  static constexpr const char* kSchema = "Tensor? lora_a, Tensor? lora_b, float lora_scale, ";
  static Lora take(Stack& s) {
    return {s.take<OptionalTensor>(), s.take<OptionalTensor>(), s.take<double>()};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> log_prob(Head head, Lora lora, Rows rows, bool entropy,
                                                    int64_t needs, int64_t keep_rows) {
  const Tensor& hidden = head.operands.hidden;
  head.operands.lora_a = std::move(lora.a), head.operands.lora_b = std::move(lora.b);
  head.formula.lora_scale = lora.scale;
  LinearCrossEntropy a = arguments(head.operands, head.formula, rows);
  a.reduction = Reduction::none;
  Tensor losses = make(hidden, {a.hidden.rows}, DType::f32);
  a.loss = vector_of(kOp, "loss", losses);
  Statistics r = make_statistics(a, hidden, entropy);
  Between between = make_between(a, hidden, needs, keep_rows);
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {r.log_prob, r.entropy, between.unit, between.kept};
}

std::tuple<Tensor, Tensor> log_prob_infer(Head head, Lora lora, Rows rows, bool entropy, int64_t, int64_t) {
  auto results = log_prob(std::move(head), std::move(lora), rows, entropy, 0, 0);
  return {std::get<0>(results), std::get<1>(results)};
}

// The two halves of a chunk; `logits` [rows, V] is the caller's memory, `dhidden`, `dweight`, `dbias` too.
std::tuple<Tensor, Tensor> chunk_logits(Tensor logits, Head head, bool entropy) {
  const Tensor& hidden = head.operands.hidden;
  LinearCrossEntropy a = arguments(head.operands, head.formula);
  Statistics r = make_statistics(a, hidden, entropy);
  auto ctx = make_context(hidden);
  linear_cross_entropy_chunk_logits(*ctx, a, rows_of(kOp, "workspace", logits));
  return {r.log_prob, r.entropy};
}

std::tuple<> chunk_gradient(Tensor logits, OptionalTensor dhidden, OptionalTensor dweight,
                            OptionalTensor dbias, Tensor upstream, OptionalTensor entropy_upstream, Head head,
                            bool first) {
  LinearCrossEntropy a = arguments(head.operands, head.formula);
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  a.entropy_upstream = vector_of(kOp, "upstream gradient of the entropy", entropy_upstream);
  a.dhidden = rows_of_optional("dhidden", dhidden);
  a.dweight = rows_of_optional("dweight", dweight);
  a.dbias = vector_of(kOp, "dbias", dbias);
  auto ctx = make_context(head.operands.hidden);
  linear_cross_entropy_chunk_gradient(*ctx, a, rows_of(kOp, "workspace", logits), first);
  return {};
}

// Rows whose label counts, in order: (index, labels, fault), see linear_head.h.
std::tuple<Tensor, Tensor, Tensor> compact(Tensor target, int64_t ignore_index, int64_t count) {
  LinearHeadCompact a = {.target = vector_of(kOp, "target", target), .ignore_index = ignore_index};
  Tensor index = make(target, {count}, DType::i64), labels = make(target, {count}, DType::i64);
  Tensor position = make(target, {a.target.size}, DType::i64), fault = make(target, {}, DType::f32);
  a.index = vector_of(kOp, "index", index);
  a.labels = vector_of(kOp, "labels", labels);
  a.position = vector_of(kOp, "position", position);
  a.fault = scalar_of(kOp, "fault", fault);
  auto ctx = make_context(target);
  linear_head_compact(*ctx, a);
  return {index, labels, fault};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string head = Head::kSchema, rows = Rows::kSchema;
  const std::string inputs =
      "(" + head + Lora::kSchema + rows + "bool entropy, int needs, int keep_rows) -> ";
  define_forward(m, "linear_log_prob",
                 inputs + "(Tensor log_prob, Tensor entropy, Tensor unit, Tensor kept)");
  define(m, "linear_log_prob_infer" + inputs + "(Tensor log_prob, Tensor entropy)");
  define(m, "linear_loss_logits(Tensor(a!) logits, " + head + "bool entropy) -> (Tensor, Tensor)");
  define(m,
         "linear_loss_gradient(Tensor(a!) logits, Tensor(b!)? dhidden, Tensor(c!)? dweight,"
         " Tensor(d!)? dbias, Tensor upstream, Tensor? entropy_upstream, " +
             head + "bool first) -> ()");
  define(m, "linear_loss_rows(Tensor target, int ignore_index, int count) -> (Tensor, Tensor, Tensor)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_log_prob", boxed<&log_prob>);
  m.impl("linear_log_prob_infer", boxed<&log_prob_infer>);
  m.impl("linear_loss_logits", boxed<&chunk_logits>);
  m.impl("linear_loss_gradient", boxed<&chunk_gradient>);
  m.impl("linear_loss_rows", TORCH_BOX(&compact));
}

}  // namespace tigon::torch_shim::linear_loss_torch
