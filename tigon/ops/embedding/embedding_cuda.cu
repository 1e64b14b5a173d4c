// CUDA backend of embedding.
//
// Bytes per element (b = element size): forward 2b; backward b per element of dy and b per element of dweight. Two conversions
// and an addition or multiplication each: nowhere near the limit. Besides 8 bytes a token and pass of the sort.
//
// Backward
//   sort    Positions by id: a stable radix sort, least digit first, of 9 bits a pass at most. A block counts the digits of
//           its tile by warp; in a second launch every block knows from all counts where its own begin. An id that gets no
//           gradient (padding_idx, or outside the table) counts as the last of all.
//   sum     Windows of the sorted order, whatever ids lie there, so that a frequent id is as many blocks' work. A window adds
//           its rows of dy in order and writes the sums of ids that begin and end in it; of others the part that it has. Blocks
//           beyond the windows clear the rows that no id names.
//   join    The parts of an id that lies in several windows are added in order by the window where it begins.
#include <bit>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/embedding/embedding.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/embedding/embedding_math.inc"

constexpr unsigned kAllLanes = 0xffffffffu;

struct Ids {
  const void* data;
  bool wide;
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : int64_t(static_cast<const int32_t*>(data)[i]);
  }
};
Ids ids_of(const Vector& v) { return {v.data, v.dtype == DType::i64}; }

// ---------------------------------------------------------------- forward

constexpr int kGatherThreads = 256, kGatherHeld = 4;

// Packs of all rows as one sequence; a thread's loads are in flight together.
template <class T, int N>
__global__ __launch_bounds__(kGatherThreads) void gather_kernel(Ids ids, const T* weight,
                                                                int64_t weight_stride, T* y, int64_t y_stride,
                                                                int64_t packs, int row_packs, int vocabulary,
                                                                float scale) {
  const int64_t first = int64_t(blockIdx.x) * kGatherThreads * kGatherHeld + threadIdx.x;
  Pack<T, N> held[kGatherHeld];
  int64_t token[kGatherHeld];
  bool known[kGatherHeld];
  int column[kGatherHeld];
#pragma unroll
  for (int k = 0; k < kGatherHeld; ++k) {
    const int64_t i = first + k * kGatherThreads;
    token[k] = packs <= INT32_MAX ? int64_t(uint32_t(i) / uint32_t(row_packs)) : i / row_packs;
    column[k] = int(i - token[k] * row_packs) * N;
    known[k] = false;
    if (i >= packs) continue;
    const int64_t id = ids[token[k]];
    known[k] = id >= 0 && id < vocabulary;
    if (known[k]) held[k] = load<T, N>(weight + id * weight_stride + column[k]);
  }
#pragma unroll
  for (int k = 0; k < kGatherHeld; ++k) {
    if (first + k * kGatherThreads >= packs) continue;
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = known[k] ? embedding_scaled(held[k][j], scale) : NAN;
    Pack<T, N> out;
    out.set(v);
    store<T, N>(y + token[k] * y_stride + column[k], out);
  }
}

// ---------------------------------------------------------------- sort

constexpr int kSortThreads = 512, kSortWarps = kSortThreads / 32, kMostTiles = 128, kMaxDigit = 9;
static_assert(1 << kMaxDigit <= kSortThreads);

// What is sorted: ids at first, then keys with their positions.
struct Unsorted {
  Ids ids;              // first pass
  const uint32_t* key;  // later ones
  const int32_t* position;
  int count, vocabulary, tile;  // tile: a block's elements, a multiple of kSortThreads
  int64_t padding_idx;

  __device__ uint32_t key_at(int i) const {
    if (key != nullptr) return key[i];
    const int64_t id = ids[i];
    return id < 0 || id >= vocabulary || id == padding_idx ? uint32_t(vocabulary) : uint32_t(id);
  }
  __device__ int position_at(int i) const { return position != nullptr ? position[i] : i; }
};
struct Digit {
  int shift, bits;
  __device__ int of(uint32_t key) const { return int(key >> shift & ((1u << bits) - 1)); }
};

// The tile of a block, warp by warp, 32 neighbours at a time: fn(element or -1, key, digit, lanes of the same digit), called by
// all lanes together.
template <class Fn>
__device__ __forceinline__ void walk_tile(const Unsorted& from, const Digit& digit, const Fn& fn) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int share = from.tile / kSortWarps;
  for (int k = 0; k < share; k += 32) {
    const int i = int(blockIdx.x) * from.tile + warp * share + k + lane;
    const bool there = i < from.count;
    const uint32_t key = there ? from.key_at(i) : 0;
    const int d = there ? digit.of(key) : -1;
    fn(there ? i : -1, key, d, __match_any_sync(kAllLanes, d));
    __syncwarp();
  }
}

// counts[block][digit].
__global__ __launch_bounds__(kSortThreads) void count_kernel(Unsorted from, Digit digit, int* counts) {
  __shared__ int found[1 << kMaxDigit];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int digits = 1 << digit.bits;
  for (int d = int(threadIdx.x); d < digits; d += kSortThreads) found[d] = 0;
  __syncthreads();
  const unsigned below = (1u << threadIdx.x % 32) - 1;
  walk_tile(from, digit, [&](int, uint32_t, int d, unsigned same) {
    if (d >= 0 && (same & below) == 0) atomicAdd(&found[d], __popc(same));  // integers: any order
  });
  __syncthreads();
  for (int d = int(threadIdx.x); d < digits; d += kSortThreads)
    counts[int64_t(blockIdx.x) * digits + d] = found[d];
}

// Every element to its place: after all smaller digits, after the same digit of earlier blocks, warps and lanes.
__global__ __launch_bounds__(kSortThreads) void place_kernel(Unsorted from, Digit digit, const int* counts,
                                                             uint32_t* key, int32_t* position) {
  __shared__ int next[kSortWarps][1 << kMaxDigit];
  __shared__ int warp_sum[kSortWarps];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int tid = int(threadIdx.x), warp = tid / 32, lane = tid % 32, digits = 1 << digit.bits;
  for (int i = tid; i < kSortWarps * digits; i += kSortThreads) next[i / digits][i % digits] = 0;
  __syncthreads();
  const unsigned below = (1u << lane) - 1;
  walk_tile(from, digit, [&](int, uint32_t, int d, unsigned same) {
    if (d >= 0 && (same & below) == 0) next[warp][d] += __popc(same);
  });
  // Thread d: the elements of its digit in all blocks, and in those before this one.
  int all = 0, before = 0;
  if (tid < digits)
    for (int b = 0; b < int(gridDim.x); ++b) {
      const int c = counts[int64_t(b) * digits + tid];
      if (b < int(blockIdx.x)) before += c;
      all += c;
    }
  int upto = all;  // inclusive prefix sum over digits
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) warp_sum[warp] = upto;
  __syncthreads();
  for (int w = 0; w < warp; ++w) upto += warp_sum[w];
  if (tid < digits) {
    int at = upto - all + before;
    for (int w = 0; w < kSortWarps; ++w) {
      const int c = next[w][tid];
      next[w][tid] = at;
      at += c;
    }
  }
  __syncthreads();
  walk_tile(from, digit, [&](int i, uint32_t k, int d, unsigned same) {
    if (d >= 0) {
      const int to = next[warp][d] + __popc(same & below);
      key[to] = k, position[to] = from.position_at(i);
    }
    __syncwarp();
    if (d >= 0 && (same & below) == 0) next[warp][d] += __popc(same);
  });
}

// ---------------------------------------------------------------- sums

constexpr int kSumThreads = 128, kJoinGroups = 4, kAhead = 8;  // kAhead: loads in flight
constexpr int kClear = 64;                                     // ids of a block that clears

struct Sorted {
  const uint32_t* key;
  const int32_t* position;
  int count, vocabulary;
};

// The first place in [from, to) whose key is at least `key`; all lanes of a warp ask for the same.
__device__ __forceinline__ int first_not_below(const uint32_t* keys, int from, int to, uint32_t key) {
  const int lane = int(threadIdx.x) % 32;
  while (from < to) {
    const int step = (to - from + 31) / 32, at = from + lane * step;
    const unsigned below = __ballot_sync(kAllLanes, at < to && keys[at] < key);
    const int n = __popc(below);  // lanes 0 to n - 1
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
  float* parts;  // [window][of an id from before, of one that goes on][H]
  int64_t dy_stride;
  int window, windows, cols, slices, clear_blocks;
  float scale;
};

// Rows that no id names, kClear ids a block.
template <class T, int N>
__device__ __forceinline__ void clear_rows(const Sums<T>& p, int block) {
  __shared__ int range[2];
  __shared__ bool named[kClear];
  const int tid = int(threadIdx.x), first = block * kClear, last = min(first + kClear, p.sorted.vocabulary);
  const uint32_t* keys = p.sorted.key;
  if (tid / 32 < 2) {
    const int at = first_not_below(keys, 0, p.sorted.count, uint32_t(tid / 32 == 0 ? first : last));
    if (tid % 32 == 0) range[tid / 32] = at;
  }
  __syncthreads();
  if (tid < last - first) {
    const uint32_t key = uint32_t(first + tid);
    int from = range[0], to = range[1];
    while (from < to) {
      const int middle = from + (to - from) / 2;
      if (keys[middle] < key)
        from = middle + 1;
      else
        to = middle;
    }
    named[tid] = from < range[1] && keys[from] == key;
  }
  __syncthreads();
  Pack<T, N> zero = {};
  for (int r = 0; r < last - first; ++r) {
    if (named[r]) continue;
    T* out = p.dweight + int64_t(first + r) * p.cols;
    for (int c = tid * N; c < p.cols; c += kSumThreads * N) store<T, N>(out + c, zero);
  }
}

template <class T, int N>
__device__ __forceinline__ void write_row(const Sums<T>& p, uint32_t id, int column, const float (&sum)[N]) {
  float v[N];
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = embedding_scaled(sum[j], p.scale);
  Pack<T, N> out;
  out.set(v);
  store<T, N>(p.dweight + int64_t(id) * p.cols + column, out);
}

template <class T, int N>
__global__ __launch_bounds__(kSumThreads) void sum_kernel(const __grid_constant__ Sums<T> p) {
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int summing = p.windows * p.slices;
  if (int(blockIdx.x) >= summing) return clear_rows<T, N>(p, int(blockIdx.x) - summing);
  const int window = int(blockIdx.x) / p.slices, slice = int(blockIdx.x) % p.slices;
  const int column = (slice * kSumThreads + int(threadIdx.x)) * N;
  if (column >= p.cols) return;
  const uint32_t *key = p.sorted.key, none = uint32_t(p.sorted.vocabulary);
  const int from = window * p.window, to = min(from + p.window, p.sorted.count);
  bool begins = from == 0 || key[from - 1] != key[from];
  float sum[N] = {};
  for (int i = from; i < to; i += kAhead) {
    Pack<T, N> x[kAhead];
    uint32_t id[kAhead + 1];
#pragma unroll
    for (int k = 0; k <= kAhead; ++k) id[k] = i + k < p.sorted.count ? key[i + k] : none + 1;
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (i + k < to && id[k] < none)
        x[k] = load_stream<T, N>(p.dy + int64_t(p.sorted.position[i + k]) * p.dy_stride + column);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (i + k >= to || id[k] >= none) return;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[k][j];
      const bool ends = id[k + 1] != id[k];
      if (!ends && i + k + 1 < to) continue;
      if (begins && ends) {
        write_row<T, N>(p, id[k], column, sum);
      } else {
        Pack<float, N> part;
        part.set(sum);
        store<float, N>(p.parts + (int64_t(window) * 2 + (begins ? 1 : 0)) * p.cols + column, part);
      }
      begins = true;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = 0.0f;
    }
  }
}

// The id that goes on after a window, by the window where it begins: groups of threads add the parts of some windows each, then
// the groups' sums are added.
template <class T, int N>
__global__ __launch_bounds__(kSumThreads* kJoinGroups) void join_kernel(const __grid_constant__ Sums<T> p) {
  __shared__ float sums[kJoinGroups][N][kSumThreads];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int window = int(blockIdx.x) / p.slices, slice = int(blockIdx.x) % p.slices;
  const int end = (window + 1) * p.window, begin = end - p.window;  // there is a window after this one
  const uint32_t* key = p.sorted.key;
  const uint32_t id = key[end - 1];
  if (id >= uint32_t(p.sorted.vocabulary) || key[end] != id) return;
  if (begin > 0 && key[begin - 1] == id) return;
  const int last = (first_not_below(key, end, p.sorted.count, id + 1) - 1) / p.window;
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
      const Pack<float, N> first = part(window, 1);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = first[j];
    }
    for (int w = from; w < to; w += kAhead) {
      Pack<float, N> x[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        if (w + k < to) x[k] = part(w + k, 0);
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
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

template <class T, int N>
void launch_sums(Context& ctx, Sums<T> p) {
  constexpr const char* op = "embedding_bwd";
  p.slices = int(ceil_div(p.cols, kSumThreads * N));
  launch(op, ctx, sum_kernel<T, N>,
         {.blocks = int64_t(p.windows) * p.slices + p.clear_blocks, .threads = kSumThreads, .early = true},
         p);
  if (p.windows > 1)
    launch(op, ctx, join_kernel<T, N>,
           {.blocks = int64_t(p.windows - 1) * p.slices, .threads = kSumThreads * kJoinGroups, .early = true},
           p);
}

Sorted sort(Context& ctx, const EmbeddingBwd& a) {
  constexpr const char* op = "embedding_bwd";
  const int count = int(a.ids.size), vocabulary = int(a.dweight.rows);
  const int bits = int(std::bit_width(unsigned(vocabulary)));  // `vocabulary` itself is a key
  const int passes = int(ceil_div(bits, kMaxDigit)), width = int(ceil_div(bits, passes));
  const int tile = int(ceil_div(count, kMostTiles * kSortThreads)) * kSortThreads;
  const int64_t blocks = count > 0 ? ceil_div(count, tile) : 0;
  int* counts = ctx.scratch_of<int>(blocks << width);
  uint32_t* keys = ctx.scratch_of<uint32_t>(2 * int64_t(count));
  int32_t* positions = ctx.scratch_of<int32_t>(2 * int64_t(count));
  Unsorted from = {ids_of(a.ids), nullptr, nullptr, count, vocabulary, tile, a.padding_idx};
  Grid grid = {.blocks = blocks, .threads = kSortThreads, .early = true};
  for (int pass = 0; pass < passes && count > 0; ++pass) {
    const Digit digit = {pass * width, width};
    uint32_t* key = keys + int64_t(pass % 2) * count;
    int32_t* position = positions + int64_t(pass % 2) * count;
    launch(op, ctx, count_kernel, grid, from, digit, counts);
    launch(op, ctx, place_kernel, grid, from, digit, counts, key, position);
    from.key = key, from.position = position;
  }
  return {from.key, from.position, count, vocabulary};
}

}  // namespace

void embedding_fwd(Context& ctx, const EmbeddingFwd& a) {
  constexpr const char* op = "embedding";
  dispatch_float(op, "weight", a.weight.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int N = 16 / int(sizeof(T));
    auto run = [&]<int Width>() {
      const int row_packs = int(a.weight.cols / Width);
      const int64_t packs = a.ids.size * row_packs;
      launch(op, ctx, gather_kernel<T, Width>,
             {.blocks = ceil_div(packs, kGatherThreads * kGatherHeld), .threads = kGatherThreads},
             ids_of(a.ids), a.weight.row<T>(0), a.weight.stride, a.y.row<T>(0), a.y.stride, packs, row_packs,
             int(a.weight.rows), a.scale);
    };
    const bool whole = packs_align(a.weight.data, a.weight.stride, a.weight.cols, sizeof(T)) &&
                       packs_align(a.y.data, a.y.stride, a.y.cols, sizeof(T));
    whole ? run.template operator()<N>() : run.template operator()<1>();
  });
}

void embedding_bwd(Context& ctx, const EmbeddingBwd& a) {
  constexpr int kShortest = 32, kMostWindows = 1024;
  const Sorted sorted = sort(ctx, a);
  int window = kShortest;
  while (ceil_div(sorted.count, window) > kMostWindows) window *= 2;
  const int windows = int(ceil_div(sorted.count, window));
  float* parts = ctx.scratch_of<float>(int64_t(windows) * 2 * a.dweight.cols);
  dispatch_float("embedding_bwd", "dweight", a.dweight.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int N = 16 / int(sizeof(T));
    const Sums<T> p = {.sorted = sorted,
                       .dy = a.dy.row<T>(0),
                       .dweight = a.dweight.row<T>(0),
                       .parts = parts,
                       .dy_stride = a.dy.stride,
                       .window = window,
                       .windows = windows,
                       .cols = int(a.dweight.cols),
                       .slices = 0,
                       .clear_blocks = int(ceil_div(a.dweight.rows, kClear)),
                       .scale = a.scale};
    const bool whole = packs_align(a.dy.data, a.dy.stride, a.dy.cols, sizeof(T)) &&
                       packs_align(a.dweight.data, a.dweight.cols, a.dweight.cols, sizeof(T));
    whole ? launch_sums<T, N>(ctx, p) : launch_sums<T, 1>(ctx, p);
  });
}

}  // namespace tigon::cuda
