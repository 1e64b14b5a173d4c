// CUDA backend of softmax.
//
// Bytes per element (b = element size): forward 2b, backward 3b.
// Instructions per element: about 9 forward, with one ex2 (two in rows past 1024 vectors), 9
// backward; the memory-bound budget is 27 and 41 (bf16).
//
// Variants
//   registers  A row is held in the registers of some lanes, a warp, a CTA, or a cluster of up to
//              16 CTAs (sm_90), with all of its loads in flight together. Clusters are persistent:
//              each vector of the next row is requested as soon as this row's vector is stored.
//   looped     Longer rows: one pass finds maximum and sum (or the dot product), one writes, out of
//              L2.
// A row may begin at any element. Vectors are those of the output; inputs of other offsets are
// shifted (aligned_row.cuh).
#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/cuda/row_view.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/softmax/softmax.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/softmax/softmax_math.inc"

constexpr const char* kOp = "softmax";

template <class T, RowAlignment kAlignment>
using Loader = AlignedRowLoader<T, kAlignment == RowAlignment::any, kAlignment == RowAlignment::vectorized>;

template <class T>
struct Forward {
  const T *x, *x_end;
  T* y;
  int64_t rows, x_stride, y_stride;
  int cols;
  // Counts the rows drawn by persistent CTAs; zero at launch. Null: static distribution.
  int* counter = nullptr;
  // For hide_from_compiler().
  uint32_t opaque_zero = 0;

  // Rows past the end load nothing.
  template <RowAlignment kAlignment>
  __device__ __forceinline__ auto row_of_y(int64_t r) const {
    return AlignedRow<T, kAlignment == RowAlignment::vectorized>(y + (r < rows ? r : 0) * y_stride, cols);
  }
  template <RowAlignment kAlignment>
  __device__ __forceinline__ auto row_of_x(const AlignedRow<T, kAlignment == RowAlignment::vectorized>& out,
                                           int64_t r) const {
    return Loader<T, kAlignment>(out, x + (r < rows ? r : 0) * x_stride, x_end, kMinusInf<T>, r < rows);
  }
};
template <class T>
struct Backward {
  const T *dy, *y, *dy_end, *y_end;
  T* dx;
  int64_t rows, dy_stride, y_stride, dx_stride;
  int cols;
  int* counter = nullptr;
  uint32_t opaque_zero = 0;
};

// A row of the backward, in the vectors of dx.
template <class T, RowAlignment kAlignment>
struct BackwardRow {
  AlignedRow<T, kAlignment == RowAlignment::vectorized> dx;
  Loader<T, kAlignment> y, dy;

  __device__ __forceinline__ BackwardRow(const Backward<T>& p, int64_t r)
      : BackwardRow(p, r < p.rows ? r : 0, r < p.rows) {}
  __device__ __forceinline__ BackwardRow(const Backward<T>& p, int64_t r, bool valid)
      : dx(p.dx + r * p.dx_stride, p.cols),
        y(dx, p.y + r * p.y_stride, p.y_end, 0, valid),
        dy(dx, p.dy + r * p.dy_stride, p.dy_end, 0, valid) {}

  // a, b: vectors of y and dy.
  template <class Index, int VecsPerThread>
  __device__ __forceinline__ void load(Index vec_index, uint4 (&a)[VecsPerThread],
                                       uint4 (&b)[VecsPerThread]) const {
#pragma unroll
    for (int i = 0; i < VecsPerThread; ++i) a[i] = y.load(vec_index(i)), b[i] = dy.load(vec_index(i));
  }
  template <class Index, int VecsPerThread>
  __device__ __forceinline__ float dot(Index vec_index, uint4 (&a)[VecsPerThread],
                                       uint4 (&b)[VecsPerThread]) const {
    y.trim(dx, a, vec_index);
    dy.trim(dx, b, vec_index);
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < VecsPerThread; ++i) {
      // Vectors have dependency chains of their own, for instruction-level parallelism.
      float u[AlignedRow<T>::N], v[AlignedRow<T>::N], of_vec = 0.0f;
      unpack<T>(a[i], u), unpack<T>(b[i], v);
#pragma unroll
      for (int j = 0; j < AlignedRow<T>::N; ++j) of_vec = fma(u[j], v[j], of_vec);
      s += of_vec;
    }
    return s;
  }
  __device__ __forceinline__ void write(int k, const uint4& a, const uint4& b, float c) const {
    float u[AlignedRow<T>::N], v[AlignedRow<T>::N];
    unpack<T>(a, u), unpack<T>(b, v);
#pragma unroll
    for (int j = 0; j < AlignedRow<T>::N; ++j) u[j] = softmax_dx(v[j], u[j], c);
    store_vec(dx, k, u);
  }
};

template <class T, int K>
__device__ __forceinline__ float max_of(const uint4 (&q)[K]) {
  uint32_t top = max_words<T>(q[0]);
#pragma unroll
  for (int i = 1; i < K; ++i) top = max_words<T>(top, max_words<T>(q[i]));
  return max_of_word<T>(top);
}
// e = e^(x - m) of all elements; returns their sum.
template <class T, int K>
__device__ __forceinline__ float exponentials(const uint4 (&q)[K], float m, float (&e)[K][AlignedRow<T>::N]) {
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    unpack<T>(q[i], e[i]);
    float of_vec = 0.0f;
#pragma unroll
    for (int j = 0; j < AlignedRow<T>::N; ++j) {
      e[i][j] = exp_minus_max<T>(e[i][j], finite_max(m));
      of_vec += e[i][j];
    }
    s += of_vec;
  }
  return s;
}
// In fp32 the threads agree on the maximum before they sum: rescaling partial sums costs an ulp.
template <class T>
constexpr bool kMaxFirst = sizeof(T) == 4;

// kReuseExp: the exponentials stay in registers; else they are computed twice. kPersistent: CTAs
// loop over rows and request the next row's vectors as they store.
template <class T, class Config, bool kCluster, bool kReuseExp, bool kPersistent, RowAlignment kAlignment>
__global__ __launch_bounds__(Config::value.max_threads, Config::value.min_blocks_per_sm) void forward_kernel(
    const __grid_constant__ Forward<T> p) {
  constexpr RowConfig kConfig = Config::value;
  constexpr int N = AlignedRow<T>::N, kVecsPerThread = kConfig.vecs_per_thread;
  using Reducer = RowReducer<kConfig, kCluster, kPersistent, OnlineSoftmax<T>>;
  __shared__ ReduceStorage<typename Reducer::Payload> storage;
  Reducer reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  auto vec_index = [&](int i) { return reducer.vec_index(i); };
  int64_t r = reducer.first_row(), following = kPersistent ? r + reducer.step() : p.rows;
  auto y = p.template row_of_y<kAlignment>(r);
  auto x = p.template row_of_x<kAlignment>(y, r);
  uint4 q[kVecsPerThread];
#pragma unroll
  for (int i = 0; i < kVecsPerThread; ++i) q[i] = x.load(vec_index(i));
  reducer.wait_for_cluster();
  for (;;) {
    int64_t later = following + reducer.step();
    const int drawn_row = reducer.draw_row(p.counter);
    x.trim(y, q, vec_index);
    float e[kVecsPerThread][N];
    OnlineSoftmax<T> own{max_of<T>(q), 0.0f};
    if (kMaxFirst<T>) own.m = reducer.all_reduce(own, drawn_row, later).m;
    own.s = exponentials<T>(q, own.m, e);
    const OnlineSoftmax<T> all = reducer.all_reduce(own, kMaxFirst<T> ? -1 : drawn_row, later);
    const auto next_y = p.template row_of_y<kAlignment>(following);
    const auto next_x = p.template row_of_x<kAlignment>(next_y, following);
    const float scale = (kReuseExp && !kMaxFirst<T> ? exp_minus_max<T>(own.m, all.m) : 1.0f) / all.s;
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (!kReuseExp) {
        unpack<T>(hide_from_compiler(q[i], p.opaque_zero), e[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) e[i][j] = exp_minus_max<T>(e[i][j], all.m);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) e[i][j] *= scale;
      if (r < p.rows && vec_index(i) < y.vecs) store_vec(y, vec_index(i), e[i]);
      if (kPersistent) q[i] = next_x.load(vec_index(i));
    }
    r = following, following = later;
    if (!kPersistent || r >= p.rows) break;
    x = next_x, y = next_y;
  }
  if constexpr (kCluster) cluster_arrive();
  reducer.wait_for_cluster();
}

// Longer rows, by a cluster per row: one pass finds maximum and sum, one writes, out of L2.
template <class T, class Config>
__global__ __launch_bounds__(
    Config::value.max_threads,
    Config::value.min_blocks_per_sm) void forward_looped_kernel(const __grid_constant__ Forward<T> p) {
  constexpr RowConfig kConfig = Config::value;
  constexpr int N = AlignedRow<T>::N, kVecsPerThread = kConfig.vecs_per_thread;
  __shared__ ReduceStorage<OnlineSoftmax<T>> storage;
  RowReducer<kConfig, true, false, OnlineSoftmax<T>> reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int64_t r = reducer.first_row();
  const auto y = p.template row_of_y<RowAlignment::any>(r);
  const auto x = p.template row_of_x<RowAlignment::any>(y, r);
  const int step = reducer.threads * reducer.blocks * kVecsPerThread;
  uint4 q[kVecsPerThread];
  float e[kVecsPerThread][N];
  auto load = [&](int first) {
    auto vec_index = [&](int i) { return first + reducer.vec_index(i); };
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) q[i] = x.load(vec_index(i));
    x.trim(y, q, vec_index);
  };
  reducer.wait_for_cluster();
  OnlineSoftmax<T> a = OnlineSoftmax<T>::identity();
  for (int first = 0; first < y.vecs; first += step) {
    load(first);
    OnlineSoftmax<T> b{max_of<T>(q), 0.0f};
    b.s = exponentials<T>(q, b.m, e);
    const float top = fmaxf(a.m, b.m);
    if (a.m != top) a.s *= exp_minus_max<T>(a.m, top);
    if (b.m != top) b.s *= exp_minus_max<T>(b.m, top);
    a.m = top, a.s += b.s;
  }
  int phase = 0;
  if (kMaxFirst<T>) {
    const float top = all_reduce_row<0, true>(OnlineSoftmax<T>{a.m, 0.0f}, storage, phase++).m;
    if (a.m != top) a.s *= exp_minus_max<T>(a.m, top);
    a.m = top;
  }
  a = all_reduce_row<0, true>(a, storage, phase);
  const float scale = 1.0f / a.s;
  for (int first = (y.vecs - 1) / step * step; first >= 0; first -= step) {
    load(first);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      unpack<T>(q[i], e[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) e[i][j] = exp_minus_max<T>(e[i][j], a.m) * scale;
      const int k = first + reducer.vec_index(i);
      if (k < y.vecs) store_vec(y, k, e[i]);
    }
  }
  cluster_arrive();
  reducer.wait_for_cluster();
}

template <class T, class Config, bool kCluster, bool kPersistent, RowAlignment kAlignment>
__global__ __launch_bounds__(Config::value.max_threads, Config::value.min_blocks_per_sm) void backward_kernel(
    const __grid_constant__ Backward<T> p) {
  constexpr RowConfig kConfig = Config::value;
  constexpr int kVecsPerThread = kConfig.vecs_per_thread;
  using Reducer = RowReducer<kConfig, kCluster, kPersistent, SumArray<1>>;
  __shared__ ReduceStorage<typename Reducer::Payload> storage;
  Reducer reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  auto vec_index = [&](int i) { return reducer.vec_index(i); };
  int64_t r = reducer.first_row(), following = kPersistent ? r + reducer.step() : p.rows;
  BackwardRow<T, kAlignment> row(p, r);
  uint4 a[kVecsPerThread], b[kVecsPerThread];
  row.load(vec_index, a, b);
  reducer.wait_for_cluster();
  for (;;) {
    int64_t later = following + reducer.step();
    const int drawn_row = reducer.draw_row(p.counter);
    const float s = reducer.all_reduce(SumArray<1>{{row.dot(vec_index, a, b)}}, drawn_row, later).s[0];
    const BackwardRow<T, kAlignment> next(p, following);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i) {
      if (r < p.rows && vec_index(i) < row.dx.vecs) {
        if (kVecsPerThread > 2)
          a[i] = hide_from_compiler(a[i], p.opaque_zero), b[i] = hide_from_compiler(b[i], p.opaque_zero);
        row.write(vec_index(i), a[i], b[i], s);
      }
      if (kPersistent) a[i] = next.y.load(vec_index(i)), b[i] = next.dy.load(vec_index(i));
    }
    r = following, following = later;
    if (!kPersistent || r >= p.rows) break;
    row = next;
  }
  if constexpr (kCluster) cluster_arrive();
  reducer.wait_for_cluster();
}

template <class T, class Config>
__global__ __launch_bounds__(
    Config::value.max_threads,
    Config::value.min_blocks_per_sm) void backward_looped_kernel(const __grid_constant__ Backward<T> p) {
  constexpr RowConfig kConfig = Config::value;
  constexpr int kVecsPerThread = kConfig.vecs_per_thread;
  __shared__ ReduceStorage<SumArray<1>> storage;
  RowReducer<kConfig, true, false, SumArray<1>> reducer(storage);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const BackwardRow<T, RowAlignment::any> row(p, reducer.first_row());
  const int vecs = row.dx.vecs, step = reducer.threads * reducer.blocks * kVecsPerThread;
  uint4 a[kVecsPerThread], b[kVecsPerThread];
  float s = 0.0f;
  for (int first = 0; first < vecs; first += step) {
    auto vec_index = [&](int i) { return first + reducer.vec_index(i); };
    row.load(vec_index, a, b);
    s += row.dot(vec_index, a, b);
  }
  reducer.wait_for_cluster();
  s = all_reduce_row<0, true>(SumArray<1>{{s}}, storage, 0).s[0];
  for (int first = (vecs - 1) / step * step; first >= 0; first -= step) {
    auto vec_index = [&](int i) { return first + reducer.vec_index(i); };
    row.load(vec_index, a, b);
    row.dot(vec_index, a, b);
#pragma unroll
    for (int i = 0; i < kVecsPerThread; ++i)
      if (vec_index(i) < vecs) row.write(vec_index(i), a[i], b[i], s);
  }
  cluster_arrive();
  reducer.wait_for_cluster();
}

// Configurations by row length. Beyond 1024 vectors the exponentials do not fit in registers and are
// computed twice. Rows that are not vectorized are rare and have few, which fp16 rows, rare too, take.
constexpr RowConfig lanes(int threads_per_row, int vecs_per_thread) {
  return several_rows({.threads_per_row = threads_per_row, .vecs_per_thread = vecs_per_thread});
}
constexpr RowConfig cta(int vecs_per_thread, int max_threads, int min_blocks_per_sm = 1) {
  return {
      .vecs_per_thread = vecs_per_thread, .max_threads = max_threads, .min_blocks_per_sm = min_blocks_per_sm};
}
constexpr RowConfigs forward_configs(RowAlignment alignment) {
  if (alignment == RowAlignment::any)
    return RowConfigs(lanes(8, 2), lanes(32, 4), cta(4, 512, 3), cta(8, 1024));
  return RowConfigs(lanes(8, 2), lanes(16, 2), lanes(32, 2), lanes(32, 4), cta(2, 512, 2), cta(8, 1024));
}
constexpr RowConfigs backward_configs(RowAlignment alignment) {
  if (alignment == RowAlignment::any) return RowConfigs(lanes(8, 2), lanes(32, 4), cta(4, 1024));
  return RowConfigs(lanes(8, 2), lanes(16, 2), lanes(32, 2), lanes(32, 4), cta(2, 512), cta(4, 1024));
}

template <class T>
const T* end_of(const Matrix& m) {
  return end_of_rows(m.row<const T>(0), m.stride, m.rows, m.cols);
}

// The configuration of the looped kernels.
constexpr RowConfig kLooped = cta(4, 1024);

// Clusters do not distinguish vectorized rows: the work per row is negligible in long rows.
template <bool kCluster, RowAlignment kAlignment>
constexpr RowAlignment cluster_alignment =
    kCluster && kAlignment == RowAlignment::vectorized ? RowAlignment::same_offset : kAlignment;

// The kernels of one direction for rows of T.
template <class T, RowAlignment kAlignment>
struct ForwardKernels {
  using Params = Forward<T>;
  static constexpr RowConfigs kConfigs = forward_configs(kAlignment);
  static constexpr RowConfig kClusterConfig = cta(8, 1024);
  template <RowConfig kConfig, bool kCluster>
  static auto register_kernel() {
    constexpr bool kReusesExp = kConfig.max_vecs() <= 1024;
    return forward_kernel<T, ConfigType<kConfig>, kCluster, kReusesExp, kCluster,
                          cluster_alignment<kCluster, kAlignment>>;
  }
  static auto looped_kernel() { return forward_looped_kernel<T, ConfigType<kLooped>>; }
};
template <class T, RowAlignment kAlignment>
struct BackwardKernels {
  using Params = Backward<T>;
  static constexpr RowConfigs kConfigs = backward_configs(kAlignment);
  static constexpr RowConfig kClusterConfig = cta(4, 1024);
  template <RowConfig kConfig, bool kCluster>
  static auto register_kernel() {
    return backward_kernel<T, ConfigType<kConfig>, kCluster, kCluster,
                           cluster_alignment<kCluster, kAlignment>>;
  }
  static auto looped_kernel() { return backward_looped_kernel<T, ConfigType<kLooped>>; }
};

template <class Kernels>
void run(Context& ctx, typename Kernels::Params p, int64_t vecs) {
  if (const int config = select_config(Kernels::kConfigs, vecs); config >= 0)
    return with_config<Kernels::kConfigs>(config, [&]<RowConfig kConfig>() {
      launch(kOp, ctx, Kernels::template register_kernel<kConfig, false>(),
             {.blocks = ceil_div(p.rows, kConfig.rows_per_block),
              .threads = kConfig.block_threads(vecs),
              .pdl = true},
             p);
    });
  // Clusters that are all resident: each takes one row after another.
  constexpr RowConfig kConfig = Kernels::kClusterConfig;
  static OccupancyCache occupancy;
  const auto kernel = Kernels::template register_kernel<kConfig, true>();
  if (const ClusterShape c = largest_cluster(kOp, occupancy, entry_of(kernel), kConfig, vecs, 192, no_shared);
      c.blocks > 0) {
    p.counter = make_row_counter(kOp, ctx, p.rows, c.clusters);
    launch(kOp, ctx, kernel,
           {.blocks = std::min(p.rows, c.clusters) * c.blocks, .threads = c.threads, .cluster = c.blocks}, p);
    return;
  }
  static OccupancyCache looped_occupancy;
  const int blocks =
      looped_occupancy.max_active(kOp, Kernels::looped_kernel(), 8, kLooped.max_threads) > 0 ? 8 : 1;
  launch(kOp, ctx, Kernels::looped_kernel(),
         {.blocks = p.rows * blocks, .threads = kLooped.max_threads, .pdl = true, .cluster = blocks}, p);
}

// `same_offset`: the inputs have the offsets of the output, row by row. Clusters do not distinguish vectorized rows.
template <template <class, RowAlignment> class Kernels, class T, class Params>
void run(Context& ctx, const Params& p, const Matrix& written, bool same_offset) {
  using Vectorized = Kernels<T, RowAlignment::vectorized>;
  const bool vectorizable = is_vectorizable(written.data, written.stride, written.cols, sizeof(T));
  const int64_t vecs = max_vecs_of_row(written.row<T>(0), written.stride, written.cols);
  if constexpr (!std::is_same_v<T, __half>)
    if (same_offset && (vectorizable || select_config(Vectorized::kConfigs, vecs) < 0))
      return run<Vectorized>(ctx, p, vecs);
  run<Kernels<T, RowAlignment::any>>(ctx, p, vecs);
}

}  // namespace

void softmax_fwd(Context& ctx, const SoftmaxFwd& a) {
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    Forward<T> p{a.x.row<T>(0), end_of<T>(a.x), a.y.row<T>(0), a.x.rows,
                 a.x.stride,    a.y.stride,     int(a.x.cols)};
    run<ForwardKernels, T>(ctx, p, a.y, same_row_offsets<T>(a.x, a.y));
  });
}

void softmax_bwd(Context& ctx, const SoftmaxBwd& a) {
  dispatch_float(kOp, "y", a.y.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    Backward<T> p{a.dy.row<T>(0), a.y.row<T>(0), end_of<T>(a.dy), end_of<T>(a.y), a.dx.row<T>(0),
                  a.y.rows,       a.dy.stride,   a.y.stride,      a.dx.stride,    int(a.y.cols)};
    run<BackwardKernels, T>(ctx, p, a.dx, same_row_offsets<T>(a.y, a.dx) && same_row_offsets<T>(a.dy, a.dx));
  });
}

}  // namespace tigon::cuda
