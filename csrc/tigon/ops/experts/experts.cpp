#include "tigon/ops/experts/experts.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

constexpr int64_t kMostSlots = (int64_t(1) << 31) - 1, kMostExperts = 1024;  // the latter on CUDA

int64_t experts_of(const char* op, Context& ctx, const Vector& offsets) {
  require_dtype(op, "offsets", offsets.dtype, DType::i32);
  TIGON_CHECK(op, offsets.size >= 2, "offsets must have one element more than there are experts, got ",
              offsets.size);
  int64_t experts = offsets.size - 1;
  TIGON_CHECK(op, ctx.device() == Device::cpu || experts <= kMostExperts, "there must be at most ",
              kMostExperts, " experts on CUDA, got ", experts);
  return experts;
}

void require_slots(const char* op, const char* name, const Matrix& rows) {
  TIGON_CHECK(op, rows.rows < kMostSlots, name, " must have fewer than 2^31 rows, got ", rows.rows);
}

void require_bias(const char* op, const char* name, const Matrix& bias, int64_t experts, const Matrix& like) {
  if (bias.data != nullptr) require_matrix(op, name, bias, experts, like.cols, like.dtype);
}
void require_weights(const char* op, const char* name, const Vector& weights, int64_t slots) {
  if (!weights) return;
  require_float(op, name, weights.dtype);
  TIGON_CHECK(op, weights.size == slots, name, " must be [", slots, "], got [", weights.size, "]");
}
void require_order(const char* op, const char* name, const Vector& order, int64_t slots) {
  if (order) require_vector(op, name, order, slots, DType::i32);
}

// Rows of several tokens each: how many.
int64_t choices(const char* op, const char* name, int64_t slots, int64_t tokens) {
  TIGON_CHECK(op, tokens == 0 ? slots == 0 : slots % tokens == 0, name,
              " must have a multiple of the tokens' number of rows (", tokens, "), got ", slots);
  return tokens == 0 ? 0 : slots / tokens;
}

// Columns of gate_up to one of act.
int64_t width(const ExpertsGate& gate) { return gate.columns == GateColumns::single ? 1 : 2; }

void require_gate(const char* op, const ExpertsGate& gate) {
  int kind = int(gate.unit.kind);
  TIGON_CHECK(op, kind >= 0 && kind < kGluKinds, "kind must be one of 0 to ", kGluKinds - 1, ", got ", kind);
  bool clamped = is_clamped(gate.unit.kind);
  TIGON_CHECK(op, !clamped || gate.unit.limit > 0.0f, "limit must be > 0, got ", gate.unit.limit);
  TIGON_CHECK(op, !clamped || gate.columns != GateColumns::single,
              "a clamped unit must have gate and up, got one");
}

}  // namespace

void experts_route(Context& ctx, const ExpertsRoute& a) {
  const char* op = "experts_route";
  experts_of(op, ctx, a.offsets);
  TIGON_CHECK(op, a.ids.dtype == DType::i64 || a.ids.dtype == DType::i32, "ids must be int64 or int32, got ",
              name_of(a.ids.dtype));
  int64_t slots = a.ids.rows * a.ids.cols;
  TIGON_CHECK(op, slots < kMostSlots, "ids must have fewer than 2^31 elements, got ", slots);
  TIGON_CHECK(op, a.ids.rows <= 1 || a.ids.stride == a.ids.cols, "ids must be dense (stride ", a.ids.cols,
              "), got stride ", a.ids.stride);
  require_vector(op, "order", a.order, slots, DType::i32);
  require_vector(op, "place", a.place, slots, DType::i32);
  TIGON_RUN(op, ctx, experts_route, a);
}

void experts_gather(Context& ctx, const ExpertsGather& a) {
  const char* op = "experts_gather";
  require_float(op, "x", a.x.dtype);
  require_slots(op, "rows", a.rows);
  choices(op, "rows", a.rows.rows, a.x.rows);
  require_matrix(op, "rows", a.rows, a.rows.rows, a.x.cols, a.x.dtype);
  require_vector(op, "place", a.place, a.rows.rows, DType::i32);
  if (a.rows.rows == 0 || a.rows.cols == 0) return;
  TIGON_RUN(op, ctx, experts_gather, a);
}

void experts_gate_fwd(Context& ctx, const ExpertsGateFwd& a) {
  const char* op = "experts_gate";
  int64_t experts = experts_of(op, ctx, a.offsets);
  require_gate(op, a.gate);
  require_float(op, "act", a.act.dtype);
  require_slots(op, "act", a.act);
  require_matrix(op, "gate_up", a.gate_up, a.act.rows, width(a.gate) * a.act.cols, a.act.dtype);
  require_bias(op, "bias", a.bias, experts, a.gate_up);
  if (a.act.rows == 0 || a.act.cols == 0) return;
  TIGON_RUN(op, ctx, experts_gate_fwd, a);
}

void experts_gate_bwd(Context& ctx, const ExpertsGateBwd& a) {
  const char* op = "experts_gate_bwd";
  int64_t experts = experts_of(op, ctx, a.offsets), slots = a.dact.rows;
  require_gate(op, a.gate);
  require_float(op, "dact", a.dact.dtype);
  require_slots(op, "dact", a.dact);
  require_matrix(op, "gate_up", a.gate_up, slots, width(a.gate) * a.dact.cols, a.dact.dtype);
  require_bias(op, "bias", a.bias, experts, a.gate_up);
  require_weights(op, "weights", a.weights, slots);
  require_order(op, "order", a.order, slots);
  if (a.dgate_up.data != nullptr)
    require_matrix(op, "dgate_up", a.dgate_up, slots, a.gate_up.cols, a.dact.dtype);
  require_result(op, "act", a.act, a.dact);
  if (a.dweights) {
    TIGON_CHECK(op, bool(a.weights), "dweights must be absent when weights are, got [", a.dweights.size, "]");
    require_vector(op, "dweights", a.dweights, slots, a.weights.dtype);
    if (a.down_bias.data != nullptr) {
      require_float(op, "g", a.g.dtype);
      require_matrix(op, "g", a.g, slots, a.down_bias.cols, a.dact.dtype);
      require_bias(op, "down_bias", a.down_bias, experts, a.g);
    }
  }
  if (slots == 0 || (a.dgate_up.data == nullptr && a.act.data == nullptr && !a.dweights)) return;
  TIGON_RUN(op, ctx, experts_gate_bwd, a);
}

void experts_combine(Context& ctx, const ExpertsCombine& a) {
  const char* op = "experts_combine";
  int64_t experts = experts_of(op, ctx, a.offsets), slots = a.rows.rows;
  require_float(op, "rows", a.rows.dtype);
  require_slots(op, "rows", a.rows);
  require_matrix(op, "y", a.y, a.y.rows, a.rows.cols, a.rows.dtype);
  choices(op, "rows", slots, a.y.rows);
  TIGON_CHECK(op, a.place || slots == a.y.rows, "y must be [", slots, ", ", a.rows.cols,
              "] without place, got ", a.y.rows, " rows");
  require_order(op, "place", a.place, slots);
  require_weights(op, "weights", a.weights, slots);
  require_bias(op, "bias", a.bias, experts, a.rows);
  if (a.y.rows == 0 || a.y.cols == 0) return;
  TIGON_RUN(op, ctx, experts_combine, a);
}

void experts_sum(Context& ctx, const ExpertsSum& a) {
  const char* op = "experts_sum";
  int64_t experts = experts_of(op, ctx, a.offsets);
  require_float(op, "rows", a.rows.dtype);
  require_slots(op, "rows", a.rows);
  require_weights(op, "weights", a.weights, a.rows.rows);
  require_order(op, "order", a.order, a.rows.rows);
  require_matrix(op, "sums", a.sums, experts, a.rows.cols, a.rows.dtype);
  if (a.rows.cols == 0) return;
  TIGON_RUN(op, ctx, experts_sum, a);
}

}  // namespace tigon
