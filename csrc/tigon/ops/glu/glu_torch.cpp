#include <algorithm>
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

// Sizes of the result.
Sizes result_sizes(const char* op, const Tensor& gate, const OptionalTensor& up) {
  TIGON_CHECK(op, gate.dim() >= 1, "gate must have at least one dimension, got 0");
  Sizes sizes = sizes_of(gate);
  if (up) return sizes;
  TIGON_CHECK(op, sizes.back() % 2 == 0, "gate must have an even number of columns without up, got ",
              sizes.back());
  sizes.back() /= 2;
  return sizes;
}

void check_like(const char* op, const char* name, const Tensor& t, const Tensor& gate,
                const Sizes& expected) {
  check_same_device(op, name, t, gate);
  Sizes given = sizes_of(t);
  TIGON_CHECK(op, given == expected, name, " must be ", print(expected), ", got ", print(given));
}

// One half of the columns of a packed matrix.
Matrix half(const Matrix& both, int which) {
  Matrix m = both;
  m.cols /= 2;
  if (which == 1 && m.data != nullptr)
    m.data = static_cast<char*>(m.data) + m.cols * int64_t(size_of(m.dtype));
  return m;
}

struct Pair {
  Matrix gate, up;
};

// As the core takes them: two matrices, or one of interleaved columns.
Pair pair_of(const GluOptions& o, const Matrix& gate, const Matrix* up) {
  if (up != nullptr) return {gate, *up};
  if (o.kind == GluKind::swiglu_oai) return {gate, {}};
  return {half(gate, 0), half(gate, 1)};
}

Pair inputs(const char* op, const GluOptions& o, Tensor& gate, OptionalTensor& up) {
  Matrix g = rows_of(op, "gate", gate), u;
  if (up) u = rows_of(op, "up", *up);
  return pair_of(o, g, up ? &u : nullptr);
}

GluOptions options(int64_t kind, double gate_multiplier, double down_multiplier, double alpha, double limit,
                   bool packed) {
  TIGON_CHECK("glu", kind >= 0 && kind < kGluKinds, "kind must be one of 0 to ", kGluKinds - 1, ", got ",
              kind);
  GluOptions o = {GluKind(kind), float(gate_multiplier), float(down_multiplier), float(alpha), float(limit)};
  TIGON_CHECK(name_of(o.kind), packed || o.kind != GluKind::swiglu_oai,
              "up must be None (interleaved with gate), got a tensor");
  return o;
}

Tensor forward(Tensor gate, OptionalTensor up, int64_t kind, double gate_multiplier, double down_multiplier,
               double alpha, double limit) {
  GluOptions o = options(kind, gate_multiplier, down_multiplier, alpha, limit, !up.has_value());
  const char* op = name_of(o.kind);
  Sizes sizes = result_sizes(op, gate, up);
  if (up) check_like(op, "up", *up, gate, sizes);
  Pair in = inputs(op, o, gate, up);
  Tensor y = empty(gate, sizes.data(), int64_t(sizes.size()), in.gate.dtype);
  auto ctx = make_context(gate);
  glu_fwd(*ctx, {.gate = in.gate, .up = in.up, .y = rows_of(op, "y", y), .options = o});
  return y;
}

// dy, gate and up of a backward pass, checked.
struct GluGradient {
  const char* op;
  GluOptions options;
  Matrix dy;
  Pair in;
};

GluGradient gradient_of(Tensor& dy, Tensor& gate, OptionalTensor& up, const GluOptions& o) {
  const char* op = name_of(o.kind);
  Sizes sizes = result_sizes(op, gate, up);
  check_like(op, "dy", dy, gate, sizes);
  if (up) check_like(op, "up", *up, gate, sizes);
  Matrix d = rows_of(op, "dy", dy);
  return {op, o, d, inputs(op, o, gate, up)};
}

std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor gate, OptionalTensor up, int64_t kind,
                                    double gate_multiplier, double down_multiplier, double alpha,
                                    double limit, bool need_dgate, bool need_dup) {
  GluOptions o = options(kind, gate_multiplier, down_multiplier, alpha, limit, !up.has_value());
  auto [op, of, d, in] = gradient_of(dy, gate, up, o);
  need_dup = need_dup && up.has_value();
  Pair out;
  Tensor dgate = need_dgate ? make_like(gate, in.gate.dtype) : nothing(gate, in.gate.dtype);
  Tensor dup = need_dup ? make_like(gate, in.gate.dtype) : nothing(gate, in.gate.dtype);
  Matrix first = need_dgate ? rows_of(op, "dgate", dgate) : Matrix{};
  Matrix second = need_dup ? rows_of(op, "dup", dup) : Matrix{};
  if (up || need_dgate) out = pair_of(o, first, up ? &second : nullptr);
  auto ctx = make_context(gate);
  glu_bwd(*ctx, {.dy = d, .gate = in.gate, .up = in.up, .dgate = out.gate, .dup = out.up, .options = o});
  return {dgate, dup};
}

// The gradients are written over gate and up.
void backward_in_place(Tensor dy, Tensor gate, OptionalTensor up, int64_t kind, double gate_multiplier,
                       double down_multiplier, double alpha, double limit) {
  GluOptions o = options(kind, gate_multiplier, down_multiplier, alpha, limit, !up.has_value());
  TIGON_CHECK(name_of(o.kind), gate.is_contiguous() && (!up || up->is_contiguous()),
              "gate and up must be contiguous to be written in place");
  auto [op, of, d, in] = gradient_of(dy, gate, up, o);
  auto ctx = make_context(gate);
  glu_bwd(*ctx, {.dy = d, .gate = in.gate, .up = in.up, .dgate = in.gate, .dup = in.up, .options = o});
}

}  // namespace

// Without up, gate holds both: halves, or interleaved columns for swiglu_oai; so does dgate then.
TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs =
      "Tensor gate, Tensor? up, int kind, float gate_multiplier, float down_multiplier, float alpha, float "
      "limit";
  define_forward(m, "glu", "(" + inputs + ") -> Tensor");
  define(m,
         "glu_bwd(Tensor dy, " + inputs + ", bool need_dgate, bool need_dup) -> (Tensor dgate, Tensor dup)");
  define(
      m,
      "glu_bwd_in_place(Tensor dy, Tensor(a!) gate, Tensor(b!)? up, int kind, float gate_multiplier, float "
      "down_multiplier, float alpha, float limit) -> ()");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "glu", TORCH_BOX(&forward));
  m.impl("glu_bwd", TORCH_BOX(&backward));
  m.impl("glu_bwd_in_place", TORCH_BOX(&backward_in_place));
}

}  // namespace tigon::torch_shim::glu_torch
