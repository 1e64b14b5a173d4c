#include "tigon/ops/rope/rope_torch.h"

namespace tigon::torch_shim::rope_torch {
namespace {

constexpr const char* kOp = "rope";

std::tuple<Tensor, Tensor> forward(Tensor q, OptionalTensor k, RopeTables tables, RopeOptions options) {
  if (k) check_same_device(kOp, "k", *k, q);
  Rope a = rope_of(kOp, tables, options, q);
  auto rotate = [&](const char* name, Tensor& x, RopeHeads& in, RopeHeads& out) {
    bool swapped = heads_swapped(x);
    in = heads_of(kOp, name, x, options.head_dim);
    Tensor y = make_heads(x, options.keep_dtype ? in.dtype : promote(in.dtype, a.cos.dtype), swapped);
    out = heads_of(kOp, name, y, options.head_dim);
    return y;
  };
  Tensor q_out = rotate("q", q, a.q, a.q_out);
  Tensor k_out = k ? rotate("k", *k, a.k, a.k_out) : nothing(q, a.q_out.dtype);
  auto ctx = make_context(q);
  rope_fwd(*ctx, a);
  return {q_out, k_out};
}

std::tuple<> forward_in_place(Tensor q, OptionalTensor k, RopeTables tables, RopeOptions options) {
  if (k) check_same_device(kOp, "k", *k, q);
  Rope a = rope_of(kOp, tables, options, q);
  auto rotate = [&](const char* name, Tensor& x, RopeHeads& in, RopeHeads& out) {
    int64_t last = x.dim() - 1;
    TIGON_CHECK(kOp, x.size(last) <= 1 || x.stride(last) == 1, name,
                " must have dense rows to be rotated in place, got stride ", x.stride(last));
    in = out = heads_of(kOp, name, x, options.head_dim);
  };
  rotate("q", q, a.q, a.q_out);
  if (k) rotate("k", *k, a.k, a.k_out);
  auto ctx = make_context(q);
  rope_fwd(*ctx, a);
  return {};
}

// dtype (of dq and dk) is a core DType; *_swapped: memory order wanted, that of q and k in the forward.
std::tuple<Tensor, Tensor> backward(OptionalTensor dq_out, OptionalTensor dk_out, RopeTables tables,
                                    RopeOptions options, int64_t dtype, bool q_swapped, bool k_swapped) {
  const Tensor cos = tables.cos;
  TIGON_CHECK(kOp, dtype >= 0 && dtype <= int64_t(DType::f16), "dtype must be 0, 1 or 2, got ", dtype);
  Rope a = rope_of(kOp, tables, options, cos);
  auto rotate = [&](const char* name, OptionalTensor& dy, bool swapped, RopeHeads& in, RopeHeads& out) {
    if (!dy) return nothing(cos, DType(dtype));
    check_same_device(kOp, name, *dy, cos);
    in = heads_of(kOp, name, *dy, options.head_dim);
    Tensor dx = make_heads(*dy, DType(dtype), swapped);
    out = heads_of(kOp, name, dx, options.head_dim);
    return dx;
  };
  Tensor dq = rotate("dq", dq_out, q_swapped, a.q, a.q_out);
  Tensor dk = rotate("dk", dk_out, k_swapped, a.k, a.k_out);
  auto ctx = make_context(cos);
  rope_bwd(*ctx, a);
  return {dq, dk};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string tables = schema<RopeTables, RopeOptions>();
  define_forward(m, "rope", "(Tensor q, Tensor? k, " + tables + ") -> (Tensor, Tensor)");
  define(m, "rope_in_place(Tensor(a!) q, Tensor(b!)? k, " + tables + ") -> ()");
  define(m, "rope_bwd(Tensor? dq_out, Tensor? dk_out, " + tables +
                ", int dtype, bool q_swapped, bool k_swapped) -> (Tensor dq, Tensor dk)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "rope", boxed<&forward>);
  m.impl("rope_in_place", boxed<&forward_in_place>);
  m.impl("rope_bwd", boxed<&backward>);
}

}  // namespace tigon::torch_shim::rope_torch
