// Router of a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538, eq. 3 to 5): which experts a token goes to, with what
// weights, and the losses that balance them (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6; Zoph et al. 2022, arXiv:2202.08906, eq. 5).
//
// Formula     z a row of logits; p = softmax(z) or sigmoid(z). A token's choice C is the K experts of largest c: c = z where there is
//             neither a bias nor a sum of two, else p + bias. With groups of E / num_groups adjacent experts, only those of the
//             top_groups groups whose score is largest: the largest c of the group, or the sum of its two largest. Equal c and equal
//             scores: the smaller index first; NaN counts as the largest. weights_k = scale * p / S at C's k-th, S = sum of p over C
//             (+ 1e-20 for sigmoid) with normalize, else 1. Softmax with normalize is the softmax of the chosen logits alone.
//             q = p, for sigmoid p / (sum of p + 1e-20); v = token_weights; W = sum of v; lse = log sum exp z
//             aux = E * sum over e of (sum over t of v [e in C_t] / W) * (sum over t of v q_e / W);  z = sum over t of v lse^2 / W
//             Tokens of weight 0 add nothing, whatever they hold; where W is 0 both losses are 0
// Gradients   dlogits of weights, aux and z; the choice is constant, and so is the bias
// Shapes      logits, dlogits [T, E]; weights, dweights, ids [T, K]; bias [E]; token_weights [T]; aux, z, daux, dz [1];
//             balance [E + 1]; rows at any stride, ids' dense or apart
// Dtypes      logits, dlogits f32 | bf16 | f16; weights, dweights the same or f32; ids i64 | i32; the rest f32; arithmetic f32
// Rounding    once, on store. A row that holds a NaN or +inf has NaN weights for softmax, and so has one of nothing but -inf
// Saved       logits, ids, balance: E * (sum of v [e in C]) / W^2 for every expert, then 1 / W
// Aliasing    dlogits may be logits (same address and stride); no other overlap
// Determinism bitwise: fixed trees inside a row, sums over tokens in parts that follow from shapes alone
// Traffic     forward T E reads, 2 T K writes; backward T (E + 2 K) reads, T E writes; losses: 2 E + 2 numbers a part of the tokens
// Refused     sizes, dtypes or options that do not fit, more than 1024 experts: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

constexpr int64_t kRouteExperts = 1024;  // at most
constexpr float kRouteTiny = 1e-20f;     // added to sums of sigmoids

enum class RouteScore : int8_t { softmax, sigmoid };
enum class RouteGroupScore : int8_t { max, sum_of_two };

struct RouteOptions {
  RouteScore score = RouteScore::softmax;
  bool normalize = true;
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  RouteGroupScore group_score = RouteGroupScore::max;
  float scale = 1.0f;

  bool sigmoid() const { return score == RouteScore::sigmoid; }
  bool two() const { return num_groups > 1 && group_score == RouteGroupScore::sum_of_two; }
};

struct RouteFwd {
  Matrix logits;
  Vector bias;           // empty: 0
  Vector token_weights;  // empty: 1
  Matrix weights;
  Matrix ids;
  Vector aux;  // empty, as z and balance are then: not wanted
  Vector z;
  Vector balance;
  RouteOptions options;
};

struct RouteBwd {
  Matrix logits;
  Matrix ids;
  Matrix dweights;  // empty: 0
  Vector daux;      // empty: 0
  Vector dz;        // empty: 0
  Vector token_weights;
  Vector balance;  // with daux or dz
  Matrix dlogits;
  RouteOptions options;
};

TIGON_API_OP(route, Route)

}  // namespace tigon
