// A layer of experts as a whole on the CPU, both ways, for programs without PyTorch: the pieces of experts.h around one product
// per expert. The contract is that of the pieces; gate_up_rows, order, place and offsets are what the forward keeps for the backward.
//
//   gate_up [E * 2 I, H], down [E * H, I] (matrices one after the other); transposed: [E * H, 2 I], [E * I, H]
//   The products read rows rounded to the operands' dtype and round theirs once.
#pragma once

#include "tigon/ops/experts/experts.h"

namespace tigon {

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

TIGON_API void experts_fwd(Context& ctx, const ExpertsFwd& a);
TIGON_API void experts_bwd(Context& ctx, const ExpertsBwd& a);

}  // namespace tigon
