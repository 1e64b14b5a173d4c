// Computes what surrounds the grouped GEMMs of a mixture-of-experts layer (Shazeer et al. 2017,
// arXiv:1701.06538; top-k routing as in Fedus et al. 2021, arXiv:2101.03961). There are S = T * K slots:
// token t's choice j is slot t * K + j. Row p of a sorted matrix belongs to slot order[p] and to the expert e
// with offsets[e] <= p < offsets[e + 1]. Of all rows R = offsets[E] are local; the experts of the other slots
// are on other devices.
// Formula     route    stable sort of the slots by expert id: order[place[s]] = s. An id outside [0, E) is
//                      not local: its slots come last in order, and place[s] = -1
//             gather   rows_place[s] = x_t, s = t * K + j, over the local slots
//             gate     z = gate_up_p + bias_e in f32; act_p = gated unit of its columns
//                      (base/gated_unit.inc): halves [gate | up], interleaved (gate, up, gate, up, ...),
//                      or single: only the activation, up = 1
//             combine  y_t = sum over j of w_s * (rows_place[s] + bias_e), s = t * K + j,
//                      over the local slots;
//                      without place: y_p = w_p * (rows_p + bias_e) for p < R, 0 for the others
//             sum      sums_e = sum of w_order[p] * rows_p over the rows of expert e
// Gradients   with y = combine(act W_down^T + bias): g_p = dy_t (gather), dact = g W_down,
//             dw_s = <dact_p, act_p> + <g_p, down_bias_e>, 0 for slots that are not local;
//             dgate_up_p = w_s * dact_p * d act / d z;  act_p, weighted by w_s, for dW_down = g^T (w act);
//             dx = combine without weights and bias; gradients of biases = sum. Y itself is never needed
// Shapes      ids [T, K]; order, place [S]; offsets [E + 1]; x, y, dy [T, H]; rows, g [S, H]; gate_up,
//             dgate_up [S, 2 I] ([S, I] for single); act, dact [S, I]; weights, dweights [S] by slot; bias
//             [E, columns], rows dense or apart
// Dtypes      ids i64 | i32; order, place, offsets i32; the rest f32 | bf16 | f16, one for all but weights,
//             which may have any of them, and dweights the same; arithmetic f32
// Adapters    GEMMs add the matmuls of x A^T and B as more columns of K. In the backward dy, and dgate_up
//             with act, are read by one pass each (ExpertsPass) if it takes them, else by several kernels
// Rounding    once, on store. combine adds in f32 and rounds the sum
// Saved       gate_up, order, place, offsets by the caller, who runs the layer: nothing of S x H
// Aliasing    combine without place may write into rows; dgate_up may be gate_up; otherwise none
// Determinism bitwise: stable order, the K slots of a token in their order, the rows of an expert in theirs,
//             in parts that follow from shapes and offsets only
// Traffic     route: two reads of ids, 2 S + E integers written; gather T reads + R writes of H; gate 3 I,
//             backward 6 I; combine R reads + T writes of H; sum R reads. Rows from R on are neither read nor
//             written
// Refused     sizes or dtypes that do not fit, 2^31 slots, more than 1024 experts on CUDA: tigon::Error
//             before anything is written. A negative id: tigon::Error on the CPU; on CUDA it is not local
#pragma once

#include "tigon/base/fields.h"
#include "tigon/base/gated_unit.h"

namespace tigon {

enum class GateColumns : int8_t { halves, interleaved, single };

struct ExpertsGate {
  GluOptions unit;
  GateColumns columns = GateColumns::halves;

  // Returns the columns of gate_up per column of act.
  int64_t width() const { return columns == GateColumns::single ? 1 : 2; }
  void fields(Fields& f) {
    f.option("kind", unit.kind);
    f.option("columns", columns);
    options(f);
  }
  void options(Fields& f) {
    f.option("alpha", unit.alpha);
    f.option("limit", unit.limit);
    f.require(is_kind(unit.kind), "kind must be one of 0 to ", kGluKinds - 1, ", got ", int(unit.kind));
    f.require(int(columns) >= 0 && int(columns) <= 2, "columns must be one of 0 to 2, got ", int(columns));
    f.require(!is_clamped(unit.kind) || unit.limit > 0.0f, "limit must be > 0, got ", unit.limit);
    f.require(!is_clamped(unit.kind) || columns != GateColumns::single,
              "a clamped unit must have gate and up, got one");
  }
};

// Holds the arguments that several pieces have.
struct ExpertsFields {
  static constexpr int64_t kMostSlots = (int64_t(1) << 31) - 1, kMostExperts = 1024;  // the latter on CUDA
  static void offsets(Fields& f, Vector& v) {
    f.input("offsets", v, v.size, DType::i32);
    f.require(v.size >= 2, "offsets must have one element more than there are experts, got ", v.size);
    f.require(!f.on_cuda() || v.size <= kMostExperts + 1, "there must be at most ", kMostExperts,
              " experts on CUDA, got ", v.size - 1);
  }
  static void rows(Fields& f, const char* name, Matrix& m) {
    f.rows(name, m, 0);
    f.require(m.rows < kMostSlots, name, " must have fewer than 2^31 rows, got ", m.rows);
  }
  static void weights(Fields& f, Vector& v, int64_t slots) {
    f.optional("weights", v, slots, v.dtype);
    f.require(!v || is_kernel_float(v.dtype), "weights must be float32, bfloat16 or float16, got ",
              name_of(v.dtype));
  }
  // The rows hold several choices per token.
  static void choices(Fields& f, int64_t slots, int64_t tokens) {
    f.require(tokens == 0 ? slots == 0 : slots % tokens == 0,
              "rows must have a multiple of the tokens' number of rows (", tokens, "), got ", slots);
  }
};

struct ExpertsRoute {
  Matrix ids;  // rows are dense
  int64_t experts = 0;
  Vector order;
  Vector place;
  Vector offsets;

  void fields(Fields& f) {
    f.input("ids", ids, ids.rows, ids.cols, ids.dtype);
    const int64_t slots = ids.rows * ids.cols;
    f.option("experts", experts);
    f.require(experts >= 1 && experts < INT32_MAX, "there must be at least one expert, got ", experts);
    f.require(!f.on_cuda() || experts <= ExpertsFields::kMostExperts, "there must be at most ",
              ExpertsFields::kMostExperts, " experts on CUDA, got ", experts);
    f.require(ids.dtype == DType::i64 || ids.dtype == DType::i32, "ids must be int64 or int32, got ",
              name_of(ids.dtype));
    f.require(slots < ExpertsFields::kMostSlots, "ids must have fewer than 2^31 elements, got ", slots);
    f.require(ids.rows <= 1 || ids.stride == ids.cols, "ids must be dense (stride ", ids.cols,
              "), got stride ", ids.stride);
    f.result("order", order, slots, DType::i32);
    f.result("place", place, slots, DType::i32);
    f.result("offsets", offsets, experts + 1, DType::i32);
  }
};

struct ExpertsGather {
  Matrix x;
  Vector place;
  Matrix rows;

  void fields(Fields& f) {
    f.rows("x", x, 0);
    f.input("place", place, place.size, DType::i32);
    f.require(place.size < ExpertsFields::kMostSlots, "rows must have fewer than 2^31 rows, got ",
              place.size);
    ExpertsFields::choices(f, place.size, x.rows);
    f.result("rows", rows, place.size, x.cols, x.dtype);
  }
};

struct ExpertsGateFwd {
  Matrix gate_up;
  Matrix bias;  // empty if absent
  Vector offsets;
  Matrix act;
  ExpertsGate gate;

  void fields(Fields& f) {
    ExpertsFields::rows(f, "gate_up", gate_up);
    f.optional("bias", bias, offsets.size - 1, gate_up.cols, gate_up.dtype);
    ExpertsFields::offsets(f, offsets);
    gate.fields(f);
    const int64_t cols = gate_up.cols / gate.width();
    f.require(cols * gate.width() == gate_up.cols, "gate_up must be [", gate_up.rows, ", ",
              cols * gate.width(), "], got [", gate_up.rows, ", ", gate_up.cols, "]");
    f.result("act", act, gate_up.rows, cols, gate_up.dtype);
  }
};

struct ExpertsGateBwd {
  Matrix dact;
  Matrix gate_up;
  Matrix bias;     // empty if absent
  Vector weights;  // 1 if empty
  Vector order;    // if empty, row p is slot p
  Vector offsets;
  Matrix g;          // given with down_bias and dweights
  Matrix down_bias;  // empty if absent
  Matrix dgate_up;   // empty if not wanted
  Matrix act;        // empty if not wanted
  Vector dweights;   // empty if not wanted
  ExpertsGate gate;

  void fields(Fields& f) {
    const int64_t slots = dact.rows;
    ExpertsFields::rows(f, "dact", dact);
    f.input("gate_up", gate_up, slots, gate.width() * dact.cols, dact.dtype);
    f.optional("bias", bias, offsets.size - 1, gate_up.cols, dact.dtype);
    ExpertsFields::weights(f, weights, slots);
    f.optional("order", order, slots, DType::i32);
    ExpertsFields::offsets(f, offsets);
    f.optional("g", g, slots, g.cols, dact.dtype);
    f.optional("down_bias", down_bias, offsets.size - 1, g.cols, g.dtype);
    gate.fields(f);
    f.result_over("dgate_up", dgate_up, "gate_up", gate_up, Role::gradient);
    f.gradient("act", act, dact);
    f.gradient("dweights", dweights, "weights", weights);
    f.require(!dweights || down_bias.data == nullptr || g.data != nullptr, "g must be given with down_bias");
  }
};

struct ExpertsCombine {
  Matrix rows;
  Vector place;  // if empty, row p is slot p
  Vector offsets;
  Vector weights;  // 1 if empty
  Matrix bias;     // empty if absent
  Matrix y;

  void fields(Fields& f) {
    const int64_t slots = rows.rows;
    ExpertsFields::rows(f, "rows", rows);
    f.optional("place", place, slots, DType::i32);
    ExpertsFields::offsets(f, offsets);
    ExpertsFields::weights(f, weights, slots);
    f.optional("bias", bias, offsets.size - 1, rows.cols, rows.dtype);
    f.option("tokens", y.rows);
    ExpertsFields::choices(f, slots, y.rows);
    f.require(place || slots == y.rows, "y must be [", slots, ", ", rows.cols, "] without place, got ",
              y.rows, " rows");
    f.result("y", y, y.rows, rows.cols, rows.dtype);
  }
};

// Writes zeros to the rows that are not local.
struct ExpertsZeroRest {
  Matrix rows;
  Vector offsets;

  void fields(Fields& f) {
    f.updated("rows", rows, Role::rows);
    ExpertsFields::offsets(f, offsets);
  }
};

struct ExpertsSum {
  Matrix rows;
  Vector weights;  // 1 if empty
  Vector order;    // if empty, row p is slot p
  Vector offsets;
  Matrix sums;

  void fields(Fields& f) {
    ExpertsFields::rows(f, "rows", rows);
    ExpertsFields::weights(f, weights, rows.rows);
    f.optional("order", order, rows.rows, DType::i32);
    ExpertsFields::offsets(f, offsets);
    f.result("sums", sums, offsets.size - 1, rows.cols, rows.dtype);
  }
};

// Multiplies the rows of expert e by its matrix of the stack: [in, out] if `transposed`, else [out, in]. With
// `order`, which comes with `place`, these are rows of a shorter matrix, several for each. The matmul of t
// and the stack b, of the same layout, is added before the sum is rounded (on the CPU after it).
struct ExpertsMatmul {
  Matrix rows;
  Matrix stack;
  int64_t experts = 0;
  Vector offsets;
  bool transposed = false;
  Vector order, place;
  Matrix t, b;  // empty if absent
  Matrix c;

  static int64_t columns(const Matrix& stack, int64_t experts, bool transposed) {
    return transposed ? stack.cols : experts > 0 ? stack.rows / experts : 0;
  }
  static void require_fit(const Fields& f, const Matrix& stack, int64_t experts, bool transposed,
                          int64_t cols) {
    f.require(columns(stack, experts, !transposed) == cols, "stack must fit ", cols, " columns");
  }
  static void fields_of_t(Fields& f, Matrix& t, Matrix& b, int64_t experts, bool transposed, int64_t rows,
                          int64_t cols, DType dtype) {
    f.optional("t", t, rows, t.cols, dtype);
    f.optional("b", b, experts * (transposed ? t.cols : cols), transposed ? cols : t.cols, dtype);
    f.require((t.data == nullptr) == (b.data == nullptr), "t and b must be given together");
  }
  void fields(Fields& f) {
    f.rows("rows", rows, 0);
    f.stacked("stack", stack, experts, rows.dtype);
    f.input("offsets", offsets, experts + 1, DType::i32);
    f.option("transposed", transposed);
    f.optional("order", order, order.size, DType::i32);
    f.optional("place", place, order.size, DType::i32);
    require_fit(f, stack, experts, transposed, rows.cols);
    const int64_t count = order ? order.size : rows.rows, cols = columns(stack, experts, transposed);
    ExpertsFields::choices(f, count, rows.rows);
    fields_of_t(f, t, b, experts, transposed, count, cols, rows.dtype);
    f.result("c", c, count, cols, rows.dtype);
  }
};

// Does the same for the rows of x in `order`, which comes with `place`, or for its rows as they are if that
// is absent; then applies the gated unit.
struct ExpertsGatedMatmul {
  Matrix x;
  Vector order, place;  // if empty, rows are taken as they are
  Matrix stack;
  int64_t experts = 0;
  Matrix bias;  // empty if absent
  Vector offsets;
  ExpertsGate gate;
  bool transposed = false, keep = false;
  Matrix t, b;     // as above
  Matrix gate_up;  // empty unless `keep`
  Matrix act;

  void fields(Fields& f) {
    f.rows("x", x, 0);
    f.optional("order", order, order.size, DType::i32);
    f.optional("place", place, order.size, DType::i32);
    f.stacked("stack", stack, experts, x.dtype);
    f.optional("bias", bias, experts, bias.cols, x.dtype);
    f.input("offsets", offsets, experts + 1, DType::i32);
    f.option("kind", gate.unit.kind);
    f.option("columns", gate.columns);
    f.option("transposed", transposed);
    gate.options(f);
    f.option("keep", keep);
    ExpertsMatmul::require_fit(f, stack, experts, transposed, x.cols);
    const int64_t rows = order ? order.size : x.rows,
                  cols = ExpertsMatmul::columns(stack, experts, transposed);
    ExpertsMatmul::fields_of_t(f, t, b, experts, transposed, rows, cols, x.dtype);
    f.result_if(keep, "gate_up", gate_up, rows, cols, x.dtype);
    f.result("act", act, rows, cols / gate.width(), x.dtype);
  }
};

// Computes a_e^T b_e of the rows of every expert e; zeros if it has none.
struct ExpertsWeightGradient {
  Matrix a, b;
  Vector offsets;
  Matrix c;  // [experts * columns of a, columns of b]

  void fields(Fields& f) {
    f.rows("a", a, 0);
    f.input("b", b, a.rows, b.cols, a.dtype);
    f.input("offsets", offsets, offsets.size, DType::i32);
    f.stacked_result("c", c, offsets.size - 1, a.cols, b.cols, a.dtype);
  }
};

// Computes scale t_e^T rows_e of the rows of every expert e into an adapter's gradient, in any memory order
// and dtype; zeros if it has no rows. With `order`, which comes with `place`, these are rows of a shorter
// matrix, several for each. The columns of t past the rank are not used.
struct ExpertsAdapterGradient {
  Matrix t;
  Matrix rows;
  Vector offsets;
  Vector order, place;
  float scale = 1.0f;
  Strided out;  // [experts, rank, columns of rows]

  void fields(Fields& f) {
    f.rows("t", t, 0);
    f.input("rows", rows, order ? rows.rows : t.rows, rows.cols, t.dtype);
    f.input("offsets", offsets, offsets.size, DType::i32);
    f.optional("order", order, t.rows, DType::i32);
    f.optional("place", place, t.rows, DType::i32);
    ExpertsFields::choices(f, t.rows, rows.rows);
    f.option("scale", scale);
    f.strided("out", out, 3, 0, Role::input, true);
  }
};

// out = scale * x, both in any memory order and dtype: adapters come with the expert as their fastest index.
struct ExpertsCopy {
  Strided x, out;
  float scale = 1.0f;

  void fields(Fields& f) {
    f.strided("x", x, 3, 0, Role::input);
    f.strided("out", out, 3, 0, Role::input, true);
    f.option("scale", scale);
  }
};

// Holds what the passes of the backward over rows of experts with adapters have in common. They run on CUDA
// in bf16 and read an operand once for what takes several kernels otherwise: u, the rows' matmul with one
// matrix of an adapter, [rank, columns], and the gradient of the other one (ExpertsAdapterGradient). An
// element of u has one order of summation. Rows of an expert are added in their order, in parts that follow
// from the offsets.
struct ExpertsPass {
  static constexpr int64_t kMostRanks = 16, kMostColumns = 2048, kMostUnits = 768;
  static void fields(Fields& f, const Matrix& rows, int64_t most, Matrix& stack, int64_t& experts,
                     int64_t columns, Vector& offsets, Vector& order) {
    f.require(f.on_cuda() && rows.dtype == DType::bf16, "rows must be bfloat16 on CUDA, got ",
              name_of(rows.dtype));
    f.require(rows.cols % 16 == 0 && rows.cols <= most, "rows must have a multiple of 16 columns, at most ",
              most, ", got ", rows.cols);
    f.stacked("stack", stack, experts, rows.dtype);
    f.require(stack.cols == columns, "stack must fit ", columns, " columns, got ", stack.cols);
    ExpertsFields::offsets(f, offsets);
    f.require(offsets.size == experts + 1, "offsets must be [", experts + 1, "], got [", offsets.size, "]");
    f.optional("order", order, order.size, DType::i32);
  }
  static void ranks(Fields& f, Matrix& t, int64_t rows, const Matrix& stack, int64_t experts) {
    f.input("t", t, rows, t.cols, DType::bf16);
    f.require(t.cols >= 1 && t.cols <= kMostRanks && stack.rows == experts * t.cols,
              "t must have as many columns as the stack has rows for each expert, at most ", kMostRanks,
              ", got ", t.cols);
  }
};

// Computes u and scale (w t)^T rows, of the routing weights w, where w t is rounded. With `order`, which
// comes with `place`, these are rows of a shorter matrix; `copy` receives them in that order if `keep`.
struct ExpertsAdapterPass {
  Matrix rows;
  Matrix stack;
  int64_t experts = 0;
  Vector offsets, order, place;
  Matrix t;
  Vector weights;  // 1 if empty, by slot
  float scale = 1.0f;
  Strided out;  // [experts, rank, columns of rows]
  bool keep = false;
  Matrix u, copy;

  void fields(Fields& f) {
    f.rows("rows", rows);
    ExpertsPass::fields(f, rows, ExpertsPass::kMostColumns, stack, experts, rows.cols, offsets, order);
    f.optional("place", place, order.size, DType::i32);
    const int64_t count = order ? order.size : rows.rows;
    ExpertsFields::choices(f, count, rows.rows);
    ExpertsPass::ranks(f, t, count, stack, experts);
    ExpertsFields::weights(f, weights, count);
    f.option("scale", scale);
    f.strided("out", out, 3, 0, Role::input, true);
    f.option("keep", keep);
    f.result("u", u, count, t.cols, rows.dtype);
    f.result_if(keep, "copy", copy, count, rows.cols, rows.dtype);
  }
};

// Computes ExpertsGateBwd of halves and silu, without biases, with dgate_up over gate_up; u of the rows of
// dgate_up; scale t^T dgate_up; and act_t^T act of the weighted act, which is not written.
struct ExpertsGatePass {
  Matrix dact, gate_up, stack;
  int64_t experts = 0;
  Vector offsets, order, weights;
  Matrix t, act_t;
  float scale = 1.0f;
  Strided out, act_out;  // [experts, rank, columns of gate_up], [experts, rank, columns of act]
  bool need_dweights = false;
  Matrix u;
  Vector dweights;

  void fields(Fields& f) {
    f.rows("dact", dact);
    Matrix like = dact;
    like.cols *= 2;
    f.updated("gate_up", gate_up, like, Role::input);
    ExpertsPass::fields(f, dact, ExpertsPass::kMostUnits, stack, experts, like.cols, offsets, order);
    ExpertsFields::weights(f, weights, dact.rows);
    ExpertsPass::ranks(f, t, dact.rows, stack, experts);
    f.input("act_t", act_t, t);
    f.option("scale", scale);
    f.strided("out", out, 3, 0, Role::input, true);
    f.strided("act_out", act_out, 3, 0, Role::input, true);
    f.option("need_dweights", need_dweights);
    f.result("u", u, dact.rows, t.cols, dact.dtype);
    f.result_if(need_dweights, "dweights", dweights, dact.rows, weights ? weights.dtype : dact.dtype);
  }
};

namespace cuda {
void experts_adapter_pass(Context& ctx, const ExpertsAdapterPass& a);
void experts_gate_pass(Context& ctx, const ExpertsGatePass& a);

// Multiplies by matrices of few rows, [r, in], whose result is then no wider than the tile of a GEMM. Returns
// false, and does nothing, if it has no kernel for the call.
bool experts_narrow_matmul(Context& ctx, const ExpertsMatmul& a);
// Does the same for gradients of few ranks.
bool experts_narrow_gradient(Context& ctx, const ExpertsAdapterGradient& a);
}  // namespace cuda

TIGON_API_ENTRY(experts_copy, ExpertsCopy)
TIGON_API_ENTRY(experts_route, ExpertsRoute)
TIGON_API_ENTRY(experts_gather, ExpertsGather)
TIGON_API_OP(experts_gate, ExpertsGate)
TIGON_API_ENTRY(experts_combine, ExpertsCombine)
TIGON_API_ENTRY(experts_sum, ExpertsSum)

}  // namespace tigon
