#include <vector>

#include "tigon/ops/glu/glu.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::glu_torch {
namespace {

using Sizes = std::vector<int64_t>;

std::string print(const Sizes& sizes) {
  std::string s;
  for (int64_t n : sizes) s += (s.empty() ? "" : ", ") + std::to_string(n);
  return "[" + s + "]";
}
Sizes sizes_of(const Tensor& t) {
  auto sizes = t.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

// Without up, gate holds both: halves, or interleaved columns for swiglu_oai, which the core takes as they are.
struct Pair {
  Matrix gate, up;
};
Pair pair_of(GluKind kind, const Matrix& both) {
  if (kind == GluKind::swiglu_oai) return {both, {}};
  Pair p{both, both};
  p.gate.cols = p.up.cols = both.cols / 2;
  if (both.data != nullptr)
    p.up.data = static_cast<char*>(both.data) + p.up.cols * int64_t(size_of(both.dtype));
  return p;
}
Pair pair_of(GluKind kind, Tensor& gate, OptionalTensor& up) {
  Matrix first = rows_of(name_of(kind), "gate", gate);
  return up ? Pair{first, rows_of(name_of(kind), "up", up)} : pair_of(kind, first);
}

// Sizes of the result, of inputs that fit.
Sizes check(const GluOptions& o, const Tensor& gate, const OptionalTensor& up, const Tensor* dy = nullptr) {
  TIGON_CHECK("glu", int(o.kind) >= 0 && int(o.kind) < kGluKinds, "kind must be one of 0 to ", kGluKinds - 1,
              ", got ", int(o.kind));
  const char* op = name_of(o.kind);
  TIGON_CHECK(op, !up || o.kind != GluKind::swiglu_oai,
              "up must be None (interleaved with gate), got a tensor");
  TIGON_CHECK(op, gate.dim() >= 1, "gate must have at least one dimension, got 0");
  Sizes sizes = sizes_of(gate);
  TIGON_CHECK(op, up || sizes.back() % 2 == 0, "gate must have an even number of columns without up, got ",
              sizes.back());
  if (!up) sizes.back() /= 2;
  auto check_like = [&](const char* name, const Tensor& t) {
    check_same_device(op, name, t, gate);
    TIGON_CHECK(op, sizes_of(t) == sizes, name, " must be ", print(sizes), ", got ", print(sizes_of(t)));
  };
  if (dy) check_like("dy", *dy);
  if (up) check_like("up", *up);
  return sizes;
}

Tensor forward(Tensor gate, OptionalTensor up, GluOptions o) {
  Sizes sizes = check(o, gate, up);
  Pair in = pair_of(o.kind, gate, up);
  Tensor y = empty(gate, sizes.data(), int64_t(sizes.size()), in.gate.dtype);
  auto ctx = make_context(gate);
  glu_fwd(*ctx, {.gate = in.gate, .up = in.up, .y = rows_of(name_of(o.kind), "y", y), .options = o});
  return y;
}

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor gate, OptionalTensor up, GluOptions o, bool need_dgate,
                                    bool need_dup) {
  check(o, gate, up, &dy);
  const char* op = name_of(o.kind);
  Matrix upstream = rows_of(op, "dy", dy);
  Pair in = pair_of(o.kind, gate, up), out;
  auto make_gradient = [&](bool wanted) {
    return wanted ? make_like(gate, in.gate.dtype) : nothing(gate, in.gate.dtype);
  };
  Tensor dgate = make_gradient(need_dgate), dup = make_gradient(need_dup && up);
  if (need_dgate) out.gate = rows_of(op, "dgate", dgate);
  if (need_dup && up) out.up = rows_of(op, "dup", dup);
  if (need_dgate && !up) out = pair_of(o.kind, out.gate);
  auto ctx = make_context(gate);
  glu_bwd(*ctx, {upstream, in.gate, in.up, out.gate, out.up, o});
  return {dgate, dup};
}

// The gradients are written over gate and up.
void backward_in_place(Tensor dy, Tensor gate, OptionalTensor up, GluOptions o) {
  check(o, gate, up, &dy);
  TIGON_CHECK(name_of(o.kind), gate.is_contiguous() && (!up || up->is_contiguous()),
              "gate and up must be contiguous to be written in place");
  Matrix upstream = rows_of(name_of(o.kind), "dy", dy);
  Pair in = pair_of(o.kind, gate, up);
  auto ctx = make_context(gate);
  glu_bwd(*ctx, {upstream, in.gate, in.up, in.gate, in.up, o});
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string options = schema<GluOptions>();
  const std::string inputs = "Tensor gate, Tensor? up, " + options;
  define_forward(m, "glu", "(" + inputs + ") -> Tensor");
  define(m,
         "glu_bwd(Tensor dy, " + inputs + ", bool need_dgate, bool need_dup) -> (Tensor dgate, Tensor dup)");
  define(m, "glu_bwd_in_place(Tensor dy, Tensor(a!) gate, Tensor(b!)? up, " + options + ") -> ()");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "glu", boxed<&forward>);
  m.impl("glu_bwd", boxed<&backward>);
  m.impl("glu_bwd_in_place", boxed<&backward_in_place>);
}

}  // namespace tigon::torch_shim::glu_torch
