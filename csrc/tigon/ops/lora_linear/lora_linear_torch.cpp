#include "tigon/ops/lora_linear/lora_linear.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::lora_linear_torch {
namespace {

constexpr const char* kOp = "lora_linear";

using Tensors = std::vector<Tensor>;
using Optionals = std::vector<OptionalTensor>;

// Rows that overlap, as those of an expanded gradient, are copied: products take none.
Matrix matrix_of(const char* name, Tensor& t, const Tensor& like) {
  check_same_device(kOp, name, t, like);
  const Matrix m = rows_of(kOp, name, t);
  if (m.rows <= 1 || m.stride >= m.cols) return m;
  t = to_contiguous(kOp, name, t);
  return rows_of(kOp, name, t);
}
// A result of x's leading dimensions.
Tensor make_rows(const Tensor& x, int64_t columns, DType dtype) {
  auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = columns;
  return empty(x, shape.data(), int64_t(shape.size()), dtype);
}

// The lists of the schema as the core takes them.
struct Group {
  std::vector<LoraBase> bases;
  std::vector<LoraAdapter> adapters;
  int64_t columns = 0;
  Vector seed;

  // Without adapters it has no columns, but as many rows as x.
  Matrix t_of(Tensor& t, const Tensor& like, const Matrix& x) const {
    Matrix m = matrix_of("t", t, like);
    if (columns == 0) m.rows = x.rows;
    return m;
  }

  Group(const Tensor& x, Tensors& weights, Tensors& a, Tensors& b, const std::vector<int64_t>& linears,
        const std::vector<double>& scales, const std::vector<double>& dropouts, OptionalTensor& seed_) {
    TIGON_CHECK(kOp,
                b.size() == a.size() && linears.size() == a.size() && scales.size() == a.size() &&
                    dropouts.size() == a.size(),
                "a, b, scales and dropouts must be as many, got ", a.size(), ", ", b.size(), ", ",
                scales.size(), ", ", dropouts.size());
    for (Tensor& w : weights) bases.push_back({.weight = matrix_of("weight", w, x)});
    for (size_t i = 0; i < a.size(); ++i) {
      adapters.push_back({.base = linears[i],
                          .a = matrix_of("a", a[i], x),
                          .b = matrix_of("b", b[i], x),
                          .scale = float(scales[i]),
                          .dropout = dropouts[i]});
      columns += lora_columns(adapters.back().a.rows);
    }
    if (!seed_) return;
    check_same_device(kOp, "seed", *seed_, x);
    seed = scalar_of(kOp, "seed", *seed_);
  }
};

Tensors forward(Tensor x, Tensors weights, Tensors biases, Tensors a, Tensors b, std::vector<int64_t> biased,
                std::vector<int64_t> linears, std::vector<double> scales, std::vector<double> dropouts,
                OptionalTensor seed, OptionalTensor t, bool only_t) {
  Group group(x, weights, a, b, linears, scales, dropouts, seed);
  TIGON_CHECK(kOp, biases.size() == biased.size(), "biases must be as many as biased, ", biased.size(),
              ", got ", biases.size());
  for (size_t i = 0; i < biases.size(); ++i) {
    TIGON_CHECK(kOp, biased[i] >= 0 && size_t(biased[i]) < weights.size(), "biased must be in [0, ",
                weights.size(), "), got ", biased[i]);
    check_same_device(kOp, "bias", biases[i], x);
    group.bases[size_t(biased[i])].bias = vector_of(kOp, "bias", biases[i]);
  }
  const Matrix rows = matrix_of("x", x, x);
  Tensors results;
  for (size_t g = 0; g < weights.size() && !only_t; ++g) {
    LoraBase& base = group.bases[g];
    results.push_back(make_rows(x, base.weight.rows, rows.dtype));
    base.y = rows_of(kOp, "y", results.back());
  }
  results.push_back(t ? nothing(x, rows.dtype) : make(x, {rows.rows, group.columns}, rows.dtype));
  auto ctx = make_context(x);
  lora_linear_fwd(*ctx, {.x = rows,
                         .bases = group.bases,
                         .adapters = group.adapters,
                         .seed = group.seed,
                         .t = group.t_of(t ? *t : results.back(), x, rows),
                         .has_t = t.has_value()});
  return results;
}

Tensors backward(Optionals dy, Tensor x, Tensors weights, Tensors a, Tensors b, Tensor t,
                 std::vector<int64_t> linears, std::vector<double> scales, std::vector<double> dropouts,
                 OptionalTensor seed, bool need_x, bool need_a, bool need_b) {
  Group group(x, weights, a, b, linears, scales, dropouts, seed);
  TIGON_CHECK(kOp, dy.size() == weights.size(), "dy must be as many as weights, ", weights.size(), ", got ",
              dy.size());
  const Matrix rows = matrix_of("x", x, x);
  for (size_t g = 0; g < dy.size(); ++g)
    if (dy[g]) group.bases[g].y = matrix_of("dy", *dy[g], x);
  const DType dtype = !a.empty() && group.adapters[0].a.dtype == rows.dtype ? rows.dtype : DType::f32;
  Tensors results = {need_x ? make_like(x, rows.dtype) : nothing(x, rows.dtype),
                     need_a ? make(x, {group.columns, rows.cols}, dtype) : nothing(x, dtype)};
  for (LoraAdapter& l : group.adapters) {
    results.push_back(need_b ? make(x, {l.b.rows, l.b.cols}, dtype) : nothing(x, dtype));
    if (need_b) l.db = rows_of(kOp, "db", results.back());
  }
  auto ctx = make_context(x);
  lora_linear_bwd(*ctx, {.x = rows,
                         .bases = group.bases,
                         .adapters = group.adapters,
                         .seed = group.seed,
                         .t = group.t_of(t, x, rows),
                         .dx = need_x ? rows_of(kOp, "dx", results[0]) : Matrix{},
                         .da = need_a ? rows_of(kOp, "da", results[1]) : Matrix{}});
  return results;
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string how = "int[] linears, float[] scales, float[] dropouts, Tensor? seed";
  define_forward(m, "lora_linear",
                 "(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] a, Tensor[] b, int[] biased, " +
                     how + ", Tensor? t, bool only_t) -> Tensor[]");
  define(m, "lora_linear_bwd(Tensor?[] dy, Tensor x, Tensor[] weights, Tensor[] a, Tensor[] b, Tensor t, " +
                how + ", bool need_x, bool need_a, bool need_b) -> Tensor[]");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "lora_linear", TORCH_BOX(&forward));
  m.impl("lora_linear_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::lora_linear_torch
