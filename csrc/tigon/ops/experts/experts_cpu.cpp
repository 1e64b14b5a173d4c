#include <algorithm>
#include <cstring>

#include "tigon/base/check.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/ops/experts/experts.h"

namespace tigon::cpu {
namespace {

// A row of the gate is processed in blocks of fp32: functions for the dtype and layout read and write them,
// and functions for the activation compute in between.
constexpr int64_t kGateBlock = 512;
struct GateBlock {
  alignas(64) float d[kGateBlock], gate[kGateBlock], up[kGateBlock], act[kGateBlock];
};
struct UnitKernels {
  void (*forward)(GateBlock& block, int64_t count, const GluOptions& o);
  float (*backward)(GateBlock& block, float weight, int64_t count, const GluOptions& o);
};
struct RowKernels {
  void (*gate)(const UnitKernels& unit, const void* gate_up, const void* bias, void* act, int64_t n,
               const ExpertsGate& gate);
  float (*gate_bwd)(const UnitKernels& unit, const void* dact, const void* gate_up, const void* bias,
                    float weight, void* dgate_up, void* act, int64_t n, const ExpertsGate& gate);
  float (*dot)(const void* a, const void* b, int64_t n);
  void (*combine)(const void* const* rows, const void* const* biases, const float* weights, int64_t count,
                  void* y, int64_t n);
  void (*add)(const void* row, float weight, float* sum, int64_t n, bool first);
  void (*store)(const float* sum, void* out, int64_t n);
};
struct ExpertsTable {
  UnitKernels unit[kGluKinds];
  ByDtype<RowKernels> rows;
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/experts/experts_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kElementsPerTask = 16384;
constexpr int64_t kColumns = 1024,
                  // A task adds this many rows to one sum before that joins its expert's.
    kPart = 64;

const UnitKernels& unit_kernels(const ExpertsGate& gate) {
  return TIGON_SELECT(experts_table).unit[int(gate.unit.kind)];
}
const RowKernels& row_kernels(DType t) { return TIGON_SELECT(experts_table).rows[t]; }

int64_t id_at(const Matrix& ids, int64_t s) {
  return ids.dtype == DType::i64 ? ids.row<int64_t>(0)[s] : int64_t(ids.row<int32_t>(0)[s]);
}

float value_at(const Vector& v, int64_t i) {
  if (!v) return 1.0f;
  return dispatch_float("experts", "weights", v.dtype,
                        [&](auto t) { return to_float(v.as<typename decltype(t)::type>()[i]); });
}
void set_value(const Vector& v, int64_t i, float x) {
  dispatch_float("experts", "dweights", v.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    v.as<T>()[i] = from_float<T>(x);
  });
}

int64_t slot_of(const Vector& order, int64_t row) { return order ? order.as<int32_t>()[row] : row; }
int64_t rows_here(const Vector& offsets) { return offsets.as<int32_t>()[offsets.size - 1]; }
int64_t expert_of(const Vector& offsets, int64_t row) {
  const int32_t* first = offsets.as<int32_t>();
  return std::upper_bound(first, first + offsets.size, int32_t(row)) - first - 1;
}
// Returns the bias of a row; null if there is none.
const char* bias_of(const Matrix& bias, const Vector& offsets, int64_t row) {
  return bias.data == nullptr ? nullptr : element_at(bias, expert_of(offsets, row), 0);
}

// Calls fn(row) for rows [0, count) of `cols` elements.
template <class Fn>
void for_each_row(Context& ctx, int64_t count, int64_t cols, const Fn& fn) {
  int64_t group = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(cols, 1));
  parallel(ctx, (count + group - 1) / group, [&](int64_t task) {
    for (int64_t r = task * group, end = std::min(count, r + group); r < end; ++r) fn(r);
  });
}

}  // namespace

void experts_copy(Context& ctx, const ExpertsCopy& a) {
  dispatch_float("experts", "x", a.x.dtype, [&](auto in) {
    dispatch_float("experts", "out", a.out.dtype, [&](auto to) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(to)::type;
      parallel(ctx, a.x.sizes[0], [&](int64_t i) {
        for (int64_t j = 0; j < a.x.sizes[1]; ++j) {
          const In* x = static_cast<const In*>(a.x.data) + i * a.x.strides[0] + j * a.x.strides[1];
          Out* out = static_cast<Out*>(a.out.data) + i * a.out.strides[0] + j * a.out.strides[1];
          for (int64_t k = 0; k < a.x.sizes[2]; ++k)
            out[k * a.out.strides[2]] = from_float<Out>(a.scale * to_float(x[k * a.x.strides[2]]));
        }
      });
    });
  });
}

// Counts, makes a prefix sum, and scatters.
void experts_route(Context&, const ExpertsRoute& a) {
  int64_t experts = a.offsets.size - 1, slots = a.order.size;
  for (int64_t s = 0; s < slots; ++s)
    TIGON_CHECK("experts", id_at(a.ids, s) >= 0, "ids must be >= 0, got ", id_at(a.ids, s));
  int32_t *offsets = a.offsets.as<int32_t>(), *order = a.order.as<int32_t>(), *place = a.place.as<int32_t>();
  std::fill(offsets, offsets + experts + 1, 0);
  for (int64_t s = 0; s < slots; ++s)
    if (int64_t id = id_at(a.ids, s); id < experts) ++offsets[id + 1];
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  int64_t last = offsets[experts];
  for (int64_t s = 0; s < slots; ++s) {
    int64_t id = id_at(a.ids, s), to = id < experts ? offsets[id]++ : last++;
    order[to] = int32_t(s), place[s] = id < experts ? int32_t(to) : -1;
  }
  // Each offset has moved to the next expert's.
  for (int64_t e = experts - 1; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

void experts_gather(Context& ctx, const ExpertsGather& a) {
  int64_t choices = a.rows.rows / a.x.rows;
  size_t bytes = size_t(a.x.cols) * size_of(a.x.dtype);
  for_each_row(ctx, a.x.rows, a.x.cols, [&](int64_t t) {
    for (int64_t s = t * choices; s < (t + 1) * choices; ++s)
      if (int32_t p = a.place.as<int32_t>()[s]; p >= 0)
        std::memcpy(element_at(a.rows, p, 0), element_at(a.x, t, 0), bytes);
  });
}

void experts_gate_fwd(Context& ctx, const ExpertsGateFwd& a) {
  const UnitKernels& unit = unit_kernels(a.gate);
  const RowKernels& k = row_kernels(a.act.dtype);
  for_each_row(ctx, rows_here(a.offsets), a.act.cols, [&](int64_t p) {
    k.gate(unit, element_at(a.gate_up, p, 0), bias_of(a.bias, a.offsets, p), element_at(a.act, p, 0),
           a.act.cols, a.gate);
  });
}

void experts_gate_bwd(Context& ctx, const ExpertsGateBwd& a) {
  const UnitKernels& unit = unit_kernels(a.gate);
  const RowKernels& k = row_kernels(a.dact.dtype);
  int64_t here = rows_here(a.offsets);
  for_each_row(ctx, a.dact.rows, a.dact.cols, [&](int64_t p) {
    int64_t slot = slot_of(a.order, p);
    float dw = 0.0f;
    if (p < here) {
      dw = k.gate_bwd(unit, element_at(a.dact, p, 0), element_at(a.gate_up, p, 0),
                      bias_of(a.bias, a.offsets, p), value_at(a.weights, slot), element_at(a.dgate_up, p, 0),
                      element_at(a.act, p, 0), a.dact.cols, a.gate);
      if (a.dweights && a.down_bias.data != nullptr)
        dw += k.dot(element_at(a.g, p, 0), bias_of(a.down_bias, a.offsets, p), a.g.cols);
    }
    if (a.dweights) set_value(a.dweights, slot, dw);
  });
}

void experts_combine(Context& ctx, const ExpertsCombine& a) {
  const RowKernels& k = row_kernels(a.y.dtype);
  int64_t choices = a.rows.rows / a.y.rows, here = rows_here(a.offsets);
  bool in_place = a.rows.data == a.y.data && !a.weights && a.bias.data == nullptr;
  auto* rows = ctx.scratch_of<const void*>(a.rows.rows);
  auto* biases = ctx.scratch_of<const void*>(a.rows.rows);
  float* weights = ctx.scratch_of<float>(a.rows.rows);
  for_each_row(ctx, a.y.rows, a.y.cols * choices, [&](int64_t t) {
    int64_t first = t * choices, next = first;
    for (int64_t s = first; s < first + choices; ++s) {
      int64_t p = a.place ? a.place.as<int32_t>()[s] : s < here ? s : -1;
      if (p < 0) continue;
      rows[next] = element_at(a.rows, p, 0), biases[next] = bias_of(a.bias, a.offsets, p);
      weights[next++] = value_at(a.weights, s);
    }
    if (in_place && next > first) return;
    k.combine(rows + first, biases + first, weights + first, next - first, element_at(a.y, t, 0), a.y.cols);
  });
}

void experts_sum(Context& ctx, const ExpertsSum& a) {
  const RowKernels& k = row_kernels(a.rows.dtype);
  const RowKernels& wide = row_kernels(DType::f32);
  const int32_t* offsets = a.offsets.as<int32_t>();
  int64_t experts = a.offsets.size - 1, width = std::min(a.rows.cols, kColumns),
          blocks = (a.rows.cols + width - 1) / width;
  parallel(ctx, experts * blocks, [&](int64_t task) {
    float sum[kColumns] = {}, part[kColumns];
    int64_t e = task / blocks, col = task % blocks * width, n = std::min(width, a.rows.cols - col);
    for (int64_t from = offsets[e], to = offsets[e + 1]; from < to; from += kPart) {
      for (int64_t p = from, end = std::min(to, from + kPart); p < end; ++p)
        k.add(element_at(a.rows, p, col), value_at(a.weights, slot_of(a.order, p)), part, n, p == from);
      wide.add(part, 1.0f, sum, n, false);
    }
    k.store(sum, element_at(a.sums, e, col), n);
  });
}

}  // namespace tigon::cpu
