#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/ops/route/route.h"

namespace tigon::cpu {
namespace {

// Holds a row of logits z in f32: e = exp(z - top) and its sum; r holds the scores (route_math.inc), and
// `scores` their sum.
struct RouteRow {
  alignas(64) float z[kRouteExperts], e[kRouteExperts], r[kRouteExperts];
  float top, sum, scores;
};
// Holds the gradients that reach a row: h from its weights (null if none), aux and lse from the losses (0 if
// none).
struct RouteGradient {
  const float *h, *q, *balance;
  float aux, lse;
};
struct RouteKernels {
  void (*load)(const void* logits, RouteRow& row, int64_t n, bool sigmoids, bool normalize);
  void (*gradient)(const RouteRow& row, const RouteGradient& g, void* dz, int64_t n, bool sigmoids);
};
struct RouteTable {
  ByDtype<RouteKernels> rows;  // by the dtype of logits
  void (*distribution)(const RouteRow& row, float* q, int64_t n, bool sigmoids);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/route/route_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
#include "tigon/base/ordered_key.inc"
#include "tigon/ops/route/route_choice.inc"

float value_at(const Matrix& m, int64_t row, int64_t i) {
  return dispatch_float("route", "weights", m.dtype,
                        [&](auto t) { return to_float(m.row<typename decltype(t)::type>(row)[i]); });
}
void set_value(const Matrix& m, int64_t row, int64_t i, float x) {
  dispatch_float("route", "weights", m.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    m.row<T>(row)[i] = from_float<T>(x);
  });
}
int64_t id_at(const Matrix& ids, int64_t row, int64_t k) {
  return ids.dtype == DType::i64 ? ids.row<int64_t>(row)[k] : int64_t(ids.row<int32_t>(row)[k]);
}
void set_id(const Matrix& ids, int64_t row, int64_t k, int id) {
  if (ids.dtype == DType::i64)
    ids.row<int64_t>(row)[k] = id;
  else
    ids.row<int32_t>(row)[k] = id;
}
float token_weight(const Vector& v, int64_t row) { return v ? v.as<float>()[row] : 1.0f; }

// Finds the k largest keys of n, equal ones by index: order[i] is the place of the i-th.
void choose(const uint32_t* keys, int n, int k, int* order) {
  int found = 0;
  for (int e = 0; e < n; ++e) {
    if (keys[e] == 0u || (found == k && keys[e] <= keys[order[k - 1]])) continue;
    int at = found < k ? found++ : k - 1;
    for (; at > 0 && keys[order[at - 1]] < keys[e]; --at) order[at] = order[at - 1];
    order[at] = e;
  }
}

// Finds a token's choice, best first.
void choose_experts(const RouteRow& row, const float* bias, int experts, int k, const RouteOptions& options,
                    int* order) {
  float c[kRouteExperts];
  uint32_t keys[kRouteExperts];
  const float unit = options.sigmoid() || !options.normalize ? 1.0f : row.sum;  // r / unit = p
  for (int e = 0; e < experts; ++e) {
    c[e] = bias != nullptr || options.two() ? row.r[e] / unit + (bias != nullptr ? bias[e] : 0.0f) : row.z[e];
    keys[e] = ordered_key(c[e]);
  }
  if (options.num_groups > 1) {
    const int groups = int(options.num_groups), size = experts / groups;
    uint32_t group_keys[kRouteExperts];
    bool open[kRouteExperts] = {};
    for (int g = 0; g < groups; ++g) group_keys[g] = route_group_key(c + g * size, size, options.two());
    choose(group_keys, groups, int(options.top_groups), order);
    for (int i = 0; i < options.top_groups; ++i) open[order[i]] = true;
    for (int g = 0; g < groups; ++g)
      if (!open[g]) std::fill_n(keys + g * size, size, 0u);
  }
  choose(keys, experts, k, order);
}

// Reads a token's forced experts. True if they are its choice.
bool take_forced(const Matrix& forced, int64_t t, int64_t k, int* order) {
  bool seen[kRouteExperts] = {};
  if (id_at(forced, t, 0) < 0) return false;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t id = id_at(forced, t, i);
    if (std::exchange(seen[id], true)) return false;
    order[i] = int(id);
  }
  return true;
}
void check_forced(const Matrix& forced, int64_t experts) {
  for (int64_t t = 0; t < forced.rows && forced.cols > 0; ++t)
    for (int64_t i = 0; i < forced.cols && id_at(forced, t, 0) >= 0; ++i) {
      const int64_t id = id_at(forced, t, i);
      TIGON_CHECK("route", id >= 0 && id < experts, "ids must be in [0, ", experts,
                  "), or begin with a negative one, got ", id, " in row ", t);
    }
}

// Computes r again if the chosen logits are too far below the others (route_math.inc). chosen(i) is the id of
// the i-th.
template <class Fn>
void rescore(RouteRow& row, const RouteOptions& options, int64_t k, const Fn& chosen) {
  if (options.sigmoid() || !options.normalize) return;
  float best = -INFINITY;
  for (int64_t i = 0; i < k; ++i) best = std::max(best, row.z[chosen(i)]);
  if (!scalar::route_is_far(best, row.top) || best == -INFINITY || !(row.sum > 0.0f)) return;
  for (int64_t i = 0; i < k; ++i) row.r[chosen(i)] = std::exp(row.z[chosen(i)] - best);
}

// Sums over tokens, for each part of them: [counts of experts | sums of q | W | sum of lse^2].
struct Sums {
  double* at;
  int64_t experts;
  double& count(int64_t e) const { return at[e]; }
  double& q(int64_t e) const { return at[experts + e]; }
  double& tokens() const { return at[2 * experts]; }
  double& z() const { return at[2 * experts + 1]; }
};

void finish(const RouteFwd& a, Sums all) {
  const double w = all.tokens(), experts = double(all.experts), inverse = w != 0.0 ? 1.0 / w : 0.0;
  double aux = 0.0;
  for (int64_t e = 0; e < all.experts; ++e) {
    aux += all.count(e) * inverse * (all.q(e) * inverse);
    a.balance.as<float>()[e] = float(experts * all.count(e) * inverse * inverse);
  }
  a.balance.as<float>()[all.experts] = float(inverse);
  a.aux.as<float>()[0] = float(experts * aux);
  a.z.as<float>()[0] = float(all.z() * inverse);
}

}  // namespace

void route_fwd(Context& ctx, const RouteFwd& a) {
  const RouteTable& table = TIGON_SELECT(route_table);
  const RouteKernels& kernels = table.rows[a.logits.dtype];
  const int64_t tokens = a.logits.rows, experts = a.logits.cols, k = a.ids.cols, width = 2 * experts + 2;
  const RowChunks parts(tokens);
  const bool sigmoids = a.options.sigmoid(), losses = bool(a.aux);
  check_forced(a.forced, experts);
  double* sums = losses ? ctx.scratch_of<double>((parts.count + 1) * width) : nullptr;
  parallel(ctx, parts.count, [&](int64_t part) {
    RouteRow row;
    alignas(64) float q[kRouteExperts];
    int order[kRouteExperts];
    const Sums own = {losses ? sums + part * width : nullptr, experts};
    if (losses) std::fill_n(own.at, width, 0.0);
    for (int64_t t = parts.begin(part); t < parts.end(part); ++t) {
      kernels.load(element_at(a.logits, t, 0), row, experts, sigmoids, a.options.normalize);
      if (a.forced.cols == 0 || !take_forced(a.forced, t, k, order))
        choose_experts(row, a.bias.as<float>(), int(experts), int(k), a.options, order);
      rescore(row, a.options, k, [&](int64_t i) { return order[i]; });
      double by = sigmoids ? double(kRouteTiny) : 0.0;
      for (int64_t i = 0; i < k; ++i) by += double(row.r[order[i]]);
      const float divisor = a.options.normalize ? float(by) : 1.0f;
      for (int64_t i = 0; i < k; ++i) {
        set_id(a.ids, t, i, order[i]);
        set_value(a.weights, t, i, scalar::route_weight(row.r[order[i]], divisor, a.options.scale));
      }
      const float v = token_weight(a.token_weights, t);
      if (!losses || v == 0.0f) continue;
      table.distribution(row, q, experts, sigmoids);
      for (int64_t i = 0; i < k; ++i) own.count(order[i]) += double(v);
      for (int64_t e = 0; e < experts; ++e) own.q(e) += double(v) * double(q[e]);
      const double lse = double(row.top) + std::log(double(row.sum));
      own.tokens() += double(v), own.z() += double(v) * lse * lse;
    }
  });
  if (!losses) return;
  const Sums all = {sums + parts.count * width, experts};
  std::fill_n(all.at, width, 0.0);
  for (int64_t part = 0; part < parts.count; ++part)
    for (int64_t i = 0; i < width; ++i) all.at[i] += sums[part * width + i];
  finish(a, all);
}

void route_bwd(Context& ctx, const RouteBwd& a) {
  const RouteTable& table = TIGON_SELECT(route_table);
  const RouteKernels& kernels = table.rows[a.logits.dtype];
  const int64_t experts = a.logits.cols, k = a.ids.cols;
  const bool sigmoids = a.options.sigmoid(), given = a.dweights.data != nullptr;
  const bool inside = a.options.normalize || !sigmoids, outside = !a.options.normalize && !sigmoids;
  const float daux = a.daux ? a.daux.as<float>()[0] : 0.0f, dz = a.dz ? a.dz.as<float>()[0] : 0.0f;
  for_each_row(ctx, a.logits.rows, [&](int64_t t) {
    RouteRow row;
    alignas(64) float h[kRouteExperts], q[kRouteExperts];
    kernels.load(element_at(a.logits, t, 0), row, experts, sigmoids, a.options.normalize);
    if (given) rescore(row, a.options, k, [&](int64_t i) { return id_at(a.ids, t, i); });
    double by = sigmoids ? double(kRouteTiny) : 0.0, dot = 0.0;
    for (int64_t i = 0; i < k && given; ++i) {
      const double r = double(row.r[id_at(a.ids, t, i)]);
      by += r, dot += r * double(value_at(a.dweights, t, i));
    }
    const double divisor = a.options.normalize && given ? by : 1.0, mean = dot / divisor,
                 factor = double(a.options.scale) / divisor;
    std::fill_n(h, experts, outside ? float(-mean * factor) : 0.0f);
    for (int64_t i = 0; i < k && given; ++i)
      h[id_at(a.ids, t, i)] = float((double(value_at(a.dweights, t, i)) - (inside ? mean : 0.0)) * factor);
    const float v = token_weight(a.token_weights, t);
    const bool counts = v != 0.0f;
    RouteGradient g = {.h = given ? h : nullptr,
                       .q = q,
                       .balance = a.balance.as<float>(),
                       .aux = counts ? daux * v : 0.0f,
                       .lse = 0.0f};
    if (g.aux != 0.0f) table.distribution(row, q, experts, sigmoids);
    if (counts && dz != 0.0f)
      g.lse = 2.0f * dz * v * a.balance.as<float>()[experts] * (row.top + std::log(row.sum));
    kernels.gradient(row, g, element_at(a.dlogits, t, 0), experts, sigmoids);
  });
}

}  // namespace tigon::cpu

namespace tigon {

TIGON_OP(route, Route)

}  // namespace tigon
