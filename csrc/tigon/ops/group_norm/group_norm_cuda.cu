// The CUDA backend of GroupNorm moves 2b bytes per element forward and 3b backward (b = element size), and
// also 8 bytes of statistics per section, and 8 bytes of partial sums per sample and piece of a channel. An
// element takes about 9 instructions forward and 12 backward; the memory-bound budget is 27 and 41 (bf16). A
// section is one group of one sample, contiguous in memory. The registers of a CTA or a cluster hold it from
// when it is read until it is written; several CTAs per SM overlap loads and stores. Its channels are divided
// into pieces, each processed by some adjacent lanes: a piece has one weight and one bias, and its sums
// contribute to one channel's gradients. Sections that are too long, and those for which it is faster, take
// several iterations and are read a second time, from cache.
#include <algorithm>

#include "tigon/base/cuda/norm_forward.cuh"
#include "tigon/ops/group_norm/group_norm.h"
#include "tigon/ops/group_norm/group_norm_partition.cuh"

namespace tigon::cuda {
namespace {

#include "tigon/base/norm_math.inc"
#include "tigon/ops/group_norm/group_norm_math.inc"

constexpr const char* kOp = "group_norm";

// Holds the count, the mean, and the sum of squared deviations from the mean.
struct alignas(16) Moments {
  float n, mean, square, unused;
  __device__ static Moments identity() { return {0.0f, 0.0f, 0.0f, 0.0f}; }
  __device__ __forceinline__ void add(const Moments& b) {
    const float all = n + b.n, delta = b.mean - mean, coord = __fdividef(b.n, all);
    mean = fma(delta, coord, mean);
    square += fma(delta * coord * n, delta, b.square);
    n = all;
  }
  // Combines the lanes of a warp, which have summed deviations from `pivot` and their squares.
  __device__ static __forceinline__ Moments reduce_warp(float n, float pivot, float sum, float square) {
    n = float(__reduce_add_sync(0xffffffffu, unsigned(n)));
    sum = reduce_lanes<Sum, 32>(sum), square = reduce_lanes<Sum, 32>(square);
    const float off = __fdividef(sum, n);
    return n > 0.0f ? Moments{n, pivot + off, fma(-off, sum, square), 0.0f} : identity();
  }
  __device__ static __forceinline__ Moments merge(const Moments* list, int entries) {
    const int lane = int(threadIdx.x % 32);
    float n = 0.0f, off = 0.0f, square = 0.0f;
    const float pivot = list[0].mean;
#pragma unroll 2
    for (int i = lane; i < entries; i += 32) n += list[i].n, off = fma(list[i].n, list[i].mean - pivot, off);
    n = float(__reduce_add_sync(0xffffffffu, unsigned(n)));
    off = reduce_lanes<Sum, 32>(off);
    const float mean = pivot + __fdividef(off, n);
#pragma unroll 2
    for (int i = lane; i < entries; i += 32) {
      const float delta = mean - list[i].mean;
      square += fma(list[i].n * delta, delta, list[i].square);
    }
    return {n, mean, reduce_lanes<Sum, 32>(square), 0.0f};
  }
};
struct alignas(8) TwoSums {
  float a, b;
  __device__ static TwoSums identity() { return {0.0f, 0.0f}; }
  __device__ __forceinline__ void add(const TwoSums& o) { a += o.a, b += o.b; }
  // Adds the values of the lane at this distance.
  __device__ __forceinline__ void add_lanes(int step) {
    a += __shfl_xor_sync(0xffffffffu, a, step);
    b += __shfl_xor_sync(0xffffffffu, b, step);
  }
  __device__ static __forceinline__ TwoSums merge(const TwoSums* list, int entries) {
    TwoSums all = identity();
#pragma unroll 4
    for (int i = int(threadIdx.x % 32); i < entries; i += 32) all.add(list[i]);
    return {reduce_lanes<Sum, 32>(all.a), reduce_lanes<Sum, 32>(all.b)};
  }
};

// A parameter has one element per channel, of T or float.
template <class T>
struct ByChannel {
  // If null, all elements are default_value.
  const void* data;
  bool wide;
  float default_value;
  __device__ __forceinline__ float operator()(int64_t channel) const {
    if (data == nullptr) return default_value;
    return wide ? static_cast<const float*>(data)[channel] : widen(static_cast<const T*>(data)[channel]);
  }
};
template <class T>
ByChannel<T> by_channel(const Vector& v, float default_value) {
  return {v.data, v.dtype == DType::f32, default_value};
}

template <class T>
struct GroupNormForward {
  const T* x;
  T* y;
  int64_t x_stride, y_stride;
  ByChannel<T> weight, bias;
  float *mean, *rstd;
  float eps;
  Divider groups;
  Partition partition;
};
template <class T>
struct GroupNormBackward {
  const T *x, *dy;
  // May be null.
  T* dx;
  int64_t x_stride, dy_stride, dx_stride;
  ByChannel<T> weight;
  const float *mean, *rstd;
  // [samples * pieces, 2, groups * channels]; may be null.
  float* partials;
  Divider groups;
  Partition partition;
};

// True if the product of mean and weight is subtracted from the bias instead of the mean from every element:
// at most 2^-18 of a deviation is then lost before rounding to 16 bits.
template <class T>
__device__ __forceinline__ bool folds_mean(float mean, float rstd) {
  return sizeof(T) == 2 && fabsf(mean) * rstd < 64.0f;
}

// Says how many vectors of a piece a lane holds, for long and short channels, and how many CTAs per SM the
// registers allow. The work per piece costs a warp as much as four vectors.
template <bool Long>
constexpr int kForwardVecs = Long ? 16 : 4;
template <int N, bool Long>
constexpr int kBackwardVecs = N == 1 ? 16
                              : Long ? 8
                                     : 4;
template <bool Long>
constexpr int kMinBlocks = Long ? 2 : 3;
// A channel is long from this many vectors on.
constexpr int64_t kLongChannel = 256;

template <class T, bool Long>
__global__ __launch_bounds__(kSectionThreads, kMinBlocks<Long>) void forward_kernel(
    const __grid_constant__ GroupNormForward<T> p) {
  constexpr int N = 16 / sizeof(T), kVecsPerThread = kForwardVecs<Long>;
  __shared__ SectionReduceStorage<Moments> storage;
  storage.init(p.partition);
  const ThreadCoord coord(p.partition, p.groups);
  const int64_t size = p.partition.size() * N, channel = int64_t(coord.group) * p.partition.channels;
  const float inv_size = 1.0f / float(size);
  const T* const from[1] = {coord.part(p.x, p.x_stride, size)};
  T* const y = coord.part(p.y, p.y_stride, size);
  const Piece first = coord.piece(0);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Vec<T, N> x[kVecsPerThread][1];
  load_piece(coord, first, from, x);
  const float first_weight = p.weight(channel + first.channel), first_bias = p.bias(channel + first.channel);
  storage.wait_for_cluster(p.partition);
  Moments own = Moments::identity();
  for (int t = 0, steps_done = 0; t < p.partition.iterations; ++t) {
    const Piece piece = t == 0 ? first : coord.piece(t);
    if (t > 0) load_piece(coord, piece, from, x);
    // Deviations are taken from the mean of the warp's first vector, so that little cancels.
    float pivot = 0.0f, sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) pivot += x[0][0][j];
    pivot = __shfl_sync(0xffffffffu, pivot * (1.0f / N), 0);
#pragma unroll
    for (int r = 0; r < kVecsPerThread; ++r) {
      if (r >= piece.vecs) break;
      float vec_sum = 0.0f, vec_square = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float v = x[r][0][j] - pivot;
        vec_sum += v;
        vec_square = fma(v, v, vec_square);
      }
      sum += vec_sum, square += vec_square;
    }
    __syncwarp();
    const Moments step = Moments::reduce_warp(float(piece.vecs * N), pivot, sum, square);
    if (steps_done == 0)
      own = step;
    else if (step.n > 0.0f)
      own.add(step);
    if (++steps_done == p.partition.steps_per_entry)
      storage.publish(p.partition, coord.entry(t), own), steps_done = 0;
  }
  const Moments all = storage.collect(p.partition);
  const float mean = all.mean, variance = all.square < 0.0f ? 0.0f : all.square * inv_size;
  const float rstd = sizeof(T) == 2 ? rsqrtf(variance + p.eps) : 1.0f / sqrtf(variance + p.eps);
  if (p.rstd != nullptr && coord.rank == 0 && threadIdx.x == 0)
    p.mean[coord.section] = mean, p.rstd[coord.section] = rstd;
  auto write = [&]<bool kFoldsMean>(std::bool_constant<kFoldsMean>) {
    for (int t = 0; t < p.partition.iterations; ++t) {
      const Piece piece = t == 0 ? first : coord.piece(t);
      if (p.partition.iterations > 1) load_piece(coord, piece, from, x);
      const float weight = rstd * (t == 0 ? first_weight : p.weight(channel + piece.channel));
      float bias = t == 0 ? first_bias : p.bias(channel + piece.channel);
      if (kFoldsMean) bias = fma(-mean, weight, bias);
#pragma unroll
      for (int r = 0; r < kVecsPerThread; ++r) {
        if (r >= piece.vecs) break;
        float v[N];
#pragma unroll
        for (int j = 0; j < N; ++j)
          v[j] = group_norm_y(kFoldsMean ? x[r][0][j] : x[r][0][j] - mean, weight, bias);
        Vec<T, N> out;
        out.set(v);
        store(y + (int64_t(piece.first) + r * p.partition.lanes_per_piece) * N, out);
      }
    }
  };
  folds_mean<T>(mean, rstd) ? write(std::true_type{}) : write(std::false_type{});
}

template <class T, int N, bool Long>
__global__ __launch_bounds__(kSectionThreads, kMinBlocks<Long>) void backward_kernel(
    const __grid_constant__ GroupNormBackward<T> p) {
  constexpr int kVecsPerThread = kBackwardVecs<N, Long>;
  __shared__ SectionReduceStorage<TwoSums> storage;
  storage.init(p.partition);
  const ThreadCoord coord(p.partition, p.groups);
  const int64_t size = p.partition.size() * N, channel = int64_t(coord.group) * p.partition.channels,
                channels = int64_t(p.groups.divisor) * p.partition.channels;
  const float inv_size = 1.0f / float(size);
  const T* const from[2] = {coord.part(p.x, p.x_stride, size), coord.part(p.dy, p.dy_stride, size)};
  T* const dx = coord.part(p.dx, p.dx_stride, size);
  const Piece first = coord.piece(0);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Vec<T, N> in[kVecsPerThread][2];
  load_piece(coord, first, from, in);
  const float mean = p.mean[coord.section], rstd = p.rstd[coord.section],
              first_weight = p.weight(channel + first.channel);
  storage.wait_for_cluster(p.partition);
  // Sums g * h and g.
  TwoSums own = TwoSums::identity();
  for (int t = 0, steps_done = 0; t < p.partition.iterations; ++t) {
    const Piece piece = t == 0 ? first : coord.piece(t);
    if (t > 0) load_piece(coord, piece, from, in);
    const float weight = t == 0 ? first_weight : p.weight(channel + piece.channel);
    // Sums dy * h and dy.
    TwoSums sums = TwoSums::identity();
#pragma unroll
    for (int r = 0; r < kVecsPerThread; ++r) {
      if (r >= piece.vecs) break;
      TwoSums vec = TwoSums::identity();
#pragma unroll
      for (int j = 0; j < N; ++j) {
        vec.a = fma(in[r][1][j], in[r][0][j] - mean, vec.a);
        vec.b += in[r][1][j];
      }
      sums.add(vec);
    }
    __syncwarp();
    for (int step = p.partition.lanes_per_piece / 2; step > 0; step /= 2) sums.add_lanes(step);
    sums.a *= rstd;
    if (p.partials != nullptr && coord.lane == 0 && piece.vecs > 0) {
      float* part = p.partials + (int64_t(coord.sample) * p.partition.pieces + piece.index) * 2 * channels +
                    channel + piece.channel;
      part[0] = sums.a, part[channels] = sums.b;
    }
    sums.a *= weight, sums.b *= weight;
    for (int step = p.partition.lanes_per_piece; step < 32; step *= 2) sums.add_lanes(step);
    if (steps_done == 0) own = TwoSums::identity();
    own.add(sums);
    if (++steps_done == p.partition.steps_per_entry)
      storage.publish(p.partition, coord.entry(t), own), steps_done = 0;
  }
  TwoSums means = storage.collect(p.partition);
  if (p.dx == nullptr) return;
  // rstd is folded into the factors of the formula.
  means.a *= rstd * rstd * inv_size, means.b *= rstd * inv_size;
  auto write = [&]<bool kFoldsMean>(std::bool_constant<kFoldsMean>) {
    const float less = kFoldsMean ? fma(mean, means.a, -means.b) : -means.b;
    for (int t = 0; t < p.partition.iterations; ++t) {
      const Piece piece = t == 0 ? first : coord.piece(t);
      if (p.partition.iterations > 1) load_piece(coord, piece, from, in);
      const float weight = rstd * (t == 0 ? first_weight : p.weight(channel + piece.channel));
#pragma unroll
      for (int r = 0; r < kVecsPerThread; ++r) {
        if (r >= piece.vecs) break;
        float v[N];
#pragma unroll
        for (int j = 0; j < N; ++j)
          v[j] = norm_gradient(fma(in[r][1][j], weight, less), kFoldsMean ? in[r][0][j] : in[r][0][j] - mean,
                               means.a, 1.0f);
        Vec<T, N> out;
        out.set(v);
        store(dx + (int64_t(piece.first) + r * p.partition.lanes_per_piece) * N, out);
      }
    }
  };
  folds_mean<T>(mean, rstd) ? write(std::true_type{}) : write(std::false_type{});
}

// Counts the warps of a section, in a single CTA or in each CTA of a cluster, and the iterations of a single
// CTA.
struct WarpTarget {
  int single_block, iterations, per_cluster_block;
};
// Selects the fewest CTAs per section that meet the target and fill the device. The sums do not depend on it.
template <auto Kernel>
Partition partition_for(const Partition& partition, WarpTarget target, int64_t sections) {
  static OccupancyCache occupancy;
  // kFull CTAs per SM fill the device. To reach them a section is divided into at most kFullBlocks CTAs.
  constexpr int64_t kFull = 3, kFullBlocks = 8;
  auto too_few = [&](int64_t blocks) {
    const int64_t most =
        blocks == 1 ? target.single_block * target.iterations : target.per_cluster_block * blocks;
    return partition.entries > most || (blocks < kFullBlocks && blocks < partition.entries &&
                                        sections * blocks < kFull * device_facts().sms);
  };
  int blocks = 1;
  while (blocks < kMaxSectionBlocks && too_few(blocks)) blocks *= 2;
  for (; blocks > 1; blocks /= 2) {
    const Partition shared = with_blocks(partition, blocks, kSectionThreads / 32);
    if (occupancy.max_active(kOp, Kernel, blocks, shared.threads) > 0) return shared;
  }
  return with_blocks(partition, 1, target.single_block);
}

template <auto Kernel, class P>
void run(Context& ctx, const P& p, int64_t samples) {
  launch(kOp, ctx, Kernel,
         {.blocks = samples * p.groups.divisor * p.partition.blocks,
          .threads = p.partition.threads,
          .pdl = true,
          .cluster = p.partition.blocks},
         p);
}

// True if all sections and all their channels begin at 16-byte boundaries.
bool all_vectorizable(int64_t spatial, std::initializer_list<const Matrix*> matrices) {
  return std::all_of(matrices.begin(), matrices.end(), [&](const Matrix* m) {
    const size_t element = size_of(m->dtype);
    return m->data == nullptr ||
           (spatial % int64_t(16 / element) == 0 && is_vectorizable(m->data, m->stride, m->cols, element));
  });
}

// Shorter sections than this are short.
constexpr int64_t kShortBytes = 8 << 10;

// Short sections, and those of any alignment, use the kernels of the norm family.
void forward_as_rows(Context& ctx, const GroupNormFwd& a) {
  with_weight_types(kOp, a.x.dtype, a.weight ? a.weight : a.bias, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_forward(kOp, ctx,
                 NormForward<GroupNormRow<float, X>, W, X>{.in = {a.x.row<X>(0)},
                                                           .in_stride = {a.x.stride},
                                                           .param = {a.weight.as<W>(), a.bias.as<W>()},
                                                           .default_value = {1.0f, 0.0f},
                                                           .y = a.y.row<X>(0),
                                                           .y_stride = a.y.stride,
                                                           .rstd = a.rstd.as<float>(),
                                                           .mean = a.mean.as<float>(),
                                                           .rows = a.x.rows,
                                                           .cols = a.x.cols / a.groups,
                                                           .groups = int(a.groups),
                                                           .eps = a.eps,
                                                           .cols_per_param = a.x.cols / a.channels});
  });
}

}  // namespace

void group_norm_fwd(Context& ctx, const GroupNormFwd& a) {
  const int64_t channels = a.channels / a.groups, spatial = a.x.cols / a.channels;
  if (channels * spatial * int64_t(size_of(a.x.dtype)) < kShortBytes ||
      !all_vectorizable(spatial, {&a.x, &a.y}))
    return forward_as_rows(ctx, a);
  auto forward = [&]<class T, bool Long>(Type<T>, std::bool_constant<Long>) {
    constexpr auto kKernel = forward_kernel<T, Long>;
    constexpr WarpTarget kTarget = Long ? WarpTarget{10, 1, 5} : WarpTarget{8, 4, 8};
    run<kKernel>(ctx,
                 GroupNormForward<T>{
                     .x = a.x.row<T>(0),
                     .y = a.y.row<T>(0),
                     .x_stride = a.x.stride,
                     .y_stride = a.y.stride,
                     .weight = by_channel<T>(a.weight, 1.0f),
                     .bias = by_channel<T>(a.bias, 0.0f),
                     .mean = a.mean.as<float>(),
                     .rstd = a.rstd.as<float>(),
                     .eps = a.eps,
                     .groups = Divider(a.groups),
                     .partition = partition_for<kKernel>(
                         make_partition(channels, spatial / int64_t(16 / sizeof(T)), kForwardVecs<Long>),
                         kTarget, a.x.rows * a.groups)},
                 a.x.rows);
  };
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    spatial / int64_t(16 / sizeof(T)) > kLongChannel ? forward(Type<T>{}, std::true_type{})
                                                     : forward(Type<T>{}, std::false_type{});
  });
}

void group_norm_bwd(Context& ctx, const GroupNormBwd& a) {
  const int64_t channels = a.channels / a.groups, spatial = a.x.cols / a.channels;
  Vector dweight = a.dweight, dbias = a.dbias;
  // One row of partials holds both gradients.
  dweight.size = dbias.size = a.channels;
  auto backward = [&]<class T, int N, bool Long>(Type<T>, std::integral_constant<int, N>,
                                                 std::bool_constant<Long>) {
    constexpr auto kKernel = backward_kernel<T, N, Long>;
    constexpr WarpTarget kTarget = Long ? WarpTarget{5, 1, 5} : WarpTarget{5, 1, 8};
    const Partition partition = partition_for<kKernel>(
        make_partition(channels, spatial / N, kBackwardVecs<N, Long>), kTarget, a.x.rows * a.groups);
    const int64_t parts = a.x.rows * partition.pieces;
    GroupNormBackward<T> p{.x = a.x.row<T>(0),
                           .dy = a.dy.row<T>(0),
                           .dx = a.dx.row<T>(0),
                           .x_stride = a.x.stride,
                           .dy_stride = a.dy.stride,
                           .dx_stride = a.dx.stride,
                           .weight = by_channel<T>(a.weight, 1.0f),
                           .mean = a.mean.as<float>(),
                           .rstd = a.rstd.as<float>(),
                           .partials = nullptr,
                           .groups = Divider(a.groups),
                           .partition = partition};
    if (dweight || dbias) p.partials = ctx.scratch_of<float>(parts * 2 * a.channels);
    run<kKernel>(ctx, p, a.x.rows);
    sum_partials(kOp, ctx, p.partials, parts, {dweight, dbias});
  };
  const bool vectorized = all_vectorizable(spatial, {&a.x, &a.dy, &a.dx});
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr std::integral_constant<int, 16 / sizeof(T)> kVecSize;
    if (!vectorized) return backward(Type<T>{}, std::integral_constant<int, 1>{}, std::true_type{});
    spatial / kVecSize > kLongChannel ? backward(Type<T>{}, kVecSize, std::true_type{})
                                      : backward(Type<T>{}, kVecSize, std::false_type{});
  });
}

}  // namespace tigon::cuda
