// Routes the tokens of a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538, eq. 3 to 5): chooses the
// experts of a token and their weights, and computes the losses that balance them (Fedus et al. 2021,
// arXiv:2101.03961, eq. 4 to 6; Zoph et al. 2022, arXiv:2202.08906, eq. 5).
// Formula     z is a row of logits; p = softmax(z) or sigmoid(z). A token's choice C is the K experts of
//             largest c: c = z if there is neither a bias nor a sum of two, else p + bias. With groups of E /
//             num_groups adjacent experts, only those of the top_groups groups with the largest scores
//             compete. A group's score is the largest c of the group, or the sum of its two largest. Among
//             equal c and equal scores the smaller index comes first; NaN counts as the largest.
//             weights_k = scale * p / S at C's k-th, S = sum of p over C (+ 1e-20 for sigmoid) with
//             normalize, else 1. Softmax with normalize is the softmax of only the chosen logits.
//             A row of `forced` (routing replay: Ma et al. 2025, arXiv:2510.11370) is C instead, in its
//             order: bias and groups do not act on it. If it begins with a negative id, or names an expert
//             twice, the token keeps its own choice.
//             q = p, for sigmoid p / (sum of p + 1e-20); v = token_weights; W = sum of v; lse = log sum exp z
//             aux = E * sum over e of (sum over t of v [e in C_t] / W) * (sum over t of v q_e / W);
//             z = sum over t of v lse^2 / W
//             Tokens of weight 0 add nothing, whatever they hold; if W is 0 both losses are 0
// Gradients   dlogits of weights, aux and z; the choice is constant, and so is the bias
// Shapes      logits, dlogits [T, E]; weights, dweights, ids, forced [T, K]; bias [E]; token_weights [T];
//             aux, z, daux, dz [1]; balance [E + 1]; rows at any stride, ids' dense or apart
// Dtypes      logits, dlogits f32 | bf16 | f16; weights, dweights the same or f32; ids, forced i64 | i32; the
//             rest f32; arithmetic f32
// Rounding    once, on store. A row that holds a NaN or +inf has NaN weights for softmax, and so has one of
//             nothing but -inf, and for any score one whose forced ids are no experts (CUDA): it keeps the
//             ids of its own choice
// Saved       logits, ids, balance: E * (sum of v [e in C]) / W^2 for every expert, then 1 / W
// Aliasing    dlogits may be logits (same address and stride); no other overlap
// Determinism bitwise: fixed trees inside a row, sums over tokens in parts that follow from shapes only
// Traffic     forward T E reads, 2 T K writes; backward T (E + 2 K) reads, T E writes; forced: T K reads;
//             losses: 2 E + 2 numbers a part of the tokens
// Refused     sizes, dtypes or options that do not fit, more than 1024 experts; on the CPU forced ids that
//             are no experts: tigon::Error before anything is written
#pragma once

#include <cmath>

#include "tigon/base/fields.h"

namespace tigon {

// A router has at most this many experts.
constexpr int64_t kRouteExperts = 1024;
// This is added to sums of sigmoids.
constexpr float kRouteTiny = 1e-20f;

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
  void fields(Fields& f) {
    f.option("score", score);
    f.option("normalize", normalize);
    f.option("num_groups", num_groups);
    f.option("top_groups", top_groups);
    f.option("group_score", group_score);
    f.option("scale", scale);
  }
};

// States the rules of both directions.
inline void require_route(const Fields& f, const Matrix& logits, const Matrix& ids, const RouteOptions& o) {
  const int64_t experts = logits.cols, k = ids.cols, groups = o.num_groups;
  f.require(experts >= 1 && experts <= kRouteExperts, "logits must have 1 to ", kRouteExperts,
            " columns, got ", experts);
  f.require(k >= 1 && k <= experts, "top_k must be in [1, ", experts, "], got ", k);
  f.require(groups >= 1 && experts % groups == 0, "num_groups must divide ", experts, ", got ", groups);
  f.require(o.top_groups >= 1 && o.top_groups <= groups, "top_groups must be in [1, ", groups, "], got ",
            o.top_groups);
  const int64_t size = groups >= 1 ? experts / groups : 0, there = size * o.top_groups;
  f.require(k <= there, "top_k must be at most ", there, ", the experts of top_groups groups, got ", k);
  f.require(!o.two() || size >= 2, "group_score must be max for groups of one expert, got sum_of_two");
  f.require(std::isfinite(o.scale), "scale must be finite, got ", o.scale);
  f.require(ids.dtype == DType::i64 || ids.dtype == DType::i32, "ids must be int64 or int32, got ",
            name_of(ids.dtype));
  f.require(ids.rows == logits.rows, "ids must have ", logits.rows, " rows, got ", ids.rows);
}
inline void require_route_weights(const Fields& f, const char* name, DType given, DType logits) {
  f.require(given == logits || given == DType::f32, name, " must be ", name_of(logits), " or float32, got ",
            name_of(given));
}

struct RouteFwd {
  Matrix logits;
  Vector bias;           // 0 if empty
  Vector token_weights;  // 1 if empty
  Matrix forced;         // if empty, every token chooses
  Matrix weights;
  Matrix ids;
  // aux is empty if not wanted; z and balance are then empty too.
  Vector aux;
  Vector z;
  Vector balance;
  RouteOptions options;

  void fields(Fields& f) {
    f.rows("logits", logits);
    f.optional("bias", bias, logits.cols, DType::f32);
    f.optional("token_weights", token_weights, logits.rows, DType::f32);
    f.option("top_k", ids.cols);
    f.optional("forced", forced, logits.rows, forced.cols, forced.dtype);
    options.fields(f);
    f.option("weights_dtype", weights.dtype);
    f.option("ids_dtype", ids.dtype);
    require_route(f, logits, ids, options);
    require_route_weights(f, "weights", weights.dtype, logits.dtype);
    if (forced.cols > 0) {
      f.require(forced.cols == ids.cols, "forced must have ", ids.cols, " columns, got ", forced.cols);
      f.require(forced.dtype == DType::i64 || forced.dtype == DType::i32,
                "forced must be int64 or int32, got ", name_of(forced.dtype));
    }
    f.result("weights", weights, logits.rows, ids.cols, weights.dtype);
    f.result("ids", ids, logits.rows, ids.cols, ids.dtype);
    f.gradient("aux", aux, 1, DType::f32);
    f.gradient("z", z, 1, DType::f32);
    f.gradient("balance", balance, logits.cols + 1, DType::f32);
    f.require(bool(z) == bool(aux), "z must be [1], got [", z.size, "]");
    f.require(bool(balance) == bool(aux), "balance must be [", logits.cols + 1, "], got [", balance.size,
              "]");
  }
};

struct RouteBwd {
  Matrix logits;
  Matrix ids;
  Matrix dweights;  // 0 if empty
  Vector daux;      // 0 if empty
  Vector dz;        // 0 if empty
  Vector token_weights;
  Vector balance;  // given with daux or dz
  Matrix dlogits;
  RouteOptions options;

  void fields(Fields& f) {
    f.optional("dweights", dweights, logits.rows, ids.cols, dweights.dtype);
    f.scalar("daux", daux, DType::f32, Role::optional);
    f.scalar("dz", dz, DType::f32, Role::optional);
    f.rows("logits", logits);
    f.input("ids", ids, ids.rows, ids.cols, ids.dtype);
    f.optional("token_weights", token_weights, logits.rows, DType::f32);
    f.optional("balance", balance, logits.cols + 1, DType::f32);
    options.fields(f);
    require_route(f, logits, ids, options);
    if (dweights.data != nullptr) require_route_weights(f, "dweights", dweights.dtype, logits.dtype);
    f.require((!daux && !dz) || balance, "balance must be [", logits.cols + 1, "], got [", balance.size, "]");
    f.result("dlogits", dlogits, logits);
  }
};

TIGON_API_OP(route, Route)

}  // namespace tigon
