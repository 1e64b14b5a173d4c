// What the adaptors of linear_cross_entropy, linear_log_prob and linear_loss share.
#pragma once

#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"
#include "tigon/torch/linear_head.h"

namespace tigon::torch_shim {

constexpr const char* kLossHead = "linear_cross_entropy";

// Operands on one device, as views of the core.
LinearCrossEntropy arguments(Operands& t, const Formula& f, const Memory& m = {});

// Logits in memory of the caller. One row keeps the stride of its tensor: a product's kernel goes by it.
inline Matrix logits_of(const char* name, Tensor& t) {
  Matrix m = rows_of(kLossHead, name, t);
  if (m.rows == 1 && t.dim() == 2) m.stride = std::max(m.cols, t.stride(0));
  return m;
}

// What the forward of per-row losses leaves for their backward; an empty tensor for what it does not.
struct KeptTensors {
  Tensor unit, dlogits;
};
KeptTensors make_kept(LinearCrossEntropy& a, const Tensor& hidden, const Memory& m);

}  // namespace tigon::torch_shim
