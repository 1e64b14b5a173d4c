// Adaptors of the products of a head by themselves, for tigon.parallel: between them other processes are heard.
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.h"

namespace tigon::torch_shim::linear_products_torch {
namespace {

constexpr const char* kOp = kLossHead;

// The head of a product, low-rank part and all.
LinearHead head_of(Tensor& hidden, Tensor& weight, OptionalTensor& lora_a, OptionalTensor& lora_b,
                   double lora_scale) {
  check_same_device(kOp, "weight", weight, hidden);
  return {.op = kOp,
          .hidden = rows_of(kOp, "hidden", hidden),
          .weight = rows_of(kOp, "weight", weight),
          .lora_a = rows_of(kOp, "lora A", lora_a),
          .lora_b = rows_of(kOp, "lora B", lora_b),
          .lora_scale = float(lora_scale)};
}

std::tuple<> logits(Tensor logits, Tensor hidden, Tensor weight, OptionalTensor lora_a, OptionalTensor lora_b,
                    double lora_scale) {
  check_same_device(kOp, "logits", logits, hidden);
  LinearHead head = head_of(hidden, weight, lora_a, lora_b, lora_scale);
  linear_head_check(head);
  LinearHeadRows all = {.count = head.hidden.rows};
  auto ctx = make_context(hidden);
  LinearHeadWorkspace workspace =
      linear_head_workspace(*ctx, head, all, {.chunk = all.count, .logits = false});
  LinearHeadChunk c = linear_head_chunk(head, all, workspace, 0, all.count);
  c.logits = logits_of("logits", logits);
  linear_head_logits(*ctx, head, c);
  return {};
}

// dlogits are only read.
std::tuple<> gradients(Tensor dlogits, Tensor hidden, Tensor weight, OptionalTensor dhidden,
                       OptionalTensor dweight, OptionalTensor dbias, OptionalTensor factor, bool first,
                       bool add_dweight, OptionalTensor lora_a, OptionalTensor lora_b, double lora_scale,
                       OptionalTensor dlora_a, OptionalTensor dlora_b) {
  check_same_device(kOp, "dlogits", dlogits, hidden);
  LinearHead head = head_of(hidden, weight, lora_a, lora_b, lora_scale);
  head.dhidden = rows_of(kOp, "dhidden", dhidden);
  head.dweight = rows_of(kOp, "dweight", dweight);
  head.add_dweight = add_dweight;
  head.dbias = vector_of(kOp, "dbias", dbias);
  head.dlora_a = rows_of(kOp, "dlora_a", dlora_a);
  head.dlora_b = rows_of(kOp, "dlora_b", dlora_b);
  linear_head_check(head);
  linear_head_check_chunks(head, first ? 1 : 2);
  LinearHeadRows all = {.count = head.hidden.rows};
  auto ctx = make_context(hidden);
  LinearHeadWorkspace workspace = linear_head_workspace(
      *ctx, head, all, {.chunk = all.count, .logits = false, .factored = factor.has_value()});
  LinearHeadChunk c = linear_head_chunk(head, all, workspace, 0, all.count);
  c.logits = logits_of("dlogits", dlogits);
  linear_head_gradients(*ctx, head, c, {.first = first, .factor = vector_of(kOp, "factor", factor)});
  return {};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define(m,
         "linear_product_logits(Tensor(a!) logits, Tensor hidden, Tensor weight, Tensor? lora_a,"
         " Tensor? lora_b, float lora_scale) -> ()");
  define(m,
         "linear_product_gradients(Tensor dlogits, Tensor hidden, Tensor weight, Tensor(a!)? dhidden,"
         " Tensor(b!)? dweight, Tensor(c!)? dbias, Tensor? factor, bool first, bool add_dweight,"
         " Tensor? lora_a, Tensor? lora_b, float lora_scale, Tensor(d!)? dlora_a, Tensor(e!)? dlora_b)"
         " -> ()");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("linear_product_logits", boxed<&logits>);
  m.impl("linear_product_gradients", boxed<&gradients>);
}

}  // namespace tigon::torch_shim::linear_products_torch
