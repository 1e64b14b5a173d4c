#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.h"

namespace tigon::torch_shim::linear_loss_torch {
namespace {

constexpr const char* kOp = kLossHead;

// Log-probability of each label, and the entropy of each distribution.
struct Statistics {
  Tensor log_prob, entropy;
};
Statistics make_statistics(LinearCrossEntropy& a, const Tensor& hidden, bool entropy) {
  int64_t rows = a.head.hidden.rows;
  Statistics r{.log_prob = a.several.labels ? make(hidden, {rows, a.several.count}, DType::f32)
                                            : make(hidden, {rows}, DType::f32),
               .entropy = make_if(entropy, hidden, {rows}, DType::f32)};
  (a.several.labels ? a.several.log_prob : a.results.log_prob) = flat(kOp, "log_prob", r.log_prob);
  if (entropy) a.results.entropy = vector_of(kOp, "entropy", r.entropy);
  return r;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> log_prob(Operands operands, Formula formula, Memory memory,
                                                    bool entropy) {
  const Tensor& hidden = operands.hidden;
  LinearCrossEntropy a = arguments(operands, formula, memory);
  a.reduction.kind = Reduction::none;
  Tensor losses = make(hidden, {a.head.hidden.rows}, DType::f32);
  a.results.loss = vector_of(kOp, "loss", losses);
  Statistics r = make_statistics(a, hidden, entropy);
  KeptTensors kept = make_kept(a, hidden, memory);
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {r.log_prob, r.entropy, kept.unit, kept.dlogits};
}

std::tuple<Tensor, Tensor> log_prob_infer(Operands operands, Formula formula, Memory memory, bool entropy) {
  memory.needs = memory.keep_rows = 0;
  auto results = log_prob(std::move(operands), formula, memory, entropy);
  return {std::get<0>(results), std::get<1>(results)};
}

// The two halves of a chunk; `logits` [rows, V] is the caller's memory, `dhidden`, `dweight`, `dbias` too.
std::tuple<Tensor, Tensor> chunk_logits(Tensor logits, Operands operands, Formula formula, bool entropy) {
  const Tensor& hidden = operands.hidden;
  LinearCrossEntropy a = arguments(operands, formula);
  Statistics r = make_statistics(a, hidden, entropy);
  auto ctx = make_context(hidden);
  linear_cross_entropy_chunk_logits(*ctx, a, logits_of("workspace", logits));
  return {r.log_prob, r.entropy};
}

std::tuple<> chunk_gradient(Tensor logits, OptionalTensor dhidden, OptionalTensor dweight,
                            OptionalTensor dbias, Tensor upstream, OptionalTensor entropy_upstream,
                            Operands operands, Formula formula, bool first) {
  LinearCrossEntropy a = arguments(operands, formula);
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  a.entropy_upstream = vector_of(kOp, "upstream gradient of the entropy", entropy_upstream);
  a.head.dhidden = rows_of(kOp, "dhidden", dhidden);
  a.head.dweight = rows_of(kOp, "dweight", dweight);
  a.head.dbias = vector_of(kOp, "dbias", dbias);
  auto ctx = make_context(operands.hidden);
  linear_cross_entropy_chunk_gradient(*ctx, a, logits_of("workspace", logits), first);
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
  const std::string head = schema<Operands, Formula>();
  const std::string inputs = "(" + head_schema() + ", bool entropy) -> ";
  define_forward(m, "linear_log_prob",
                 inputs + "(Tensor log_prob, Tensor entropy, Tensor unit, Tensor kept)");
  define(m, "linear_log_prob_infer" + inputs + "(Tensor log_prob, Tensor entropy)");
  define(m, "linear_loss_logits(Tensor(a!) logits, " + head + ", bool entropy) -> (Tensor, Tensor)");
  define(m,
         "linear_loss_gradient(Tensor(a!) logits, Tensor(b!)? dhidden, Tensor(c!)? dweight,"
         " Tensor(d!)? dbias, Tensor upstream, Tensor? entropy_upstream, " +
             head + ", bool first) -> ()");
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
