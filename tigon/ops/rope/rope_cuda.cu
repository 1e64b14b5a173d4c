#include <algorithm>
#include <type_traits>

#include "tigon/base/cuda/elementwise.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/ops/rope/rope.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/rope/rope_math.inc"

constexpr const char* kOp = "rope";
constexpr int kThreads = 256;
constexpr int kHeld = 2;  // heads whose packs a thread has in flight: 64 bytes, 48 KB a multiprocessor

template <class X, class Y>
struct Heads {
  const X* x;
  Y* y;
  int64_t x_batch, x_head, x_token;
  int64_t y_batch, y_head, y_token;
  int heads;
};

template <class X, class C, class Y>
struct Params {
  Heads<X, Y> q, k;
  const C *cos, *sin;
  int64_t cos_batch, cos_token, sin_batch, sin_token;
  int64_t batch, tokens;
  int half, cols;
  int groups;          // threads that share the heads of one token and column
  bool tokens_inside;  // in memory tokens lie inside heads: neighbouring threads take neighbouring tokens,
                       // else heads
};

// cos and sin of N columns of the first half and of their partners, as the rotation takes them; in registers
// for all heads.
template <int N, bool Backward, class C>
struct Table {
  Pack<C, N> c1, c2, s1, s2;

  __device__ __forceinline__ Table(const C* cos, const C* sin, int half)
      : c1(load<C, N>(cos)), c2(load<C, N>(cos + half)), s1(load<C, N>(sin)), s2(load<C, N>(sin + half)) {}
  __device__ __forceinline__ float first(float x1, float x2, int n) const {
    return rope_first(x1, x2, c1[n], Backward ? -s2[n] : s1[n]);
  }
  __device__ __forceinline__ float second(float x1, float x2, int n) const {
    return rope_second(x1, x2, c2[n], Backward ? -s1[n] : s2[n]);
  }
};

// Heads head, head + groups, ... of one token: a pack of N columns of the first half and its partner.
template <int N, class X, class Y, class Table>
__device__ __forceinline__ void rotate(const Heads<X, Y>& p, int64_t x_at, int64_t y_at, const Table& table,
                                       int half, int head, int groups) {
  const X* x = p.x + x_at + head * p.x_head;
  Y* y = p.y + y_at + head * p.y_head;
  int64_t x_step = groups * p.x_head, y_step = groups * p.y_head;
  for (; head < p.heads; head += kHeld * groups) {
    Pack<X, N> x1[kHeld], x2[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (head + i * groups < p.heads) {
        x1[i] = load_stream<X, N>(x);
        x2[i] = load_stream<X, N>(x + half);
      }
      x += x_step;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (head + i * groups < p.heads) {
        Pack<Y, N> y1, y2;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float a = x1[i][n], b = x2[i][n];
          y1.set(n, table.first(a, b, n));
          y2.set(n, table.second(a, b, n));
        }
        store(y, y1);
        store(y + half, y2);
      }
      y += y_step;
    }
  }
}

// The same for columns that are not rotated.
template <int N, class X, class Y>
__device__ __forceinline__ void copy(const Heads<X, Y>& p, int64_t x_at, int64_t y_at, int head, int groups) {
  for (; head < p.heads; head += groups) {
    Pack<X, N> x = load_stream<X, N>(p.x + x_at + head * p.x_head);
    Pack<Y, N> y;
    if constexpr (std::is_same_v<X, Y>) {
      y = x;
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) y.set(n, x[n]);
    }
    store(p.y + y_at + head * p.y_head, y);
  }
}

// A thread owns a token, a column pack and every groups-th head of q and k.
template <int N, bool Backward, class X, class C, class Y>
__global__ void __launch_bounds__(kThreads, 3) rope_kernel(const __grid_constant__ Params<X, C, Y> p) {
  int turned = p.half / N,
      lanes = p.cols / N - turned;  // columns of the second half come with their partners
  int per_block = lanes < kThreads ? kThreads / lanes : 1, own = lanes < kThreads ? threadIdx.x / lanes : 0;
  int lane = threadIdx.x - own * lanes;
  uint64_t inner = p.tokens_inside ? p.tokens : p.groups, middle = p.tokens_inside ? p.groups : p.tokens;
  uint64_t unit = uint64_t(blockIdx.x) * per_block + own, outer = unit / inner, i = unit - outer * inner;
  uint64_t b = outer / middle, m = outer - b * middle;
  if (own >= per_block || b >= uint64_t(p.batch)) return;
  int64_t t = p.tokens_inside ? i : m;
  int group = p.tokens_inside ? m : i;
  int k_first = group - p.q.heads % p.groups;  // k goes on where q stopped, so that groups stay even
  if (k_first < 0) k_first += p.groups;
  for (int j = lane; j < lanes; j += kThreads) {
    int column = (j < turned ? j : j + turned) * N;
    int64_t q_x = b * p.q.x_batch + t * p.q.x_token + column,
            q_y = b * p.q.y_batch + t * p.q.y_token + column;
    int64_t k_x = b * p.k.x_batch + t * p.k.x_token + column,
            k_y = b * p.k.y_batch + t * p.k.y_token + column;
    if (j < turned) {
      Table<N, Backward, C> table(p.cos + b * p.cos_batch + t * p.cos_token + column,
                                  p.sin + b * p.sin_batch + t * p.sin_token + column, p.half);
      rotate<N>(p.q, q_x, q_y, table, p.half, group, p.groups);
      rotate<N>(p.k, k_x, k_y, table, p.half, k_first, p.groups);
    } else {
      copy<N>(p.q, q_x, q_y, group, p.groups);
      copy<N>(p.k, k_x, k_y, k_first, p.groups);
    }
  }
}

template <class X, class Y>
Heads<X, Y> heads_of(const RopeHeads& x, const RopeHeads& y) {
  return {.x = static_cast<const X*>(x.data),
          .y = static_cast<Y*>(y.data),
          .x_batch = x.batch_stride,
          .x_head = x.head_stride,
          .x_token = x.token_stride,
          .y_batch = y.batch_stride,
          .y_head = y.head_stride,
          .y_token = y.token_stride,
          .heads = int(x.heads)};
}

template <bool Packs, bool Backward, class X, class C, class Y>
void run(Context& ctx, const Rope& a) {
  constexpr int N = Packs ? 16 / std::max(sizeof(X), sizeof(Y)) : 1;
  Params<X, C, Y> p{.q = heads_of<X, Y>(a.q, a.q_out),
                    .k = heads_of<X, Y>(a.k, a.k_out),
                    .cos = static_cast<const C*>(a.cos.data),
                    .sin = static_cast<const C*>(a.sin.data),
                    .cos_batch = a.cos.batch == 1 ? 0 : a.cos.batch_stride,
                    .cos_token = a.cos.token_stride,
                    .sin_batch = a.sin.batch == 1 ? 0 : a.sin.batch_stride,
                    .sin_token = a.sin.token_stride,
                    .batch = a.q.batch,
                    .tokens = a.q.tokens,
                    .half = int(a.cos.cols / 2),
                    .cols = int(a.q.cols),
                    .groups = 1,
                    .tokens_inside = a.q.token_stride < a.q.head_stride};
  // As few groups as fill the device twice: the fewer, the longer a thread keeps its cos and sin.
  int64_t heads = a.q.heads + a.k.heads, lanes = p.cols / N - p.half / N, rows = p.batch * p.tokens;
  int64_t wanted = ceil_div(int64_t(device_facts().sms) * 4096, rows * lanes);
  int64_t per_thread = std::max<int64_t>(1, heads / (wanted * kHeld)) * kHeld;
  p.groups = int(ceil_div(heads, per_thread));
  int64_t per_block = lanes < kThreads ? kThreads / lanes : 1;
  launch(kOp, ctx, rope_kernel<N, Backward, X, C, Y>,
         {.blocks = ceil_div(rows * p.groups, per_block), .threads = kThreads}, p);
}

// The combinations that promotion makes of x and tables, and in the backward undoes.
template <bool Packs>
void run_types(Context& ctx, const Rope& a, bool backward) {
  DType narrow = backward ? a.q_out.dtype : a.q.dtype;
  dispatch_float(kOp, "q", narrow, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    if (a.cos.dtype == narrow)
      return backward ? run<Packs, true, T, T, T>(ctx, a) : run<Packs, false, T, T, T>(ctx, a);
    if constexpr (!std::is_same_v<T, float>)
      backward ? run<Packs, true, float, float, T>(ctx, a) : run<Packs, false, T, float, float>(ctx, a);
  });
}

bool strides_align(int64_t size, int64_t stride, size_t element) {
  return size <= 1 || stride * int64_t(element) % 16 == 0;
}

bool heads_align(const RopeHeads& x) {
  size_t e = size_of(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && strides_align(x.batch, x.batch_stride, e) &&
         strides_align(x.heads, x.head_stride, e) && strides_align(x.tokens, x.token_stride, e);
}
bool table_aligns(const RopeTable& x) {
  size_t e = size_of(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && strides_align(x.batch, x.batch_stride, e) &&
         strides_align(x.tokens, x.token_stride, e);
}

bool packs_fit(const Rope& a) {
  int64_t n = int64_t(16 / std::max(size_of(a.q.dtype), size_of(a.q_out.dtype)));
  return a.cos.cols / 2 % n == 0 && a.q.cols % n == 0 && heads_align(a.q) && heads_align(a.k) &&
         heads_align(a.q_out) && heads_align(a.k_out) && table_aligns(a.cos) && table_aligns(a.sin);
}

struct Variant {
  const char* name;
  bool (*supports)(const Rope&);
  void (*run)(Context&, const Rope&, bool backward);
};

// The first that supports the call runs.
constexpr Variant kVariants[] = {
    {"16-byte packs", packs_fit, run_types<true>},
    {"single elements", [](const Rope&) { return true; }, run_types<false>},
};

}  // namespace

void rope(Context& ctx, const Rope& a, bool backward) {
  for (const Variant& v : kVariants)
    if (v.supports(a)) return v.run(ctx, a, backward);
}

}  // namespace tigon::cuda
