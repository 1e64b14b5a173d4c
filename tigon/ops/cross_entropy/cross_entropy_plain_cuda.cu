// CUDA backend of cross_entropy, rows without options (z is the logit itself; class weights and z-loss are a matter of whole
// rows).
//
// Bytes per element (b = element size): 2b with the gradient, b without. Instructions: about 11 per element with the
// gradient, two of them ex2, against a budget of 28 at the speed of the memory.
//
// Variants
//   held    A row lies in the registers of one block of up to 512 threads, 8 packs of 16 bytes a thread: all its loads are in flight
//           together. One barrier a row. A block takes one row and ends: the next one loads while others store.
//   staged  Longer rows, by a block that has a multiprocessor to itself, or by a cluster of 2 or 4 (sm_90 on), which stays. A row arrives
//           in shared memory, moves on to registers, 8 packs a thread, and leaves its place to the next row, whose loads are in
//           flight while the sums are found and the gradient is stored. What the registers have no room for waits in shared memory.
//   swept   No gradient, longer rows: one sweep, maximum and sum found together, four loads in flight a thread.
// A row may start at any element: the columns before the first whole pack and after the last are one element each of the first
// threads.
#include <algorithm>
#include <type_traits>

#include "tigon/base/cuda/async_copy.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_packs.cuh"
#include "tigon/base/cuda/row_team.cuh"
#include "tigon/ops/cross_entropy/cross_entropy_rows.cuh"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "cross_entropy";
constexpr int kHeld = 8, kHeldThreads = 1024;  // packs of a thread in registers, threads of a multiprocessor
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

// 16 bytes, or -inf in every column. In order, as they stand, where the compiler has registers to spare; else where it likes.
template <class T, bool InOrder>
__device__ __forceinline__ uint4 fetch_or_nothing(bool there, const T* from) {
  constexpr uint32_t none = kMinusInf<T>;
  if constexpr (InOrder)
    return load_where(there, static_cast<const void*>(from), none);
  else
    return there ? *reinterpret_cast<const uint4*>(from) : make_uint4(none, none, none, none);
}

template <class T, int K>
__device__ __forceinline__ float max_of(const uint4 (&q)[K]) {
  uint32_t t = max_words<T>(q[0]);
#pragma unroll
  for (int k = 1; k < K; ++k) t = max_words<T>(t, max_words<T>(q[k]));
  return max_of_word<T>(t);
}

__device__ __forceinline__ float exp_of(float z, float m) { return exp2_approx((z - m) * kLog2e); }

// A pack with -inf in one element.
template <class T>
__device__ __forceinline__ uint4 without(const uint4& q, int element) {
  const int word = element * int(sizeof(T)) / 4;
  // Bytes of the word and, from 4 on, of nothing.
  const uint32_t bytes = sizeof(T) == 4 ? 0x7654u : element % 2 == 0 ? 0x3254u : 0x5410u, none = kMinusInf<T>;
  return make_uint4(__byte_perm(q.x, none, word == 0 ? bytes : 0x3210u),
                    __byte_perm(q.y, none, word == 1 ? bytes : 0x3210u),
                    __byte_perm(q.z, none, word == 2 ? bytes : 0x3210u),
                    __byte_perm(q.w, none, word == 3 ? bytes : 0x3210u));
}

// Where a column of a row is, if this thread holds it: its level, of packs one of every `threads`, or -1; its place in the pack.
struct Spot {
  int level, element;
  template <class T>
  __device__ __forceinline__ Spot(const Part<T>& part, int column, int threads) {
    const int at = column - part.head, pack = at / Part<T>::N;
    element = at % Part<T>::N;
    level = at >= 0 && pack < part.packs && pack % threads == int(threadIdx.x) ? pack / threads : -1;
  }
};

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
    store_whole(to, reinterpret_cast<const Pack<T, Row<T>::N>&>(words));
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

// Threads of a block of the held variant, 0 where they are known at run time only: that costs registers, and some percent.
constexpr int most_threads(int threads) { return threads ? threads : kHeldThreads / 2; }

template <class T, int Threads>
__global__ __launch_bounds__(most_threads(Threads), kHeldThreads / most_threads(Threads)) void held_kernel(
    const __grid_constant__ Params<T> p, int64_t first_row) {
  constexpr int N = Row<T>::N;
  __shared__ Exchange<Sums<T>> exchange;
  const int tid = int(threadIdx.x), threads = Threads ? Threads : int(blockDim.x);
  const int64_t r = first_row + blockIdx.x;
  T* out = p.dlogits + r * p.dlogits_stride;
  const int label = label_of(p, p.target[r]);
  if (label == kUnread) {
    if (p.dlogits != nullptr) clear(out, p.cols);
    if (tid == 0) finish_unread(p, r);
    return;
  }
  const Part<const T> part(p.logits + r * p.stride, p.cols);
  auto has = [&](int k) { return k * threads + tid < part.packs; };
  uint4 q[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    q[k] = fetch_or_nothing<T, Threads == 0>(has(k), part.pack(k * threads + tid));
  const float scale = p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f;  // asked for in time
  const int c = part.edge(p.cols);
  const Spot own(part, label, threads);
  const float z = label >= 0 ? widen(part.x[label]) : -INFINITY;
  float edge = c >= 0 ? widen(part.x[c]) : -INFINITY;
  // z is among the maxima: it has been read before any thread may overwrite it.
  const float m = fmaxf(fmaxf(edge, z), max_of<T>(q));
  if (c >= 0 && c == label) edge = -INFINITY;
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    if (k == own.level) q[k] = without<T>(q[k], own.element);
  float s = exp_of(edge, reference(m));
#pragma unroll
  for (int k = 0; k < kHeld; ++k) s += sum_of<T>(q[k], reference(m));
  const Sums<T> a = merge_row<0, false>(Sums<T>{m, s}, exchange, 0);
  const Gradient g = finish(p, r, label, a, z, scale, tid == 0);
  if (p.dlogits == nullptr) return;
  if (label == kIgnored) return clear(out, p.cols);
  if (c >= 0) out[c] = narrow<T>(g.of(edge));
  T* to = out + part.head + N * tid;
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
    if (has(k)) store_words(to + k * threads * N, gradient_of<T>(q[k], g), aligned);
  // The label's column by the thread that has stored its neighbours.
  if (label >= 0 && (c == label || own.level >= 0)) out[label] = narrow<T>(g.of_label(z));
}

// The whole packs of a row in levels of one a thread.
template <class T>
struct Levels : Part<T> {
  using Part<T>::Part;
  // This thread's pack.
  __device__ __forceinline__ static int index(int level) { return level * kHeldThreads + int(threadIdx.x); }
  __device__ __forceinline__ bool has(int level) const { return index(level) < this->packs; }
  __device__ __forceinline__ T* at(int level) const { return this->pack(index(level)); }
  // Those that this thread's warp has something of.
  __device__ __forceinline__ int of_warp() const {
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
    return (this->packs - warp * 32 + kHeldThreads - 1) / kHeldThreads;
  }
};

// Levels of a thread: the first kHeld of them in registers, of which the last `Direct` are loaded there, and the others pass through
// shared memory; those beyond stay in shared memory. A thread sees nothing but its own packs: no barrier.
template <class T, int Direct, bool Cluster>
__global__ __launch_bounds__(kHeldThreads, 1) void staged_kernel(const __grid_constant__ Params<T> p) {
  constexpr int N = Row<T>::N, kPassing = kHeld - Direct;
  extern __shared__ uint4 places[];
  __shared__ Exchange<Sums<T>> exchange;
  const int tid = int(threadIdx.x);
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
  uint4 q[kHeld];
  float edge, z;  // of the first threads; the label's, of every thread
  auto place = [&](int level) -> uint4& {
    return places[(level < kPassing ? level : level - Direct) * kHeldThreads + tid];
  };
  auto staying = [&](const Levels<const T>& part, int level) {
    constexpr uint32_t none = kMinusInf<T>;
    return part.has(level) ? place(level) : make_uint4(none, none, none, none);
  };
  // A row is asked for in two steps, which are kPassing + 1 groups of copies whether it is wanted or not.
  auto pass = [&](const Levels<const T>& part, bool wanted, int level) {
    copy_async_where(wanted && part.has(level), shared_address(&place(level)), part.at(level));
    copies_commit();
  };
  auto pass_all = [&](const Levels<const T>& part, bool wanted) {
#pragma unroll
    for (int k = 0; k < kPassing; ++k) pass(part, wanted, k);
  };
  auto load = [&](const Levels<const T>& part, bool wanted, int level) {
    q[level] = load_where(wanted && part.has(level), part.at(level), kMinusInf<T>);
  };
  auto stay = [&](const Levels<const T>& part, bool wanted, int level) {
    copy_async_where(wanted && part.has(level), shared_address(&place(level)), part.at(level));
  };
  auto read_ends = [&](const Levels<const T>& part, bool wanted, int label) {
    const int c = part.edge(n);
    edge = wanted && c >= 0 ? widen(part.x[c]) : -INFINITY;
    z = wanted && label >= 0 ? widen(part.x[label - first]) : -INFINITY;
  };
  auto rest = [&](const Levels<const T>& part, bool wanted, int label) {
#pragma unroll
    for (int k = kPassing; k < kHeld; ++k) load(part, wanted, k);
    const int levels = part.of_warp();
    for (int i = kHeld; i < levels; ++i) stay(part, wanted, i);
    copies_commit();
    read_ends(part, wanted, label);
  };
  if (r < p.rows) {
    int turn = 0, label = label_of(p, p.target[r]), next = kUnread;
    if (r + step < p.rows) next = label_of(p, p.target[r + step]);
    Levels<const T> part(p.logits + r * p.stride + first, n);
    pass_all(part, label != kUnread);
    rest(part, label != kUnread, label);
    for (;;) {
      const bool more = r + step < p.rows, ahead = more && next != kUnread;
      const Levels<const T> following(part.x + step * p.stride, n);
      const int64_t later = r + 2 * step < p.rows ? p.target[r + 2 * step] : p.ignore_index;
      T* out = p.dlogits + r * p.dlogits_stride + first;
      if (label == kUnread) {
        clear(out, n);
        if (tid == 0 && rank == 0) finish_unread(p, r);
        pass_all(following, ahead);
        rest(following, ahead, next);
      } else {
        const int levels = part.of_warp();
        const float scale = p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f;  // asked for in time
        const int own = label >= 0 && unsigned(label - first) < unsigned(n) ? label - first : -1;
        const Spot spot(part, own, kHeldThreads);
        uint32_t top = kMinusInf<T>;
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
          if (k < kPassing) copies_wait<kPassing>();
          if (k < levels) {
            if (k < kPassing) q[k] = staying(part, k);
            if (k == spot.level) q[k] = without<T>(q[k], spot.element);
            top = max_words<T>(top, max_words<T>(q[k]));
          }
          if (k < kPassing) pass(following, ahead, k);
        }
        copies_wait<kPassing>();
#pragma unroll 1
        for (int i = kHeld; i < levels; ++i) {
          if (i == spot.level) place(i) = without<T>(place(i), spot.element);
          top = max_words<T>(top, max_words<T>(staying(part, i)));
        }
        // z is among the maxima: it has been read before any block may overwrite it.
        const float m = fmaxf(fmaxf(edge, z), max_of_word<T>(top));
        const int c = part.edge(n);
        if (own >= 0 && c == own) edge = -INFINITY;
        float s = exp_of(edge, reference(m));
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
          if (k >= levels) break;
          s += sum_of<T>(q[k], reference(m));
        }
#pragma unroll 1
        for (int i = kHeld; i < levels; ++i) s += sum_of<T>(staying(part, i), reference(m));
        const Sums<T> a = merge_row<0, Cluster>(Sums<T>{m, s}, exchange, turn++);
        const Gradient g = finish(p, r, label, a, z, scale, tid == 0 && (label >= 0 ? own >= 0 : rank == 0));
        if (label == kIgnored) {
          clear(out, n);
          rest(following, ahead, next);
        } else {
          if (c >= 0) out[c] = narrow<T>(g.of(edge));
          T* to = out + part.head + N * tid;
          const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
          auto put = [&](int level, const uint4& words) {
            if (part.has(level))
              store_words(to + level * (kHeldThreads * N), gradient_of<T>(words, g), aligned);
          };
#pragma unroll
          for (int k = 0; k < kHeld; ++k) {
            if (k < levels) put(k, q[k]);
            if (k >= kPassing) load(following, ahead, k);
          }
          const int most = max(levels, following.of_warp());
#pragma unroll 1
          for (int i = kHeld; i < most; ++i) {
            put(i, place(i));
            stay(following, ahead, i);
          }
          copies_commit();
          // The label's column by the thread that has stored its neighbours.
          if (own >= 0 && (c == own || spot.level >= 0)) out[own] = narrow<T>(g.of_label(z));
          read_ends(following, ahead, next);
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
    const int c = part.edge(p.cols);
    const Spot own(part, label, kSweepThreads);
    float edge = c >= 0 ? widen(part.x[c]) : -INFINITY;
    float m = fmaxf(edge, z);
    if (c >= 0 && c == label) edge = -INFINITY;
    float s = exp_of(edge, reference(m));
    for (int base = 0; base < part.packs; base += kSweepThreads * kSweepHeld) {
      uint4 q[kSweepHeld];
#pragma unroll
      for (int k = 0; k < kSweepHeld; ++k) {
        const int i = base + k * kSweepThreads + tid;
        q[k] = fetch_or_nothing<T, true>(i < part.packs, part.pack(i));
      }
#pragma unroll
      for (int k = 0; k < kSweepHeld; ++k)
        if (base / kSweepThreads + k == own.level) q[k] = without<T>(q[k], own.element);
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

// A row by a block of Threads threads, Held packs each; Threads 0: of as many as hold it. False when they do not, or when a tenth of
// them would have nothing to do.
template <class T, int Threads>
bool launch_held(Context& ctx, const Params<T>& p) {
  constexpr int kMost = most_threads(Threads);
  static OncePerDevice prepared;
  auto kernel = &held_kernel<T, Threads>;
  const int64_t needed = ceil_div(ceil_div(p.cols, Row<T>::N), kHeld * 32) * 32;
  if (needed > kMost || 10 * needed < 9 * Threads) return false;
  prepared.run(kOp, [&] { prefer_cache(kernel, kHeldThreads / kMost, int(sizeof(Exchange<Sums<T>>))); });
  for (int64_t first = 0; first < p.rows; first += INT32_MAX)
    launch(
        kOp, ctx, kernel,
        {.blocks = std::min<int64_t>(p.rows - first, INT32_MAX), .threads = Threads ? Threads : int(needed)},
        p, first);
  return true;
}

// A row by `blocks` blocks. False when they do not hold it, or the device has no room for them.
template <class T, int Direct, bool Cluster>
bool launch_staged(Context& ctx, Params<T> p, int blocks) {
  static ClusterRoom rooms;
  auto kernel = &staged_kernel<T, Direct, Cluster>;
  p.slice = int(ceil_div(ceil_div(p.cols, blocks), 64) * 64);
  const int64_t levels = ceil_div(std::min(p.slice, p.cols) / Row<T>::N, kHeldThreads);
  const int64_t places = std::min<int64_t>(levels, kHeld - Direct) + std::max<int64_t>(levels - kHeld, 0);
  const size_t shared = size_t(places) * kHeldThreads * 16;
  const int64_t room = rooms.of(kOp, kernel, blocks, kHeldThreads, shared);
  if (room == 0) return false;
  launch(kOp, ctx, kernel,
         {.blocks = std::min(p.rows, room) * blocks,
          .threads = kHeldThreads,
          .shared = shared,
          .cluster = blocks},
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
  if (launch_held<T, 128>(ctx, p) || launch_held<T, 256>(ctx, p) || launch_held<T, 512>(ctx, p) ||
      launch_held<T, 0>(ctx, p))
    return true;
  return launch_staged<T, 0, false>(ctx, p, 1) || launch_staged<T, 0, true>(ctx, p, 2) ||
         launch_staged<T, 3, true>(ctx, p, 2) || launch_staged<T, 0, true>(ctx, p, 4) ||
         launch_staged<T, 3, true>(ctx, p, 4) || launch_staged<T, 3, false>(ctx, p, 1);
}

template bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<float>& p);
template bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<__nv_bfloat16>& p);
template bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<__half>& p);

}  // namespace tigon::cuda
