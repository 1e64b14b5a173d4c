// A layer of experts, both ways, of the pieces of experts.h with one product per expert: what the tests of the
// pieces run. gate_up_rows, order, place and offsets are what the forward keeps for the backward.
//
//   gate_up [E * 2 I, H], down [E * H, I] (matrices one after the other); transposed: [E * H, 2 I], [E * I, H]
//   The products read rows rounded to the operands' dtype and round theirs once.
#pragma once

#include "tigon/base/grouped_gemm.h"
#include "tigon/base/require.h"
#include "tigon/ops/experts/experts.h"

namespace tigon::test {

struct ExpertsWeights {
  Matrix gate_up;
  Matrix down;
  Matrix gate_up_bias;  // empty: none
  Matrix down_bias;     // empty: none
  bool transposed = false;
  ExpertsGate gate;
};

struct ExpertsFwd {
  Matrix x;
  Matrix ids;
  Vector weights;  // empty: 1
  ExpertsWeights experts;
  Matrix y;
  Matrix gate_up_rows;
  Vector order;
  Vector place;
  Vector offsets;
};

struct ExpertsBwd {
  Matrix dy;
  Matrix x;
  Vector weights;  // empty: 1
  ExpertsWeights experts;
  Matrix gate_up_rows;
  Vector order;
  Vector place;
  Vector offsets;
  // Empty: not wanted.
  Matrix dx;
  Vector dweights;
  Matrix dgate_up;
  Matrix ddown;
  Matrix dgate_up_bias;
  Matrix ddown_bias;
};

struct Sizes {
  int64_t experts, slots, inner;  // inner: columns of act
};

inline Sizes sizes_of(const char* op, const Matrix& x, const Vector& offsets, const Vector& order,
                      const Matrix& gate_up_rows, const ExpertsWeights& w) {
  TIGON_CHECK(op, offsets.size >= 2, "offsets must have one element more than there are experts, got ",
              offsets.size);
  int64_t experts = offsets.size - 1, wide = gate_up_rows.cols;
  bool single = w.gate.columns == GateColumns::single;
  TIGON_CHECK(op, single || wide % 2 == 0, "gate_up_rows must have an even number of columns, got ", wide);
  int64_t inner = single ? wide : wide / 2;
  require_float(op, "x", x.dtype);
  require_matrix(op, "gate_up_rows", gate_up_rows, order.size, wide, x.dtype);
  require_matrix(op, "gate_up", w.gate_up, experts * (w.transposed ? x.cols : wide),
                 w.transposed ? wide : x.cols, x.dtype);
  require_matrix(op, "down", w.down, experts * (w.transposed ? inner : x.cols), w.transposed ? x.cols : inner,
                 x.dtype);
  return {experts, order.size, inner};
}

inline Matrix scratch_rows(Context& ctx, int64_t rows, int64_t cols, DType dtype) {
  void* data = ctx.scratch(size_t(rows * cols) * size_of(dtype) + 1);
  return {.data = data, .dtype = dtype, .rows = rows, .cols = cols, .stride = cols};
}

inline void experts_fwd(Context& ctx, const ExpertsFwd& a) {
  const ExpertsWeights& w = a.experts;
  Sizes n = sizes_of("experts", a.x, a.offsets, a.order, a.gate_up_rows, w);
  require_matrix("experts", "y", a.y, a.x.rows, a.x.cols, a.x.dtype);
  TIGON_CHECK("experts", a.ids.rows == a.x.rows, "ids must have ", a.x.rows, " rows, got ", a.ids.rows);
  experts_route(
      ctx, {.ids = a.ids, .experts = n.experts, .order = a.order, .place = a.place, .offsets = a.offsets});
  Matrix rows = scratch_rows(ctx, n.slots, a.x.cols, a.x.dtype);
  Matrix act = scratch_rows(ctx, n.slots, n.inner, a.x.dtype);
  const int32_t* offsets = a.offsets.as<int32_t>();
  experts_gather(ctx, {.x = a.x, .place = a.place, .rows = rows});
  grouped_gemm(ctx, {.offsets = offsets,
                     .groups = n.experts,
                     .a = rows,
                     .b = w.gate_up,
                     .c = a.gate_up_rows,
                     .trans_b = !w.transposed});
  experts_gate_fwd(
      ctx,
      {.gate_up = a.gate_up_rows, .bias = w.gate_up_bias, .offsets = a.offsets, .act = act, .gate = w.gate});
  // The gathered rows have been read: their memory takes the second product.
  grouped_gemm(
      ctx,
      {.offsets = offsets, .groups = n.experts, .a = act, .b = w.down, .c = rows, .trans_b = !w.transposed});
  experts_combine(ctx, {.rows = rows,
                        .place = a.place,
                        .offsets = a.offsets,
                        .weights = a.weights,
                        .bias = w.down_bias,
                        .y = a.y});
}

inline void experts_bwd(Context& ctx, const ExpertsBwd& a) {
  const ExpertsWeights& w = a.experts;
  Sizes n = sizes_of("experts_bwd", a.x, a.offsets, a.order, a.gate_up_rows, w);
  require_matrix("experts_bwd", "dy", a.dy, a.x.rows, a.x.cols, a.x.dtype);
  require_result("experts_bwd", "dx", a.dx, a.x);
  require_result("experts_bwd", "dgate_up", a.dgate_up, w.gate_up);
  require_result("experts_bwd", "ddown", a.ddown, w.down);
  const int32_t* offsets = a.offsets.as<int32_t>();
  auto product = [&](const Matrix& rows, const Matrix& b, const Matrix& c, bool trans_b) {
    grouped_gemm(ctx,
                 {.offsets = offsets, .groups = n.experts, .a = rows, .b = b, .c = c, .trans_b = trans_b});
  };
  auto weight_gradient = [&](const Matrix& in, const Matrix& out, const Matrix& dweight) {
    grouped_gemm(ctx, {.offsets = offsets,
                       .groups = n.experts,
                       .a = w.transposed ? in : out,
                       .b = w.transposed ? out : in,
                       .c = dweight,
                       .reduce_rows = true});
  };
  bool before = a.dx.data != nullptr || a.dgate_up.data != nullptr || a.dgate_up_bias.data != nullptr;
  Matrix g = scratch_rows(ctx, n.slots, a.x.cols, a.x.dtype);
  Matrix dact = scratch_rows(ctx, n.slots, n.inner, a.x.dtype);
  Matrix act = scratch_rows(ctx, a.ddown.data == nullptr ? 0 : n.slots, n.inner, a.x.dtype);
  Matrix dz = scratch_rows(ctx, before ? n.slots : 0, a.gate_up_rows.cols, a.x.dtype);
  experts_gather(ctx, {.x = a.dy, .place = a.place, .rows = g});
  product(g, w.down, dact, w.transposed);
  experts_gate_bwd(ctx, {.dact = dact,
                         .gate_up = a.gate_up_rows,
                         .bias = w.gate_up_bias,
                         .weights = a.weights,
                         .order = a.order,
                         .offsets = a.offsets,
                         .g = g,
                         .down_bias = w.down_bias,
                         .dgate_up = before ? dz : Matrix{},
                         .act = a.ddown.data == nullptr ? Matrix{} : act,
                         .dweights = a.dweights,
                         .gate = w.gate});
  if (a.ddown.data != nullptr) weight_gradient(act, g, a.ddown);
  if (a.ddown_bias.data != nullptr)
    experts_sum(
        ctx, {.rows = g, .weights = a.weights, .order = a.order, .offsets = a.offsets, .sums = a.ddown_bias});
  if (a.dgate_up_bias.data != nullptr)
    experts_sum(ctx, {.rows = dz, .offsets = a.offsets, .sums = a.dgate_up_bias});
  // g has been read: its memory takes the gathered rows of x, then the gradients of the rows.
  if (a.dgate_up.data != nullptr) {
    experts_gather(ctx, {.x = a.x, .place = a.place, .rows = g});
    weight_gradient(g, dz, a.dgate_up);
  }
  if (a.dx.data != nullptr) {
    product(dz, w.gate_up, g, w.transposed);
    experts_combine(ctx, {.rows = g, .place = a.place, .offsets = a.offsets, .y = a.dx});
  }
}

}  // namespace tigon::test
