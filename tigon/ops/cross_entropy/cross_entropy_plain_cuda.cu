// CUDA backend of cross_entropy, rows without options (z is the logit itself; class weights and z-loss are a matter of whole
// rows).
//
// Bytes per element (b = element size): 2b with the gradient, b without. Instructions: about 11 per element with the
// gradient, two of them ex2, against a budget of 28 at the speed of the memory.
//
// Variants
//   held    A row lies in the registers of one block, or of a cluster of 2 to 4 (sm_90 on), 8 packs of 16 bytes a thread, or 20 of fewer
//           threads: all its loads are in flight together. One barrier a row. Clusters stay: a pack of the cluster's next row is
//           asked for as soon as this row's has been stored. So do blocks of more than 512 threads; smaller ones take one row and end:
//           the next block loads while others store.
//   swept   No gradient, longer rows: one sweep, maximum and sum found together, four loads in flight a thread.
// A row may start at any element: the columns before the first whole pack and after the last are one element each of the first
// threads.
#include <algorithm>
#include <type_traits>

#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_packs.cuh"
#include "tigon/base/cuda/row_team.cuh"
#include "tigon/ops/cross_entropy/cross_entropy_rows.cuh"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "cross_entropy";
constexpr int kHeld = 8, kHeldThreads = 1024;  // packs of a thread, threads of a multiprocessor
constexpr int kSweepThreads = 512, kSweepHeld = 4, kSweepBlocks = 3;

template <class T>
using Params = CrossEntropyParams<T>;

// The label of a row: its column, or
enum : int {
  kUnread = -1,
  kIgnored = -2,
  kBad = -3
};  // zeros without reading the row; its lse is wanted; out of range
template <class T>
__device__ __forceinline__ int label_of(const Params<T>& p, int64_t y) {
  if (y == p.ignore_index) return p.lse != nullptr ? kIgnored : kUnread;
  return y < 0 || y >= p.cols ? kBad : int(y);
}

// -inf in every column that is not there. In order, as they stand, where the compiler has registers to spare; else where it likes
// (4096 x 262144 bf16: 88 % of a copy against 84; 8192 x 152064 with 20 packs a thread the other way round, 88 against 90).
template <class T, bool InOrder = true>
__device__ __forceinline__ uint4 fetch_or_nothing(const Part<const T>& part, int k) {
  constexpr uint32_t none = kMinusInf<T>;
  if constexpr (InOrder)
    return load_where(k < part.packs, part.pack(k), none);
  else
    return k < part.packs ? *reinterpret_cast<const uint4*>(part.pack(k))
                          : make_uint4(none, none, none, none);
}

template <class T, int K>
__device__ __forceinline__ float max_of(const uint4 (&q)[K]) {
  uint32_t t = max_words<T>(q[0]);
#pragma unroll
  for (int k = 1; k < K; ++k) t = max_words<T>(t, max_words<T>(q[k]));
  return max_of_word<T>(t);
}

__device__ __forceinline__ float exp_of(float z, float m) { return exp2_approx((z - m) * kLog2e); }

// -inf in element `at` of the packs that a thread holds, one of every `threads`; `at` counts from its block's first pack. Whether it
// holds that one.
template <class T, int K>
__device__ __forceinline__ bool leave_out(uint4 (&q)[K], int at, int threads) {
  constexpr int N = Row<T>::N;
  const int pack = at / N, element = at % N;
  if (at < 0 || pack % threads != int(threadIdx.x)) return false;
  const int word = pack / threads * 4 + element * int(sizeof(T)) / 4;
  // Bytes of the word and, from 4 on, of nothing.
  const uint32_t bytes = sizeof(T) == 4 ? 0x7654u : element % 2 == 0 ? 0x3254u : 0x5410u, none = kMinusInf<T>;
#pragma unroll
  for (int k = 0; k < K; ++k) {  // selections, no indexing: q stays in registers
    q[k].x = __byte_perm(q[k].x, none, word == 4 * k ? bytes : 0x3210u);
    q[k].y = __byte_perm(q[k].y, none, word == 4 * k + 1 ? bytes : 0x3210u);
    q[k].z = __byte_perm(q[k].z, none, word == 4 * k + 2 ? bytes : 0x3210u);
    q[k].w = __byte_perm(q[k].w, none, word == 4 * k + 3 ? bytes : 0x3210u);
  }
  return true;
}

// Sum of e^(z - m) of a pack.
template <class T>
__device__ __forceinline__ float sum_of(const uint4& words, float m) {
  constexpr int N = Row<T>::N;
  float e[N];
  unpack<T>(words, e);
#pragma unroll
  for (int j = 0; j < N; ++j) e[j] = exp_of(e[j], m);
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) e[j] += e[j + step];
  return e[0];
}

// Of a part of a row: the sum leaves out the label's column. That one is kept apart until the end: p - 1 and the logarithm of p
// lose nothing where the label has nearly all the weight.
template <class T>
using Sums = ExpSum<T>;

// The gradient of a row: e * each, at the label's column (lift * e - weight * others) * share.
struct Gradient {
  float m, each, others, weight, lift, share;
  __device__ __forceinline__ float of(float z) const { return exp_of(z, m) * each; }
  __device__ __forceinline__ float of_label(float z) const {
    return fma(lift, exp_of(z, m), -weight * others) * share;
  }
};

// The results of a row, written by one thread, and its gradient. `z`: the label's, in every thread.
template <class T>
__device__ __forceinline__ Gradient finish(const Params<T>& p, int64_t row, int label, Sums<T> a, float z,
                                           float scale, bool writes) {
  Gradient g{a.m, 0.0f, a.s, 1.0f, 0.0f, 0.0f};
  const float s = label >= 0 ? a.s + exp_of(z, a.m) : a.s;
  if (p.class_weight != nullptr && label >= 0) g.weight = __ldg(p.class_weight + label);
  if (writes || p.z_loss != 0.0f) {
    float log_s = logf(s), lse = a.m + log_s;
    if (p.z_loss != 0.0f) g.lift = 2.0f * p.z_loss * lse;
    if (writes) {
      const bool leads = label >= 0 && z == a.m && fabsf(z) < INFINITY;
      const float surprise = leads ? log1pf(a.s) : (a.m - z) + log_s;  // -log p
      float loss = g.weight * surprise;
      if (p.z_loss != 0.0f) loss += p.z_loss * lse * lse;
      bool ignored = label == kIgnored, bad = label == kBad;
      if (p.loss) p.loss[row] = ignored ? 0.0f : bad ? NAN : loss;
      if (p.target_logit) p.target_logit[row] = ignored ? 0.0f : bad ? NAN : z;
      if (p.log_prob) p.log_prob[row] = ignored ? 0.0f : bad ? NAN : -surprise;
      if (p.lse) p.lse[row] = lse;
    }
  }
  g.share = (label == kBad ? NAN : scale) / s;
  g.each = (g.weight + g.lift) * g.share;
  return g;
}
template <class T>
__device__ __forceinline__ void finish_unread(const Params<T>& p, int64_t row) {
  if (p.loss) p.loss[row] = 0.0f;
  if (p.target_logit) p.target_logit[row] = 0.0f;
  if (p.log_prob) p.log_prob[row] = 0.0f;
}

template <class T>
__device__ __forceinline__ uint32_t narrow_two(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 r = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(r);
  } else {
    __nv_bfloat162 r = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(r);
  }
}

// Gradient of a pack without the label's column.
template <class T>
__device__ __forceinline__ uint4 gradient_of(const uint4& words, const Gradient& g) {
  constexpr int N = Row<T>::N;
  float v[N];
  unpack<T>(words, v);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = g.of(v[j]);
  if constexpr (sizeof(T) == 4)
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
  else
    return make_uint4(narrow_two<T>(v[0], v[1]), narrow_two<T>(v[2], v[3]), narrow_two<T>(v[4], v[5]),
                      narrow_two<T>(v[6], v[7]));
}

// Anywhere, or at a boundary of 16 bytes.
template <class T>
__device__ __forceinline__ void store_words(T* to, const uint4& words, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = words;
  } else {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        reinterpret_cast<uint32_t*>(to)[i] = w[i];
      } else {
        reinterpret_cast<uint16_t*>(to)[2 * i] = uint16_t(w[i]);
        reinterpret_cast<uint16_t*>(to)[2 * i + 1] = uint16_t(w[i] >> 16);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void clear(T* x, int n) {
  Part<T> part(x, n);
  for (int k = int(threadIdx.x); k < part.packs; k += int(blockDim.x))
    *reinterpret_cast<uint4*>(part.pack(k)) = make_uint4(0, 0, 0, 0);
  int c = part.edge(n);
  if (c >= 0) x[c] = narrow<T>(0.0f);
}

// Blocks that the registers of a multiprocessor are for.
constexpr int together(int held, int threads) {
  return threads == 0 ? 1 : std::max(1, kHeld * kHeldThreads / (held * threads));
}

// Threads of a block, 0 where they are known at run time only: that costs registers, and some percent.
template <class T, int Held, int Threads, bool Cluster>
__global__ __launch_bounds__(Threads ? Threads : kHeldThreads,
                             together(Held, Threads)) void held_kernel(const __grid_constant__ Params<T> p) {
  constexpr int N = Row<T>::N;
  constexpr bool kInOrder = Threads == 0 || Held > kHeld;
  __shared__ Exchange<Sums<T>> exchange;
  const int tid = int(threadIdx.x), threads = Threads ? Threads : int(blockDim.x);
  const unsigned blocks = Cluster ? cluster_size() : 1, rank = Cluster ? cluster_rank() : 0;
  if constexpr (Cluster) {
    exchange.init();
    cluster_arrive();
    cluster_wait();
  }
  // The block's columns [first, first + n) of every row that it takes.
  const int first = Cluster ? min(int(rank) * p.slice, p.cols) : 0;
  const int n = Cluster ? min(p.slice, p.cols - first) : p.cols;
  const int64_t step = gridDim.x / blocks;
  int64_t r = blockIdx.x / blocks;
  if (r < p.rows) {
    uint4 q[Held];
    float edge, z;  // of the first threads; the label's, of every thread
    auto read_edge = [&](const Part<const T>& part, int label) {
      int c = part.edge(n);
      edge = c >= 0 ? widen(part.x[c]) : -INFINITY;
      z = label >= 0 ? widen(part.x[label - first]) : -INFINITY;
    };
    auto read = [&](const Part<const T>& part, int label) {
#pragma unroll
      for (int k = 0; k < Held; ++k) q[k] = fetch_or_nothing<T, kInOrder>(part, k * threads + tid);
      read_edge(part, label);
    };
    int turn = 0, label = label_of(p, p.target[r]), next = kUnread;
    if (r + step < p.rows) next = label_of(p, p.target[r + step]);
    Part<const T> part(p.logits + r * p.stride + first, n);
    if (label != kUnread) read(part, label);
    for (;;) {
      const bool more = r + step < p.rows, ahead = more && next != kUnread;
      const Part<const T> following(part.x + step * p.stride, n);
      const int64_t later = r + 2 * step < p.rows ? p.target[r + 2 * step] : p.ignore_index;
      T* out = p.dlogits + r * p.dlogits_stride + first;
      if (label == kUnread) {
        if (p.dlogits != nullptr) clear(out, n);
        if (tid == 0 && rank == 0) finish_unread(p, r);
        if (ahead) read(following, next);
      } else {
        const int own = label >= 0 && unsigned(label - first) < unsigned(n) ? label - first : -1;
        const float scale = p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f;  // asked for in time
        const int c = part.edge(n), at = own < part.head ? -1 : own - part.head;
        // z is among the maxima: it has been read before any block may overwrite it.
        const float m = fmaxf(fmaxf(edge, z), max_of<T>(q));
        if (own >= 0 && c == own) edge = -INFINITY;
        const bool holds = leave_out<T>(q, at, threads);
        float s = exp_of(edge, reference(m));
#pragma unroll
        for (int k = 0; k < Held; ++k) s += sum_of<T>(q[k], reference(m));
        const Sums<T> a = merge_row<0, Cluster>(Sums<T>{m, s}, exchange, turn++);
        const Gradient g = finish(p, r, label, a, z, scale, tid == 0 && (label >= 0 ? own >= 0 : rank == 0));
        if (p.dlogits == nullptr || label == kIgnored) {
          if (p.dlogits != nullptr) clear(out, n);
          if (ahead) read(following, next);
        } else {
          if (c >= 0) out[c] = narrow<T>(g.of(edge));
          const bool aligned = reinterpret_cast<uintptr_t>(out + part.head) % 16 == 0;
#pragma unroll
          for (int k = 0; k < Held; ++k) {
            const int i = k * threads + tid;
            if (i < part.packs) store_words(out + part.head + N * i, gradient_of<T>(q[k], g), aligned);
            if (ahead) q[k] = fetch_or_nothing<T, kInOrder>(following, i);
          }
          // The label's column by the thread that has stored its neighbours.
          if (own >= 0 && (c == own || (holds && at / N < part.packs))) out[own] = narrow<T>(g.of_label(z));
          if (ahead) read_edge(following, next);
        }
      }
      if (!more) break;
      r += step, part = following, label = next, next = label_of(p, later);
    }
  }
  if constexpr (Cluster) {  // a block that has ended cannot be written to
    cluster_arrive();
    cluster_wait();
  }
}

template <class T>
__global__ __launch_bounds__(kSweepThreads,
                             kSweepBlocks) void sweep_kernel(const __grid_constant__ Params<T> p) {
  __shared__ Exchange<Sums<T>> exchange;
  const int tid = int(threadIdx.x);
  int turn = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const int label = label_of(p, p.target[r]);
    if (label == kUnread) {
      if (tid == 0) finish_unread(p, r);
      continue;
    }
    const Part<const T> part(p.logits + r * p.stride, p.cols);
    const float z = label >= 0 ? widen(part.x[label]) : -INFINITY;
    const int c = part.edge(p.cols), at = label < part.head ? -1 : label - part.head;
    float edge = c >= 0 ? widen(part.x[c]) : -INFINITY;
    float m = fmaxf(edge, z);
    if (c >= 0 && c == label) edge = -INFINITY;
    float s = exp_of(edge, reference(m));
    for (int base = 0; base < part.packs; base += kSweepThreads * kSweepHeld) {
      uint4 q[kSweepHeld];
#pragma unroll
      for (int k = 0; k < kSweepHeld; ++k) q[k] = fetch_or_nothing<T>(part, base + k * kSweepThreads + tid);
      leave_out<T>(q, at < 0 ? -1 : at - base * Row<T>::N, kSweepThreads);
      float top = max_of<T>(q);
      if (top > m) {
        s *= exp_of(m, top);
        m = top;
      }
      const float from = reference(m);
#pragma unroll
      for (int k = 0; k < kSweepHeld; ++k) s += sum_of<T>(q[k], from);
    }
    const Sums<T> a = merge_row<0, false>(Sums<T>{m, s}, exchange, turn++);
    if (tid == 0) finish(p, r, label, a, z, 1.0f, true);
  }
}

// Shared memory for the blocks that are to run together and no more: the rest is the first-level cache, where loads in
// flight need room.
template <class Kernel>
void prefer_cache(Kernel kernel, int blocks, int shared) {
  constexpr int kSystem = 1024;  // of every block
  int percent = int(ceil_div(100 * int64_t(blocks) * (kSystem + shared), device_facts().shared_per_block));
  TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             std::min(percent, 100)));
}

// A row by `blocks` blocks of Threads threads, Held packs each; Threads 0: of as many as hold it. False when they do not, when a
// tenth of them would have nothing to do, or the device has no room for them.
template <class T, int Held, int Threads, bool Cluster>
bool launch_held(Context& ctx, Params<T> p, int blocks) {
  constexpr int kMost = Threads ? Threads : kHeldThreads;
  static ClusterRoom clusters;
  static OncePerDevice prepared;
  auto kernel = &held_kernel<T, Held, Threads, Cluster>;
  p.slice = int(ceil_div(ceil_div(p.cols, blocks), 64) * 64);
  const int64_t packs = ceil_div(std::min(p.slice, p.cols), Row<T>::N);
  const int needed = int(ceil_div(packs, Held * 32) * 32), threads = Threads ? Threads : needed;
  if (needed > kMost || 10 * needed < 9 * Threads) return false;
  prepared.run(kOp, [&] {
    prefer_cache(kernel, Threads ? together(Held, Threads) : 2, int(sizeof(Exchange<Sums<T>>)));
  });
  // Single blocks do not stay, unless one fills a multiprocessor: the next could not load meanwhile.
  int64_t room = threads > kHeldThreads / 2 ? device_facts().sms : INT32_MAX;
  if (Cluster) room = clusters.of(kOp, kernel, blocks, threads);
  if (room == 0) return false;
  launch(kOp, ctx, kernel, {.blocks = std::min(p.rows, room) * blocks, .threads = threads, .cluster = blocks},
         p);
  return true;
}

template <class T>
void launch_sweep(Context& ctx, const Params<T>& p) {
  static OncePerDevice prepared;
  prepared.run(kOp, [] { prefer_cache(&sweep_kernel<T>, kSweepBlocks, int(sizeof(Exchange<Sums<T>>))); });
  int64_t blocks = std::min<int64_t>(p.rows, int64_t(device_facts().sms) * kSweepBlocks);
  launch(kOp, ctx, sweep_kernel<T>, {.blocks = blocks, .threads = kSweepThreads}, p);
}

}  // namespace

template <class T>
bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<T>& p) {
  if (p.rows == 0) return true;
  const int64_t packs = ceil_div(p.cols, 16 / int64_t(sizeof(T)));
  auto fits = [&](int threads) { return packs <= int64_t(kHeld) * threads; };
  if (p.dlogits == nullptr && !fits(256)) {
    launch_sweep(ctx, p);
    return true;
  }
  if (launch_held<T, kHeld, 128, false>(ctx, p, 1) || launch_held<T, kHeld, 256, false>(ctx, p, 1) ||
      launch_held<T, kHeld, 512, false>(ctx, p, 1) || launch_held<T, kHeld, 1024, false>(ctx, p, 1) ||
      launch_held<T, kHeld, 0, false>(ctx, p, 1))
    return true;
  if (device_facts().capability < 90) return false;
  // Pairs of blocks leave no multiprocessor without work, larger clusters do.
  return launch_held<T, kHeld, 1024, true>(ctx, p, 2) || launch_held<T, kHeld, 0, true>(ctx, p, 2) ||
         launch_held<T, 20, 480, true>(ctx, p, 2) || launch_held<T, kHeld, 0, true>(ctx, p, 3) ||
         launch_held<T, kHeld, 1024, true>(ctx, p, 4) || launch_held<T, kHeld, 0, true>(ctx, p, 4);
}

template bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<float>& p);
template bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<__nv_bfloat16>& p);
template bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<__half>& p);

}  // namespace tigon::cuda
