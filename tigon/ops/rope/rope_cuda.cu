// CUDA backend of the rotary embedding.
//
// Bytes per element (b = element size): 2b either way; tables come out of L1 and L2, once for kHeld heads of a token.
// Instructions: about 7 per element against a budget of 28 at the speed of the memory (bf16).
#include <algorithm>
#include <type_traits>

#include "tigon/base/dispatch.h"
#include "tigon/ops/rope/rope_cuda.cuh"

namespace tigon::cuda {
namespace {

using namespace rope_kernels;

constexpr const char* kOp = "rope";
// Heads of a unit, all of them in flight; blocks a multiprocessor.
template <class X>
constexpr int kHeld = sizeof(X) == 2 ? 4 : 2;
constexpr int kBlocks = 5;

struct Params {
  Part q, k;
  Units units;
  Tables tables;
  Shape shape;
};

// From and To: pairs of x and of y lie in halves. Where one of them does, two lanes side by side share what they read or write of
// the other, so that it is 32 bytes in one place, and the tables lie in halves.
template <bool From, bool To, bool Mixed, class X, class Y>
__global__ void __launch_bounds__(kThreads, kBlocks) packs_kernel(const __grid_constant__ Params p) {
  constexpr int N = kPack;
  constexpr bool kHalves = From || To;
  const Place place(p.shape);
  const int lanes = p.shape.rotated / kColumns;
  const bool even = place.lane % 2 == 0, crossed = From != To && place.turned && (place.lane | 1) < lanes;
  // Column of the first pack, columns to the second one.
  auto columns = [&](bool neighbours) -> int2 {
    if (!neighbours || !place.turned) return {place.first, place.apart()};
    const int own = p.shape.start + place.lane * kColumns;
    return {crossed && !even ? own - kPack : own, crossed ? kColumns : kPack};
  };
  const int2 from = columns(From != To && !From), to = columns(From != To && !To);
  const uint32_t index = blockIdx.x * p.shape.rows + place.row;
  const bool live = place.inside && index < p.units.count;
  Unit unit = p.units[live ? index : 0];
  const Part& part = part_of(p, unit);
  const Run run = part.run(unit, live);
  auto has = [&](int i) { return run.next + i * run.step < run.end; };
  wait_for_kernel_ahead();
  Pack<X, N> a[kHeld<X>], b[kHeld<X>];
  const X* x = x_of<X>(part, unit) + from.x;
  const int64_t x_step = part.groups * part.x_head, y_step = part.groups * part.y_head;
#pragma unroll
  for (int i = 0; i < kHeld<X>; ++i, x += x_step)
    a[i] = load_where<X, N>(has(i), x), b[i] = load_where<X, N>(has(i), x + from.y);
  float c[2 * N], s[2 * N];
  if (live && place.turned)
    p.tables.template read<Half<X, Y>, kHalves, Mixed, N>(
        unit.batch, unit.token, p.tables.template place<kHalves, N>(place.lane), c, s);
  let_next_kernel_start();
  Y* y = y_of<Y>(part, unit) + to.x;
#pragma unroll
  for (int i = 0; i < kHeld<X>; ++i, y += y_step) {
    if constexpr (To && !From) cross(a[i], b[i], even, crossed);
    float v[2 * N];
    widen_packs(a[i], b[i], v);
    if (place.turned) {
      if constexpr (To && !From) rearrange<true, N>(v);
      turn<kHalves, N>(v, c, s);
      if constexpr (From && !To) rearrange<false, N>(v);
    }
    auto first = narrow_pack<Y, N>(v, 0), second = narrow_pack<Y, N>(v, 1);
    if constexpr (From && !To) cross(first, second, even, crossed);
    if (has(i)) store(y, first), store(y + to.y, second);
  }
}

// Rows of any length, alignment and pairs: a thread owns a pair, or a column that is not rotated, of the rows of a unit.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    single_kernel(const __grid_constant__ Params p, uint64_t units, bool from_halves, bool to_halves) {
  const uint64_t thread = uint64_t(blockIdx.x) * kThreads + threadIdx.x,
                 index = thread / p.shape.lanes.divisor;
  wait_for_kernel_ahead();
  let_next_kernel_start();
  if (index >= units) return;
  Unit unit = p.units.far(index);
  const Part& part = part_of(p, unit);
  const int lane = int(thread - index * p.shape.lanes.divisor), half = p.shape.rotated / 2,
            start = p.shape.start;
  const X* x = x_of<X>(part, unit);
  Y* y = y_of<Y>(part, unit);
  const int count = (part.heads - int(unit.group) + part.groups - 1) / part.groups;
  const int64_t x_step = part.groups * part.x_head, y_step = part.groups * part.y_head;
  if (lane >= half) {
    int column = lane - half;
    if (column >= start) column += 2 * half;
    for (int i = 0; i < count; ++i) y[i * y_step + column] = narrow<Y>(widen(x[i * x_step + column]));
    return;
  }
  auto columns = [&](bool halves) {
    return halves ? int2{start + lane, start + half + lane} : int2{start + 2 * lane, start + 2 * lane + 1};
  };
  const int2 from = columns(from_halves), to = columns(to_halves);
  float c[2], s[2];
  p.tables.template read<Half<X, Y>, true, false, 1>(unit.batch, unit.token, p.tables.place(lane), c, s);
  for (int i = 0; i < count; ++i) {
    float v[2] = {widen(x[i * x_step + from.x]), widen(x[i * x_step + from.y])};
    turn<true, 1>(v, c, s);
    y[i * y_step + to.x] = narrow<Y>(v[0]), y[i * y_step + to.y] = narrow<Y>(v[1]);
  }
}

Params params_of(const Rope& a, bool backward, int held, int64_t lanes) {
  Part q(a.q, a.q_out, held), k(a.k, a.k_out, held);
  return {.q = q,
          .k = k,
          .units = Units(a.q, q.groups + k.groups),
          .tables = Tables(a, backward, a.form.in == RopePairs::halves || a.form.out == RopePairs::halves),
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
void run_packs(Context& ctx, const Rope& a, bool backward, bool from, bool to) {
  int64_t lanes = a.q.cols / kColumns;
  if (from != to) lanes += lanes % 2;
  const auto p = params_of(a, backward, kHeld<X>, lanes);
  dispatch_bool(p.tables.mixed, [&](auto mixed) {
    auto kernel = from && to ? packs_kernel<true, true, mixed, X, Y>
                  : from     ? packs_kernel<true, false, mixed, X, Y>
                  : to       ? packs_kernel<false, true, mixed, X, Y>
                             : packs_kernel<false, false, mixed, X, Y>;
    launch(kOp, ctx, kernel,
           {.blocks = ceil_div(p.units.count, p.shape.rows), .threads = kThreads, .early = true}, p);
  });
}

template <class X, class Y>
void run_single(Context& ctx, const Rope& a, bool backward, bool from_halves, bool to_halves) {
  const int64_t lanes = a.q.cols - a.rotated() / 2;
  auto p = params_of(a, backward, 4, lanes);
  const int64_t units = a.q.batch * a.q.tokens * (p.q.groups + p.k.groups);
  launch(kOp, ctx, single_kernel<X, Y>,
         {.blocks = ceil_div(units * lanes, kThreads), .threads = kThreads, .early = true}, p,
         uint64_t(units), from_halves, to_halves);
}

}  // namespace

void rope(Context& ctx, const Rope& a, bool backward) {
  const bool in = a.form.in == RopePairs::halves, out = a.form.out == RopePairs::halves;
  const bool from = backward ? out : in, to = backward ? in : out;
  const bool packs = packs_fit(a, a.q) && (out || !in);
  with_types(a.q.dtype, a.q_out.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    packs ? run_packs<X, Y>(ctx, a, backward, from, to) : run_single<X, Y>(ctx, a, backward, from, to);
  });
}

}  // namespace tigon::cuda
