// The CUDA backend of the rotary embedding moves 2b bytes per element in either direction (b = element size).
// Tables are read from L1 and L2, once for kHeadsPerThread heads of a token. An element takes about 6
// instructions; the memory-bound budget is 24 (bf16).
#include <algorithm>
#include <type_traits>

#include "tigon/base/dispatch.h"
#include "tigon/ops/rope/rope_heads.cuh"

namespace tigon::cuda {
namespace {

using namespace rope_kernels;

constexpr const char* kOp = "rope";
// Counts the heads of a token that a thread has in flight, in vectors and in single pairs, and the CTAs per
// SM, which bound the registers.
constexpr int kHeadsPerThread = 4, kPairHeads = 8;
template <class X, class Y, bool Mixed, bool Crossed>
constexpr int kMinBlocks = sizeof(X) + sizeof(Y) > 4 ? 4
                           : Mixed                   ? 5
                           : Crossed                 ? 7
                                                     : 8;
template <class X, class Y>
constexpr int kWideMinBlocks = sizeof(X) + sizeof(Y) > 4 ? 1 : 4;

struct RopeParams {
  HeadTensors q, k;
  Units units;
  Tables tables;
  Shape shape;
};

// Holds the rows of a unit.
template <class X, class Y>
struct UnitRows {
  Unit unit;
  const X* x;
  Y* y;
  int64_t x_step, y_step;
  HeadRange range;

  __device__ __forceinline__ UnitRows(const RopeParams& p, const Unit& of, bool live) : unit(of) {
    const HeadTensors& tensors = tensors_of(p, unit);
    x = x_of<X>(tensors, unit), y = y_of<Y>(tensors, unit);
    x_step = tensors.groups * tensors.x_head, y_step = tensors.groups * tensors.y_head;
    range = tensors.range(unit, live);
  }
  __device__ __forceinline__ bool has(int i) const { return range.next + i * range.step < range.end; }
};

// --- a vector per thread --------------------------------------------------------------------

// Gives the position of a thread in the rows of its unit.
struct VecCoord {
  // Counts among the rows of the CTA at a time.
  int row;
  // True if the row has such a vector.
  bool in_row;
  // True if the vector is rotated.
  bool is_rotated;
  // Counts within the row.
  int column;
  // Counts among the rotated columns.
  int rotated;
  // True if it is odd among the rotated vectors (crossed).
  bool odd;
  // The column where the pairs of the odd vector and the one before it begin in halves (crossed).
  int across;
  // The lane that holds the other elements of its pairs (halves), or the neighbouring vector (crossed).
  int partner;

  template <Pairs P>
  static __device__ __forceinline__ VecCoord of(const Shape& shape) {
    VecCoord r;
    const int half = shape.rotated / 2;
    r.row = int(shape.lanes.divide(threadIdx.x));
    r.column = (int(threadIdx.x) - r.row * int(shape.lanes.divisor)) * kVecColumns;
    r.in_row = r.column < shape.cols;
    r.rotated = r.column - shape.start;
    r.is_rotated = r.in_row && r.rotated >= 0 && r.rotated < shape.rotated;
    r.odd = r.rotated / kVecColumns % 2 != 0;
    r.across = r.is_rotated ? shape.start + r.rotated / (2 * kVecColumns) * kVecColumns + (r.odd ? half : 0)
                            : r.column;
    const int step = P == Pairs::halves ? (r.rotated < half ? half : -half) / kVecColumns : r.odd ? -1 : 1;
    r.partner = int(threadIdx.x % 32) + (r.is_rotated ? step : 0);
    return r;
  }
};

// Returns the vector of lane `from`, bit for bit.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> shuffle(const Vec<T, N>& x, int from) {
  Vec<T, N> r;
#pragma unroll
  for (int i = 0; i < int(sizeof(x) / 4); ++i)
    reinterpret_cast<uint32_t*>(&r)[i] =
        __shfl_sync(0xffffffffu, reinterpret_cast<const uint32_t*>(&x)[i], from);
  return r;
}

// The even vector holds the first elements of N pairs, the odd one their second elements. Afterwards each
// lane has both elements of half of them.
template <class T, int N>
__device__ __forceinline__ void swap_halves(Vec<T, N>& a, Vec<T, N>& b, const VecCoord& coord) {
  const Vec<T, N> got = shuffle(coord.odd ? a : b, coord.partner);
  coord.odd ? a = got : b = got;
}

template <class Y, class X, int N>
__device__ __forceinline__ Vec<Y, N> convert(const Vec<X, N>& x) {
  if constexpr (std::is_same_v<X, Y>) {
    return x;
  } else {
    Vec<Y, N> y;
#pragma unroll
    for (int n = 0; n < N; ++n) y.set(n, x[n]);
    return y;
  }
}

template <class T>
using HalfVecs = Vec<T, kVecColumns / 2>[2];

// Converts a lane's share of two vectors of halves to pairs of neighbours, and back.
template <class T>
__device__ __forceinline__ void gather(const Vec<T, kVecColumns>& halves, const VecCoord& coord,
                                       float (&v)[kVecColumns]) {
  auto both_halves = reinterpret_cast<const HalfVecs<T>&>(halves);
  Vec<T, kVecColumns / 2> a = both_halves[0], b = both_halves[1];
  swap_halves(a, b, coord);
#pragma unroll
  for (int n = 0; n < kVecColumns; ++n) v[n] = n % 2 == 0 ? a[n / 2] : b[n / 2];
}
template <class T>
__device__ __forceinline__ Vec<T, kVecColumns> scatter(const float (&v)[kVecColumns], const VecCoord& coord) {
  float first[kVecColumns / 2], second[kVecColumns / 2];
#pragma unroll
  for (int n = 0; n < kVecColumns / 2; ++n) first[n] = v[2 * n], second[n] = v[2 * n + 1];
  Vec<T, kVecColumns> halves;
  auto both_halves = reinterpret_cast<HalfVecs<T>&>(halves);
  both_halves[0].set(first), both_halves[1].set(second);
  swap_halves(both_halves[0], both_halves[1], coord);
  return halves;
}

// A thread owns a vector of columns in kHeadsPerThread heads of a token, so that loads and stores
// cover whole rows. With pairs in halves, another lane holds the other elements; if only x or
// only y is in halves (From, To), two lanes exchange theirs.
template <bool From, bool To, bool Mixed, class X, class Y>
__global__ void __launch_bounds__(kThreads, kMinBlocks<X, Y, Mixed, From != To>)
    vec_kernel(const __grid_constant__ RopeParams p) {
  constexpr int N = kVecColumns;
  constexpr Pairs P = From != To ? Pairs::crossed : From ? Pairs::halves : Pairs::neighbours;
  const auto coord = VecCoord::of<P>(p.shape);
  const uint32_t index = blockIdx.x * p.shape.rows + coord.row;
  const bool live = coord.in_row && index < p.units.count;
  const UnitRows<X, Y> rows(p, p.units[live ? index : 0], live);
  griddepcontrol_wait();
  const X* from = rows.x + (From && !To ? coord.across : coord.column);
  Y* to = rows.y + (To && !From ? coord.across : coord.column);
  Vec<X, N> x[kHeadsPerThread] = {};
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) x[i] = load_predicated<X, N>(rows.has(i), from + i * rows.x_step);
  float c[N] = {}, s[N] = {};
  if (live && coord.is_rotated)
    p.tables.template read_for_vec<Half<X, Y>, P, Mixed, N>(rows.unit.batch, rows.unit.token, coord.rotated,
                                                            c, s);
  griddepcontrol_launch_dependents();
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    float v[N], y[N];
    Vec<X, N> other;
    if constexpr (P == Pairs::halves) other = shuffle(x[i], coord.partner);
    if constexpr (From && !To) {
      gather(x[i], coord, v);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = x[i][n];
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
      y[n] = rope_second(P == Pairs::halves ? other[n] : v[n ^ 1], v[n], c[n], s[n]);
    Vec<Y, N> out;
    if constexpr (To && !From) {
      out = scatter<Y>(y, coord);
    } else {
      out.set(y);
    }
    if (!coord.is_rotated) out = convert<Y>(x[i]);
    if (rows.has(i)) store(to + i * rows.y_step, out);
  }
}

// --- pairs per thread -----------------------------------------------------------------------

// Takes rows of more vectors than a warp has lanes, and tables that read_for_vec does not support: a thread
// owns both elements of its pairs.
template <Pairs P, class X, class Y>
__global__ void __launch_bounds__(kThreads, kWideMinBlocks<X, Y>)
    wide_kernel(const __grid_constant__ RopeParams p) {
  constexpr int N = kVecColumns;
  const PairCoord coord(p.shape);
  const uint32_t index = blockIdx.x * p.shape.rows + coord.row;
  const bool live = coord.in_row && index < p.units.count;
  const UnitRows<X, Y> rows(p, p.units[live ? index : 0], live);
  griddepcontrol_wait();
  const X* x = rows.x + coord.first;
  Y* y = rows.y + coord.first;
  Vec<X, N> a[kHeadsPerThread], b[kHeadsPerThread];
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i, x += rows.x_step)
    a[i] = load_predicated<X, N>(rows.has(i), x),
    b[i] = load_predicated<X, N>(rows.has(i), x + coord.vec_stride());
  float c[2 * N], s[2 * N];
  if (live && coord.is_rotated)
    p.tables.template read<Half<X, Y>, P, N>(rows.unit.batch, rows.unit.token,
                                             p.tables.template coord<P, N>(coord.lane), c, s);
  griddepcontrol_launch_dependents();
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i, y += rows.y_step) {
    float v[2 * N];
    widen_vecs(a[i], b[i], v);
    if (coord.is_rotated) rotate<P, N>(v, c, s);
    if (rows.has(i)) store(y, narrow_vec<Y, N>(v, 0)), store(y + coord.vec_stride(), narrow_vec<Y, N>(v, 1));
  }
}

// Takes rows of any length, alignment and pairs: a thread owns a pair, or a column that is not rotated, of
// the rows of a unit.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads)
    pair_kernel(const __grid_constant__ RopeParams p, uint64_t units, bool from_halves, bool to_halves) {
  const uint64_t thread = uint64_t(blockIdx.x) * kThreads + threadIdx.x,
                 index = thread / p.shape.lanes.divisor;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (index >= units) return;
  const UnitRows<X, Y> rows(p, p.units.at64(index), true);
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
  const int in_pair_stride = from_halves ? half : 1, out_pair_stride = to_halves ? half : 1;
  X in[kPairHeads][2];
#pragma unroll
  for (int i = 0; i < kPairHeads; ++i)
    if (rows.has(i)) in[i][0] = x[i * rows.x_step], in[i][1] = x[i * rows.x_step + in_pair_stride];
  float c[2], s[2];
  p.tables.template read<Half<X, Y>, Pairs::halves, 1>(rows.unit.batch, rows.unit.token, p.tables.coord(lane),
                                                       c, s);
#pragma unroll
  for (int i = 0; i < kPairHeads; ++i) {
    if (!rows.has(i)) break;
    float v[2] = {widen(in[i][0]), widen(in[i][1])};
    rotate<Pairs::halves, 1>(v, c, s);
    y[i * rows.y_step] = narrow<Y>(v[0]), y[i * rows.y_step + out_pair_stride] = narrow<Y>(v[1]);
  }
}

// --- launches -------------------------------------------------------------------------------

RopeParams params_of(const Rope& a, bool backward, int64_t lanes, int heads_per_unit = kHeadsPerThread) {
  HeadTensors q(a.q, a.q_out, heads_per_unit), k(a.k, a.k_out, heads_per_unit);
  return {.q = q,
          .k = k,
          .units = Units(a.q, q.groups + k.groups),
          .tables = Tables(a, backward, pairs_of(a)),
          .shape = Shape(a, a.q, lanes)};
}

// Calls fn(Type<X>, Type<Y>) for the type pairs that promotion makes, and that the backward undoes.
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
void run_vecs(Context& ctx, const Rope& a, bool backward) {
  const auto p = params_of(a, backward, lanes_of(a.q, kVecColumns));
  auto kernel =
      pairs_of(a) == Pairs::neighbours ? vec_kernel<false, false, false, X, Y>
      : pairs_of(a) == Pairs::halves
          ? (p.tables.mixed ? vec_kernel<true, true, true, X, Y> : vec_kernel<true, true, false, X, Y>)
      : backward ? vec_kernel<true, false, false, X, Y>
                 : vec_kernel<false, true, false, X, Y>;
  launch(kOp, ctx, kernel,
         {.blocks = ceil_div(p.units.count, p.shape.rows), .threads = kThreads, .pdl = true}, p);
}

template <class X, class Y>
void run_wide(Context& ctx, const Rope& a, bool backward) {
  const auto p = params_of(a, backward, a.q.cols / kColumns);
  launch(
      kOp, ctx,
      pairs_of(a) == Pairs::halves ? wide_kernel<Pairs::halves, X, Y> : wide_kernel<Pairs::neighbours, X, Y>,
      {.blocks = ceil_div(p.units.count, p.shape.rows), .threads = kThreads, .pdl = true}, p);
}

template <class X, class Y>
void run_pairs(Context& ctx, const Rope& a, bool backward) {
  const int64_t lanes = a.q.cols - a.rotated() / 2;
  const auto p = params_of(a, backward, lanes, kPairHeads);
  const int64_t units = a.q.batch * a.q.tokens * (p.q.groups + p.k.groups);
  const bool in = a.form.in == RopePairs::halves, out = a.form.out == RopePairs::halves;
  launch(kOp, ctx, pair_kernel<X, Y>,
         {.blocks = ceil_div(units * lanes, kThreads), .threads = kThreads, .pdl = true}, p, uint64_t(units),
         backward ? out : in, backward ? in : out);
}

bool vecs_fit(const Rope& a) {
  // Halves never become neighbours.
  const bool neighbours = a.form.out == RopePairs::neighbours;
  return rope_kernels::vecs_fit(a, a.q, kVecColumns) && a.q.cols <= 32 * kVecColumns &&
         (neighbours ? a.form.in == a.form.out : a.rotated() % (2 * kVecColumns) == 0) &&
         Tables(a, false, pairs_of(a)).vecs_fit(pairs_of(a));
}
bool wide_fit(const Rope& a) {
  return rope_kernels::vecs_fit(a, a.q, kColumns) && a.q.cols <= kThreads * kColumns &&
         a.form.in == a.form.out;
}

}  // namespace

void rope(Context& ctx, const Rope& a, bool backward) {
  with_types(a.q.dtype, a.q_out.dtype, [&](auto tx, auto ty) {
    using X = typename decltype(tx)::type;
    using Y = typename decltype(ty)::type;
    if (vecs_fit(a)) return run_vecs<X, Y>(ctx, a, backward);
    // Long rows in fp16 or with results of another type are rare.
    if constexpr (std::is_same_v<X, Y> && !std::is_same_v<X, __half>)
      if (wide_fit(a)) return run_wide<X, Y>(ctx, a, backward);
    run_pairs<X, Y>(ctx, a, backward);
  });
}

}  // namespace tigon::cuda
