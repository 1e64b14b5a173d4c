// CUDA backend of the rotary embedding.
//
// Bytes per element (b = element size): 2b either way; tables come out of L1 and L2, once for kHeld heads of a token.
// Instructions: about 6 per element against a budget of 24 at the speed of the memory (bf16).
#include <algorithm>
#include <type_traits>

#include "tigon/base/dispatch.h"
#include "tigon/ops/rope/rope_heads.cuh"

namespace tigon::cuda {
namespace {

using namespace rope_kernels;

constexpr const char* kOp = "rope";
// Rows (heads of a token) a thread has in flight, of packs and of single pairs; blocks a multiprocessor, which bound the registers.
constexpr int kHeld = 4, kPairHeld = 8;
template <class X, class Y, bool Mixed, bool Crossed>
constexpr int kBlocks = sizeof(X) + sizeof(Y) > 4 ? 4
                        : Mixed                   ? 5
                        : Crossed                 ? 7
                                                  : 8;
template <class X, class Y>
constexpr int kWideBlocks = sizeof(X) + sizeof(Y) > 4 ? 1 : 4;

struct Params {
  Part q, k;
  Units units;
  Tables tables;
  Shape shape;
};

// The rows of a unit.
template <class X, class Y>
struct Rows {
  Unit unit;
  const X* x;
  Y* y;
  int64_t x_step, y_step;
  Run run;

  __device__ __forceinline__ Rows(const Params& p, const Unit& of, bool live) : unit(of) {
    const Part& part = part_of(p, unit);
    x = x_of<X>(part, unit), y = y_of<Y>(part, unit);
    x_step = part.groups * part.x_head, y_step = part.groups * part.y_head;
    run = part.run(unit, live);
  }
  __device__ __forceinline__ bool has(int i) const { return run.next + i * run.step < run.end; }
};

// --- a pack a thread -----------------------------------------------------------------------------------------------

// A thread's place in the rows of its unit.
struct PackPlace {
  int row;      // of those that the block has at a time
  bool inside;  // the row has such a pack
  bool turned;  // and it is rotated
  int column;   // of the row
  int rotated;  // and among the rotated ones
  bool odd;     // pack of those (crossed)
  int across;   // of the row, where pairs of the odd pack and of the one before it lie in halves (crossed)
  int partner;  // the lane that holds the other elements of its pairs (halves), of it and the next pack (crossed)

  template <Pairs P>
  static __device__ __forceinline__ PackPlace of(const Shape& shape) {
    PackPlace r;
    const int half = shape.rotated / 2;
    r.row = int(shape.lanes.divide(threadIdx.x));
    r.column = (int(threadIdx.x) - r.row * int(shape.lanes.divisor)) * kPack;
    r.inside = r.column < shape.cols;
    r.rotated = r.column - shape.start;
    r.turned = r.inside && r.rotated >= 0 && r.rotated < shape.rotated;
    r.odd = r.rotated / kPack % 2 != 0;
    r.across = r.turned ? shape.start + r.rotated / (2 * kPack) * kPack + (r.odd ? half : 0) : r.column;
    const int step = P == Pairs::halves ? (r.rotated < half ? half : -half) / kPack : r.odd ? -1 : 1;
    r.partner = int(threadIdx.x % 32) + (r.turned ? step : 0);
    return r;
  }
};

// The pack of lane `from`, bit for bit.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> exchange(const Pack<T, N>& x, int from) {
  Pack<T, N> r;
#pragma unroll
  for (int i = 0; i < int(sizeof(x) / 4); ++i)
    reinterpret_cast<uint32_t*>(&r)[i] =
        __shfl_sync(0xffffffffu, reinterpret_cast<const uint32_t*>(&x)[i], from);
  return r;
}

// An even pack of N pairs' first elements and the odd one of their second ones: each lane has the first or the last half of both.
template <class T, int N>
__device__ __forceinline__ void swap_halves(Pack<T, N>& a, Pack<T, N>& b, const PackPlace& place) {
  const Pack<T, N> got = exchange(place.odd ? a : b, place.partner);
  place.odd ? a = got : b = got;
}

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

template <class T>
using Both = Pack<T, kPack / 2>[2];

// Pairs of neighbours, from and to a lane's share of two packs of halves.
template <class T>
__device__ __forceinline__ void gather(const Pack<T, kPack>& halves, const PackPlace& place,
                                       float (&v)[kPack]) {
  auto part = reinterpret_cast<const Both<T>&>(halves);
  Pack<T, kPack / 2> a = part[0], b = part[1];
  swap_halves(a, b, place);
#pragma unroll
  for (int n = 0; n < kPack; ++n) v[n] = n % 2 == 0 ? a[n / 2] : b[n / 2];
}
template <class T>
__device__ __forceinline__ Pack<T, kPack> spread(const float (&v)[kPack], const PackPlace& place) {
  float first[kPack / 2], second[kPack / 2];
#pragma unroll
  for (int n = 0; n < kPack / 2; ++n) first[n] = v[2 * n], second[n] = v[2 * n + 1];
  Pack<T, kPack> halves;
  auto part = reinterpret_cast<Both<T>&>(halves);
  part[0].set(first), part[1].set(second);
  swap_halves(part[0], part[1], place);
  return halves;
}

// A thread owns a pack of columns in kHeld rows of a token, so that every load and store is of whole rows. The other elements of
// pairs in halves are another lane's; where only x or only y lies in halves (From, To), two lanes share theirs.
template <bool From, bool To, bool Mixed, class X, class Y>
__global__ void __launch_bounds__(kThreads, kBlocks<X, Y, Mixed, From != To>)
    packs_kernel(const __grid_constant__ Params p) {
  constexpr int N = kPack;
  constexpr Pairs P = From != To ? Pairs::crossed : From ? Pairs::halves : Pairs::neighbours;
  const auto place = PackPlace::of<P>(p.shape);
  const uint32_t index = blockIdx.x * p.shape.rows + place.row;
  const bool live = place.inside && index < p.units.count;
  const Rows<X, Y> rows(p, p.units[live ? index : 0], live);
  wait_for_kernel_ahead();
  const X* from = rows.x + (From && !To ? place.across : place.column);
  Y* to = rows.y + (To && !From ? place.across : place.column);
  Pack<X, N> x[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) x[i] = load_where<X, N>(rows.has(i), from + i * rows.x_step);
  float c[N] = {}, s[N] = {};
  if (live && place.turned)
    p.tables.template read_for_pack<Half<X, Y>, P, Mixed, N>(rows.unit.batch, rows.unit.token, place.rotated,
                                                             c, s);
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    float v[N], y[N];
    Pack<X, N> other;
    if constexpr (P == Pairs::halves) other = exchange(x[i], place.partner);
    if constexpr (From && !To) {
      gather(x[i], place, v);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = x[i][n];
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
      y[n] = rope_second(P == Pairs::halves ? other[n] : v[n ^ 1], v[n], c[n], s[n]);
    Pack<Y, N> out;
    if constexpr (To && !From) {
      out = spread<Y>(y, place);
    } else {
      out.set(y);
    }
    if (!place.turned) out = converted<Y>(x[i]);
    if (rows.has(i)) store(to + i * rows.y_step, out);
  }
}

// --- pairs a thread ------------------------------------------------------------------------------------------------

// Rows of more packs than a warp has lanes, and tables that no pack is read of (read_for_pack): a thread owns both elements of its
// pairs.
template <Pairs P, class X, class Y>
__global__ void __launch_bounds__(kThreads, kWideBlocks<X, Y>) wide_kernel(const __grid_constant__ Params p) {
  constexpr int N = kPack;
  const Place place(p.shape);
  const uint32_t index = blockIdx.x * p.shape.rows + place.row;
  const bool live = place.inside && index < p.units.count;
  const Rows<X, Y> rows(p, p.units[live ? index : 0], live);
  wait_for_kernel_ahead();
  const X* x = rows.x + place.first;
  Y* y = rows.y + place.first;
  Pack<X, N> a[kHeld], b[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i, x += rows.x_step)
    a[i] = load_where<X, N>(rows.has(i), x), b[i] = load_where<X, N>(rows.has(i), x + place.apart());
  float c[2 * N], s[2 * N];
  if (live && place.turned)
    p.tables.template read<Half<X, Y>, P, N>(rows.unit.batch, rows.unit.token,
                                             p.tables.template place<P, N>(place.lane), c, s);
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kHeld; ++i, y += rows.y_step) {
    float v[2 * N];
    widen_packs(a[i], b[i], v);
    if (place.turned) turn<P, N>(v, c, s);
    if (rows.has(i)) store(y, narrow_pack<Y, N>(v, 0)), store(y + place.apart(), narrow_pack<Y, N>(v, 1));
  }
}

// Rows of any length, alignment and pairs: a thread owns a pair, or a column that is not rotated, of the rows of a unit.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    pair_kernel(const __grid_constant__ Params p, uint64_t units, bool from_halves, bool to_halves) {
  const uint64_t thread = uint64_t(blockIdx.x) * kThreads + threadIdx.x,
                 index = thread / p.shape.lanes.divisor;
  wait_for_kernel_ahead();
  let_next_kernel_start();
  if (index >= units) return;
  const Rows<X, Y> rows(p, p.units.far(index), true);
  const int lane = int(thread - index * p.shape.lanes.divisor), half = p.shape.rotated / 2;
  if (lane >= half) {
    const int column = lane - half + (lane - half < p.shape.start ? 0 : 2 * half);
    for (int i = 0; rows.has(i); ++i)
      rows.y[i * rows.y_step + column] = narrow<Y>(widen(rows.x[i * rows.x_step + column]));
    return;
  }
  auto first = [&](bool halves) { return p.shape.start + (halves ? lane : 2 * lane); };
  const X* x = rows.x + first(from_halves);
  Y* y = rows.y + first(to_halves);
  const int from_apart = from_halves ? half : 1, to_apart = to_halves ? half : 1;
  X in[kPairHeld][2];
#pragma unroll
  for (int i = 0; i < kPairHeld; ++i)
    if (rows.has(i)) in[i][0] = x[i * rows.x_step], in[i][1] = x[i * rows.x_step + from_apart];
  float c[2], s[2];
  p.tables.template read<Half<X, Y>, Pairs::halves, 1>(rows.unit.batch, rows.unit.token, p.tables.place(lane),
                                                       c, s);
#pragma unroll
  for (int i = 0; i < kPairHeld; ++i) {
    if (!rows.has(i)) break;
    float v[2] = {widen(in[i][0]), widen(in[i][1])};
    turn<Pairs::halves, 1>(v, c, s);
    y[i * rows.y_step] = narrow<Y>(v[0]), y[i * rows.y_step + to_apart] = narrow<Y>(v[1]);
  }
}

// --- launches ------------------------------------------------------------------------------------------------------

Params params_of(const Rope& a, bool backward, int64_t lanes, int held = kHeld) {
  Part q(a.q, a.q_out, held), k(a.k, a.k_out, held);
  return {.q = q,
          .k = k,
          .units = Units(a.q, q.groups + k.groups),
          .tables = Tables(a, backward, pairs_of(a)),
          .shape = Shape(a, a.q, lanes)};
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

template <class X, class Y>
void run_packs(Context& ctx, const Rope& a, bool backward) {
  const auto p = params_of(a, backward, lanes_of(a.q, kPack));
  auto kernel =
      pairs_of(a) == Pairs::neighbours ? packs_kernel<false, false, false, X, Y>
      : pairs_of(a) == Pairs::halves
          ? (p.tables.mixed ? packs_kernel<true, true, true, X, Y> : packs_kernel<true, true, false, X, Y>)
      : backward ? packs_kernel<true, false, false, X, Y>
                 : packs_kernel<false, true, false, X, Y>;
  launch(kOp, ctx, kernel,
         {.blocks = ceil_div(p.units.count, p.shape.rows), .threads = kThreads, .early = true}, p);
}

template <class X, class Y>
void run_wide(Context& ctx, const Rope& a, bool backward) {
  const auto p = params_of(a, backward, a.q.cols / kColumns);
  launch(
      kOp, ctx,
      pairs_of(a) == Pairs::halves ? wide_kernel<Pairs::halves, X, Y> : wide_kernel<Pairs::neighbours, X, Y>,
      {.blocks = ceil_div(p.units.count, p.shape.rows), .threads = kThreads, .early = true}, p);
}

template <class X, class Y>
void run_pairs(Context& ctx, const Rope& a, bool backward) {
  const int64_t lanes = a.q.cols - a.rotated() / 2;
  const auto p = params_of(a, backward, lanes, kPairHeld);
  const int64_t units = a.q.batch * a.q.tokens * (p.q.groups + p.k.groups);
  const bool in = a.form.in == RopePairs::halves, out = a.form.out == RopePairs::halves;
  launch(kOp, ctx, pair_kernel<X, Y>,
         {.blocks = ceil_div(units * lanes, kThreads), .threads = kThreads, .early = true}, p,
         uint64_t(units), backward ? out : in, backward ? in : out);
}

bool packs_fit(const Rope& a) {
  const bool neighbours = a.form.out == RopePairs::neighbours;  // which no halves become
  return rope_kernels::packs_fit(a, a.q, kPack) && a.q.cols <= 32 * kPack &&
         (neighbours ? a.form.in == a.form.out : a.rotated() % (2 * kPack) == 0) &&
         Tables(a, false, pairs_of(a)).packs_fit(pairs_of(a));
}
bool wide_fit(const Rope& a) {
  return rope_kernels::packs_fit(a, a.q, kColumns) && a.q.cols <= kThreads * kColumns &&
         a.form.in == a.form.out;
}

}  // namespace

void rope(Context& ctx, const Rope& a, bool backward) {
  with_types(a.q.dtype, a.q_out.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    packs_fit(a)  ? run_packs<X, Y>(ctx, a, backward)
    : wide_fit(a) ? run_wide<X, Y>(ctx, a, backward)
                  : run_pairs<X, Y>(ctx, a, backward);
  });
}

}  // namespace tigon::cuda
