// The CUDA backend of embedding moves 2b bytes per element forward (b = element size), and backward b per
// element of dy and b per element of dweight. The arithmetic is negligible. Also, every CTA of the sort reads
// the ids, from L2. The backward has three kernels:
//   sort    sorts positions by id. Every CTA owns some of the ids: it scans all tokens, counts those of its
//           ids by warp and those of earlier CTAs, whose number is the offset of its own, zeroes the rows of
//           its unused ids, and writes its tokens in order. CTAs do not wait for each other. Ids are
//           interleaved over CTAs, since frequent ids are neighbours. An id that gets no gradient
//           (padding_idx, or out of range) sorts last.
//   sum     takes fixed windows of the sorted order, so that many CTAs share a frequent id. A window adds its
//           rows of dy in order and writes the sums of ids that begin and end in it, and partial sums of the
//           others.
//   join    adds the partial sums of an id that has several windows, in order, in the window where it begins.
#include <bit>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/reduce.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/embedding/embedding.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/embedding/embedding_math.inc"

struct Ids {
  const void* data;
  bool wide;
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : int64_t(static_cast<const int32_t*>(data)[i]);
  }
};
Ids ids_of(const Vector& v) { return {v.data, v.dtype == DType::i64}; }

// ---------------------------------------------------------------- forward

constexpr int kGatherThreads = 128, kGatherVecs = 4;

// Treats the vectors of all rows as one sequence. All loads of a thread are in flight together.
template <class T, int N>
__global__ __launch_bounds__(kGatherThreads) void gather_kernel(Ids ids, const T* weight,
                                                                int64_t weight_stride, T* y, int64_t y_stride,
                                                                int64_t vecs, int row_vecs, int vocabulary,
                                                                float scale) {
  const int64_t first = int64_t(blockIdx.x) * kGatherThreads * kGatherVecs + threadIdx.x;
  Vec<T, N> loaded[kGatherVecs];
  int64_t token[kGatherVecs];
  bool known[kGatherVecs];
  int column[kGatherVecs];
#pragma unroll
  for (int k = 0; k < kGatherVecs; ++k) {
    const int64_t i = first + k * kGatherThreads;
    token[k] = vecs <= INT32_MAX ? int64_t(uint32_t(i) / uint32_t(row_vecs)) : i / row_vecs;
    column[k] = int(i - token[k] * row_vecs) * N;
    known[k] = false;
    if (i >= vecs) continue;
    const int64_t id = ids[token[k]];
    known[k] = id >= 0 && id < vocabulary;
    if (known[k]) loaded[k] = load<T, N>(weight + id * weight_stride + column[k]);
  }
#pragma unroll
  for (int k = 0; k < kGatherVecs; ++k) {
    if (first + k * kGatherThreads >= vecs) continue;
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = known[k] ? embedding_scaled(loaded[k][j], scale) : NAN;
    Vec<T, N> out;
    out.set(v);
    store<T, N>(y + token[k] * y_stride + column[k], out);
  }
}

// ---------------------------------------------------------------- sort

// A thread has kLoadsInFlight tokens in flight.
constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / 32, kLoadsInFlight = 4;

// Gives the sort order of ids: by CTA, each of which owns every 2^blocks-th id, then by id. `range` is the
// number of ids of a CTA, at most 2^range_bits.
struct Order {
  int blocks, range_bits;
  uint32_t range;

  __device__ __forceinline__ uint32_t begin(uint32_t block) const { return block << range_bits; }
  __device__ __forceinline__ uint32_t key(uint32_t id) const {
    return begin(id & ((1u << blocks) - 1)) | id >> blocks;
  }
  __device__ __forceinline__ uint32_t id(uint32_t key) const {
    return (key & ((1u << range_bits) - 1)) << blocks | key >> range_bits;
  }
  // Returns the key of ids without a gradient: the last one of the last CTA.
  __device__ __forceinline__ uint32_t none() const { return begin((1u << blocks) - 1) + range; }
};

struct Sort {
  Ids ids;
  uint32_t count, vocabulary;
  Order order;
  int64_t padding_idx;
  uint32_t* key;
  int32_t* position;
  // Points to the rows of the table's gradient.
  char* rows;  // null: rows of unused ids stay
  int64_t row_bytes;

  __device__ __forceinline__ uint32_t key_at(uint32_t i) const {
    const int64_t id = ids[i];
    return id < 0 || id >= vocabulary || id == padding_idx ? order.none() : order.key(uint32_t(id));
  }
};

// Visits all tokens, warp by warp, 32 adjacent ones at a time, and calls fn(token, key) in all lanes
// together; the key of no token is 0xffffffff. Returns a mask of the iterations (modulo 64) in which fn
// returned true; iterations not in `iterations` are skipped.
template <class Fn>
__device__ __forceinline__ uint64_t walk_tokens(const Sort& p, uint64_t iterations, const Fn& fn) {
  const uint32_t warp = threadIdx.x / 32, share = (p.count + kSortThreads - 1) / kSortThreads;
  const uint32_t first = warp * share * 32 + threadIdx.x % 32;
  uint64_t hits = 0;
  for (uint32_t t = 0; t < share; t += kLoadsInFlight) {
    uint32_t key[kLoadsInFlight];
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k) {
      const uint32_t i = first + (t + k) * 32;
      const bool wanted = t + k < share && i < p.count && (iterations >> (t + k) % 64 & 1);
      key[k] = wanted ? p.key_at(i) : 0xffffffffu;
    }
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k)
      if (fn(first + (t + k) * 32, key[k])) hits |= uint64_t(1) << (t + k) % 64;
  }
  return hits;
}

// Writes zeros to the CTA's rows that no id refers to.
__device__ __forceinline__ void zero_unused_rows(const Sort& p, const bool* used) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = p.order.begin(blockIdx.x);
  const bool vectorized = p.row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(p.rows) % 16 == 0;
  for (uint32_t d = warp; d < p.order.range; d += kSortWarps) {
    const uint32_t id = p.order.id(begin + d);
    if (used[d] || id >= p.vocabulary) continue;
    char* row = p.rows + id * p.row_bytes;
    if (vectorized) {
#pragma unroll 4
      for (int64_t c = lane * 16; c < p.row_bytes; c += 512) *reinterpret_cast<uint4*>(row + c) = uint4{};
    } else {
      for (int64_t c = lane * 2; c < p.row_bytes; c += 64) *reinterpret_cast<uint16_t*>(row + c) = 0;
    }
  }
}

// Count is the type of counters, which hold up to the number of tokens.
template <class Count>
__global__ __launch_bounds__(kSortThreads) void sort_kernel(const __grid_constant__ Sort p) {
  extern __shared__ uint4 shared[];
  __shared__ int warp_sum[kSortWarps], warp_before[kSortWarps];
  const int tid = int(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int pitch = int(p.order.range + 2) & ~1;
  // The indices are [warp][id of the CTA].
  Count* const next = reinterpret_cast<Count*>(shared);
  bool* const used = reinterpret_cast<bool*>(next + kSortWarps * pitch);
  const uint32_t begin = p.order.begin(blockIdx.x);
  const int ids = int(p.order.range) + (blockIdx.x + 1 == gridDim.x);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int i = tid; i < kSortWarps * pitch / int(4 / sizeof(Count)); i += kSortThreads)
    reinterpret_cast<int*>(next)[i] = 0;
  __syncthreads();
  Count* const mine = next + warp * pitch;
  const unsigned lower = (1u << lane) - 1;
  int before = 0;
  const uint64_t iterations = walk_tokens(p, ~uint64_t(0), [&](uint32_t, uint32_t key) {
    const uint32_t d = key - begin;
    const bool own = d < uint32_t(ids);
    before += key < begin;
    if (!__any_sync(kAllLanes, own)) return false;
    const unsigned same = __match_any_sync(kAllLanes, own ? d : 0xffffffffu);
    if (own && (same & lower) == 0) mine[d] += Count(__popc(same));
    __syncwarp();
    return true;
  });
  before = __reduce_add_sync(kAllLanes, before);
  if (lane == 0) warp_before[warp] = before;
  __syncthreads();
  // Thread d computes where the tokens of an id begin after the CTA's first, warp by warp.
  for (int base = 0, through = 0; base < ids; base += kSortThreads) {
    const int d = base + tid;
    int all = 0;
    if (d < ids) {
#pragma unroll 8
      for (int w = 0; w < kSortWarps; ++w) all += next[w * pitch + d];
      used[d] = all > 0;
    }
    // Makes an inclusive prefix sum over ids.
    int sum = prefix_sum_of_lanes(all, lane);
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    const int of_warp = warp_sum[lane];
    sum += through + __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
    through += __reduce_add_sync(kAllLanes, of_warp);
    if (d < ids) {
      int at = sum - all;
#pragma unroll 8
      for (int w = 0; w < kSortWarps; ++w) {
        const int c = next[w * pitch + d];
        next[w * pitch + d] = Count(at);
        at += c;
      }
    }
    __syncthreads();
  }
  if (p.rows != nullptr) zero_unused_rows(p, used);
  const int offset = __reduce_add_sync(kAllLanes, warp_before[lane]);
  walk_tokens(p, iterations, [&](uint32_t i, uint32_t key) {
    const uint32_t d = key - begin;
    const bool own = d < uint32_t(ids);
    if (!__any_sync(kAllLanes, own)) return false;
    const unsigned same = __match_any_sync(kAllLanes, own ? d : 0xffffffffu);
    if (own) {
      const int to = offset + int(mine[d]) + __popc(same & lower);
      p.key[to] = key, p.position[to] = int32_t(i);
    }
    __syncwarp();
    if (own && (same & lower) == 0) mine[d] += Count(__popc(same));
    __syncwarp();
    return true;
  });
}

// ---------------------------------------------------------------- sums

// kPrefetch loads are in flight.
constexpr int kSumThreads = 128, kJoinGroups = 4, kPrefetch = 8;

struct Sorted {
  const uint32_t* key;
  const int32_t* position;
  int count;
  Order order;
};

// Returns the first index in [from, to) whose key is at least `key`. All lanes of a warp pass the same
// arguments.
__device__ __forceinline__ int lower_bound(const uint32_t* keys, int from, int to, uint32_t key) {
  const int lane = int(threadIdx.x) % 32;
  while (from < to) {
    const int step = (to - from + 31) / 32, at = from + lane * step;
    const unsigned below = __ballot_sync(kAllLanes, at < to && keys[at] < key);
    // Lanes 0 to n - 1 are below.
    const int n = __popc(below);
    if (n == 0) return from;
    const int low = from + (n - 1) * step + 1;
    to = min(to, from + n * step), from = low;
  }
  return from;
}

template <class T>
struct Sums {
  Sorted sorted;
  const T* dy;
  T* dweight;
  // The indices are [window][id from an earlier window, id that continues][H].
  float* parts;
  int64_t dy_stride;
  // `window` is the number of tokens of a window.
  int window, windows, cols, slices;
  float scale;
  bool add;
};

template <class T, int N>
__device__ __forceinline__ void write_row(const Sums<T>& p, uint32_t key, int column, const float (&sum)[N]) {
  float v[N];
  T* const to = p.dweight + int64_t(p.sorted.order.id(key)) * p.cols + column;
  Vec<T, N> out;
  if (p.add) out = load<T, N>(to);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = p.add ? out[j] + sum[j] : embedding_scaled(sum[j], p.scale);
  out.set(v);
  store<T, N>(to, out);
}

template <class T, int N>
__global__ __launch_bounds__(kSumThreads) void sum_kernel(const __grid_constant__ Sums<T> p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int window = int(blockIdx.x) / p.slices, slice = int(blockIdx.x) % p.slices;
  const int column = (slice * kSumThreads + int(threadIdx.x)) * N;
  if (column >= p.cols) return;
  const uint32_t *key = p.sorted.key, none = p.sorted.order.none();
  const int from = window * p.window, to = min(from + p.window, p.sorted.count);
  bool begins = from == 0 || key[from - 1] != key[from];
  float sum[N] = {};
  for (int i = from; i < to; i += kPrefetch) {
    Vec<T, N> x[kPrefetch];
    uint32_t id[kPrefetch + 1];
#pragma unroll
    for (int k = 0; k <= kPrefetch; ++k) id[k] = i + k < p.sorted.count ? key[i + k] : none + 1;
#pragma unroll
    for (int k = 0; k < kPrefetch; ++k)
      if (i + k < to && id[k] < none)
        x[k] = load_stream<T, N>(p.dy + int64_t(p.sorted.position[i + k]) * p.dy_stride + column);
#pragma unroll
    for (int k = 0; k < kPrefetch; ++k) {
      if (i + k >= to || id[k] >= none) return;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[k][j];
      const bool ends = id[k + 1] != id[k];
      if (!ends && i + k + 1 < to) continue;
      if (begins && ends) {
        write_row<T, N>(p, id[k], column, sum);
      } else {
        Vec<float, N> part;
        part.set(sum);
        store<float, N>(p.parts + (int64_t(window) * 2 + (begins ? 1 : 0)) * p.cols + column, part);
      }
      begins = true;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = 0.0f;
    }
  }
}

// Adds the parts of an id that continues after its first window: groups of threads add the parts of
// some windows each, then the groups' sums are added.
template <class T, int N>
__global__ __launch_bounds__(kSumThreads* kJoinGroups) void join_kernel(const __grid_constant__ Sums<T> p) {
  __shared__ float sums[kJoinGroups][N][kSumThreads];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int window = int(blockIdx.x) / p.slices, slice = int(blockIdx.x) % p.slices;
  // There is a window after this one.
  const int end = (window + 1) * p.window, begin = end - p.window;
  const uint32_t* key = p.sorted.key;
  const uint32_t id = key[end - 1];
  if (id >= p.sorted.order.none() || key[end] != id) return;
  if (begin > 0 && key[begin - 1] == id) return;
  const int last = (lower_bound(key, end, p.sorted.count, id + 1) - 1) / p.window;
  const int thread = int(threadIdx.x) % kSumThreads, group = int(threadIdx.x) / kSumThreads;
  const int column = (slice * kSumThreads + thread) * N,
            share = (last - window + kJoinGroups - 1) / kJoinGroups;
  const int from = window + 1 + group * share, to = min(from + share, last + 1);
  auto part = [&](int w, int which) {
    return load_stream<float, N>(p.parts + (int64_t(w) * 2 + which) * p.cols + column);
  };
  float sum[N] = {};
  if (column < p.cols) {
    if (group == 0) {
      const Vec<float, N> first = part(window, 1);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = first[j];
    }
    for (int w = from; w < to; w += kPrefetch) {
      Vec<float, N> x[kPrefetch];
#pragma unroll
      for (int k = 0; k < kPrefetch; ++k)
        if (w + k < to) x[k] = part(w + k, 0);
#pragma unroll
      for (int k = 0; k < kPrefetch; ++k)
        if (w + k < to)
#pragma unroll
          for (int j = 0; j < N; ++j) sum[j] += x[k][j];
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sums[group][j][thread] = sum[j];
  __syncthreads();
  if (group > 0 || column >= p.cols) return;
  for (int g = 1; g < kJoinGroups; ++g)
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += sums[g][j][thread];
  write_row<T, N>(p, id, column, sum);
}

// Windows have 64 tokens: more if there are many tokens, fewer if the CTAs would not fill the device.
template <class T, int N>
void launch_sums(Context& ctx, Sums<T> p) {
  constexpr const char* op = "embedding_bwd";
  constexpr int kWindow = 64, kShortest = 16, kMostWindows = 512, kEnoughBlocks = 512;
  p.slices = int(ceil_div(p.cols, kSumThreads * N));
  auto windows = [&](int window) { return ceil_div(p.sorted.count, window); };
  p.window = kWindow;
  while (windows(p.window) > kMostWindows) p.window *= 2;
  while (p.window > kShortest && windows(p.window / 2) * p.slices <= kEnoughBlocks) p.window /= 2;
  p.windows = int(windows(p.window));
  p.parts = ctx.scratch_of<float>(int64_t(p.windows) * 2 * p.cols);
  launch(op, ctx, sum_kernel<T, N>,
         {.blocks = int64_t(p.windows) * p.slices, .threads = kSumThreads, .pdl = true}, p);
  if (p.windows > 1)
    launch(op, ctx, join_kernel<T, N>,
           {.blocks = int64_t(p.windows - 1) * p.slices, .threads = kSumThreads * kJoinGroups, .pdl = true},
           p);
}

// Takes as many CTAs as their counters need to fit in shared memory, at least 128: about one per SM.
template <class Count>
Order sort_into(Context& ctx, Sort p) {
  constexpr const char* op = "embedding_bwd";
  const int max_shared = device_facts().shared_per_block - 1024;
  static OncePerDevice configured;
  configured.run(op, [&] {
    TIGON_CUDA_CHECK(op, cudaFuncSetAttribute(sort_kernel<Count>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              max_shared));
  });
  Order& order = p.order;
  int64_t bytes = 0;
  for (order.blocks = 7;; ++order.blocks) {
    order.range = uint32_t(ceil_div(p.vocabulary, int64_t(1) << order.blocks));
    bytes = (int64_t(order.range) + 2) * (kSortWarps * int64_t(sizeof(Count)) + 1);
    if (bytes <= max_shared) break;
  }
  order.range_bits = int(std::bit_width(order.range - 1));
  launch(
      op, ctx, sort_kernel<Count>,
      {.blocks = int64_t(1) << order.blocks, .threads = kSortThreads, .shared = size_t(bytes), .pdl = true},
      p);
  return order;
}

Sorted sort(Context& ctx, const EmbeddingBwd& a) {
  const Sort p = {.ids = ids_of(a.ids),
                  .count = uint32_t(a.ids.size),
                  .vocabulary = uint32_t(a.dweight.rows),
                  .order = {},
                  .padding_idx = a.padding_idx,
                  .key = ctx.scratch_of<uint32_t>(a.ids.size),
                  .position = ctx.scratch_of<int32_t>(a.ids.size),
                  .rows = a.add ? nullptr : static_cast<char*>(a.dweight.data),
                  .row_bytes = a.dweight.cols * int64_t(size_of(a.dweight.dtype))};
  const Order order = a.ids.size <= UINT16_MAX ? sort_into<uint16_t>(ctx, p) : sort_into<uint32_t>(ctx, p);
  return {p.key, p.position, int(a.ids.size), order};
}

}  // namespace

void embedding_fwd(Context& ctx, const EmbeddingFwd& a) {
  constexpr const char* op = "embedding";
  dispatch_float(op, "weight", a.weight.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int N = 16 / int(sizeof(T));
    auto run = [&]<int Width>() {
      const int row_vecs = int(a.weight.cols / Width);
      const int64_t vecs = a.ids.size * row_vecs;
      launch(op, ctx, gather_kernel<T, Width>,
             {.blocks = ceil_div(vecs, kGatherThreads * kGatherVecs), .threads = kGatherThreads},
             ids_of(a.ids), a.weight.row<T>(0), a.weight.stride, a.y.row<T>(0), a.y.stride, vecs, row_vecs,
             int(a.weight.rows), a.scale);
    };
    const bool vectorized = is_vectorizable(a.weight.data, a.weight.stride, a.weight.cols, sizeof(T)) &&
                            is_vectorizable(a.y.data, a.y.stride, a.y.cols, sizeof(T));
    vectorized ? run.template operator()<N>() : run.template operator()<1>();
  });
}

void embedding_bwd(Context& ctx, const EmbeddingBwd& a) {
  const Sorted sorted = sort(ctx, a);
  dispatch_float("embedding_bwd", "dweight", a.dweight.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int N = 16 / int(sizeof(T));
    const Sums<T> p = {.sorted = sorted,
                       .dy = a.dy.row<T>(0),
                       .dweight = a.dweight.row<T>(0),
                       .parts = nullptr,
                       .dy_stride = a.dy.stride,
                       .window = 0,
                       .windows = 0,
                       .cols = int(a.dweight.cols),
                       .slices = 0,
                       .scale = a.scale,
                       .add = a.add};
    const bool vectorized = is_vectorizable(a.dy.data, a.dy.stride, a.dy.cols, sizeof(T)) &&
                            is_vectorizable(a.dweight.data, a.dweight.cols, a.dweight.cols, sizeof(T));
    vectorized ? launch_sums<T, N>(ctx, p) : launch_sums<T, 1>(ctx, p);
  });
}

}  // namespace tigon::cuda
