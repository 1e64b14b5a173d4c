// CUDA backend of softmax.
//
// Bytes per element (b = element size): forward 2b, backward 3b. Instructions: about 16 per element forward, two of them ex2, and 8
// backward, against a budget of 31 and 46 at the speed of the memory (bf16).
//
// Variants
//   held    A row lies in the registers of one or several warps, of a block, or of a cluster of up to 8 blocks (sm_90 on).
//   looped  Longer rows: one sweep that finds maximum and sum (or the dot product), one that writes, out of L2.
// A row may start at any element: packs are counted from the 16-byte boundary before it (row_packs.cuh), so odd lengths move in
// packs too; where results lie differently from the inputs, element by element.
#include "tigon/base/cuda/cluster.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_packs.cuh"
#include "tigon/base/cuda/rows.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/softmax/softmax.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/softmax/softmax_math.inc"

constexpr const char* kOp = "softmax";
constexpr int kMaxCluster = 8, kLoopThreads = 1024;

template <class T>
struct Forward {
  const T* x;
  T* y;
  int64_t rows, x_stride, y_stride;
  int cols;
};
template <class T>
struct Backward {
  const T *dy, *y;
  T* dx;
  int64_t rows, dy_stride, y_stride, dx_stride;
  int cols;
};

// e^(x - m). The rounding of x * log2(e) shows in fp32 only.
template <class T>
__device__ __forceinline__ float exp_below(float x, float m) {
  if constexpr (sizeof(T) == 4)
    return exp(x - m);
  else
    return exp2_approx((x - m) * 1.44269504f);
}
// Nothing but -inf so far adds nothing; NaN and +inf survive.
__device__ __forceinline__ float reference(float m) { return m == -INFINITY ? 0.0f : m; }

// Pack k of `like` out of a row that may lie differently.
template <class T>
__device__ __forceinline__ uint4 fetch_like(const Row<const T>& like, const T* row, int k, float fill) {
  Row<const T> own(row, like.cols);
  if (own.lead == like.lead) return fetch(own, k, fill);
  Pack<T, Row<T>::N> pack;
#pragma unroll
  for (int j = 0; j < Row<T>::N; ++j) {
    int c = like.column(k) + j;
    pack.v[j] = like.has(c) ? row[c] : narrow<T>(fill);
  }
  return *reinterpret_cast<const uint4*>(&pack);
}
template <class T>
__device__ __forceinline__ void store_like(const Row<const T>& like, T* row, int k,
                                           const float (&v)[Row<T>::N]) {
  constexpr int N = Row<T>::N;
  Pack<T, N> pack;
  pack.set(v);
  int first = like.column(k);
  if (like.whole(k) && reinterpret_cast<uintptr_t>(row + first) % 16 == 0) {
    store(row + first, pack);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (like.has(first + j)) row[first + j] = pack.v[j];
  }
}

// The threads that share a row: reductions over all of them, in order.
template <class Shape, bool Cluster>
struct Team {
  float (*slots)[32];            // one array a reduction
  float (*remote)[kMaxCluster];  // likewise
  template <class Op>
  __device__ __forceinline__ float reduce(float x, int which) const {
    x = reduce_row<Op, Shape::threads>(x, slots[which]);
    if constexpr (Cluster) {
      unsigned n = cluster_size();
      if (threadIdx.x < n) put_remote(&remote[which][cluster_rank()], threadIdx.x, x);
      cluster_arrive();
      cluster_wait();
      x = remote[which][0];
      for (unsigned r = 1; r < n; ++r) x = Op::combine(x, remote[which][r]);
    }
    return x;
  }
};

// Pack i of this thread: the blocks of a cluster take turns, so that all have as much to do. And the row of its group.
template <class Shape, bool Cluster>
__device__ __forceinline__ int pack_of(int i) {
  int thread = Shape::rows == 1 ? threadIdx.x : threadIdx.x % Shape::threads;
  return thread + Shape::threads * (Cluster ? i * int(cluster_size()) + int(cluster_rank()) : i);
}
template <class Shape, bool Cluster>
__device__ __forceinline__ int64_t row_of_group() {
  if constexpr (Cluster) return blockIdx.x / cluster_size();
  return int64_t(blockIdx.x) * Shape::rows + threadIdx.x / Shape::threads;
}

template <class T, class Shape, bool Cluster>
__global__ __launch_bounds__(Shape::block) void forward_kernel(const __grid_constant__ Forward<T> p) {
  constexpr int N = Row<T>::N;
  __shared__ float slots[2][32], remote[2][kMaxCluster];
  const Team<Shape, Cluster> team{slots, remote};
  if constexpr (Cluster) cluster_arrive();  // every block has started before one writes into another
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int64_t row = row_of_group<Shape, Cluster>();
  const bool live = row < p.rows;
  const Row<const T> x(p.x + (live ? row : 0) * p.x_stride, p.cols);
  uint4 held[Shape::held];
  const T none = narrow<T>(-INFINITY);
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    int k = pack_of<Shape, Cluster>(i);
    if (live && k < x.packs) {
      held[i] = fetch(x, k, -INFINITY);
    } else {
      Pack<T, N> pack;
#pragma unroll
      for (int j = 0; j < N; ++j) pack.v[j] = none;
      held[i] = *reinterpret_cast<const uint4*>(&pack);
    }
  }
  if constexpr (Cluster) cluster_wait();
  float m = -INFINITY, s = 0.0f, v[N];
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    unpack<T>(held[i], v);
#pragma unroll
    for (int j = 0; j < N; ++j) m = fmaxf(m, v[j]);
  }
  m = team.template reduce<Max>(m, 0);
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    unpack<T>(held[i], v);
#pragma unroll
    for (int j = 0; j < N; ++j) s += exp_below<T>(v[j], m);
  }
  const float scale = 1.0f / team.template reduce<Sum>(s, 1);
  if (!live) return;
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    int k = pack_of<Shape, Cluster>(i);
    if (k >= x.packs) continue;
    unpack<T>(held[i], v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = exp_below<T>(v[j], m) * scale;
    store_like(x, p.y + row * p.y_stride, k, v);
  }
}

template <class T>
__global__ __launch_bounds__(kLoopThreads) void forward_looped_kernel(const __grid_constant__ Forward<T> p) {
  constexpr int N = Row<T>::N;
  __shared__ float slots[2][32];
  const Row<const T> x(p.x + blockIdx.x * p.x_stride, p.cols);
  float m = -INFINITY, s = 0.0f, v[N];
  for (int k = threadIdx.x; k < x.packs; k += kLoopThreads) {
    unpack<T>(fetch(x, k, -INFINITY), v);
    float top = m;
#pragma unroll
    for (int j = 0; j < N; ++j) top = fmaxf(top, v[j]);
    if (top > m) s *= exp_below<T>(m, reference(top)), m = top;
#pragma unroll
    for (int j = 0; j < N; ++j) s += exp_below<T>(v[j], reference(m));
  }
  const float top = reduce_row<Max, kLoopThreads>(m, slots[0]);
  s = reduce_row<Sum, kLoopThreads>(s * exp_below<T>(m, reference(top)), slots[1]);
  const float scale = 1.0f / s;
  for (int k = threadIdx.x; k < x.packs; k += kLoopThreads) {
    unpack<T>(fetch(x, k, -INFINITY), v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = exp_below<T>(v[j], top) * scale;
    store_like(x, p.y + blockIdx.x * p.y_stride, k, v);
  }
}

template <class T>
__device__ __forceinline__ float dot(const uint4& y, const uint4& dy, float s) {
  float a[Row<T>::N], b[Row<T>::N];
  unpack<T>(y, a), unpack<T>(dy, b);
#pragma unroll
  for (int j = 0; j < Row<T>::N; ++j) s = fma(a[j], b[j], s);
  return s;
}
template <class T>
__device__ __forceinline__ void write_dx(const Backward<T>& p, const Row<const T>& y, int64_t row, int k,
                                         const uint4& yk, const uint4& dyk, float c) {
  float a[Row<T>::N], b[Row<T>::N];
  unpack<T>(yk, a), unpack<T>(dyk, b);
#pragma unroll
  for (int j = 0; j < Row<T>::N; ++j) a[j] = softmax_dx(b[j], a[j], c);
  store_like(y, p.dx + row * p.dx_stride, k, a);
}

template <class T, class Shape, bool Cluster>
__global__ __launch_bounds__(Shape::block) void backward_kernel(const __grid_constant__ Backward<T> p) {
  __shared__ float slots[1][32], remote[1][kMaxCluster];
  const Team<Shape, Cluster> team{slots, remote};
  if constexpr (Cluster) cluster_arrive();
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int64_t row = row_of_group<Shape, Cluster>();
  const bool live = row < p.rows;
  const Row<const T> y(p.y + (live ? row : 0) * p.y_stride, p.cols);
  uint4 held[2][Shape::held] = {};
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    int k = pack_of<Shape, Cluster>(i);
    if (!live || k >= y.packs) continue;
    held[0][i] = fetch(y, k, 0.0f);
    held[1][i] = fetch_like(y, p.dy + row * p.dy_stride, k, 0.0f);
  }
  if constexpr (Cluster) cluster_wait();
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) s = dot<T>(held[0][i], held[1][i], s);
  s = team.template reduce<Sum>(s, 0);
  if (!live) return;
#pragma unroll
  for (int i = 0; i < Shape::held; ++i) {
    int k = pack_of<Shape, Cluster>(i);
    if (k < y.packs) write_dx(p, y, row, k, held[0][i], held[1][i], s);
  }
}

template <class T>
__global__ __launch_bounds__(kLoopThreads) void backward_looped_kernel(
    const __grid_constant__ Backward<T> p) {
  __shared__ float slots[32];
  const Row<const T> y(p.y + blockIdx.x * p.y_stride, p.cols);
  const T* dy = p.dy + blockIdx.x * p.dy_stride;
  float s = 0.0f;
  for (int k = threadIdx.x; k < y.packs; k += kLoopThreads)
    s = dot<T>(fetch(y, k, 0.0f), fetch_like(y, dy, k, 0.0f), s);
  s = reduce_row<Sum, kLoopThreads>(s, slots);
  for (int k = threadIdx.x; k < y.packs; k += kLoopThreads)
    write_dx(p, y, blockIdx.x, k, fetch(y, k, 0.0f), fetch_like(y, dy, k, 0.0f), s);
}

// By the packs of a row. Longer ones take a cluster of blocks of 1024 threads with four packs each (of both inputs).
using Clustered = RowShape<1024, 4>;
using ForwardLadder =
    RowShapes<RowShape<8, 1>, RowShape<16, 1>, RowShape<32, 1>, RowShape<32, 2>, RowShape<32, 4>,
              RowShape<128, 2>, RowShape<128, 4>, RowShape<256, 4>, RowShape<512, 4>, RowShape<1024, 4>>;
using BackwardLadder =
    RowShapes<RowShape<8, 1>, RowShape<16, 1>, RowShape<32, 1>, RowShape<32, 2>, RowShape<128, 1>,
              RowShape<128, 2>, RowShape<256, 2>, RowShape<512, 2>, RowShape<1024, 2>>;

// fn(shape, std::bool_constant<cluster>, blocks a row) for the first that holds a row; false when none does.
template <class Ladder, class Fn>
bool pick(int64_t packs, Fn&& fn) {
  if (Ladder::pick(packs, [&](auto shape) { fn(shape, std::false_type{}, 1); })) return true;
  int64_t blocks = ceil_div(packs, Clustered::packs);
  if (blocks > kMaxCluster || device_facts().capability < 90) return false;
  fn(Clustered{}, std::true_type{}, blocks <= 2 ? 2 : blocks <= 4 ? 4 : kMaxCluster);
  return true;
}

// The packs that a row touches at most, wherever it starts.
template <class T>
int64_t most_packs(const T* row, int64_t stride, int64_t cols) {
  constexpr int N = 16 / sizeof(T);
  return packs_align(row, stride, cols, sizeof(T)) ? cols / N : ceil_div(cols + N - 1, N);
}

}  // namespace

void softmax_fwd(Context& ctx, const SoftmaxFwd& a) {
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    Forward<T> p{a.x.row<T>(0), a.y.row<T>(0), a.x.rows, a.x.stride, a.y.stride, int(a.x.cols)};
    bool held =
        pick<ForwardLadder>(most_packs(p.x, p.x_stride, p.cols), [&](auto shape, auto cluster, int blocks) {
          using Shape = decltype(shape);
          launch(kOp, ctx, forward_kernel<T, Shape, cluster>,
                 {.blocks = ceil_div(p.rows, Shape::rows) * blocks,
                  .threads = Shape::block,
                  .early = true,
                  .cluster = blocks},
                 p);
        });
    if (!held) launch(kOp, ctx, forward_looped_kernel<T>, {.blocks = p.rows, .threads = kLoopThreads}, p);
  });
}

void softmax_bwd(Context& ctx, const SoftmaxBwd& a) {
  dispatch_float(kOp, "y", a.y.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    Backward<T> p{a.dy.row<T>(0), a.y.row<T>(0), a.dx.row<T>(0), a.y.rows,
                  a.dy.stride,    a.y.stride,    a.dx.stride,    int(a.y.cols)};
    bool held =
        pick<BackwardLadder>(most_packs(p.y, p.y_stride, p.cols), [&](auto shape, auto cluster, int blocks) {
          using Shape = decltype(shape);
          launch(kOp, ctx, backward_kernel<T, Shape, cluster>,
                 {.blocks = ceil_div(p.rows, Shape::rows) * blocks,
                  .threads = Shape::block,
                  .early = true,
                  .cluster = blocks},
                 p);
        });
    if (!held) launch(kOp, ctx, backward_looped_kernel<T>, {.blocks = p.rows, .threads = kLoopThreads}, p);
  });
}

}  // namespace tigon::cuda
