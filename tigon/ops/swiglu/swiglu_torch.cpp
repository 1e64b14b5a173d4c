#include "tigon/ops/swiglu/swiglu.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "swiglu";

std::string print(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::string s;
  for (int64_t n : sizes) s += (s.empty() ? "" : ", ") + std::to_string(n);
  return "[" + s + "]";
}

void check_like_gate(const char* name, const Tensor& t, const Tensor& gate) {
  check_same_device(kOp, name, t, gate);
  auto given = t.sizes(), expected = gate.sizes();
  bool same = given.size() == expected.size() && std::equal(given.begin(), given.end(), expected.begin());
  TIGON_CHECK(kOp, same, name, " must be ", print(expected), ", got ", print(given));
}

Tensor forward(Tensor gate, Tensor up) {
  check_like_gate("up", up, gate);
  Matrix g = rows_of(kOp, "gate", gate), u = rows_of(kOp, "up", up);
  Tensor y = make_like(gate, g.dtype);
  auto ctx = make_context(gate);
  swiglu_fwd(*ctx, {.gate = g, .up = u, .y = rows_of(kOp, "y", y)});
  return y;
}

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor gate, Tensor up, bool need_dgate, bool need_dup) {
  check_like_gate("dy", dy, gate);
  check_like_gate("up", up, gate);
  Matrix d = rows_of(kOp, "dy", dy), g = rows_of(kOp, "gate", gate), u = rows_of(kOp, "up", up);
  Tensor dgate = need_dgate ? make_like(gate, g.dtype) : nothing(gate, g.dtype);
  Tensor dup = need_dup ? make_like(gate, g.dtype) : nothing(gate, g.dtype);
  auto ctx = make_context(gate);
  swiglu_bwd(*ctx, {.dy = d,
                    .gate = g,
                    .up = u,
                    .dgate = need_dgate ? rows_of(kOp, "dgate", dgate) : Matrix{},
                    .dup = need_dup ? rows_of(kOp, "dup", dup) : Matrix{}});
  return {dgate, dup};
}

}  // namespace

// swiglu is swiglu_fwd under a second name: Python attaches autograd to it, and eager calls stay free of that
// layer.
TIGON_TORCH_SCHEMAS(m) {
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_fwd(Tensor gate, Tensor up) -> Tensor");
  m.def(
      "swiglu_bwd(Tensor dy, Tensor gate, Tensor up, bool need_dgate, bool need_dup) -> (Tensor dgate, "
      "Tensor dup)");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("swiglu", TORCH_BOX(&forward));
  m.impl("swiglu_fwd", TORCH_BOX(&forward));
  m.impl("swiglu_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim
