#include "tigon/ops/lora_linear/lora_linear.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::lora_linear_torch {
namespace {

constexpr const char* kOp = "lora_linear";

using Tensors = std::vector<Tensor>;
using Optionals = std::vector<OptionalTensor>;

// Rows that overlap, as those of an expanded gradient, are copied: GEMM does not take them.
Matrix matrix_of(const char* name, Tensor& t, const Tensor& like) {
  check_same_device(kOp, name, t, like);
  const Matrix m = rows_of(kOp, name, t);
  if (m.rows <= 1 || m.stride >= m.cols) return m;
  t = to_contiguous(kOp, name, t);
  return rows_of(kOp, name, t);
}
// Takes the lists of the schema as the core needs them.
struct Operands {
  std::vector<LoraBase> bases;
  std::vector<LoraAdapter> adapters;
  int64_t columns = 0;
  Vector seed, xs;
  Matrix xq;

  // Without adapters t has no columns, but as many rows as x.
  Matrix t_of(Tensor& t, const Tensor& like, const Matrix& x) const {
    Matrix m = matrix_of("t", t, like);
    if (columns == 0) m.rows = x.rows;
    return m;
  }

  // `tensors` holds weights, biases, A of each adapter, and B of each. `linears` holds the linear of each
  // adapter, then that of each bias. `fp8` is empty, or the weights are of float8: their scales, then in the
  // forward x in float8 with its scales; in the backward, each if the caller has it, the weights transposed,
  // the rows of each dy in float8, and their scales.
  Operands(const Tensor& x, Tensors& tensors, const std::vector<int64_t>& linears,
           const std::vector<double>& scales, const std::vector<double>& dropouts, OptionalTensor& seed_,
           Optionals fp8, bool forward) {
    const size_t count = scales.size(), options = linears.size() + count;
    TIGON_CHECK(kOp, dropouts.size() == count && linears.size() >= count && tensors.size() >= options,
                "tensors, linears, scales and dropouts must fit, got ", tensors.size(), ", ", linears.size(),
                ", ", count, " and ", dropouts.size());
    const size_t maps = tensors.size() - options, first_a = tensors.size() - 2 * count;
    for (size_t i = 0; i < maps; ++i) bases.push_back({.weight = matrix_of("weight", tensors[i], x)});
    for (size_t i = maps; i < first_a; ++i) {
      const int64_t base = linears[i - maps + count];
      TIGON_CHECK(kOp, base >= 0 && size_t(base) < maps, "a bias's linear must be in [0, ", maps, "), got ",
                  base);
      check_same_device(kOp, "bias", tensors[i], x);
      bases[size_t(base)].bias = vector_of(kOp, "bias", tensors[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      adapters.push_back({.base = linears[i],
                          .a = matrix_of("a", tensors[first_a + i], x),
                          .b = matrix_of("b", tensors[first_a + count + i], x),
                          .scale = float(scales[i]),
                          .dropout = dropouts[i]});
      columns += lora_columns(adapters.back().a.rows);
    }
    fp8.resize(forward ? maps + 2 : 4 * maps);
    auto matrix = [&](const char* name, size_t i) { return fp8[i] ? matrix_of(name, *fp8[i], x) : Matrix{}; };
    auto vector = [&](const char* name, size_t i) {
      if (fp8[i]) check_same_device(kOp, name, *fp8[i], x);
      return fp8[i] ? vector_of(kOp, name, *fp8[i]) : Vector{};
    };
    for (size_t i = 0; i < maps; ++i) {
      bases[i].scales = vector("scales", i);
      if (forward) continue;
      bases[i].transposed = matrix("transposed", maps + i);
      bases[i].dyq = matrix("dyq", 2 * maps + i), bases[i].dys = vector("dys", 3 * maps + i);
    }
    if (forward) xq = matrix("xq", maps), xs = vector("xs", maps + 1);
    if (!seed_) return;
    check_same_device(kOp, "seed", *seed_, x);
    seed = scalar_of(kOp, "seed", *seed_);
  }
};

Tensors forward(Tensor x, Tensors tensors, std::vector<int64_t> linears, std::vector<double> scales,
                std::vector<double> dropouts, OptionalTensor seed, OptionalTensor t, bool only_t,
                Tensors fp8) {
  Operands operands(x, tensors, linears, scales, dropouts, seed, {fp8.begin(), fp8.end()}, true);
  const Matrix rows = matrix_of("x", x, x);
  Tensors results;
  if (!only_t)
    for (LoraBase& base : operands.bases) {
      results.push_back(make_rows(x, base.weight.rows, rows.dtype));
      base.y = rows_of(kOp, "y", results.back());
    }
  results.push_back(t ? nothing(x, rows.dtype) : make(x, {rows.rows, operands.columns}, rows.dtype));
  auto ctx = make_context(x);
  lora_linear_fwd(*ctx, {.x = rows,
                         .xq = operands.xq,
                         .xs = operands.xs,
                         .bases = operands.bases,
                         .adapters = operands.adapters,
                         .seed = operands.seed,
                         .t = operands.t_of(t ? *t : results.back(), x, rows),
                         .has_t = t.has_value()});
  return results;
}

Tensors backward(Optionals dy, Tensor x, Tensors tensors, Tensor t, std::vector<int64_t> linears,
                 std::vector<double> scales, std::vector<double> dropouts, OptionalTensor seed, bool need_x,
                 bool need_a, bool need_b, Optionals fp8) {
  Operands operands(x, tensors, linears, scales, dropouts, seed, fp8, false);
  TIGON_CHECK(kOp, dy.size() == operands.bases.size(), "dy must be as many as weights, ",
              operands.bases.size(), ", got ", dy.size());
  const Matrix rows = matrix_of("x", x, x);
  for (size_t g = 0; g < dy.size(); ++g)
    if (dy[g]) operands.bases[g].y = matrix_of("dy", *dy[g], x);
  const DType dtype = !scales.empty() && operands.adapters[0].a.dtype == rows.dtype ? rows.dtype : DType::f32;
  Tensors results = {need_x ? make_like(x, rows.dtype) : nothing(x, rows.dtype),
                     need_a ? make(x, {operands.columns, rows.cols}, dtype) : nothing(x, dtype)};
  for (LoraAdapter& l : operands.adapters) {
    results.push_back(need_b ? make(x, {l.b.rows, l.b.cols}, dtype) : nothing(x, dtype));
    if (need_b) l.db = rows_of(kOp, "db", results.back());
  }
  auto ctx = make_context(x);
  lora_linear_bwd(*ctx, {.x = rows,
                         .bases = operands.bases,
                         .adapters = operands.adapters,
                         .seed = operands.seed,
                         .t = operands.t_of(t, x, rows),
                         .dx = need_x ? rows_of(kOp, "dx", results[0]) : Matrix{},
                         .da = need_a ? rows_of(kOp, "da", results[1]) : Matrix{}});
  return results;
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string options = "int[] linears, float[] scales, float[] dropouts, Tensor? seed, ";
  for (const char* name : {"lora_linear", "lora_linear_fwd"})
    define(m, name + ("(Tensor x, Tensor[] tensors, " + options +
                      "Tensor? t, bool only_t, Tensor[] fp8) -> Tensor[]"));
  define(m, "lora_linear_bwd(Tensor?[] dy, Tensor x, Tensor[] tensors, Tensor t, " + options +
                "bool need_x, bool need_a, bool need_b, Tensor?[] fp8) -> Tensor[]");
}
TIGON_TORCH_KERNELS(m) {
  for (const char* name : {"lora_linear", "lora_linear_fwd"}) m.impl(name, TORCH_BOX(&forward));
  m.impl("lora_linear_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::lora_linear_torch
