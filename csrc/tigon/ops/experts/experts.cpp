#include "tigon/ops/experts/experts.h"

#include <algorithm>

#include "tigon/base/grouped_gemm.h"
#include "tigon/base/op.h"

namespace tigon {

TIGON_DEFINE_ENTRY(experts_route, ExpertsRoute, "experts_route", "experts_route", none)
TIGON_DEFINE_ENTRY(experts_gather, ExpertsGather, "experts_gather", "experts_gather", none)
TIGON_DEFINE_ENTRY(experts_gate_fwd, ExpertsGateFwd, "experts_gate", "experts_gate", none)
TIGON_DEFINE_ENTRY(experts_gate_bwd, ExpertsGateBwd, "experts_gate", "experts_gate_bwd", backward)
TIGON_DEFINE_ENTRY(experts_combine, ExpertsCombine, "experts_combine", "experts_combine", none)
TIGON_DEFINE_ENTRY(experts_sum, ExpertsSum, "experts_sum", "experts_sum", none)

void experts_copy(Context& ctx, const ExpertsCopy& a) {
  require_float("experts", "x", a.x.dtype), require_float("experts", "out", a.out.dtype);
  TIGON_CHECK("experts",
              a.x.dims == 3 && a.out.dims == 3 && std::equal(a.x.sizes, a.x.sizes + 3, a.out.sizes),
              "x and out must have three dimensions of the same sizes");
  if (a.x.sizes[0] * a.x.sizes[1] * a.x.sizes[2] == 0) return;
  on_device("experts", ctx, [&] { cpu::experts_copy(ctx, a); }, TIGON_ON_CUDA(cuda::experts_copy(ctx, a)));
}

namespace {

void zero_rest(Context& ctx, const ExpertsZeroRest& a) {
  experts_combine(ctx, {.rows = a.rows, .offsets = a.offsets, .y = a.rows});
}

Matrix scratch(Context& ctx, Matrix m) {
  m.stride = m.cols, m.data = ctx.scratch(size_of(m.dtype) * size_t(m.rows * m.cols) + 1);
  return m;
}
// Returns the rows of x in the order of their experts.
Matrix gathered(Context& ctx, const Matrix& x, const Vector& place) {
  const Matrix rows = scratch(ctx, {.dtype = x.dtype, .rows = place.size, .cols = x.cols});
  experts_gather(ctx, {.x = x, .place = place, .rows = rows});
  return rows;
}

void matmul(Context& ctx, const ExpertsMatmul& call) {
  const ExpertsMatmul a = checked("experts", ctx, call);
  bool done = false;
  on_device("experts", ctx, [] {}, TIGON_ON_CUDA(done = cuda::experts_narrow_matmul(ctx, a)));
  if (done) return;
  grouped_gemm(ctx, {.offsets = a.offsets.as<int32_t>(),
                     .groups = a.experts,
                     .a = a.order ? gathered(ctx, a.rows, a.place) : a.rows,
                     .b = a.stack,
                     .c = a.c,
                     .a2 = a.t,
                     .b2 = a.b,
                     .trans_b = !a.transposed});
}

void gated_matmul(Context& ctx, const ExpertsGatedMatmul& call) {
  const ExpertsGatedMatmul a = checked("experts", ctx, call);
  GroupedGemm gemm = {.offsets = a.offsets.as<int32_t>(),
                      .groups = a.experts,
                      .a = a.x,
                      .b = a.stack,
                      .c = a.gate_up,
                      .a2 = a.t,
                      .b2 = a.b,
                      .trans_b = !a.transposed};
  if (!a.keep) gemm.c = {.dtype = a.x.dtype, .rows = a.act.rows, .cols = a.gate.width() * a.act.cols};
  gemm.c.stride = gemm.c.cols;
  GroupedGate gate = {.unit = a.gate.unit, .act = a.act, .order = a.order};
  auto fuses = [&] {
    return a.gate.columns == GateColumns::halves && !a.bias.data && has_grouped_gate(ctx, gemm, gate);
  };
  if (a.order && !fuses()) {
    gemm.a = gathered(ctx, a.x, a.place);
    gate.order = {};
  }
  if (fuses()) return grouped_gated_gemm(ctx, gemm, gate);
  if (!a.keep) gemm.c = scratch(ctx, gemm.c);
  grouped_gemm(ctx, gemm);
  experts_gate_fwd(ctx,
                   {.gate_up = gemm.c, .bias = a.bias, .offsets = a.offsets, .act = a.act, .gate = a.gate});
}

void weight_gradient(Context& ctx, const ExpertsWeightGradient& call) {
  const ExpertsWeightGradient a = checked("experts", ctx, call);
  grouped_gemm(ctx, {.offsets = a.offsets.as<int32_t>(),
                     .groups = a.offsets.size - 1,
                     .a = a.a,
                     .b = a.b,
                     .c = a.c,
                     .reduce_rows = true});
}

void require_gradient(const Strided& out, int64_t experts, const Matrix& t, int64_t columns) {
  require_float("experts", "out", out.dtype);
  TIGON_CHECK("experts",
              out.dims == 3 && out.sizes[0] == experts && out.sizes[1] <= t.cols && out.sizes[2] == columns,
              "out must be [", experts, ", at most ", t.cols, ", ", columns, "]");
}

void adapter_gradient(Context& ctx, const ExpertsAdapterGradient& call) {
  const ExpertsAdapterGradient a = checked("experts", ctx, call);
  const int64_t experts = a.offsets.size - 1, columns = a.rows.cols;
  require_gradient(a.out, experts, a.t, columns);
  if (experts * a.out.sizes[1] * columns == 0) return;
  bool done = false;
  on_device("experts", ctx, [] {}, TIGON_ON_CUDA(done = cuda::experts_narrow_gradient(ctx, a)));
  if (done) return;
  const Matrix c = scratch(ctx, {.dtype = a.t.dtype, .rows = experts * a.t.cols, .cols = columns});
  grouped_gemm(ctx, {.offsets = a.offsets.as<int32_t>(),
                     .groups = experts,
                     .a = a.t,
                     .b = a.order ? gathered(ctx, a.rows, a.place) : a.rows,
                     .c = c,
                     .reduce_rows = true});
  Strided gradient = a.out;
  gradient.data = c.data, gradient.dtype = c.dtype;
  gradient.strides[0] = a.t.cols * columns, gradient.strides[1] = columns, gradient.strides[2] = 1;
  experts_copy(ctx, {.x = gradient, .out = a.out, .scale = a.scale});
}

void adapter_pass(Context& ctx, const ExpertsAdapterPass& call) {
  const ExpertsAdapterPass a = checked("experts", ctx, call);
  require_gradient(a.out, a.experts, a.t, a.rows.cols);
  on_device("experts", ctx, [] {}, TIGON_ON_CUDA(cuda::experts_adapter_pass(ctx, a)));
}
void gate_pass(Context& ctx, const ExpertsGatePass& call) {
  const ExpertsGatePass a = checked("experts", ctx, call);
  require_gradient(a.out, a.experts, a.t, a.gate_up.cols);
  require_gradient(a.act_out, a.experts, a.t, a.dact.cols);
  on_device("experts", ctx, [] {}, TIGON_ON_CUDA(cuda::experts_gate_pass(ctx, a)));
}

TIGON_OPERATOR(adapter_pass, ExpertsAdapterPass, "experts_adapter_pass", none)
TIGON_OPERATOR(gate_pass, ExpertsGatePass, "experts_gate_pass", none)
TIGON_OPERATOR(experts_copy, ExpertsCopy, "experts_copy", none)
TIGON_OPERATOR(zero_rest, ExpertsZeroRest, "experts_zero_rest", none)
TIGON_OPERATOR(matmul, ExpertsMatmul, "experts_matmul", none)
TIGON_OPERATOR(gated_matmul, ExpertsGatedMatmul, "experts_gated_matmul", none)
TIGON_OPERATOR(weight_gradient, ExpertsWeightGradient, "experts_weight_gradient", none)
TIGON_OPERATOR(adapter_gradient, ExpertsAdapterGradient, "experts_adapter_gradient", none)

}  // namespace

}  // namespace tigon
