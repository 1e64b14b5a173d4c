// In the CUDA backend of the router each row has a warp, whose lane l holds experts l, l + 32, ... A warp
// adds what losses need over its rows. A token moves E b + K (weight + id) bytes forward and 2 E b + K
// (weight + id) backward (b = element size of logits). Instructions: K rounds of an argmax over the lanes,
// two warp reductions each. Each direction is one launch; losses take a second one of one CTA, which adds the
// parts of the CTAs in their order.
#include "tigon/base/cuda/block_sum.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/values.cuh"
#include "tigon/ops/route/route.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/route/route_math.inc"

TIGON_FN uint32_t bits_of(float x) { return __float_as_uint(x); }
#include "tigon/base/ordered_key.inc"
#include "tigon/ops/route/route_choice.inc"

constexpr const char* kOp = "route";
constexpr int kThreads = 256, kWarps = kThreads / 32, kMostParts = 256, kFinishThreads = 1024;

// N is the number of places of a lane in a row. Experts past 512 are rare: the loops over them stay loops, in
// a quarter of the code, since the compiler does not know that a CTA has all its threads.
template <int N>
__device__ __forceinline__ int row_places() {
  return N <= 16 ? N : N * int(blockDim.x / kThreads);
}

struct Rows {
  Values values;
  int64_t stride;
  __device__ __forceinline__ float at(int64_t row, int i) const { return values[row * stride + i]; }
  __device__ __forceinline__ void set(int64_t row, int i, float x) const { values.set(row * stride + i, x); }
};
Rows rows_of(const Matrix& m) { return {{m.data, m.dtype}, m.stride}; }

struct Ids {
  void* data;
  int64_t stride;
  bool wide;
  __device__ __forceinline__ int at(int64_t row, int k) const {
    const int64_t i = row * stride + k;
    return wide ? int(static_cast<const int64_t*>(data)[i]) : static_cast<const int32_t*>(data)[i];
  }
  __device__ __forceinline__ void set(int64_t row, int k, int id) const {
    const int64_t i = row * stride + k;
    if (wide)
      static_cast<int64_t*>(data)[i] = id;
    else
      static_cast<int32_t*>(data)[i] = id;
  }
};
Ids ids_of(const Matrix& m) { return {m.data, m.stride, m.dtype == DType::i64}; }

// Reads a forced id: -1 if it is negative, kRouteExperts if it is too large.
__device__ __forceinline__ int forced_at(const Ids& ids, int64_t row, int k) {
  const int64_t i = row * ids.stride + k;
  const int64_t id =
      ids.wide ? static_cast<const int64_t*>(ids.data)[i] : int64_t(static_cast<const int32_t*>(ids.data)[i]);
  return id < 0 ? -1 : int(id < kRouteExperts ? id : kRouteExperts);
}

struct Options {
  bool sigmoids, normalize, two;
  int groups, top_groups;
  float scale;
};
Options options_of(const RouteOptions& options) {
  return {.sigmoids = options.sigmoid(),
          .normalize = options.normalize,
          .two = options.two(),
          .groups = int(options.num_groups),
          .top_groups = int(options.top_groups),
          .scale = options.scale};
}

template <int N>
__device__ __forceinline__ float sum_row(const float (&x)[N]) {
  float own[N];
#pragma unroll
  for (int j = 0; j < row_places<N>(); ++j) own[j] = x[j];
  return reduce_lanes<Sum, 32>(reduce_registers<Sum>(own));
}

// Holds a row of logits z: e = exp(z - top) and its sum; r holds the scores (route_math.inc), and `scores`
// their sum. Places past the row hold zeros.
template <int N>
struct Row {
  float z[N], e[N], r[N];
  float top, sum, scores;

  __device__ __forceinline__ void load(const Rows& logits, int64_t row, int experts, const Options& options) {
    const int lane = int(threadIdx.x) % 32;
    float most[N];
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j) {
      z[j] = j * 32 + lane < experts ? logits.at(row, j * 32 + lane) : -INFINITY;
      most[j] = z[j];
    }
    top = reduce_lanes<Max, 32>(reduce_registers<Max>(most));
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j) e[j] = j * 32 + lane < experts ? exp(z[j] - top) : 0.0f;
    sum = sum_row(e);
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j)
      r[j] =
          j * 32 + lane < experts ? route_score(z[j], e[j], sum, options.sigmoids, options.normalize) : 0.0f;
    scores = options.sigmoids ? sum_row(r) : sum;
  }
  // Computes r again if the chosen logits are too far below the others (route_math.inc). chosen(j) is true if
  // j is one of them.
  template <class Fn>
  __device__ __forceinline__ void rescore(const Options& options, const Fn& chosen) {
    if (options.sigmoids || !options.normalize) return;
    float most[N];
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j) most[j] = chosen(j) ? z[j] : -INFINITY;
    const float best = reduce_lanes<Max, 32>(reduce_registers<Max>(most));
    if (!route_is_far(best, top) || best == -INFINITY || !(sum > 0.0f)) return;
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j)
      if (chosen(j)) r[j] = exp(z[j] - best);
  }
  // Returns the distribution that aux balances.
  __device__ __forceinline__ float q(int j, bool sigmoids) const {
    return sigmoids ? r[j] / (scores + kRouteTiny) : e[j] / sum;
  }
  __device__ __forceinline__ float lse() const { return top + log(sum); }
};

// Takes the `count` largest keys of a warp, equal ones by index: calls picked(i, index) in all lanes. Taken
// keys become 0.
template <int N, class Fn>
__device__ __forceinline__ void choose(uint32_t (&keys)[N], int count, const Fn& picked) {
  const int lane = int(threadIdx.x) % 32;
  for (int i = 0; i < count; ++i) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j)
      if (keys[j] > best) best = keys[j], at = j;
    const uint32_t top = __reduce_max_sync(kAllLanes, best);
    const int index = int(__reduce_min_sync(kAllLanes, best == top ? unsigned(at * 32 + lane) : ~0u));
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j)
      if (index == j * 32 + lane) keys[j] = 0;
    picked(i, index);
  }
}

struct RouteForward {
  Rows logits, weights;
  Ids ids, forced;
  const float *bias, *token_weights;
  // [CTA][2 experts + 2]: parts of the sums; null if there are none.
  float* parts;
  int64_t tokens;
  int experts, top_k;
  Options options;
};

// Keeps only the keys of the experts of the best groups. c is a warp's memory, with a float for each expert.
template <int N>
__device__ __forceinline__ void close_groups(const RouteForward& p, const float (&value)[N],
                                             uint32_t (&keys)[N], float* c) {
  const int lane = int(threadIdx.x) % 32, size = p.experts / p.options.groups;
#pragma unroll
  for (int j = 0; j < row_places<N>(); ++j)
    if (j * 32 + lane < p.experts) c[j * 32 + lane] = value[j];
  __syncwarp();
  uint32_t group_keys[N];
#pragma unroll
  for (int j = 0; j < row_places<N>(); ++j) {
    const int group = j * 32 + lane;
    group_keys[j] = group < p.options.groups ? route_group_key(c + group * size, size, p.options.two) : 0u;
  }
  __syncwarp();
  for (int group = lane; group < p.options.groups; group += 32) c[group] = 0.0f;
  __syncwarp();
  choose(group_keys, p.options.top_groups, [&](int, int group) {
    if (lane == 0) c[group] = 1.0f;
  });
  __syncwarp();
#pragma unroll
  for (int j = 0; j < row_places<N>(); ++j) {
    const int expert = j * 32 + lane;
    if (expert < p.experts && c[expert / size] == 0.0f) keys[j] = 0;
  }
  __syncwarp();
}

// Writes the ids of a token's forced experts and finds their places. Returns true if they are its choice.
// `own` is the lane's id among the first 32. `bad` says that some are no experts.
template <int N>
__device__ __forceinline__ bool take_forced(const RouteForward& p, int64_t t, int own, int (&place)[N],
                                            bool& bad) {
  const int lane = int(threadIdx.x) % 32;
  bool taken = true, twice = false;
#pragma unroll
  for (int j = 0; j < row_places<N>(); ++j) place[j] = -1;
  for (int first = 0; first < p.top_k && taken; first += 32) {
    const int count = min(32, p.top_k - first);
    if (first > 0) own = lane < count ? forced_at(p.forced, t, first + lane) : 0;
    if (lane < count) p.ids.set(t, first + lane, own);
    if (first == 0) taken = __shfl_sync(kAllLanes, own, 0) >= 0;
    bad = bad || __any_sync(kAllLanes, own < 0 || own >= p.experts);
    for (int k = 0; k < count; ++k) {
      const int id = __shfl_sync(kAllLanes, own, k);
#pragma unroll
      for (int j = 0; j < row_places<N>(); ++j)
        if (id == j * 32 + lane) {
          twice = twice || place[j] >= 0;
          place[j] = first + k;
        }
    }
  }
  bad = bad && taken;
  return taken && !bad && !__any_sync(kAllLanes, twice);
}

template <int N, bool kLosses>
__global__ __launch_bounds__(kThreads) void forward_kernel(const __grid_constant__ RouteForward p) {
  extern __shared__ float shared[];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float counts[kLosses ? N : 1] = {}, qs[kLosses ? N : 1] = {}, all = 0.0f, squares = 0.0f;
  for (int64_t t = int64_t(blockIdx.x) * kWarps + warp; t < p.tokens; t += int64_t(gridDim.x) * kWarps) {
    Row<N> row;
    const bool given = p.forced.data != nullptr;
    const int first = given && lane < p.top_k ? forced_at(p.forced, t, lane) : 0;
    row.load(p.logits, t, p.experts, p.options);
    int place[N];
    bool bad = false;
    if (!given || !take_forced(p, t, first, place, bad)) {
      float value[N];
      uint32_t keys[N];
      const bool scored = p.bias != nullptr || p.options.two;
#pragma unroll
      for (int j = 0; j < row_places<N>(); ++j) {
        const int expert = j * 32 + lane;
        const bool here = expert < p.experts;
        value[j] = row.z[j];
        if (scored) {
          value[j] = p.options.sigmoids ? row.r[j] : row.e[j] / row.sum;
          if (p.bias != nullptr && here) value[j] += p.bias[expert];
        }
        keys[j] = here ? ordered_key(value[j]) : 0u;
        place[j] = -1;
      }
      if (p.options.groups > 1) close_groups(p, value, keys, shared + warp * p.experts);
      int mine = 0;
      choose(keys, p.top_k, [&](int k, int id) {
#pragma unroll
        for (int j = 0; j < row_places<N>(); ++j)
          if (id == j * 32 + lane) place[j] = k;
        if (k % 32 == lane) mine = id;
        if ((k % 32 == 31 || k == p.top_k - 1) && lane <= k % 32) p.ids.set(t, k / 32 * 32 + lane, mine);
      });
    }
    row.rescore(p.options, [&](int j) { return place[j] >= 0; });
    float by = 1.0f;
    if (p.options.normalize) {
      float chosen[N];
#pragma unroll
      for (int j = 0; j < row_places<N>(); ++j) chosen[j] = place[j] >= 0 ? row.r[j] : 0.0f;
      by = sum_row(chosen) + (p.options.sigmoids ? kRouteTiny : 0.0f);
    }
    if (bad) by = NAN;
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j)
      if (place[j] >= 0) p.weights.set(t, place[j], route_weight(row.r[j], by, p.options.scale));
    if constexpr (kLosses) {
      const float v = p.token_weights == nullptr ? 1.0f : p.token_weights[t];
      if (v == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < row_places<N>(); ++j) {
        counts[j] += place[j] >= 0 ? v : 0.0f;
        qs[j] = fma(v, row.q(j, p.options.sigmoids), qs[j]);
      }
      const float lse = row.lse();
      all += v, squares = fma(v, lse * lse, squares);
    }
  }
  if constexpr (kLosses) {
    // Adds the warps' sums in their order, one warp after the other.
    const int width = 2 * p.experts + 2;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) {
        auto add = [&](int i, float x) { shared[i] = w == 0 ? x : shared[i] + x; };
#pragma unroll
        for (int j = 0; j < row_places<N>(); ++j) {
          const int expert = j * 32 + lane;
          if (expert < p.experts) add(expert, counts[j]), add(p.experts + expert, qs[j]);
        }
        if (lane == 0) add(width - 2, all), add(width - 1, squares);
      }
      __syncthreads();
    }
    for (int i = int(threadIdx.x); i < width; i += kThreads)
      p.parts[int64_t(blockIdx.x) * width + i] = shared[i];
  }
}

__global__ __launch_bounds__(kFinishThreads) void finish_kernel(const float* parts, int count, int experts,
                                                                float* aux, float* z, float* balance) {
  __shared__ double sums[2 * kRouteExperts + 2], groups[kFinishThreads], slots[kFinishThreads / 32];
  const int width = 2 * experts + 2, tid = int(threadIdx.x);
  // Groups of threads take every `of`-th part; their sums are added in order.
  const int of = max(1, kFinishThreads / width), group = tid / width;
  for (int first = 0; first < width; first += kFinishThreads) {
    const int i = of > 1 ? tid % width : first + tid;
    double sum = 0.0;
    if (group < of && i < width) {
#pragma unroll 8
      for (int part = of > 1 ? group : 0; part < count; part += of)
        sum += double(parts[int64_t(part) * width + i]);
    }
    groups[tid] = sum;
    __syncthreads();
    if (i < width && (of == 1 || group == 0)) {
      for (int g = 1; g < of; ++g) sum += groups[g * width + i];
      sums[i] = sum;
    }
    __syncthreads();
  }
  const double all = sums[width - 2], inverse = all != 0.0 ? 1.0 / all : 0.0;
  double dot[1] = {};
  for (int e = tid; e < experts; e += kFinishThreads) {
    dot[0] += sums[e] * inverse * (sums[experts + e] * inverse);
    balance[e] = float(double(experts) * sums[e] * inverse * inverse);
  }
  sum_block<kFinishThreads>(dot, slots);
  if (tid > 0) return;
  balance[experts] = float(inverse);
  *aux = float(double(experts) * dot[0]);
  *z = float(sums[width - 1] * inverse);
}

struct RouteBackward {
  Rows logits, dweights, dlogits;
  Ids ids;
  bool given;  // dweights is given
  const float *daux, *dz, *token_weights, *balance;
  int64_t tokens;
  int experts, top_k;
  Options options;
};

template <int N>
__global__ __launch_bounds__(kThreads) void backward_kernel(const __grid_constant__ RouteBackward p) {
  extern __shared__ int places[];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  int* const place = places + warp * p.experts;
  const int64_t t = int64_t(blockIdx.x) * kWarps + warp;
  if (t >= p.tokens) return;
  Row<N> row;
  row.load(p.logits, t, p.experts, p.options);
  float d[N] = {};
  if (p.given) {
    for (int e = lane; e < p.experts; e += 32) place[e] = -1;
    __syncwarp();
    for (int k = lane; k < p.top_k; k += 32) place[p.ids.at(t, k)] = k;
    __syncwarp();
    row.rescore(p.options, [&](int j) { return j * 32 + lane < p.experts && place[j * 32 + lane] >= 0; });
    // For normalized weights only differences of g count. They are taken against the g of the best expert,
    // which may have all of the weight. Weights of sigmoids sum to 1 - kRouteTiny / by, so that the shift
    // itself has a share.
    const float shift = p.options.normalize ? p.dweights.at(t, 0) : 0.0f;
    float g[N], chosen[N], product[N];
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j) {
      const int expert = j * 32 + lane, k = expert < p.experts ? place[expert] : -1;
      g[j] = k >= 0 ? p.dweights.at(t, k) - shift : 0.0f;
      chosen[j] = k >= 0 ? row.r[j] : 0.0f;
      product[j] = chosen[j] * g[j];
    }
    const float tiny = p.options.sigmoids ? kRouteTiny : 0.0f;
    const float by = p.options.normalize ? sum_row(chosen) + tiny : 1.0f;
    const float mean = sum_row(product) / by - shift * (tiny / by), factor = p.options.scale / by;
    const float inside = p.options.normalize || !p.options.sigmoids ? mean : 0.0f,
                outside = p.options.normalize || p.options.sigmoids ? 0.0f : -mean * factor;
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j) {
      const int expert = j * 32 + lane;
      const bool taken = expert < p.experts && place[expert] >= 0;
      d[j] = route_dz(row.r[j], taken ? (g[j] - inside) * factor : outside, p.options.sigmoids);
    }
  }
  const float v = p.token_weights == nullptr ? 1.0f : p.token_weights[t];
  const float aux = p.daux == nullptr || v == 0.0f ? 0.0f : *p.daux * v;
  if (aux != 0.0f) {
    float a[N], product[N];
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j) {
      const int expert = j * 32 + lane;
      a[j] = expert < p.experts ? p.balance[expert] * aux : 0.0f;
      product[j] = expert < p.experts ? a[j] * row.q(j, p.options.sigmoids) : 0.0f;
    }
    const float dot = sum_row(product);
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j)
      d[j] += route_dz_aux(row.q(j, p.options.sigmoids), row.r[j], a[j], dot, p.options.sigmoids);
  }
  const float dz = p.dz == nullptr || v == 0.0f ? 0.0f : *p.dz;
  if (dz != 0.0f) {
    const float lse = 2.0f * dz * v * p.balance[p.experts] * row.lse();
#pragma unroll
    for (int j = 0; j < row_places<N>(); ++j) d[j] += route_dz_lse(row.e[j], row.sum, lse);
  }
#pragma unroll
  for (int j = 0; j < row_places<N>(); ++j)
    if (j * 32 + lane < p.experts) p.dlogits.set(t, j * 32 + lane, d[j]);
}

// Calls fn<N>() with the fewest experts per lane that hold a row.
template <class Fn>
void by_width(int64_t experts, const Fn& fn) {
  if (experts <= 32) return fn.template operator()<1>();
  if (experts <= 64) return fn.template operator()<2>();
  if (experts <= 128) return fn.template operator()<4>();
  if (experts <= 256) return fn.template operator()<8>();
  if (experts <= 512) return fn.template operator()<16>();
  fn.template operator()<32>();
}

}  // namespace

void route_fwd(Context& ctx, const RouteFwd& a) {
  const int experts = int(a.logits.cols), width = 2 * experts + 2;
  const bool losses = bool(a.aux);
  int64_t blocks = ceil_div(a.logits.rows, kWarps);
  if (losses) blocks = std::min<int64_t>(blocks, kMostParts);
  float* parts = losses ? ctx.scratch_of<float>(blocks * width) : nullptr;
  const RouteForward p = {.logits = rows_of(a.logits),
                          .weights = rows_of(a.weights),
                          .ids = ids_of(a.ids),
                          .forced = a.forced.cols > 0 ? ids_of(a.forced) : Ids{},
                          .bias = a.bias.as<float>(),
                          .token_weights = a.token_weights.as<float>(),
                          .parts = parts,
                          .tokens = a.logits.rows,
                          .experts = experts,
                          .top_k = int(a.ids.cols),
                          .options = options_of(a.options)};
  const size_t group_words = a.options.num_groups > 1 ? size_t(kWarps) * size_t(experts) : 0,
               shared = sizeof(float) * std::max(group_words, losses ? size_t(width) : 0);
  by_width(experts, [&]<int N>() {
    launch(kOp, ctx, losses ? forward_kernel<N, true> : forward_kernel<N, false>,
           {.blocks = blocks, .threads = kThreads, .shared = shared}, p);
  });
  if (losses)
    launch(kOp, ctx, finish_kernel, {.blocks = 1, .threads = kFinishThreads}, parts, int(blocks), experts,
           a.aux.as<float>(), a.z.as<float>(), a.balance.as<float>());
}

void route_bwd(Context& ctx, const RouteBwd& a) {
  const int experts = int(a.logits.cols);
  const bool given = a.dweights.data != nullptr;
  const RouteBackward p = {.logits = rows_of(a.logits),
                           .dweights = rows_of(a.dweights),
                           .dlogits = rows_of(a.dlogits),
                           .ids = ids_of(a.ids),
                           .given = given,
                           .daux = a.daux.as<float>(),
                           .dz = a.dz.as<float>(),
                           .token_weights = a.token_weights.as<float>(),
                           .balance = a.balance.as<float>(),
                           .tokens = a.logits.rows,
                           .experts = experts,
                           .top_k = int(a.ids.cols),
                           .options = options_of(a.options)};
  const size_t shared = given ? sizeof(int) * kWarps * size_t(experts) : 0;
  by_width(experts, [&]<int N>() {
    launch(kOp, ctx, backward_kernel<N>,
           {.blocks = ceil_div(a.logits.rows, kWarps), .threads = kThreads, .shared = shared}, p);
  });
}

}  // namespace tigon::cuda
