// CUDA backend of GroupNorm.
//
// Bytes per element (b = element size): forward 2b, backward 3b; besides, 8 bytes a group of statistics and 8 bytes a sample and
// piece of a channel of partial sums. Instructions: about 9 per element forward, 12 backward, against a budget of 27 and 41 at the
// speed of the memory (bf16).
//
// A section (a group of a sample) is one stretch of memory. It waits in the registers of a block, or of a cluster of them, from when it is read
// until it is written; so many blocks are under way that others read and write meanwhile. Its channels are cut into pieces, one team of
// adjacent lanes each: a piece has one weight and one bias, and its sums are a part of one channel's gradients. Sections too long for that,
// and those for which it is faster, go round: what a warp has read is read again, out of the caches.
#include <algorithm>

#include "tigon/base/cuda/norm_forward.cuh"
#include "tigon/ops/group_norm/group_norm.h"
#include "tigon/ops/group_norm/group_norm_sections.cuh"

namespace tigon::cuda {
namespace {

#include "tigon/base/norm_math.inc"
#include "tigon/ops/group_norm/group_norm_math.inc"

constexpr const char* kOp = "group_norm";

// Number, mean, and sum of squares about it.
struct alignas(16) Moments {
  float n, mean, square, unused;
  __device__ static Moments none() { return {0.0f, 0.0f, 0.0f, 0.0f}; }
  __device__ __forceinline__ void add(const Moments& b) {
    const float all = n + b.n, apart = b.mean - mean, share = __fdividef(b.n, all);
    mean = fma(apart, share, mean);
    square += fma(apart * share * n, apart, b.square);
    n = all;
  }
  // Of all lanes of a warp, which have summed `sum` and squares about the same number.
  __device__ static __forceinline__ Moments of_warp(float n, float near, float sum, float square) {
    n = float(__reduce_add_sync(0xffffffffu, unsigned(n)));
    sum = reduce_lanes<Sum, 32>(sum), square = reduce_lanes<Sum, 32>(square);
    const float off = __fdividef(sum, n);
    return n > 0.0f ? Moments{n, near + off, fma(-off, sum, square), 0.0f} : none();
  }
  __device__ static __forceinline__ Moments merge(const Moments* list, int entries) {
    const int lane = int(threadIdx.x % 32);
    float n = 0.0f, off = 0.0f, square = 0.0f;
    const float near = list[0].mean;
#pragma unroll 2
    for (int i = lane; i < entries; i += 32) n += list[i].n, off = fma(list[i].n, list[i].mean - near, off);
    n = float(__reduce_add_sync(0xffffffffu, unsigned(n)));
    off = reduce_lanes<Sum, 32>(off);
    const float mean = near + __fdividef(off, n);
#pragma unroll 2
    for (int i = lane; i < entries; i += 32) {
      const float apart = mean - list[i].mean;
      square += fma(list[i].n * apart, apart, list[i].square);
    }
    return {n, mean, reduce_lanes<Sum, 32>(square), 0.0f};
  }
};
struct alignas(8) TwoSums {
  float a, b;
  __device__ static TwoSums none() { return {0.0f, 0.0f}; }
  __device__ __forceinline__ void add(const TwoSums& o) { a += o.a, b += o.b; }
  // Of lanes so far apart.
  __device__ __forceinline__ void add_across(int step) {
    a += __shfl_xor_sync(0xffffffffu, a, step);
    b += __shfl_xor_sync(0xffffffffu, b, step);
  }
  __device__ static __forceinline__ TwoSums merge(const TwoSums* list, int entries) {
    TwoSums all = none();
#pragma unroll 4
    for (int i = int(threadIdx.x % 32); i < entries; i += 32) all.add(list[i]);
    return {reduce_lanes<Sum, 32>(all.a), reduce_lanes<Sum, 32>(all.b)};
  }
};

// A number by channel, of T or float.
template <class T>
struct ByChannel {
  const void* data;  // null: `absent` everywhere
  bool wide;
  float absent;
  __device__ __forceinline__ float operator()(int64_t channel) const {
    if (data == nullptr) return absent;
    return wide ? static_cast<const float*>(data)[channel] : widen(static_cast<const T*>(data)[channel]);
  }
};
template <class T>
ByChannel<T> by_channel(const Vector& v, float absent) {
  return {v.data, v.dtype == DType::f32, absent};
}

template <class T>
struct Forward {
  const T* x;
  T* y;
  int64_t x_stride, y_stride;
  ByChannel<T> weight, bias;
  float *mean, *rstd;
  float eps;
  Divider groups;
  Split split;
};
template <class T>
struct Backward {
  const T *x, *dy;
  T* dx;  // may be null
  int64_t x_stride, dy_stride, dx_stride;
  ByChannel<T> weight;
  const float *mean, *rstd;
  float* partials;  // [samples * pieces, 2, groups * channels]; may be null
  Divider groups;
  Split split;
};

// The mean's product with the weight taken off the bias, instead of the mean off every number: where at most 2^-18 of a deviation is lost on
// the way to 16 bits.
template <class T>
__device__ __forceinline__ bool folds(float mean, float rstd) {
  return sizeof(T) == 2 && fabsf(mean) * rstd < 64.0f;
}

// Packs of a piece that a lane holds, of long and short channels, and blocks a multiprocessor that the registers leave room for. What a warp
// does once for a piece is as much as four packs' work.
template <bool Long>
constexpr int kForwardHeld = Long ? 16 : 4;
template <int N, bool Long>
constexpr int kBackwardHeld = N == 1 ? 16
                              : Long ? 8
                                     : 4;
template <bool Long>
constexpr int kBlocks = Long ? 2 : 3;
constexpr int64_t kLongChannel = 256;  // packs

template <class T, bool Long>
__global__ __launch_bounds__(kSectionThreads,
                             kBlocks<Long>) void forward_kernel(const __grid_constant__ Forward<T> p) {
  constexpr int N = 16 / sizeof(T), kHeld = kForwardHeld<Long>;
  __shared__ Found<Moments> found;
  found.begin(p.split);
  const Share share(p.split, p.groups);
  const int64_t size = p.split.size() * N, channel = int64_t(share.group) * p.split.channels;
  const float inverse = 1.0f / float(size);
  const T* const from[1] = {share.part(p.x, p.x_stride, size)};
  T* const y = share.part(p.y, p.y_stride, size);
  const Piece first = share.piece(0);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  Pack<T, N> x[kHeld][1];
  load_piece(share, first, from, x);
  const float first_weight = p.weight(channel + first.channel), first_bias = p.bias(channel + first.channel);
  found.meet(p.split);
  Moments own = Moments::none();
  for (int t = 0, of_run = 0; t < p.split.turns; ++t) {
    const Piece piece = t == 0 ? first : share.piece(t);
    if (t > 0) load_piece(share, piece, from, x);
    // About the mean of the warp's first pack, which is among what is added up: few digits can cancel.
    float near = 0.0f, sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) near += x[0][0][j];
    near = __shfl_sync(0xffffffffu, near * (1.0f / N), 0);
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      if (r >= piece.packs) break;
      float pack_sum = 0.0f, pack_square = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float v = x[r][0][j] - near;
        pack_sum += v;
        pack_square = fma(v, v, pack_square);
      }
      sum += pack_sum, square += pack_square;
    }
    __syncwarp();
    const Moments step = Moments::of_warp(float(piece.packs * N), near, sum, square);
    if (of_run == 0)
      own = step;
    else if (step.n > 0.0f)
      own.add(step);
    if (++of_run == p.split.run) found.tell(p.split, share.entry(t), own), of_run = 0;
  }
  const Moments all = found.all(p.split);
  const float mean = all.mean, variance = all.square < 0.0f ? 0.0f : all.square * inverse;
  const float rstd = sizeof(T) == 2 ? rsqrtf(variance + p.eps) : 1.0f / sqrtf(variance + p.eps);
  if (p.rstd != nullptr && share.rank == 0 && threadIdx.x == 0)
    p.mean[share.section] = mean, p.rstd[share.section] = rstd;
  auto write = [&]<bool Folds>(std::bool_constant<Folds>) {
    for (int t = 0; t < p.split.turns; ++t) {
      const Piece piece = t == 0 ? first : share.piece(t);
      if (p.split.turns > 1) load_piece(share, piece, from, x);
      const float weight = rstd * (t == 0 ? first_weight : p.weight(channel + piece.channel));
      float bias = t == 0 ? first_bias : p.bias(channel + piece.channel);
      if (Folds) bias = fma(-mean, weight, bias);
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        if (r >= piece.packs) break;
        float v[N];
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] = group_norm_y(Folds ? x[r][0][j] : x[r][0][j] - mean, weight, bias);
        Pack<T, N> out;
        out.set(v);
        store(y + (int64_t(piece.first) + r * p.split.across) * N, out);
      }
    }
  };
  folds<T>(mean, rstd) ? write(std::true_type{}) : write(std::false_type{});
}

template <class T, int N, bool Long>
__global__ __launch_bounds__(kSectionThreads,
                             kBlocks<Long>) void backward_kernel(const __grid_constant__ Backward<T> p) {
  constexpr int kHeld = kBackwardHeld<N, Long>;
  __shared__ Found<TwoSums> found;
  found.begin(p.split);
  const Share share(p.split, p.groups);
  const int64_t size = p.split.size() * N, channel = int64_t(share.group) * p.split.channels,
                channels = int64_t(p.groups.divisor) * p.split.channels;
  const float inverse = 1.0f / float(size);
  const T* const from[2] = {share.part(p.x, p.x_stride, size), share.part(p.dy, p.dy_stride, size)};
  T* const dx = share.part(p.dx, p.dx_stride, size);
  const Piece first = share.piece(0);
  wait_for_kernel_ahead();
  let_next_kernel_start();
  Pack<T, N> in[kHeld][2];
  load_piece(share, first, from, in);
  const float mean = p.mean[share.section], rstd = p.rstd[share.section],
              first_weight = p.weight(channel + first.channel);
  found.meet(p.split);
  TwoSums own = TwoSums::none();  // of g * h and of g
  for (int t = 0, of_run = 0; t < p.split.turns; ++t) {
    const Piece piece = t == 0 ? first : share.piece(t);
    if (t > 0) load_piece(share, piece, from, in);
    const float weight = t == 0 ? first_weight : p.weight(channel + piece.channel);
    TwoSums sums = TwoSums::none();  // of dy * h and of dy
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      if (r >= piece.packs) break;
      TwoSums pack = TwoSums::none();
#pragma unroll
      for (int j = 0; j < N; ++j) {
        pack.a = fma(in[r][1][j], in[r][0][j] - mean, pack.a);
        pack.b += in[r][1][j];
      }
      sums.add(pack);
    }
    __syncwarp();
    for (int step = p.split.across / 2; step > 0; step /= 2) sums.add_across(step);
    sums.a *= rstd;
    if (p.partials != nullptr && share.lane == 0 && piece.packs > 0) {
      float* part = p.partials + (int64_t(share.sample) * p.split.pieces + piece.index) * 2 * channels +
                    channel + piece.channel;
      part[0] = sums.a, part[channels] = sums.b;
    }
    sums.a *= weight, sums.b *= weight;
    for (int step = p.split.across; step < 32; step *= 2) sums.add_across(step);
    if (of_run == 0) own = TwoSums::none();
    own.add(sums);
    if (++of_run == p.split.run) found.tell(p.split, share.entry(t), own), of_run = 0;
  }
  TwoSums means = found.all(p.split);
  if (p.dx == nullptr) return;
  // rstd is multiplied into the terms of the formula.
  means.a *= rstd * rstd * inverse, means.b *= rstd * inverse;
  auto write = [&]<bool Folds>(std::bool_constant<Folds>) {
    const float less = Folds ? fma(mean, means.a, -means.b) : -means.b;
    for (int t = 0; t < p.split.turns; ++t) {
      const Piece piece = t == 0 ? first : share.piece(t);
      if (p.split.turns > 1) load_piece(share, piece, from, in);
      const float weight = rstd * (t == 0 ? first_weight : p.weight(channel + piece.channel));
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        if (r >= piece.packs) break;
        float v[N];
#pragma unroll
        for (int j = 0; j < N; ++j)
          v[j] = norm_gradient(fma(in[r][1][j], weight, less), Folds ? in[r][0][j] : in[r][0][j] - mean,
                               means.a, 1.0f);
        Pack<T, N> out;
        out.set(v);
        store(dx + (int64_t(piece.first) + r * p.split.across) * N, out);
      }
    }
  };
  folds<T>(mean, rstd) ? write(std::true_type{}) : write(std::false_type{});
}

// How many warps a section has, alone or in each block of a cluster, and how often they go round if one block is to do.
struct Wanted {
  int alone, turns, of_cluster;
};
// The fewest blocks for that, and for a machine that is full: the sums do not depend on it.
template <auto Kernel>
Split share_out(const Split& split, Wanted wanted, int64_t sections) {
  static ClusterRoom room;
  constexpr int64_t kFull = 3,
                    kFullBlocks = 8;  // blocks a multiprocessor, for which a section has so many at most
  auto few = [&](int64_t blocks) {
    const int64_t most = blocks == 1 ? wanted.alone * wanted.turns : wanted.of_cluster * blocks;
    return split.entries > most ||
           (blocks < kFullBlocks && blocks < split.entries && sections * blocks < kFull * device_facts().sms);
  };
  int blocks = 1;
  while (blocks < kMostSectionBlocks && few(blocks)) blocks *= 2;
  for (; blocks > 1; blocks /= 2) {
    const Split shared = shared_by(split, blocks, kSectionThreads / 32);
    if (room.of(kOp, Kernel, blocks, shared.threads) > 0) return shared;
  }
  return shared_by(split, 1, wanted.alone);
}

template <auto Kernel, class P>
void run(Context& ctx, const P& p, int64_t samples) {
  launch(kOp, ctx, Kernel,
         {.blocks = samples * p.groups.divisor * p.split.blocks,
          .threads = p.split.threads,
          .early = true,
          .cluster = p.split.blocks},
         p);
}

// Whether all sections of the matrices, and all their channels, begin at boundaries of 16 bytes.
bool in_packs(int64_t places, std::initializer_list<const Matrix*> matrices) {
  return std::all_of(matrices.begin(), matrices.end(), [&](const Matrix* m) {
    const size_t element = size_of(m->dtype);
    return m->data == nullptr ||
           (places % int64_t(16 / element) == 0 && packs_align(m->data, m->stride, m->cols, element));
  });
}

// Short sections, and those that begin anywhere: on the engine of the norm family.
template <class X>
struct Formula {
  using Element = X;
  static constexpr int kIn = 1, kParams = 2;
  using Spans = void;
  static constexpr bool kCentred = true, kKeeps = false, round_h = false;
  __device__ float value(const float (&x)[1]) const { return x[0]; }
  __device__ float result(float h, const float (&param)[2], const float (&)[1]) const {
    return group_norm_y(h, param[0], param[1]);
  }
};
constexpr int64_t kShortBytes = 8 << 10;  // 10 KB: 9.0 us there, 7.9 here; 20 KB: 13.5 and 11.1

void forward_as_rows(Context& ctx, const GroupNormFwd& a) {
  with_weight_types(kOp, a.x.dtype, a.weight ? a.weight : a.bias, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_forward(kOp, ctx,
                 NormForward<Formula<X>, W, X>{.in = {a.x.row<X>(0)},
                                               .in_stride = {a.x.stride},
                                               .param = {a.weight.as<W>(), a.bias.as<W>()},
                                               .absent = {1.0f, 0.0f},
                                               .y = a.y.row<X>(0),
                                               .y_stride = a.y.stride,
                                               .rstd = a.rstd.as<float>(),
                                               .mean = a.mean.as<float>(),
                                               .rows = a.x.rows,
                                               .cols = a.x.cols / a.groups,
                                               .sections = int(a.groups),
                                               .eps = a.eps,
                                               .span = a.x.cols / a.channels});
  });
}

}  // namespace

void group_norm_fwd(Context& ctx, const GroupNormFwd& a) {
  const int64_t channels = a.channels / a.groups, places = a.x.cols / a.channels;
  if (channels * places * int64_t(size_of(a.x.dtype)) < kShortBytes || !in_packs(places, {&a.x, &a.y}))
    return forward_as_rows(ctx, a);
  auto forward = [&]<class T, bool Long>(Type<T>, std::bool_constant<Long>) {
    constexpr auto kKernel = forward_kernel<T, Long>;
    constexpr Wanted kWanted = Long ? Wanted{10, 1, 5} : Wanted{8, 4, 8};
    run<kKernel>(ctx,
                 Forward<T>{.x = a.x.row<T>(0),
                            .y = a.y.row<T>(0),
                            .x_stride = a.x.stride,
                            .y_stride = a.y.stride,
                            .weight = by_channel<T>(a.weight, 1.0f),
                            .bias = by_channel<T>(a.bias, 0.0f),
                            .mean = a.mean.as<float>(),
                            .rstd = a.rstd.as<float>(),
                            .eps = a.eps,
                            .groups = Divider(a.groups),
                            .split = share_out<kKernel>(
                                split_of(channels, places / int64_t(16 / sizeof(T)), kForwardHeld<Long>),
                                kWanted, a.x.rows * a.groups)},
                 a.x.rows);
  };
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    places / int64_t(16 / sizeof(T)) > kLongChannel ? forward(Type<T>{}, std::true_type{})
                                                    : forward(Type<T>{}, std::false_type{});
  });
}

void group_norm_bwd(Context& ctx, const GroupNormBwd& a) {
  const int64_t channels = a.channels / a.groups, places = a.x.cols / a.channels;
  Vector dweight = a.dweight, dbias = a.dbias;
  dweight.size = dbias.size = a.channels;  // partial rows hold both
  auto backward = [&]<class T, int N, bool Long>(Type<T>, std::integral_constant<int, N>,
                                                 std::bool_constant<Long>) {
    constexpr auto kKernel = backward_kernel<T, N, Long>;
    constexpr Wanted kWanted = Long ? Wanted{5, 1, 5} : Wanted{5, 1, 8};
    const Split split = share_out<kKernel>(split_of(channels, places / N, kBackwardHeld<N, Long>), kWanted,
                                           a.x.rows * a.groups);
    const int64_t parts = a.x.rows * split.pieces;
    Backward<T> p{.x = a.x.row<T>(0),
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
                  .split = split};
    if (dweight || dbias) p.partials = ctx.scratch_of<float>(parts * 2 * a.channels);
    run<kKernel>(ctx, p, a.x.rows);
    sum_partials(kOp, ctx, p.partials, parts, {dweight, dbias});
  };
  const bool packs = in_packs(places, {&a.x, &a.dy, &a.dx});
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr std::integral_constant<int, 16 / sizeof(T)> kPack;
    if (!packs) return backward(Type<T>{}, std::integral_constant<int, 1>{}, std::true_type{});
    places / kPack > kLongChannel ? backward(Type<T>{}, kPack, std::true_type{})
                                  : backward(Type<T>{}, kPack, std::false_type{});
  });
}

}  // namespace tigon::cuda
