// CUDA backend of the rotary embedding.
//
// Bytes per element (b = element size): 2b either way; tables come out of L1 and L2, once for kHeld heads of a token.
// Instructions: about 6 per element against a budget of 24 at the speed of the memory (bf16).
#include <algorithm>
#include <type_traits>

#include "tigon/base/dispatch.h"
#include "tigon/ops/rope/rope_cuda.cuh"

namespace tigon::cuda {
namespace {

using namespace rope_kernels;

constexpr const char* kOp = "rope";

template <bool Plain>
struct Params {
  Part q, k;
  Tables<Plain> tables;
  Shape shape;
  Lanes lanes;       // columns_kernel
  int64_t q_blocks;  // then come those of k
};

template <class Y, class X, int N>
__device__ __forceinline__ Pack<Y, N> converted(const Pack<X, N>& x) {
  if constexpr (std::is_same_v<X, Y>) {
    return x;
  } else {
    Pack<Y, N> y;
#pragma unroll
    for (int n = 0; n < N; ++n) y.set(n, x[n]);
    return y;
  }
}

template <class X, class Y>
using Half = std::conditional_t<sizeof(X) == 2, X, Y>;  // the type of tables that are not fp32

// A thread owns a pack of columns in kHeld rows of a token. Where pairs lie in halves, a lane has the partners of its
// columns from another lane of the warp, so that every load and store is of whole rows.
template <bool Halves, bool Plain, class X, class Y>
__global__ void __launch_bounds__(kThreads, Plain && sizeof(X) + sizeof(Y) == 4 ? 8 : 4)
    columns_kernel(const __grid_constant__ Params<Plain> p) {
  constexpr int N = kPack;
  const bool second = blockIdx.x >= p.q_blocks;
  const Part& part = second ? p.k : p.q;
  const uint32_t block = blockIdx.x - uint32_t(second ? p.q_blocks : 0);
  const uint32_t index = block * (kThreads >> p.lanes.log) + (threadIdx.x >> p.lanes.log);
  const bool live = index < part.units;
  const Unit unit(p.shape, part, live ? index : 0u);
  const Place place(p.shape, p.lanes.width);
  wait_for_kernel_ahead();
  const Rows<X, Y> rows(part, unit, place.column, live && place.inside);
  Pack<X, N> x[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (rows.has(i)) x[i] = load_stream<X, N>(rows.x + i * rows.x_step);
  float c[N] = {}, s[N] = {};
  if (live && place.turned) p.tables.template columns<Half<X, Y>, N>(unit.b, unit.t, place.rotated, c, s);
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    Pack<X, N> other;
    if constexpr (Halves) other = exchange(x[i], place.partner);
    float y[N];
#pragma unroll
    for (int n = 0; n < N; ++n) y[n] = rope_second(Halves ? other[n] : x[i][n ^ 1], x[i][n], c[n], s[n]);
    Pack<Y, N> out;
    out.set(y);
    if (!place.turned) out = converted<Y>(x[i]);
    if (rows.has(i)) store(rows.y + i * rows.y_step, out);
  }
}

// N pairs of a row as they lie: their first and second elements, or, where pairs are neighbours, N elements and the next N.
template <class T, int N>
struct Pairs {
  Pack<T, N> a, b;

  __device__ __forceinline__ void load(const T* row, int pair, int half, bool halves) {
    a = load_stream<T, N>(row + (halves ? pair : 2 * pair));
    b = load_stream<T, N>(row + (halves ? half + pair : 2 * pair + N));
  }
  __device__ __forceinline__ void store(T* row, int pair, int half, bool halves) const {
    cuda::store(row + (halves ? pair : 2 * pair), a);
    cuda::store(row + (halves ? half + pair : 2 * pair + N), b);
  }
  __device__ __forceinline__ void open(bool halves, float (&first)[N], float (&second)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Pack<T, N>& both = 2 * n < N ? a : b;
      first[n] = halves || N == 1 ? a[n] : both[2 * n % N];
      second[n] = halves || N == 1 ? b[n] : both[(2 * n + 1) % N];
    }
  }
  __device__ __forceinline__ void close(bool halves, const float (&first)[N], const float (&second)[N]) {
    float one[N], two[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int in_a = n / 2, in_b = N == 1 ? 0 : (N + n) / 2;
      one[n] = halves || N == 1 ? first[n] : n % 2 == 0 ? first[in_a] : second[in_a];
      two[n] = halves || N == 1 ? second[n] : n % 2 == 0 ? first[in_b] : second[in_b];
    }
    a.set(one), b.set(two);
  }
};

// Rows of any length, alignment and pairs: a thread owns N pairs, or N columns that are not rotated, of the rows of a unit.
template <int N, class X, class Y>
__global__ void __launch_bounds__(kThreads)
    pairs_kernel(const __grid_constant__ Params<false> p, bool from_halves, bool to_halves) {
  const bool second = blockIdx.x >= p.q_blocks;
  const Part& part = second ? p.k : p.q;
  const int half = p.tables.half, turned = half / N, lanes = turned + (p.shape.cols - 2 * half) / N;
  const uint64_t thread = uint64_t(blockIdx.x - (second ? p.q_blocks : 0)) * kThreads + threadIdx.x;
  const uint64_t index = thread / lanes;
  wait_for_kernel_ahead();
  let_next_kernel_start();
  if (index >= uint64_t(part.units)) return;
  const Unit unit(p.shape, part, index);
  const int lane = int(thread - index * lanes);
  const X* x = x_of<X>(part, unit, 0);
  Y* y = y_of<Y>(part, unit, 0);
  if (lane >= turned) {
    int column = (lane - turned) * N;
    if (column >= p.shape.start) column += 2 * half;
    for (int head = unit.group; head < part.heads; head += part.groups) {
      store(y + head * part.y_head + column,
            converted<Y>(load_stream<X, N>(x + head * part.x_head + column)));
    }
    return;
  }
  x += p.shape.start, y += p.shape.start;
  Pairs<X, N> in[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (int head = unit.group + i * part.groups; head < part.heads)
      in[i].load(x + head * part.x_head, lane * N, half, from_halves);
  float c1[N], c2[N], s1[N], s2[N];
  p.tables.template pairs<Half<X, Y>, N>(unit.b, unit.t, lane * N, c1, c2, s1, s2);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int head = unit.group + i * part.groups;
    if (head >= part.heads) break;
    float x1[N], x2[N], y1[N], y2[N];
    in[i].open(from_halves, x1, x2);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      y1[n] = rope_first(x1[n], x2[n], c1[n], s1[n]);
      y2[n] = rope_second(x1[n], x2[n], c2[n], s2[n]);
    }
    Pairs<Y, N> out;
    out.close(to_halves, y1, y2);
    out.store(y + head * part.y_head, lane * N, half, to_halves);
  }
}

template <bool Plain>
Params<Plain> params_of(const Rope& a, bool backward, int64_t lanes_of_a_row) {
  Params<Plain> p{.q = Part(a.q, a.q_out, kHeld),
                  .k = Part(a.k, a.k_out, kHeld),
                  .tables = Tables<Plain>(a, backward),
                  .shape = Shape(a, a.q),
                  .lanes = Lanes(int(a.q.cols / kPack)),
                  .q_blocks = 0};
  p.q_blocks = ceil_div(p.q.units * lanes_of_a_row, kThreads);
  return p;
}
template <bool Plain>
Grid grid_of(const Params<Plain>& p, int64_t lanes_of_a_row) {
  return {.blocks = p.q_blocks + ceil_div(p.k.units * lanes_of_a_row, kThreads),
          .threads = kThreads,
          .early = true};
}

// fn(Type<X>, Type<Y>) for the pairs that promotion makes, and in the backward undoes.
template <class Fn>
void with_types(DType x, DType y, Fn&& fn) {
  dispatch_float(kOp, "q", is_half(x) ? x : y, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    if (x == y) return fn(Type<T>{}, Type<T>{});
    if constexpr (sizeof(T) == 2)
      x == DType::f32 ? fn(Type<float>{}, Type<T>{}) : fn(Type<T>{}, Type<float>{});
  });
}

void run_columns(Context& ctx, const Rope& a, bool backward) {
  with_types(a.q.dtype, a.q_out.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    int64_t lanes = Lanes(int(a.q.cols / kPack)).width;
    dispatch_bool(plain_tables(a), [&](auto plain) {
      auto p = params_of<plain>(a, backward, lanes);
      auto kernel = a.form.out == RopePairs::halves ? columns_kernel<true, plain, X, Y>
                                                    : columns_kernel<false, plain, X, Y>;
      launch(kOp, ctx, kernel, grid_of(p, lanes), p);
    });
  });
}

template <int N>
void run_pairs(Context& ctx, const Rope& a, bool backward) {
  with_types(a.q.dtype, a.q_out.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    int64_t half = a.rotated() / 2, lanes = half / N + (a.q.cols - 2 * half) / N;
    auto p = params_of<false>(a, backward, lanes);
    bool in = a.form.in == RopePairs::halves, out = a.form.out == RopePairs::halves;
    launch(kOp, ctx, pairs_kernel<N, X, Y>, grid_of(p, lanes), p, backward ? out : in, backward ? in : out);
  });
}

bool pairs_fit(const Rope& a) { return packs_fit(a, a.q) && a.rotated() / 2 % kPack == 0; }

struct Variant {
  const char* name;
  bool (*supports)(const Rope&);
  void (*run)(Context&, const Rope&, bool backward);
};

// The first that supports the call runs.
constexpr Variant kVariants[] = {
    {"rows of a warp", [](const Rope& a) { return columns_fit(a, a.q); }, run_columns},
    {"packs of pairs", pairs_fit, run_pairs<kPack>},
    {"single pairs", [](const Rope&) { return true; }, run_pairs<1>},
};

}  // namespace

void rope(Context& ctx, const Rope& a, bool backward) {
  for (const Variant& v : kVariants)
    if (v.supports(a)) return v.run(ctx, a, backward);
}

}  // namespace tigon::cuda
