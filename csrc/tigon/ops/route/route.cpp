#include "tigon/ops/route/route.h"

#include <cmath>

#include "tigon/base/require.h"

namespace tigon {
namespace {

void require_options(const char* op, const Matrix& logits, int64_t k, const RouteOptions& options) {
  require_float(op, "logits", logits.dtype);
  const int64_t experts = logits.cols, groups = options.num_groups;
  TIGON_CHECK(op, experts >= 1 && experts <= kRouteExperts, "logits must have 1 to ", kRouteExperts,
              " columns, got ", experts);
  TIGON_CHECK(op, k >= 1 && k <= experts, "top_k must be in [1, ", experts, "], got ", k);
  TIGON_CHECK(op, groups >= 1 && experts % groups == 0, "num_groups must divide ", experts, ", got ", groups);
  TIGON_CHECK(op, options.top_groups >= 1 && options.top_groups <= groups, "top_groups must be in [1, ",
              groups, "], got ", options.top_groups);
  const int64_t there = experts / groups * options.top_groups;
  TIGON_CHECK(op, k <= there, "top_k must be at most ", there, ", the experts of top_groups groups, got ", k);
  TIGON_CHECK(op, !options.two() || experts / groups >= 2,
              "group_score must be max for groups of one expert, got sum_of_two");
  TIGON_CHECK(op, std::isfinite(options.scale), "scale must be finite, got ", options.scale);
}

void require_weights(const char* op, const char* name, const Matrix& weights, const Matrix& ids,
                     DType logits) {
  require_or_f32(op, name, weights.dtype, logits);
  require_matrix(op, name, weights, ids.rows, ids.cols, weights.dtype);
}

void require_ids(const char* op, const Matrix& ids, int64_t rows) {
  TIGON_CHECK(op, ids.dtype == DType::i64 || ids.dtype == DType::i32, "ids must be int64 or int32, got ",
              name_of(ids.dtype));
  TIGON_CHECK(op, ids.rows == rows, "ids must have ", rows, " rows, got ", ids.rows);
}

}  // namespace

void route_fwd(Context& ctx, const RouteFwd& a) {
  const char* op = "route";
  require_options(op, a.logits, a.ids.cols, a.options);
  require_ids(op, a.ids, a.logits.rows);
  require_weights(op, "weights", a.weights, a.ids, a.logits.dtype);
  require_optional(op, "bias", a.bias, a.logits.cols);
  require_optional(op, "token_weights", a.token_weights, a.logits.rows);
  if (a.aux || a.z || a.balance) {
    require_vector(op, "aux", a.aux, 1, DType::f32);
    require_vector(op, "z", a.z, 1, DType::f32);
    require_vector(op, "balance", a.balance, a.logits.cols + 1, DType::f32);
  } else if (a.logits.rows == 0) {
    return;
  }
  TIGON_RUN(op, ctx, route_fwd, a);
}

void route_bwd(Context& ctx, const RouteBwd& a) {
  const char* op = "route_bwd";
  require_options(op, a.logits, a.ids.cols, a.options);
  require_ids(op, a.ids, a.logits.rows);
  if (a.dweights.data != nullptr) require_weights(op, "dweights", a.dweights, a.ids, a.logits.dtype);
  require_optional(op, "daux", a.daux, 1);
  require_optional(op, "dz", a.dz, 1);
  require_optional(op, "token_weights", a.token_weights, a.logits.rows);
  if (a.daux || a.dz) require_vector(op, "balance", a.balance, a.logits.cols + 1, DType::f32);
  require_matrix(op, "dlogits", a.dlogits, a.logits.rows, a.logits.cols, a.logits.dtype);
  if (a.logits.rows == 0) return;
  TIGON_RUN(op, ctx, route_bwd, a);
}

}  // namespace tigon
