// CUDA backend of softmax.
//
// Bytes per element (b = element size): forward 2b, backward 3b. Instructions: about 9 per element forward, one ex2 (two in rows past
// 1024 packs), and 9 backward, against a budget of 27 and 41 at the speed of the memory (bf16).
//
// Variants
//   held    A row lies in the registers of several lanes, a warp, a block of as many warps as it needs, or a cluster of up to 16
//           blocks (sm_90 on). All its loads are in flight together. Clusters stay: a pack of the next row is asked for as soon as
//           this row's has been stored.
//   swept   Longer rows: one sweep that finds maximum and sum (or the dot product), one that writes, out of L2.
// A row may start at any element: packs are those of the row that is written, and what is read lies anywhere (row_packs.cuh).
#include "tigon/base/cuda/row_lie.cuh"
#include "tigon/base/cuda/row_packs.cuh"
#include "tigon/base/cuda/row_team.cuh"
#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/softmax/softmax.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/softmax/softmax_math.inc"

constexpr const char* kOp = "softmax";

template <class T, Lying How>
using Words = RowWords<T, How == Lying::apart, How == Lying::packs>;

template <class T>
struct Forward {
  const T *x, *x_end;
  T* y;
  int64_t rows, x_stride, y_stride;
  int cols;
  int* counter =
      nullptr;        // of rows that blocks which stay have drawn; 0 at first. Null: they take every so many
  uint32_t zero = 0;  // for again()

  // Rows that are not there hold nothing.
  template <Lying How>
  __device__ __forceinline__ auto row_of_y(int64_t r) const {
    return Row<T, How == Lying::packs>(y + (r < rows ? r : 0) * y_stride, cols);
  }
  template <Lying How>
  __device__ __forceinline__ auto row_of_x(const Row<T, How == Lying::packs>& out, int64_t r) const {
    return Words<T, How>(out, x + (r < rows ? r : 0) * x_stride, x_end, kMinusInf<T>, r < rows);
  }
};
template <class T>
struct Backward {
  const T *dy, *y, *dy_end, *y_end;
  T* dx;
  int64_t rows, dy_stride, y_stride, dx_stride;
  int cols;
  int* counter = nullptr;
  uint32_t zero = 0;
};

// A row of the backward: the packs are those of dx.
template <class T, Lying How>
struct BackwardRow {
  Row<T, How == Lying::packs> dx;
  Words<T, How> y, dy;

  __device__ __forceinline__ BackwardRow(const Backward<T>& p, int64_t r)
      : BackwardRow(p, r < p.rows ? r : 0, r < p.rows) {}
  __device__ __forceinline__ BackwardRow(const Backward<T>& p, int64_t r, bool live)
      : dx(p.dx + r * p.dx_stride, p.cols),
        y(dx, p.y + r * p.y_stride, p.y_end, 0, live),
        dy(dx, p.dy + r * p.dy_stride, p.dy_end, 0, live) {}

  // a, b: packs of y and dy, in as many steps as there are packs.
  template <class Index, int Held>
  __device__ __forceinline__ void load(Index pack, uint4 (&a)[Held], uint4 (&b)[Held]) const {
#pragma unroll
    for (int i = 0; i < Held; ++i) a[i] = y.load(pack(i)), b[i] = dy.load(pack(i));
  }
  template <class Index, int Held>
  __device__ __forceinline__ float dot(Index pack, uint4 (&a)[Held], uint4 (&b)[Held]) const {
    y.trim(dx, a, pack);
    dy.trim(dx, b, pack);
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < Held; ++i) {
      float u[Row<T>::N], v[Row<T>::N], of_pack = 0.0f;  // chains of their own, so that several are under way
      unpack<T>(a[i], u), unpack<T>(b[i], v);
#pragma unroll
      for (int j = 0; j < Row<T>::N; ++j) of_pack = fma(u[j], v[j], of_pack);
      s += of_pack;
    }
    return s;
  }
  __device__ __forceinline__ void write(int k, const uint4& a, const uint4& b, float c) const {
    float u[Row<T>::N], v[Row<T>::N];
    unpack<T>(a, u), unpack<T>(b, v);
#pragma unroll
    for (int j = 0; j < Row<T>::N; ++j) u[j] = softmax_dx(v[j], u[j], c);
    store_pack(dx, k, u);
  }
};

// The same words, which the compiler must take for others (vec.cuh).
__device__ __forceinline__ uint4 again(const uint4& w, uint32_t zero) {
  return make_uint4(w.x ^ zero, w.y ^ zero, w.z ^ zero, w.w ^ zero);
}

template <class T, int K>
__device__ __forceinline__ float max_of(const uint4 (&q)[K]) {
  uint32_t top = max_words<T>(q[0]);
#pragma unroll
  for (int i = 1; i < K; ++i) top = max_words<T>(top, max_words<T>(q[i]));
  return max_of_word<T>(top);
}
// e = e^(x - m) of all elements, and their sum.
template <class T, int K>
__device__ __forceinline__ float exponentials(const uint4 (&q)[K], float m, float (&e)[K][Row<T>::N]) {
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    unpack<T>(q[i], e[i]);
    float of_pack = 0.0f;
#pragma unroll
    for (int j = 0; j < Row<T>::N; ++j) {
      e[i][j] = exp_below<T>(e[i][j], reference(m));
      of_pack += e[i][j];
    }
    s += of_pack;
  }
  return s;
}
// In fp32 the threads agree on the maximum before they add up: sums that are rescaled on their way lose an ulp.
template <class T>
constexpr bool kExact = sizeof(T) == 4;

// Keeps: the exponentials stay in registers, else they are found twice. Stays: blocks take one row after another, and ask for
// the next one's packs as they store.
template <class T, class Shape, bool Cluster, bool Keeps, bool Stays, Lying How>
__global__ __launch_bounds__(Shape::block,
                             Shape::min_blocks) void forward_kernel(const __grid_constant__ Forward<T> p) {
  constexpr int N = Row<T>::N, kHeld = Shape::held;
  using Threads = Team<Shape, Cluster, Stays, ExpSum<T>>;
  __shared__ Exchange<typename Threads::Told> exchange;
  Threads team(exchange);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  auto pack = [&](int i) { return team.pack(i); };
  int64_t r = team.first_row(), following = Stays ? r + team.step() : p.rows;
  auto y = p.template row_of_y<How>(r);
  auto x = p.template row_of_x<How>(y, r);
  uint4 q[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) q[i] = x.load(pack(i));
  team.meet();
  for (;;) {
    int64_t later = following + team.step();
    const int drawn = team.draw(p.counter);
    x.trim(y, q, pack);
    float e[kHeld][N];
    ExpSum<T> own{max_of<T>(q), 0.0f};
    if (kExact<T>) own.m = team.merge(own, drawn, later).m;
    own.s = exponentials<T>(q, own.m, e);
    const ExpSum<T> all = team.merge(own, kExact<T> ? -1 : drawn, later);
    const auto next_y = p.template row_of_y<How>(following);
    const auto next_x = p.template row_of_x<How>(next_y, following);
    const float scale = (Keeps && !kExact<T> ? exp_below<T>(own.m, all.m) : 1.0f) / all.s;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!Keeps) {
        unpack<T>(again(q[i], p.zero), e[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) e[i][j] = exp_below<T>(e[i][j], all.m);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) e[i][j] *= scale;
      if (r < p.rows && pack(i) < y.packs) store_pack(y, pack(i), e[i]);
      if (Stays) q[i] = next_x.load(pack(i));
    }
    r = following, following = later;
    if (!Stays || r >= p.rows) break;
    x = next_x, y = next_y;
  }
  if constexpr (Cluster) cluster_arrive();
  team.meet();
}

// Longer rows, by a cluster of blocks each: a sweep that finds maximum and sum, one that writes, out of L2.
template <class T, class Shape>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void forward_swept_kernel(
    const __grid_constant__ Forward<T> p) {
  constexpr int N = Row<T>::N, kHeld = Shape::held;
  __shared__ Exchange<ExpSum<T>> exchange;
  Team<Shape, true, false, ExpSum<T>> team(exchange);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int64_t r = team.first_row();
  const auto y = p.template row_of_y<Lying::apart>(r);
  const auto x = p.template row_of_x<Lying::apart>(y, r);
  const int step = team.threads * team.blocks * kHeld;
  uint4 q[kHeld];
  float e[kHeld][N];
  auto load = [&](int first) {
    auto pack = [&](int i) { return first + team.pack(i); };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) q[i] = x.load(pack(i));
    x.trim(y, q, pack);
  };
  team.meet();
  ExpSum<T> a = ExpSum<T>::none();
  for (int first = 0; first < y.packs; first += step) {
    load(first);
    ExpSum<T> b{max_of<T>(q), 0.0f};
    b.s = exponentials<T>(q, b.m, e);
    const float top = fmaxf(a.m, b.m);
    if (a.m != top) a.s *= exp_below<T>(a.m, top);
    if (b.m != top) b.s *= exp_below<T>(b.m, top);
    a.m = top, a.s += b.s;
  }
  int turn = 0;
  if (kExact<T>) {
    const float top = merge_row<0, true>(ExpSum<T>{a.m, 0.0f}, exchange, turn++).m;
    if (a.m != top) a.s *= exp_below<T>(a.m, top);
    a.m = top;
  }
  a = merge_row<0, true>(a, exchange, turn);
  const float scale = 1.0f / a.s;
  for (int first = (y.packs - 1) / step * step; first >= 0; first -= step) {
    load(first);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      unpack<T>(q[i], e[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) e[i][j] = exp_below<T>(e[i][j], a.m) * scale;
      const int k = first + team.pack(i);
      if (k < y.packs) store_pack(y, k, e[i]);
    }
  }
  cluster_arrive();
  team.meet();
}

template <class T, class Shape, bool Cluster, bool Stays, Lying How>
__global__ __launch_bounds__(Shape::block,
                             Shape::min_blocks) void backward_kernel(const __grid_constant__ Backward<T> p) {
  constexpr int kHeld = Shape::held;
  using Threads = Team<Shape, Cluster, Stays, SumsOf<1>>;
  __shared__ Exchange<typename Threads::Told> exchange;
  Threads team(exchange);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  auto pack = [&](int i) { return team.pack(i); };
  int64_t r = team.first_row(), following = Stays ? r + team.step() : p.rows;
  BackwardRow<T, How> row(p, r);
  uint4 a[kHeld], b[kHeld];
  row.load(pack, a, b);
  team.meet();
  for (;;) {
    int64_t later = following + team.step();
    const int drawn = team.draw(p.counter);
    const float s = team.merge(SumsOf<1>{{row.dot(pack, a, b)}}, drawn, later).s[0];
    const BackwardRow<T, How> next(p, following);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (r < p.rows && pack(i) < row.dx.packs) {
        if (kHeld > 2) a[i] = again(a[i], p.zero), b[i] = again(b[i], p.zero);
        row.write(pack(i), a[i], b[i], s);
      }
      if (Stays) a[i] = next.y.load(pack(i)), b[i] = next.dy.load(pack(i));
    }
    r = following, following = later;
    if (!Stays || r >= p.rows) break;
    row = next;
  }
  if constexpr (Cluster) cluster_arrive();
  team.meet();
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::block, Shape::min_blocks) void backward_swept_kernel(
    const __grid_constant__ Backward<T> p) {
  constexpr int kHeld = Shape::held;
  __shared__ Exchange<SumsOf<1>> exchange;
  Team<Shape, true, false, SumsOf<1>> team(exchange);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const BackwardRow<T, Lying::apart> row(p, team.first_row());
  const int packs = row.dx.packs, step = team.threads * team.blocks * kHeld;
  uint4 a[kHeld], b[kHeld];
  float s = 0.0f;
  for (int first = 0; first < packs; first += step) {
    auto pack = [&](int i) { return first + team.pack(i); };
    row.load(pack, a, b);
    s += row.dot(pack, a, b);
  }
  team.meet();
  s = merge_row<0, true>(SumsOf<1>{{s}}, exchange, 0).s[0];
  for (int first = (packs - 1) / step * step; first >= 0; first -= step) {
    auto pack = [&](int i) { return first + team.pack(i); };
    row.load(pack, a, b);
    row.dot(pack, a, b);
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (pack(i) < packs) row.write(pack(i), a[i], b[i], s);
  }
  cluster_arrive();
  team.meet();
}

// By the packs of a row. Beyond 1024 of them the exponentials find no room in the registers and are found twice. Rows that do not lie
// alike are few shapes' matter.
using Short = RowShapes<RowShape<8, 2>, RowShape<16, 2>, RowShape<32, 2>, RowShape<32, 4>>;
template <Lying How>
using ForwardLadder = std::conditional_t<
    How == Lying::apart, RowShapes<RowShape<32, 4>, RowBlock<4, 512, 3>, RowBlock<8, 1024>>,
    typename Short::with<std::conditional_t<How == Lying::packs, RowBlock<2, 512, 2>,
                                            RowBlock<4, 256, 4>>>::template with<RowBlock<8, 1024>>>;
template <Lying How>
using BackwardLadder = std::conditional_t<How == Lying::apart, RowShapes<RowShape<32, 4>, RowBlock<4, 1024>>,
                                          Short::with<RowBlock<2, 512>>::with<RowBlock<4, 1024>>>;

// The packs that a row touches at most, wherever it starts.
template <class T>
int64_t most_packs(const T* row, int64_t stride, int64_t cols) {
  constexpr int N = 16 / sizeof(T);
  return packs_align(row, stride, cols, sizeof(T)) ? cols / N : ceil_div(cols + N - 1, N);
}
template <class T>
const T* end_of(const Matrix& m) {
  return end_of_rows(m.row<const T>(0), m.stride, m.rows, m.cols);
}

// Blocks that sweep.
using Swept = RowBlock<4, 1024>;

// Long rows do not feel what is done once a row.
template <bool Cluster, Lying How>
constexpr Lying in_cluster = Cluster && How == Lying::packs ? Lying::alike : How;

// The kernels of one direction, for rows of T.
template <class T, Lying How>
struct ForwardKernels {
  using Params = Forward<T>;
  using Ladder = ForwardLadder<How>;
  using Clustered = RowBlock<8, 1024>;
  template <class Shape, bool Cluster>
  static auto held() {
    constexpr bool kKeeps = Shape::packs <= 1024;
    return forward_kernel<T, Shape, Cluster, kKeeps, Cluster, in_cluster<Cluster, How>>;
  }
  static auto swept() { return forward_swept_kernel<T, Swept>; }
};
template <class T, Lying How>
struct BackwardKernels {
  using Params = Backward<T>;
  using Ladder = BackwardLadder<How>;
  using Clustered = RowBlock<4, 1024>;
  template <class Shape, bool Cluster>
  static auto held() {
    return backward_kernel<T, Shape, Cluster, Cluster, in_cluster<Cluster, How>>;
  }
  static auto swept() { return backward_swept_kernel<T, Swept>; }
};

template <class Kernels>
void run(Context& ctx, typename Kernels::Params p, int64_t packs) {
  const bool held = Kernels::Ladder::pick(packs, [&](auto shape) {
    using Shape = decltype(shape);
    launch(kOp, ctx, Kernels::template held<Shape, false>(),
           {.blocks = ceil_div(p.rows, Shape::rows), .threads = block_threads<Shape>(packs), .early = true},
           p);
  });
  if (held) return;
  // Clusters, as many as run at a time: each takes one row after another.
  using Clustered = typename Kernels::Clustered;
  static ClusterRoom clusters;
  const auto kernel = Kernels::template held<Clustered, true>();
  if (const Cluster c =
          large_cluster<Clustered>(kOp, clusters, kernel, packs, 192, [](int) { return size_t(0); });
      c.blocks > 0) {
    p.counter = row_counter(kOp, ctx, p.rows, c.clusters);
    launch(kOp, ctx, kernel,
           {.blocks = std::min(p.rows, c.clusters) * c.blocks, .threads = c.threads, .cluster = c.blocks}, p);
    return;
  }
  static ClusterRoom swept_clusters;
  const int blocks = swept_clusters.of(kOp, Kernels::swept(), 8, Swept::block) > 0 ? 8 : 1;
  launch(kOp, ctx, Kernels::swept(),
         {.blocks = p.rows * blocks, .threads = Swept::block, .early = true, .cluster = blocks}, p);
}

// fn(how rows lie): those that are written, and whether those that are read lie as they do.
template <class Fn>
void with_lying(const Matrix& written, bool alike, Fn&& fn) {
  if (!alike) return fn(std::integral_constant<Lying, Lying::apart>{});
  packs_align(written.data, written.stride, written.cols, size_of(written.dtype))
      ? fn(std::integral_constant<Lying, Lying::packs>{})
      : fn(std::integral_constant<Lying, Lying::alike>{});
}

}  // namespace

void softmax_fwd(Context& ctx, const SoftmaxFwd& a) {
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    Forward<T> p{a.x.row<T>(0), end_of<T>(a.x), a.y.row<T>(0), a.x.rows,
                 a.x.stride,    a.y.stride,     int(a.x.cols)};
    const int64_t packs = most_packs(p.y, p.y_stride, p.cols);
    with_lying(a.y, rows_alike<T>(a.x, a.y), [&](auto how) { run<ForwardKernels<T, how>>(ctx, p, packs); });
  });
}

void softmax_bwd(Context& ctx, const SoftmaxBwd& a) {
  dispatch_float(kOp, "y", a.y.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    Backward<T> p{a.dy.row<T>(0), a.y.row<T>(0), end_of<T>(a.dy), end_of<T>(a.y), a.dx.row<T>(0),
                  a.y.rows,       a.dy.stride,   a.y.stride,      a.dx.stride,    int(a.y.cols)};
    const int64_t packs = most_packs(p.dx, p.dx_stride, p.cols);
    with_lying(a.dx, rows_alike<T>(a.y, a.dx) && rows_alike<T>(a.dy, a.dx),
               [&](auto how) { run<BackwardKernels<T, how>>(ctx, p, packs); });
  });
}

}  // namespace tigon::cuda
