#include "tigon/ops/rope/qk_norm_rope.h"

#include "tigon/ops/rope/rope_torch.h"

namespace tigon::torch_shim::qk_norm_rope_torch {
namespace {

constexpr const char* kOp = "qk_norm_rope";

struct Weights {
  OptionalTensor q, k;
  static constexpr const char* kNames[] = {"q_weight", "k_weight"};
};
struct NormOptions {
  float eps, offset;
  Rounding rounding;
  static constexpr const char* kNames[] = {"eps", "offset", "rounding"};
};

QkNorm norm_of(Weights& weights, const NormOptions& o, const Tensor& q) {
  check_devices(kOp, weights, q);
  return {.q_weight = vector_of(kOp, "q_weight", weights.q),
          .k_weight = vector_of(kOp, "k_weight", weights.k),
          .eps = o.eps,
          .offset = o.offset,
          .rounding = o.rounding};
}

std::tuple<Tensor, Tensor> forward(Tensor q, OptionalTensor k, Weights weights, RopeTables tables,
                                   NormOptions norm, RopeOptions options) {
  if (k) check_same_device(kOp, "k", *k, q);
  QkNormRopeFwd a{.rope = rope_of(kOp, tables, options, q), .norm = norm_of(weights, norm, q)};
  auto one = [&](const char* name, Tensor& x, RopeHeads& in, RopeHeads& out) {
    bool swapped = heads_swapped(x);
    in = heads_of(kOp, name, x, options.head_dim);
    DType wide = promote(a.norm.result(in.dtype), a.rope.cos.dtype);
    Tensor y = make_heads(x, options.keep_dtype ? in.dtype : wide, swapped);
    out = heads_of(kOp, name, y, options.head_dim);
    return y;
  };
  Tensor q_out = one("q", q, a.rope.q, a.rope.q_out);
  Tensor k_out = k ? one("k", *k, a.rope.k, a.rope.k_out) : nothing(q, a.rope.q_out.dtype);
  auto ctx = make_context(q);
  qk_norm_rope_fwd(*ctx, a);
  return {q_out, k_out};
}

// A dy that is absent leaves its tensor out.
std::tuple<Tensor, Tensor, Tensor> backward(OptionalTensor dq_out, OptionalTensor dk_out, Tensor q,
                                            OptionalTensor k, Weights weights, RopeTables tables,
                                            NormOptions norm, RopeOptions options, bool need_dweight) {
  QkNormRopeBwd a{.rope = rope_of(kOp, tables, options, q), .norm = norm_of(weights, norm, q)};
  DType dtype = dtype_of(kOp, "q", q);
  auto one = [&](const char* name, OptionalTensor& dy, Tensor& x, RopeHeads& upstream, RopeHeads& in,
                 RopeHeads& out) {
    if (!dy) return nothing(q, dtype);
    check_same_device(kOp, name, *dy, q);
    bool swapped = heads_swapped(x);
    in = heads_of(kOp, name, x, options.head_dim);
    upstream = heads_of(kOp, name, *dy, options.head_dim);
    Tensor dx = make_heads(x, dtype, swapped);
    out = heads_of(kOp, name, dx, options.head_dim);
    return dx;
  };
  Tensor dq = one("dq", dq_out, q, a.rope.q, a.q, a.rope.q_out);
  Tensor dk = k ? one("dk", dk_out, *k, a.rope.k, a.k, a.rope.k_out) : nothing(q, dtype);
  const Vector& w = a.norm.any_weight();
  Tensor dweight = need_dweight ? make(q, {2, w.size}, w.dtype) : nothing(q, dtype);
  if (need_dweight) a.dweight = rows_of(kOp, "dweight", dweight);
  auto ctx = make_context(q);
  qk_norm_rope_bwd(*ctx, a);
  return {dq, dk, dweight};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs =
      "Tensor q, Tensor? k, " + schema<Weights, RopeTables, NormOptions, RopeOptions>();
  define_forward(m, "qk_norm_rope", "(" + inputs + ") -> (Tensor, Tensor)");
  define(m, "qk_norm_rope_bwd(Tensor? dq_out, Tensor? dk_out, " + inputs +
                ", bool need_dweight) -> (Tensor dq, Tensor dk, Tensor dweight)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "qk_norm_rope", boxed<&forward>);
  m.impl("qk_norm_rope_bwd", boxed<&backward>);
}

}  // namespace tigon::torch_shim::qk_norm_rope_torch
