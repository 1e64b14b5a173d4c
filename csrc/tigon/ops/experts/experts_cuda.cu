// The CUDA backend of what surrounds the GEMMs of a layer of experts. Bytes moved (b = element size, R local
// rows): gather b per element of R x H and of T x H; gate 3b per element of R x I, its backward 6b; combine b
// per element of R x H and b per element of T x H; sum b per element. Route reads the ids twice, in two
// launches:
//   count   Every CTA counts the experts of its share of the slots.
//   place   Every CTA adds the counts of all CTAs and of those before it, which is where its slots of an
//           expert begin, then ranks its slots warp by warp in order.
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/values.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/experts/experts.h"
#include "tigon/ops/experts/experts_rows.cuh"

namespace tigon::cuda {
namespace {

#include "tigon/ops/experts/experts_math.inc"

constexpr const char* kOp = "experts";

Values values_of(const Vector& v) { return {v.data, v.dtype}; }

// Calls fn<T, N>(): N makes a 16-byte vector of T if all matrices allow it, else N is 1.
template <class Fn>
void by_type(const Matrix& first, std::initializer_list<const Matrix*> others, const Fn& fn) {
  bool wide = vectorized(first);
  for (const Matrix* m : others) wide = wide && vectorized(*m);
  dispatch_float(kOp, "rows", first.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    wide ? fn.template operator()<T, 16 / int(sizeof(T))>() : fn.template operator()<T, 1>();
  });
}

// Returns the row and first column of a thread's vector, if all vectors of all rows are one sequence.
__device__ __forceinline__ void split(int64_t i, int row_vecs, int64_t& row, int& vec) {
  row = i <= INT32_MAX ? int64_t(uint32_t(i) / uint32_t(row_vecs)) : i / row_vecs;
  vec = int(i - row * row_vecs);
}

// ---------------------------------------------------------------- route

constexpr int kRouteThreads = 256, kRouteWarps = kRouteThreads / 32, kRouteShare = 2048, kMostShares = 512;

struct Route {
  const void* ids;
  bool wide;
  int slots, share, experts;
  // [CTA][expert]; the last expert counts the slots that are not local.
  int32_t* counts;
  int32_t *order, *place, *offsets;

  __device__ __forceinline__ int bin(int slot) const {
    const int64_t id =
        wide ? static_cast<const int64_t*>(ids)[slot] : int64_t(static_cast<const int32_t*>(ids)[slot]);
    return id < 0 || id >= experts ? experts : int(id);
  }
};

__global__ __launch_bounds__(kRouteThreads) void count_kernel(const Route p) {
  extern __shared__ int shared[];
  for (int e = threadIdx.x; e <= p.experts; e += kRouteThreads) shared[e] = 0;
  __syncthreads();
  const int begin = int(blockIdx.x) * p.share, end = min(begin + p.share, p.slots);
  for (int s = begin + int(threadIdx.x); s < end; s += kRouteThreads) atomicAdd(&shared[p.bin(s)], 1);
  __syncthreads();
  for (int e = threadIdx.x; e <= p.experts; e += kRouteThreads)
    p.counts[int64_t(blockIdx.x) * (p.experts + 1) + e] = shared[e];
}

__global__ __launch_bounds__(kRouteThreads) void place_kernel(const Route p) {
  // [warp][expert]: first the slots of the warp, then where its next slot goes.
  extern __shared__ int shared[];
  __shared__ int warp_sum[kRouteWarps];
  const int tid = int(threadIdx.x), warp = tid / 32, lane = tid % 32, bins = p.experts + 1;
  for (int i = tid; i < kRouteWarps * bins; i += kRouteThreads) shared[i] = 0;
  __syncthreads();
  const int begin = int(blockIdx.x) * p.share, end = min(begin + p.share, p.slots);
  const int warp_share = p.share / kRouteWarps, from = begin + warp * warp_share,
            to = min(from + warp_share, end);
  int* const mine = shared + warp * bins;
  for (int s = from + lane; s < to; s += 32) atomicAdd(&mine[p.bin(s)], 1);
  __syncthreads();
  for (int base = 0, through = 0; base < bins; base += kRouteThreads) {
    const int e = base + tid;
    int all = 0, before = 0;
    if (e < bins) {
#pragma unroll 8
      for (int b = 0; b < int(gridDim.x); ++b) {
        const int c = p.counts[int64_t(b) * bins + e];
        all += c, before += b < int(blockIdx.x) ? c : 0;
      }
    }
    // Makes an exclusive prefix sum over experts.
    const int sum = prefix_sum_of_lanes(all, lane);
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    int earlier = through;
    for (int w = 0; w < kRouteWarps; ++w) {
      if (w < warp) earlier += warp_sum[w];
      through += warp_sum[w];
    }
    int at = earlier + sum - all;
    if (e < bins) {
      if (blockIdx.x == 0) p.offsets[e] = at;
      at += before;
      for (int w = 0; w < kRouteWarps; ++w) {
        const int c = shared[w * bins + e];
        shared[w * bins + e] = at;
        at += c;
      }
    }
    __syncthreads();
  }
  const unsigned lower = (1u << lane) - 1;
  for (int first = from; first < to; first += 32) {
    const int s = first + lane, bin = s < to ? p.bin(s) : -1;
    const unsigned same = __match_any_sync(kAllLanes, bin);
    const int rank = __popc(same & lower);
    if (bin >= 0) {
      const int where = mine[bin] + rank;
      p.order[where] = s;
      p.place[s] = bin < p.experts ? where : -1;
    }
    __syncwarp();
    if (bin >= 0 && rank == 0) mine[bin] += __popc(same);
    __syncwarp();
  }
}

// ---------------------------------------------------------------- gather

constexpr int kThreads = 256;

// A thread reads its vector of a token once, however many rows take it.
template <class T, int N>
__global__ __launch_bounds__(kThreads) void gather_kernel(Rows<const T> x, const int32_t* place, Rows<T> rows,
                                                          int64_t tokens, int row_vecs, int choices) {
  int64_t token;
  int vec;
  split(int64_t(blockIdx.x) * kThreads + threadIdx.x, row_vecs, token, vec);
  if (token >= tokens) return;
  const Vec<T, N> v = load_stream<T, N>(x[token] + vec * N);
  for (int j = 0; j < choices; ++j)
    if (const int row = place[token * choices + j]; row >= 0) store<T, N>(rows[row] + vec * N, v);
}

// ---------------------------------------------------------------- gate

// Holds N points of a row as they are loaded.
template <class T, int N>
struct Points {
  Vec<T, N> a, b;  // b is unused for single columns
};
template <class T, int N>
__device__ __forceinline__ Points<T, N> load_points(const T* row, GateColumns columns, int i, int n) {
  Points<T, N> x;
  const bool interleaved = columns == GateColumns::interleaved;
  x.a = load_stream<T, N>(row + (interleaved ? 2 * i : i));
  x.b = columns == GateColumns::single ? x.a : load_stream<T, N>(row + (interleaved ? 2 * i + N : n + i));
  return x;
}
template <class T, int N>
__device__ __forceinline__ void unpack(const Points<T, N>& x, GateColumns columns, float (&gate)[N],
                                       float (&up)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int g = 2 * k, u = 2 * k + 1;
    const bool interleaved = columns == GateColumns::interleaved;
    gate[k] = !interleaved ? x.a[k] : g < N ? x.a[g % N] : x.b[g % N];
    up[k] = columns == GateColumns::single ? 1.0f : !interleaved ? x.b[k] : u < N ? x.a[u % N] : x.b[u % N];
  }
}

template <class T, int N>
__device__ __forceinline__ void store_points(T* row, GateColumns columns, int i, int n,
                                             const float (&gate)[N], const float (&up)[N]) {
  Vec<T, N> a, b;
  if (columns == GateColumns::interleaved) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int g = 2 * k, u = 2 * k + 1;
      (g < N ? a : b).set(g % N, gate[k]);
      (u < N ? a : b).set(u % N, up[k]);
    }
    store<T, N>(row + 2 * i, a), store<T, N>(row + 2 * i + N, b);
    return;
  }
  a.set(gate);
  store<T, N>(row + i, a);
  if (columns == GateColumns::halves) b.set(up), store<T, N>(row + n + i, b);
}

template <class T, int N>
__device__ __forceinline__ void add_bias(const T* bias, GateColumns columns, int i, int n, float (&gate)[N],
                                         float (&up)[N]) {
  if (bias == nullptr) return;
  float g[N], u[N];
  unpack(load_points<T, N>(bias, columns, i, n), columns, g, u);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    gate[k] += g[k];
    if (columns != GateColumns::single) up[k] += u[k];
  }
}

// Calls fn.operator()<kind>(), where kind is K for vectors. Single elements, which are rare, have one kernel
// for all kinds.
template <GluKind K, int N, class Fn>
__device__ __forceinline__ void with_kind_of(const GluOptions& options, Fn&& fn) {
  if constexpr (N > 1)
    fn.template operator()<K>();
  else
    with_kind(options.kind, fn);
}
// Sigmoids are approximate if the results are stored in 16 bits.
template <GluKind K, class T>
using UnitValue = std::conditional_t<K == GluKind::swiglu || is_clamped(K), ApproxFor<T>, float>;
template <GluKind K, int N>
constexpr GluKind kKernelKind = N > 1 ? K : GluKind::swiglu;

// Each row has a warp: a lane loads some vectors before it uses the first.
constexpr int kRowThreads = 128;

template <GluKind K, class T, int N>
__global__ __launch_bounds__(kRowThreads) void gate_kernel(Rows<const T> gate_up, Rows<const T> bias,
                                                           Offsets offsets, Rows<T> act, int n,
                                                           const ExpertsGate gate) {
  constexpr int kVecs = N > 1 ? 2 : 1, kStep = 32 * N;
  const int row = int(blockIdx.x) * (kRowThreads / 32) + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (row >= offsets.here()) return;
  const T* expert_bias = bias.data == nullptr ? nullptr : bias[offsets.expert_of(row)];
  for (int first = lane * N; first < n; first += kVecs * kStep) {
    Points<T, N> z[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
      if (const int i = first + v * kStep; i < n) z[v] = load_points<T, N>(gate_up[row], gate.columns, i, n);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = first + v * kStep;
      if (i >= n) break;
      float g[N], u[N];
      unpack(z[v], gate.columns, g, u);
      add_bias<T, N>(expert_bias, gate.columns, i, n, g, u);
      with_kind_of<K, N>(gate.unit, [&]<GluKind kKind>() {
#pragma unroll
        for (int k = 0; k < N; ++k) g[k] = glu_y<kKind, UnitValue<kKind, T>>(g[k], u[k], gate.unit);
      });
      Vec<T, N> out;
      out.set(g);
      store<T, N>(act[row] + i, out);
    }
  }
}

template <class T>
struct GateBwd {
  Rows<const T> dact, gate_up, bias, g, down_bias;
  Rows<T> dgate_up, act;
  Values weights, dweights;
  const int32_t* order;
  Offsets offsets;
  int rows, n, hidden;
  ExpertsGate gate;
};

// Each row has a warp here too: the row's sum over its columns is the gradient of the routing weight.
template <GluKind K, class T, int N>
__global__ __launch_bounds__(kRowThreads) void gate_bwd_kernel(const __grid_constant__ GateBwd<T> p) {
  constexpr int kVecs = N > 1 ? 3 : 1, kStep = 32 * N;
  const int row = int(blockIdx.x) * (kRowThreads / 32) + int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  if (row >= p.rows) return;
  const int slot = p.order == nullptr ? row : p.order[row];
  if (row >= p.offsets.here()) {
    if (lane == 0 && p.dweights.data != nullptr) p.dweights.set(slot, 0.0f);
    return;
  }
  const bool biased = p.bias.data != nullptr || p.down_bias.data != nullptr;
  const int expert = biased ? p.offsets.expert_of(row) : 0;
  const T* bias = p.bias.data == nullptr ? nullptr : p.bias[expert];
  const float weight = p.weights[slot];
  float sum = 0.0f;
  for (int first = lane * N; first < p.n; first += kVecs * kStep) {
    Vec<T, N> d[kVecs];
    Points<T, N> z[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = first + v * kStep;
      if (i >= p.n) break;
      d[v] = load_stream<T, N>(p.dact[row] + i);
      z[v] = load_points<T, N>(p.gate_up[row], p.gate.columns, i, p.n);
    }
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int i = first + v * kStep;
      if (i >= p.n) break;
      float g[N], u[N], weighted[N];
      unpack(z[v], p.gate.columns, g, u);
      add_bias<T, N>(bias, p.gate.columns, i, p.n, g, u);
      with_kind_of<K, N>(p.gate.unit, [&]<GluKind kKind>() {
        using V = UnitValue<kKind, T>;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          V act = 0.0f, dg = act, du = act, dw = act;
          experts_point<kKind, V>(d[v][k], weight, g[k], u[k], p.gate.unit, act, dg, du, dw);
          weighted[k] = act, g[k] = dg, u[k] = du, sum += dw;
        }
      });
      if (p.act.data != nullptr) {
        Vec<T, N> out;
        out.set(weighted);
        store<T, N>(p.act[row] + i, out);
      }
      if (p.dgate_up.data != nullptr) store_points<T, N>(p.dgate_up[row], p.gate.columns, i, p.n, g, u);
    }
  }
  if (p.dweights.data == nullptr) return;
  if (p.down_bias.data != nullptr) {
#pragma unroll 4
    for (int i = lane * N; i < p.hidden; i += kStep) {
      const Vec<T, N> g = load_stream<T, N>(p.g[row] + i), b = load<T, N>(p.down_bias[expert] + i);
#pragma unroll
      for (int k = 0; k < N; ++k) sum = fma(g[k], b[k], sum);
    }
  }
  sum = reduce_lanes<Sum, 32>(sum);
  if (lane == 0) p.dweights.set(slot, sum);
}

template <GluKind K>
void gate_fwd(Context& ctx, const ExpertsGateFwd& a) {
  by_type(a.act, {&a.gate_up, &a.bias}, [&]<class T, int N>() {
    const int n = int(a.act.cols);
    launch(kOp, ctx, gate_kernel<kKernelKind<K, N>, T, N>,
           {.blocks = ceil_div(a.act.rows, kRowThreads / 32), .threads = kRowThreads},
           rows_of<const T>(a.gate_up), rows_of<const T>(a.bias), offsets_of(a.offsets), rows_of<T>(a.act), n,
           a.gate);
  });
}

template <GluKind K>
void gate_bwd(Context& ctx, const ExpertsGateBwd& a) {
  const bool summed = bool(a.dweights) && a.down_bias.data != nullptr;
  const Matrix g = summed ? a.g : Matrix{}, down_bias = summed ? a.down_bias : Matrix{};
  by_type(a.dact, {&a.gate_up, &a.bias, &a.dgate_up, &a.act, &g, &down_bias}, [&]<class T, int N>() {
    launch(kOp, ctx, gate_bwd_kernel<kKernelKind<K, N>, T, N>,
           {.blocks = ceil_div(a.dact.rows, kRowThreads / 32), .threads = kRowThreads},
           GateBwd<T>{.dact = rows_of<const T>(a.dact),
                      .gate_up = rows_of<const T>(a.gate_up),
                      .bias = rows_of<const T>(a.bias),
                      .g = rows_of<const T>(g),
                      .down_bias = rows_of<const T>(down_bias),
                      .dgate_up = rows_of<T>(a.dgate_up),
                      .act = rows_of<T>(a.act),
                      .weights = values_of(a.weights),
                      .dweights = values_of(a.dweights),
                      .order = a.order.as<int32_t>(),
                      .offsets = offsets_of(a.offsets),
                      .rows = int(a.dact.rows),
                      .n = int(a.dact.cols),
                      .hidden = int(g.cols),
                      .gate = a.gate});
  });
}

// ---------------------------------------------------------------- combine

template <class T>
struct Combine {
  Rows<const T> rows, bias;
  Rows<T> y;
  const int32_t* place;
  Offsets offsets;
  Values weights;
  int64_t tokens;
  int row_vecs, choices;
  // Local rows stay as they are.
  bool in_place;
};

template <class T, int N>
__global__ __launch_bounds__(kThreads) void combine_kernel(const __grid_constant__ Combine<T> p) {
  int64_t token;
  int vec;
  split(int64_t(blockIdx.x) * kThreads + threadIdx.x, p.row_vecs, token, vec);
  if (token >= p.tokens) return;
  const int here = p.offsets.here();
  if (p.in_place && token < here) return;
  float sum[N] = {};
  for (int j = 0; j < p.choices; ++j) {
    const int64_t slot = token * p.choices + j;
    const int row = p.place != nullptr ? p.place[slot] : slot < here ? int(slot) : -1;
    if (row < 0) continue;
    const Vec<T, N> x = load_stream<T, N>(p.rows[row] + vec * N);
    const float weight = p.weights[slot];
    Vec<T, N> b;
    if (p.bias.data != nullptr) b = load<T, N>(p.bias[p.offsets.expert_of(row)] + vec * N);
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = fma(weight, p.bias.data != nullptr ? x[k] + b[k] : x[k], sum[k]);
  }
  Vec<T, N> out;
  out.set(sum);
  store<T, N>(p.y[token] + vec * N, out);
}

// ---------------------------------------------------------------- sum

// A lane sums N columns of an expert: groups of warps take every kSumGroups-th row, then the groups' sums are
// added in order.
constexpr int kSumGroups = kThreads / 32;

template <class T, int N>
__global__ __launch_bounds__(kThreads) void sum_kernel(Rows<const T> rows, Values weights,
                                                       const int32_t* order, Offsets offsets, Rows<T> sums,
                                                       int cols, int slices) {
  __shared__ float parts[kSumGroups][32][N];
  const int expert = int(blockIdx.x) / slices, group = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32,
            column = (int(blockIdx.x) % slices * 32 + lane) * N;
  float sum[N] = {};
  if (column < cols) {
    const int end = offsets.first[expert + 1];
#pragma unroll 4
    for (int row = offsets.first[expert] + group; row < end; row += kSumGroups) {
      const float weight = weights[order == nullptr ? row : order[row]];
      const Vec<T, N> x = load_stream<T, N>(rows[row] + column);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] = fma(weight, x[k], sum[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) parts[group][lane][k] = sum[k];
  __syncthreads();
  if (group > 0 || column >= cols) return;
  Vec<T, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    for (int g = 1; g < kSumGroups; ++g) sum[k] += parts[g][lane][k];
    out.set(k, sum[k]);
  }
  store<T, N>(sums[expert] + column, out);
}

}  // namespace

void experts_route(Context& ctx, const ExpertsRoute& a) {
  const int slots = int(a.order.size), experts = int(a.offsets.size - 1);
  // Shares are whole rounds of all warps.
  const int least = int(ceil_div(slots, kMostShares)),
            share = std::max(kRouteShare, int(ceil_div(least, kRouteThreads)) * kRouteThreads);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(slots, share));
  const Route p = {.ids = a.ids.data,
                   .wide = a.ids.dtype == DType::i64,
                   .slots = slots,
                   .share = share,
                   .experts = experts,
                   .counts = ctx.scratch_of<int32_t>(blocks * (experts + 1)),
                   .order = a.order.as<int32_t>(),
                   .place = a.place.as<int32_t>(),
                   .offsets = a.offsets.as<int32_t>()};
  const size_t bins = size_t(experts + 1) * sizeof(int);
  launch(kOp, ctx, count_kernel, {.blocks = blocks, .threads = kRouteThreads, .shared = bins}, p);
  launch(kOp, ctx, place_kernel, {.blocks = blocks, .threads = kRouteThreads, .shared = bins * kRouteWarps},
         p);
}

void experts_gather(Context& ctx, const ExpertsGather& a) {
  by_type(a.rows, {&a.x}, [&]<class T, int N>() {
    const int row_vecs = int(a.rows.cols / N);
    launch(kOp, ctx, gather_kernel<T, N>,
           {.blocks = ceil_div(a.x.rows * row_vecs, kThreads), .threads = kThreads}, rows_of<const T>(a.x),
           a.place.as<int32_t>(), rows_of<T>(a.rows), a.x.rows, row_vecs, int(a.rows.rows / a.x.rows));
  });
}

void experts_gate_fwd(Context& ctx, const ExpertsGateFwd& a) {
  dispatch_kind(a.gate.unit.kind, [&]<GluKind K>() { gate_fwd<K>(ctx, a); });
}
void experts_gate_bwd(Context& ctx, const ExpertsGateBwd& a) {
  dispatch_kind(a.gate.unit.kind, [&]<GluKind K>() { gate_bwd<K>(ctx, a); });
}

void experts_combine(Context& ctx, const ExpertsCombine& a) {
  const bool in_place = a.rows.data == a.y.data && !a.weights && a.bias.data == nullptr;
  by_type(a.rows, {&a.y, &a.bias}, [&]<class T, int N>() {
    const int row_vecs = int(a.y.cols / N);
    launch(kOp, ctx, combine_kernel<T, N>,
           {.blocks = ceil_div(a.y.rows * row_vecs, kThreads), .threads = kThreads},
           Combine<T>{.rows = rows_of<const T>(a.rows),
                      .bias = rows_of<const T>(a.bias),
                      .y = rows_of<T>(a.y),
                      .place = a.place.as<int32_t>(),
                      .offsets = offsets_of(a.offsets),
                      .weights = values_of(a.weights),
                      .tokens = a.y.rows,
                      .row_vecs = row_vecs,
                      .choices = int(a.rows.rows / a.y.rows),
                      .in_place = in_place});
  });
}

void experts_sum(Context& ctx, const ExpertsSum& a) {
  by_type(a.rows, {&a.sums}, [&]<class T, int kWide>() {
    constexpr int N = kWide > 1 ? 2 : 1;
    const int slices = int(ceil_div(a.rows.cols, int64_t(32 * N)));
    launch(kOp, ctx, sum_kernel<T, N>, {.blocks = (a.offsets.size - 1) * slices, .threads = kThreads},
           rows_of<const T>(a.rows), values_of(a.weights), a.order.as<int32_t>(), offsets_of(a.offsets),
           rows_of<T>(a.sums), int(a.rows.cols), slices);
  });
}

}  // namespace tigon::cuda
