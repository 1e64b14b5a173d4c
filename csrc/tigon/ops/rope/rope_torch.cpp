#include "tigon/ops/rope/rope_torch.h"

namespace tigon::torch_shim::rope_torch {
namespace {

constexpr const char* kOp = "rope";

Rope prepared(const Tensor& q, const OptionalTensor& k, Tensor& cos, OptionalTensor& sin,
              OptionalTensor& positions, const RopeOptions& options) {
  if (k) check_same_device(kOp, "k", *k, q);
  check_rope_devices(kOp, cos, sin, positions, q);
  return rope_of(kOp, cos, sin, positions, options);
}

std::tuple<Tensor, Tensor> forward(Tensor q, OptionalTensor k, Tensor cos, OptionalTensor sin,
                                   OptionalTensor positions, int64_t head_dim, int64_t pairs, bool shared,
                                   bool tail, bool keep_dtype, int64_t time, int64_t height, int64_t width,
                                   bool mixed) {
  Rope a = prepared(q, k, cos, sin, positions,
                    {head_dim, pairs, shared, tail, keep_dtype, time, height, width, mixed});
  auto rotate = [&](const char* name, Tensor& x, RopeHeads& in, RopeHeads& out) {
    bool swapped = heads_swapped(x);
    in = heads_of(kOp, name, x, head_dim);
    Tensor y = make_heads(x, keep_dtype ? in.dtype : promote(in.dtype, a.cos.dtype), swapped);
    out = heads_of(kOp, name, y, head_dim);
    return y;
  };
  Tensor q_out = rotate("q", q, a.q, a.q_out);
  Tensor k_out = k ? rotate("k", *k, a.k, a.k_out) : nothing(q, a.q_out.dtype);
  auto ctx = make_context(q);
  rope_fwd(*ctx, a);
  return {q_out, k_out};
}

void forward_in_place(Tensor q, OptionalTensor k, Tensor cos, OptionalTensor sin, OptionalTensor positions,
                      int64_t head_dim, int64_t pairs, bool shared, bool tail, bool keep_dtype, int64_t time,
                      int64_t height, int64_t width, bool mixed) {
  Rope a = prepared(q, k, cos, sin, positions,
                    {head_dim, pairs, shared, tail, keep_dtype, time, height, width, mixed});
  auto rotate = [&](const char* name, Tensor& x, RopeHeads& in, RopeHeads& out) {
    int64_t last = x.dim() - 1;
    TIGON_CHECK(kOp, x.size(last) <= 1 || x.stride(last) == 1, name,
                " must have dense rows to be rotated in place, got stride ", x.stride(last));
    in = out = heads_of(kOp, name, x, head_dim);
  };
  rotate("q", q, a.q, a.q_out);
  if (k) rotate("k", *k, a.k, a.k_out);
  auto ctx = make_context(q);
  rope_fwd(*ctx, a);
}

// dtype (of dq and dk) is a core DType; *_swapped: memory order wanted, that of q and k in the forward.
std::tuple<Tensor, Tensor> backward(OptionalTensor dq_out, OptionalTensor dk_out, Tensor cos,
                                    OptionalTensor sin, OptionalTensor positions, int64_t head_dim,
                                    int64_t pairs, bool shared, bool tail, bool keep_dtype, int64_t time,
                                    int64_t height, int64_t width, bool mixed, int64_t dtype, bool q_swapped,
                                    bool k_swapped) {
  TIGON_CHECK(kOp, dtype >= 0 && dtype <= int64_t(DType::f16), "dtype must be 0, 1 or 2, got ", dtype);
  check_rope_devices(kOp, cos, sin, positions, cos);
  Rope a = rope_of(kOp, cos, sin, positions,
                   {head_dim, pairs, shared, tail, keep_dtype, time, height, width, mixed});
  auto rotate = [&](const char* name, OptionalTensor& dy, bool swapped, RopeHeads& in, RopeHeads& out) {
    if (!dy) return nothing(cos, DType(dtype));
    check_same_device(kOp, name, *dy, cos);
    in = heads_of(kOp, name, *dy, head_dim);
    Tensor dx = make_heads(*dy, DType(dtype), swapped);
    out = heads_of(kOp, name, dx, head_dim);
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
  const std::string tables = "Tensor cos, Tensor? sin, Tensor? positions, " TIGON_ROPE_OPTIONS;
  define_forward(m, "rope", "(Tensor q, Tensor? k, " + tables + ") -> (Tensor, Tensor)");
  define(m, "rope_in_place(Tensor(a!) q, Tensor(b!)? k, " + tables + ") -> ()");
  define(m, "rope_bwd(Tensor? dq_out, Tensor? dk_out, " + tables +
                ", int dtype, bool q_swapped, bool k_swapped) -> (Tensor dq, Tensor dk)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "rope", TORCH_BOX(&forward));
  m.impl("rope_in_place", TORCH_BOX(&forward_in_place));
  m.impl("rope_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::rope_torch
