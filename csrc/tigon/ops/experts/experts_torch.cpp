#include "tigon/base/grouped_gemm.h"
#include "tigon/ops/experts/experts.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::experts_torch {
namespace {

constexpr const char* kOp = "experts";

ExpertsGate gate_of(int64_t kind, int64_t columns, double alpha, double limit) {
  TIGON_CHECK(kOp, kind >= 0 && kind < kGluKinds, "kind must be one of 0 to ", kGluKinds - 1, ", got ", kind);
  TIGON_CHECK(kOp, columns >= 0 && columns <= 2, "columns must be one of 0 to 2, got ", columns);
  return {.unit = {.kind = GluKind(kind), .alpha = float(alpha), .limit = float(limit)},
          .columns = GateColumns(columns)};
}

Matrix rows_of(const char* name, OptionalTensor& t) {
  return t ? torch_shim::rows_of(kOp, name, *t) : Matrix{};
}
// The matrices of all experts, one after the other.
Matrix stack_of(const char* name, Tensor& t) {
  TIGON_CHECK(kOp, t.dim() == 3, name, " must have three dimensions, got ", t.dim());
  if (!t.is_contiguous()) t = to_contiguous(kOp, name, t);
  return torch_shim::rows_of(kOp, name, t);
}

std::tuple<Tensor, Tensor, Tensor> route(Tensor ids, int64_t experts) {
  TIGON_CHECK(kOp, ids.dim() == 2, "ids must have two dimensions, got ", ids.dim());
  TIGON_CHECK(kOp, experts >= 1 && experts < INT32_MAX, "there must be at least one expert, got ", experts);
  if (!ids.is_contiguous()) ids = to_contiguous(kOp, "ids", ids);
  Tensor order = make(ids, {ids.numel()}, DType::i32), place = make(ids, {ids.numel()}, DType::i32),
         offsets = make(ids, {experts + 1}, DType::i32);
  auto ctx = make_context(ids);
  experts_route(*ctx, {.ids = {.data = data_of(kOp, "ids", ids),
                               .dtype = dtype_of(kOp, "ids", ids),
                               .rows = ids.size(0),
                               .cols = ids.size(1),
                               .stride = ids.size(1)},
                       .order = vector_of(kOp, "order", order),
                       .place = vector_of(kOp, "place", place),
                       .offsets = vector_of(kOp, "offsets", offsets)});
  return {order, place, offsets};
}

Tensor gather(Tensor x, Tensor place) {
  check_same_device(kOp, "place", place, x);
  Matrix from = torch_shim::rows_of(kOp, "x", x);
  Tensor rows = make(x, {place.numel(), from.cols}, from.dtype);
  auto ctx = make_context(x);
  experts_gather(
      *ctx,
      {.x = from, .place = vector_of(kOp, "place", place), .rows = torch_shim::rows_of(kOp, "rows", rows)});
  return rows;
}

Tensor gate(Tensor gate_up, OptionalTensor bias, Tensor offsets, int64_t kind, int64_t columns, double alpha,
            double limit) {
  check_same_device(kOp, "offsets", offsets, gate_up);
  ExpertsGate how = gate_of(kind, columns, alpha, limit);
  Matrix from = torch_shim::rows_of(kOp, "gate_up", gate_up);
  Tensor act =
      make(gate_up, {from.rows, how.columns == GateColumns::single ? from.cols : from.cols / 2}, from.dtype);
  auto ctx = make_context(gate_up);
  experts_gate_fwd(*ctx, {.gate_up = from,
                          .bias = rows_of("gate_up_bias", bias),
                          .offsets = vector_of(kOp, "offsets", offsets),
                          .act = torch_shim::rows_of(kOp, "act", act),
                          .gate = how});
  return act;
}

// dgate_up: where it is given, the result; else a new one.
std::tuple<Tensor, Tensor, Tensor> gate_bwd_into(Tensor* dgate_up, Tensor dact, Tensor gate_up,
                                                 OptionalTensor bias, OptionalTensor weights,
                                                 OptionalTensor order, Tensor offsets, OptionalTensor g,
                                                 OptionalTensor down_bias, const ExpertsGate& gate,
                                                 bool need_dgate_up, bool need_act, bool need_dweights) {
  check_same_device(kOp, "gate_up", gate_up, dact);
  Matrix d = torch_shim::rows_of(kOp, "dact", dact), z = torch_shim::rows_of(kOp, "gate_up", gate_up);
  Vector w = vector_of(kOp, "weights", weights), slots = vector_of(kOp, "order", order);
  Tensor dz = dgate_up != nullptr ? *dgate_up
              : need_dgate_up     ? make(dact, {z.rows, z.cols}, z.dtype)
                                  : nothing(dact, z.dtype);
  Tensor act = need_act ? make(dact, {d.rows, d.cols}, d.dtype) : nothing(dact, d.dtype);
  Tensor dweights = need_dweights ? make(dact, {d.rows}, w.dtype) : nothing(dact, d.dtype);
  auto ctx = make_context(dact);
  experts_gate_bwd(*ctx, {.dact = d,
                          .gate_up = z,
                          .bias = rows_of("gate_up_bias", bias),
                          .weights = w,
                          .order = slots,
                          .offsets = vector_of(kOp, "offsets", offsets),
                          .g = rows_of("g", g),
                          .down_bias = rows_of("down_bias", down_bias),
                          .dgate_up = need_dgate_up ? torch_shim::rows_of(kOp, "dgate_up", dz) : Matrix{},
                          .act = need_act ? torch_shim::rows_of(kOp, "act", act) : Matrix{},
                          .dweights = need_dweights ? vector_of(kOp, "dweights", dweights) : Vector{},
                          .gate = gate});
  return {dz, act, dweights};
}

std::tuple<Tensor, Tensor, Tensor> gate_bwd(Tensor dact, Tensor gate_up, OptionalTensor bias,
                                            OptionalTensor weights, OptionalTensor order, Tensor offsets,
                                            OptionalTensor g, OptionalTensor down_bias, int64_t kind,
                                            int64_t columns, double alpha, double limit, bool need_dgate_up,
                                            bool need_act, bool need_dweights) {
  return gate_bwd_into(nullptr, dact, gate_up, bias, weights, order, offsets, g, down_bias,
                       gate_of(kind, columns, alpha, limit), need_dgate_up, need_act, need_dweights);
}

// dgate_up is written over gate_up.
std::tuple<Tensor, Tensor> gate_bwd_in_place(Tensor dact, Tensor gate_up, OptionalTensor bias,
                                             OptionalTensor weights, OptionalTensor order, Tensor offsets,
                                             OptionalTensor g, OptionalTensor down_bias, int64_t kind,
                                             int64_t columns, double alpha, double limit, bool need_act,
                                             bool need_dweights) {
  auto [dz, act, dweights] =
      gate_bwd_into(&gate_up, dact, gate_up, bias, weights, order, offsets, g, down_bias,
                    gate_of(kind, columns, alpha, limit), true, need_act, need_dweights);
  return {act, dweights};
}

Tensor combine(Tensor rows, OptionalTensor place, Tensor offsets, OptionalTensor weights, OptionalTensor bias,
               int64_t tokens) {
  check_same_device(kOp, "offsets", offsets, rows);
  Matrix from = torch_shim::rows_of(kOp, "rows", rows);
  Tensor y = make(rows, {tokens, from.cols}, from.dtype);
  auto ctx = make_context(rows);
  experts_combine(*ctx, {.rows = from,
                         .place = vector_of(kOp, "place", place),
                         .offsets = vector_of(kOp, "offsets", offsets),
                         .weights = vector_of(kOp, "weights", weights),
                         .bias = rows_of("down_bias", bias),
                         .y = torch_shim::rows_of(kOp, "y", y)});
  return y;
}

// Zeros in the rows that are not here.
void zero_rest(Tensor rows, Tensor offsets) {
  Matrix m = torch_shim::rows_of(kOp, "rows", rows);
  auto ctx = make_context(rows);
  experts_combine(*ctx, {.rows = m, .offsets = vector_of(kOp, "offsets", offsets), .y = m});
}

Tensor sum(Tensor rows, OptionalTensor weights, OptionalTensor order, Tensor offsets) {
  check_same_device(kOp, "offsets", offsets, rows);
  Matrix from = torch_shim::rows_of(kOp, "rows", rows);
  Tensor sums = make(rows, {offsets.numel() - 1, from.cols}, from.dtype);
  auto ctx = make_context(rows);
  experts_sum(*ctx, {.rows = from,
                     .weights = vector_of(kOp, "weights", weights),
                     .order = vector_of(kOp, "order", order),
                     .offsets = vector_of(kOp, "offsets", offsets),
                     .sums = torch_shim::rows_of(kOp, "sums", sums)});
  return sums;
}

void check_stack(const Tensor& stack, int64_t cols, bool transposed) {
  TIGON_CHECK(kOp, stack.dim() == 3 && stack.size(transposed ? 1 : 2) == cols, "stack must fit ", cols,
              " columns");
}

Tensor product(Tensor rows, Tensor stack, Tensor offsets, bool transposed) {
  Matrix a = torch_shim::rows_of(kOp, "rows", rows), b = stack_of("stack", stack);
  int64_t cols = transposed ? stack.size(2) : stack.size(1);
  check_stack(stack, a.cols, transposed);
  Tensor c = make(rows, {a.rows, cols}, a.dtype);
  auto ctx = make_context(rows);
  grouped_gemm(*ctx, {.offsets = vector_of(kOp, "offsets", offsets).as<int32_t>(),
                      .groups = stack.size(0),
                      .a = a,
                      .b = b,
                      .c = torch_shim::rows_of(kOp, "c", c),
                      .trans_b = !transposed});
  return c;
}

// gate_up, empty unless it is kept, and act of the rows of x in `order`, which has `place` beside it, else of its rows as they are.
std::tuple<Tensor, Tensor> gated_product(Tensor x, OptionalTensor order, OptionalTensor place, Tensor stack,
                                         OptionalTensor bias, Tensor offsets, int64_t kind, int64_t columns,
                                         bool transposed, double alpha, double limit, bool keep) {
  ExpertsGate how = gate_of(kind, columns, alpha, limit);
  Matrix a = torch_shim::rows_of(kOp, "x", x);
  Vector ends = vector_of(kOp, "offsets", offsets), slots = vector_of(kOp, "order", order);
  int64_t rows = order ? slots.size : a.rows, cols = stack.size(transposed ? 2 : 1);
  check_stack(stack, a.cols, transposed);
  Tensor act = make(x, {rows, how.columns == GateColumns::single ? cols : cols / 2}, a.dtype);
  GroupedGemm product = {.offsets = ends.as<int32_t>(),
                         .groups = stack.size(0),
                         .a = a,
                         .b = stack_of("stack", stack),
                         .c = {.dtype = a.dtype, .rows = rows, .cols = cols, .stride = cols},
                         .trans_b = !transposed};
  GroupedGate gate = {.unit = how.unit, .act = torch_shim::rows_of(kOp, "act", act), .order = slots};
  auto ctx = make_context(x);
  auto fuses = [&] {
    return how.columns == GateColumns::halves && !bias && has_grouped_gate(*ctx, product, gate);
  };
  Tensor gathered = x;
  if (order && !fuses()) {
    gathered = gather(x, *place);
    product.a = torch_shim::rows_of(kOp, "rows", gathered);
    gate.order = {};
  }
  Tensor z = keep || !fuses() ? make(x, {rows, cols}, a.dtype) : nothing(x, a.dtype);
  if (z.numel() > 0) product.c = torch_shim::rows_of(kOp, "gate_up", z);
  if (fuses()) {
    grouped_gated_gemm(*ctx, product, gate);
  } else {
    grouped_gemm(*ctx, product);
    experts_gate_fwd(*ctx, {.gate_up = product.c,
                            .bias = rows_of("gate_up_bias", bias),
                            .offsets = ends,
                            .act = gate.act,
                            .gate = how});
  }
  return {z, act};
}

Tensor product_over_rows(Tensor a, Tensor b, Tensor offsets) {
  Matrix left = torch_shim::rows_of(kOp, "a", a), right = torch_shim::rows_of(kOp, "b", b);
  int64_t experts = offsets.numel() - 1;
  Tensor c = make(a, {experts, left.cols, right.cols}, left.dtype);
  auto ctx = make_context(a);
  grouped_gemm(*ctx, {.offsets = vector_of(kOp, "offsets", offsets).as<int32_t>(),
                      .groups = experts,
                      .a = left,
                      .b = right,
                      .c = torch_shim::rows_of(kOp, "c", c),
                      .over_rows = true});
  return c;
}

}  // namespace

// The pieces of a layer; Python runs them around the products (python/tigon/ops/experts.py). Rows from offsets[-1] on of what
// they return are not written, but by combine and zero_rest.
TIGON_TORCH_SCHEMAS(m) {
  const std::string gate = "int kind, int columns, float alpha, float limit";
  define(m, "experts_route(Tensor ids, int experts) -> (Tensor order, Tensor place, Tensor offsets)");
  define(m, "experts_gather(Tensor x, Tensor place) -> Tensor");
  define(m, "experts_gate(Tensor gate_up, Tensor? bias, Tensor offsets, " + gate + ") -> Tensor");
  define(
      m,
      "experts_gate_bwd(Tensor dact, Tensor gate_up, Tensor? bias, Tensor? weights, Tensor? order, Tensor "
      "offsets, Tensor? g, Tensor? down_bias, " +
          gate +
          ", bool need_dgate_up, bool need_act, bool need_dweights) -> (Tensor dgate_up, Tensor act, Tensor "
          "dweights)");
  define(m,
         "experts_gate_bwd_in_place(Tensor dact, Tensor(a!) gate_up, Tensor? bias, Tensor? weights, Tensor? "
         "order, Tensor offsets, Tensor? g, Tensor? down_bias, " +
             gate + ", bool need_act, bool need_dweights) -> (Tensor act, Tensor dweights)");
  define(m,
         "experts_combine(Tensor rows, Tensor? place, Tensor offsets, Tensor? weights, Tensor? bias, int "
         "tokens) -> Tensor");
  define(m, "experts_zero_rest(Tensor(a!) rows, Tensor offsets) -> ()");
  define(m, "experts_sum(Tensor rows, Tensor? weights, Tensor? order, Tensor offsets) -> Tensor");
  define(m, "experts_product(Tensor rows, Tensor stack, Tensor offsets, bool transposed) -> Tensor");
  define(m,
         "experts_gated_product(Tensor x, Tensor? order, Tensor? place, Tensor stack, Tensor? bias, Tensor "
         "offsets, int kind, int columns, bool "
         "transposed, float alpha, float limit, bool keep) -> (Tensor gate_up, Tensor act)");
  define(m, "experts_product_over_rows(Tensor a, Tensor b, Tensor offsets) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("experts_route", TORCH_BOX(&route));
  m.impl("experts_gather", TORCH_BOX(&gather));
  m.impl("experts_gate", TORCH_BOX(&gate));
  m.impl("experts_gate_bwd", TORCH_BOX(&gate_bwd));
  m.impl("experts_gate_bwd_in_place", TORCH_BOX(&gate_bwd_in_place));
  m.impl("experts_combine", TORCH_BOX(&combine));
  m.impl("experts_zero_rest", TORCH_BOX(&zero_rest));
  m.impl("experts_sum", TORCH_BOX(&sum));
  m.impl("experts_product", TORCH_BOX(&product));
  m.impl("experts_gated_product", TORCH_BOX(&gated_product));
  m.impl("experts_product_over_rows", TORCH_BOX(&product_over_rows));
}

}  // namespace tigon::torch_shim::experts_torch
