// Experts of a mixture (Shazeer et al. 2017, arXiv:1701.06538; top-k routing as in Fedus et al. 2021, arXiv:2101.03961): all that
// lies around the grouped products of a layer. S = T * K slots: token t's choice j is slot t * K + j. Row p of a sorted matrix
// belongs to slot order[p] and to the expert e with offsets[e] <= p < offsets[e + 1]; R = offsets[E] rows are here.
//
// Formula     route    stable sort of the slots by expert id: order[place[s]] = s. An id outside [0, E) is "not here": its slots
//                      come last in order, and place[s] = -1
//             gather   rows_place[s] = x_t, s = t * K + j, over the slots that are here
//             gate     z = gate_up_p + bias_e in f32; act_p = gated unit of its columns (base/gated_unit.inc): halves [gate | up],
//                      interleaved (gate, up, gate, up, ...), or single: the activation alone, up = 1
//             combine  y_t = sum over j of w_s * (rows_place[s] + bias_e), s = t * K + j, over the slots that are here
//                      without place: y_p = w_p * (rows_p + bias_e) for p < R, 0 for the others
//             sum      sums_e = sum of w_order[p] * rows_p over the rows of expert e
// Gradients   with y = combine(act W_down^T + bias): g_p = dy_t (gather), dact = g W_down,
//             dw_s = <dact_p, act_p> + <g_p, down_bias_e>, 0 for slots that are not here;
//             dgate_up_p = w_s * dact_p * d act / d z;  act_p, weighted by w_s, for dW_down = g^T (w act);
//             dx = combine without weights and bias; gradients of biases = sum. Y itself is never needed
// Shapes      ids [T, K]; order, place [S]; offsets [E + 1]; x, y, dy [T, H]; rows, g [S, H]; gate_up, dgate_up [S, 2 I]
//             ([S, I] for single); act, dact [S, I]; weights, dweights [S] by slot; bias [E, columns], rows dense or apart
// Dtypes      ids i64 | i32; order, place, offsets i32; the rest f32 | bf16 | f16, one for all but weights, which have any of them,
//             and dweights the same; arithmetic f32
// Rounding    once, on store. combine adds in f32 and rounds the sum
// Saved       gate_up, order, place, offsets by whoever runs the layer: nothing of S x H
// Aliasing    combine without place may write into rows; dgate_up may be gate_up; otherwise none
// Determinism bitwise: stable order, the K slots of a token in their order, the rows of an expert in theirs, in parts that follow
//             from shapes and offsets alone
// Traffic     route: two reads of ids, 2 S + E integers written; gather T reads + R writes of H; gate 3 I, backward 6 I;
//             combine R reads + T writes of H; sum R reads. Rows from R on are neither read nor written, by anything
// Refused     sizes or dtypes that do not fit, 2^31 slots, more than 1024 experts on CUDA: tigon::Error before anything is
//             written. A negative id: tigon::Error on the CPU; on CUDA it is not here
#pragma once

#include "tigon/base/fields.h"
#include "tigon/base/gated_unit.h"

namespace tigon {

enum class GateColumns : int8_t { halves, interleaved, single };

struct ExpertsGate {
  GluOptions unit;
  GateColumns columns = GateColumns::halves;
};

struct ExpertsRoute {
  Matrix ids;
  Vector order;
  Vector place;
  Vector offsets;
};

struct ExpertsGather {
  Matrix x;
  Vector place;
  Matrix rows;
};

struct ExpertsGateFwd {
  Matrix gate_up;
  Matrix bias;  // empty: none
  Vector offsets;
  Matrix act;
  ExpertsGate gate;
};

struct ExpertsGateBwd {
  Matrix dact;
  Matrix gate_up;
  Matrix bias;     // empty: none
  Vector weights;  // empty: 1
  Vector order;    // empty: row p is slot p
  Vector offsets;
  Matrix g;          // with down_bias and dweights
  Matrix down_bias;  // empty: none
  Matrix dgate_up;   // empty: not wanted
  Matrix act;        // empty: not wanted
  Vector dweights;   // empty: not wanted
  ExpertsGate gate;
};

struct ExpertsCombine {
  Matrix rows;
  Vector place;  // empty: row p is slot p
  Vector offsets;
  Vector weights;  // empty: 1
  Matrix bias;     // empty: none
  Matrix y;
};

struct ExpertsSum {
  Matrix rows;
  Vector weights;  // empty: 1
  Vector order;    // empty: row p is slot p
  Vector offsets;
  Matrix sums;
};

TIGON_API_ENTRY(experts_route, ExpertsRoute)
TIGON_API_ENTRY(experts_gather, ExpertsGather)
TIGON_API_OP(experts_gate, ExpertsGate)
TIGON_API_ENTRY(experts_combine, ExpertsCombine)
TIGON_API_ENTRY(experts_sum, ExpertsSum)

}  // namespace tigon
