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
constexpr int kHeld = 4;  // heads whose packs a thread has in flight: 128 bytes, 64 KB a multiprocessor

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

// Where the packs of one token and column lie: the heads of q, then those of k, as one list.
template <class X, class Y>
struct Column {
  const X *q_x, *k_x;
  Y *q_y, *k_y;

  template <class P>
  __device__ __forceinline__ Column(const P& p, int64_t b, int64_t t, int column)
      : q_x(p.q.x + b * p.q.x_batch + t * p.q.x_token + column),
        k_x(p.k.x + b * p.k.x_batch + t * p.k.x_token + column),
        q_y(p.q.y + b * p.q.y_batch + t * p.q.y_token + column),
        k_y(p.k.y + b * p.k.y_batch + t * p.k.y_token + column) {}
  template <class P>
  __device__ __forceinline__ const X* x(const P& p, int head) const {
    int k = head - p.q.heads;
    return k < 0 ? q_x + head * p.q.x_head : k_x + k * p.k.x_head;
  }
  template <class P>
  __device__ __forceinline__ Y* y(const P& p, int head) const {
    int k = head - p.q.heads;
    return k < 0 ? q_y + head * p.q.y_head : k_y + k * p.k.y_head;
  }
};

// Heads head, head + groups, ... of one token: a pack of N columns of the first half and its partner. The table is loaded
// behind the first heads.
template <int N, bool Backward, class X, class C, class Y>
__device__ __forceinline__ void rotate(const Params<X, C, Y>& p, const Column<X, Y>& at, const C* cos,
                                       const C* sin, int head) {
  const int heads = p.q.heads + p.k.heads;
  Pack<X, N> x1[kHeld], x2[kHeld];
  auto fetch = [&] {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      int h = head + i * p.groups;
      if (h >= heads) continue;
      const X* x = at.x(p, h);
      x1[i] = load_stream<X, N>(x);
      x2[i] = load_stream<X, N>(x + p.half);
    }
  };
  if (head >= heads) return;
  fetch();
  const Table<N, Backward, C> table(cos, sin, p.half);
  for (;;) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      int h = head + i * p.groups;
      if (h >= heads) continue;
      float y1[N], y2[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        y1[n] = table.first(x1[i][n], x2[i][n], n);
        y2[n] = table.second(x1[i][n], x2[i][n], n);
      }
      Pack<Y, N> out;
      Y* y = at.y(p, h);
      out.set(y1);
      store(y, out);
      out.set(y2);
      store(y + p.half, out);
    }
    head += kHeld * p.groups;
    if (head >= heads) break;
    fetch();
  }
}

// The same for columns that are not rotated.
template <int N, class X, class C, class Y>
__device__ __forceinline__ void copy(const Params<X, C, Y>& p, const Column<X, Y>& at, int head) {
  for (; head < p.q.heads + p.k.heads; head += p.groups) {
    Pack<X, N> x = load_stream<X, N>(at.x(p, head));
    Pack<Y, N> y;
    if constexpr (std::is_same_v<X, Y>) {
      y = x;
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) y.set(n, x[n]);
    }
    store(at.y(p, head), y);
  }
}

// A thread owns a token, a column pack and every groups-th head of q and k.
template <int N, bool Backward, class X, class C, class Y>
__global__ void __launch_bounds__(kThreads, 2) rope_kernel(const __grid_constant__ Params<X, C, Y> p) {
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
  for (int j = lane; j < lanes; j += kThreads) {
    int column = (j < turned ? j : j + turned) * N;
    Column<X, Y> at(p, b, t, column);
    if (j < turned)
      rotate<N, Backward>(p, at, p.cos + b * p.cos_batch + t * p.cos_token + column,
                          p.sin + b * p.sin_batch + t * p.sin_token + column, group);
    else
      copy<N>(p, at, group);
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
  // One turn a thread: many short blocks keep more bytes in flight than a loop over heads.
  int64_t heads = a.q.heads + a.k.heads, lanes = p.cols / N - p.half / N, rows = p.batch * p.tokens;
  p.groups = int(ceil_div(heads, kHeld));
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
