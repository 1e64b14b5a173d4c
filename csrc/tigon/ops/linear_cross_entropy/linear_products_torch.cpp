// Adaptors of the products of a head by themselves, for tigon.parallel: between them other processes are heard.
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = kLossHead;

std::tuple<> logits(Tensor logits, Tensor hidden, Tensor weight) {
  check_same_device(kOp, "weight", weight, hidden);
  check_same_device(kOp, "logits", logits, hidden);
  LinearHead head = {
      .op = kOp, .hidden = rows_of(kOp, "hidden", hidden), .weight = rows_of(kOp, "weight", weight)};
  linear_head_check(head);
  LinearHeadRows all = {.count = head.hidden.rows};
  LinearHeadChunk c = linear_head_chunk(head, all, {}, 0, all.count);
  c.logits = rows_of(kOp, "logits", logits);
  auto ctx = make_context(hidden);
  linear_head_logits(*ctx, head, c);
  return {};
}

// dlogits are only read.
std::tuple<> gradients(Tensor dlogits, Tensor hidden, Tensor weight, OptionalTensor dhidden,
                       OptionalTensor dweight, OptionalTensor dbias, OptionalTensor factor, bool first) {
  check_same_device(kOp, "dlogits", dlogits, hidden);
  LinearHead head = {.op = kOp,
                     .hidden = rows_of(kOp, "hidden", hidden),
                     .weight = rows_of(kOp, "weight", weight),
                     .dhidden = rows_of_optional("dhidden", dhidden),
                     .dweight = rows_of_optional("dweight", dweight),
                     .dbias = vector_of(kOp, "dbias", dbias)};
  linear_head_check(head);
  LinearHeadRows all = {.count = head.hidden.rows};
  auto ctx = make_context(hidden);
  LinearHeadWorkspace workspace = linear_head_workspace(
      *ctx, head, all, {.chunk = all.count, .logits = false, .factored = factor.has_value()});
  LinearHeadChunk c = linear_head_chunk(head, all, workspace, 0, all.count);
  c.logits = rows_of(kOp, "dlogits", dlogits);
  linear_head_gradients(*ctx, head, c, {.first = first, .factor = vector_of(kOp, "factor", factor)});
  return {};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define(m, "linear_product_logits(Tensor(a!) logits, Tensor hidden, Tensor weight) -> ()");
  define(m,
         "linear_product_gradients(Tensor dlogits, Tensor hidden, Tensor weight, Tensor(a!)? dhidden,"
         " Tensor(b!)? dweight, Tensor(c!)? dbias, Tensor? factor, bool first) -> ()");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("linear_product_logits", boxed<&logits>);
  m.impl("linear_product_gradients", boxed<&gradients>);
}

}  // namespace tigon::torch_shim
