// CUDA backend of GroupNorm.
//
// Bytes per element (b = element size): forward 2b, backward 3b; besides, 8 bytes a group of statistics and 8 bytes a sample and
// piece of a channel of partial sums. Instructions: about 10 per element forward, 14 backward, against a budget of 27 and 41 at the
// speed of the memory (bf16).
//
// A section (a group of a sample) is one stretch of memory. It waits in the shared memory of a block, or of a cluster of them, is read
// from there as often as need be, and written once. Its channels are cut into pieces, one team of adjacent lanes each: a piece has
// one weight and one bias, and its sums are a part of one channel's gradients. Blocks stay, several on a multiprocessor, and ask for
// their next section pack by pack as they write. What shared memory does not hold is read again, out of L2.
#include <algorithm>

#include "tigon/base/cuda/norm_forward.cuh"
#include "tigon/base/cuda/row_team.cuh"
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
  template <int Width>
  __device__ __forceinline__ void merge_lanes() {
    const float near = __shfl_sync(0xffffffffu, mean, 0, Width);
    const float all =
        Width == 32 ? float(__reduce_add_sync(0xffffffffu, unsigned(n))) : reduce_lanes<Sum, Width>(n);
    const float off = reduce_lanes<Sum, Width>(n * (mean - near));
    const float merged = near + (all > 0.0f ? __fdividef(off, all) : 0.0f), apart = mean - merged;
    square = reduce_lanes<Sum, Width>(fma(n * apart, apart, square));
    n = all, mean = merged;
  }
};
struct alignas(8) TwoSums {
  float a, b;
  __device__ static TwoSums none() { return {0.0f, 0.0f}; }
  template <int Width>
  __device__ __forceinline__ void merge_lanes() {
    a = reduce_lanes<Sum, Width>(a);
    b = reduce_lanes<Sum, Width>(b);
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
  int64_t samples, groups;
  Split split;
};
template <class T>
struct Backward {
  const T *dy, *x;
  T* dx;  // may be null
  int64_t dy_stride, x_stride, dx_stride;
  ByChannel<T> weight;
  const float *mean, *rstd;
  float* partials;  // [samples * pieces, 2, groups * channels]; may be null
  int64_t samples, groups;
  Split split;
};

template <class T>
__global__ __launch_bounds__(kSectionThreads, 2) void forward_kernel(const __grid_constant__ Forward<T> p) {
  constexpr int N = 16 / sizeof(T);
  extern __shared__ uint4 shared[];
  __shared__ Exchange<Moments> exchange;
  if (p.split.blocks > 1) {
    exchange.init();
    cluster_arrive();
  }
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Share share(p.split);
  const int64_t size = p.split.size() * N, begin = share.begin * N;
  const float inverse = 1.0f / float(size);
  Sections sections(p.samples, p.groups);
  const Step x_step(sections, p.x_stride, size), y_step(sections, p.y_stride, size);
  const int64_t start = sections.group * size + begin;
  Image<T, N> x[1] = {{shared, p.x + (sections.sample * p.x_stride + start)}};
  T* y = p.y + (sections.sample * p.y_stride + start);
  x[0].copy(share);
  copies_commit();
  if (p.split.blocks > 1) cluster_wait();
  for (int turn = 0; sections.there(); ++turn) {
    const bool more = sections.more();
    const Image<T, N> next = {shared, x_step(x[0].from, sections)};
    const int64_t channel = int64_t(sections.group) * p.split.channels;
    const float first_weight = p.weight(channel + share.first.channel),
                first_bias = p.bias(channel + share.first.channel);
    copies_wait<0>();
    Moments own = Moments::none();
    for (int t = 0; t < p.split.turns; ++t) {
      const Mine mine = share.mine(t);
      if (mine.packs == 0) continue;
      // About the mean of the first pack, which is among what is added up: few digits can cancel.
      const Pack<T, N> pack = mine.first < p.split.held ? x[0].held(mine.first) : x[0].beyond(mine.first);
      float near = 0.0f, sum = 0.0f, square = 0.0f;
#pragma unroll
      for (int j = 0; j < N; ++j) near += pack[j];
      near *= 1.0f / N;
      for_packs(share, mine, x, [&](int, const Pack<T, N>(&q)[1]) {
        float pack_sum = 0.0f, pack_square = 0.0f;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float v = q[0][j] - near;
          pack_sum += v;
          pack_square = fma(v, v, pack_square);
        }
        sum += pack_sum, square += pack_square;
      });
      const float n = float(mine.packs * N), off = __fdividef(sum, n);
      const Moments piece = {n, near + off, fma(-off, sum, square), 0.0f};
      if (t == 0)
        own = piece;
      else
        own.add(piece);
    }
    __syncwarp();
    const Moments all = merge_row<0, true>(own, exchange, turn);
    const float mean = all.mean, variance = all.square < 0.0f ? 0.0f : all.square * inverse;
    const float rstd = sizeof(T) == 2 ? rsqrtf(variance + p.eps) : 1.0f / sqrtf(variance + p.eps);
    if (p.rstd != nullptr && share.rank == 0 && threadIdx.x == 0)
      p.mean[sections.at] = mean, p.rstd[sections.at] = rstd;
    for (int t = 0; t < p.split.turns; ++t) {
      const Mine mine = share.mine(t);
      const float weight = rstd * (t == 0 ? first_weight : p.weight(channel + mine.channel));
      const float bias = t == 0 ? first_bias : p.bias(channel + mine.channel);
      for_packs(share, mine, x, [&](int i, const Pack<T, N>(&q)[1]) {
        if (more && i < p.split.held) next.copy_pack(i);
        float v[N];
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] = group_norm_y(q[0][j] - mean, weight, bias);
        Pack<T, N> out;
        out.set(v);
        store(y + int64_t(i) * N, out);
      });
    }
    y = y_step(y, sections), x[0] = next;
    sections.go_on();
    copies_commit();
  }
  if (p.split.blocks > 1) {
    cluster_arrive();
    cluster_wait();
  }
}

template <class T, int N>
__global__ __launch_bounds__(kSectionThreads, 2) void backward_kernel(const __grid_constant__ Backward<T> p) {
  extern __shared__ uint4 shared[];
  __shared__ Exchange<TwoSums> exchange;
  if (p.split.blocks > 1) {
    exchange.init();
    cluster_arrive();
  }
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const Share share(p.split);
  const int64_t size = p.split.size() * N, begin = share.begin * N, channels = p.groups * p.split.channels;
  const float inverse = 1.0f / float(size);
  using Part = Image<T, N>;
  Sections sections(p.samples, p.groups);
  const Step x_step(sections, p.x_stride, size), dy_step(sections, p.dy_stride, size),
      dx_step(sections, p.dx_stride, size);
  const int64_t start = sections.group * size + begin;
  Part in[2] = {{shared, p.x + (sections.sample * p.x_stride + start)},
                {shared + p.split.held / Part::kPerWord + Part::kEdges,
                 p.dy + (sections.sample * p.dy_stride + start)}};
  T* dx = p.dx + (sections.sample * p.dx_stride + start);
  in[0].copy(share), in[1].copy(share);
  copies_commit();
  if (p.split.blocks > 1) cluster_wait();
  for (int turn = 0; sections.there(); ++turn) {
    const bool more = sections.more();
    const Part next[2] = {{in[0].words, x_step(in[0].from, sections)},
                          {in[1].words, dy_step(in[1].from, sections)}};
    const int64_t channel = int64_t(sections.group) * p.split.channels;
    const float mean = p.mean[sections.at], rstd = p.rstd[sections.at],
                first_weight = p.weight(channel + share.first.channel);
    copies_wait<0>();
    if (N == 1) __syncthreads();
    TwoSums own = TwoSums::none();  // of g * h and of g
    for (int t = 0; t < p.split.turns; ++t) {
      const Mine mine = share.mine(t);
      TwoSums sums = TwoSums::none();  // of dy * h and of dy
      for_packs(share, mine, in, [&](int, const Pack<T, N>(&q)[2]) {
        TwoSums pack = TwoSums::none();
#pragma unroll
        for (int j = 0; j < N; ++j) {
          pack.a = fma(q[1][j], q[0][j] - mean, pack.a);
          pack.b += q[1][j];
        }
        sums.a += pack.a, sums.b += pack.b;
      });
      __syncwarp();
      for (int step = p.split.across / 2; step > 0; step /= 2) {
        sums.a += __shfl_xor_sync(0xffffffffu, sums.a, step);
        sums.b += __shfl_xor_sync(0xffffffffu, sums.b, step);
      }
      if (share.lane != 0 || mine.packs == 0) continue;
      sums.a *= rstd;
      if (p.partials != nullptr) {
        float* part = p.partials + (sections.sample * p.split.pieces + mine.index) * 2 * channels + channel +
                      mine.channel;
        part[0] = sums.a, part[channels] = sums.b;
      }
      const float weight = t == 0 ? first_weight : p.weight(channel + mine.channel);
      own.a = fma(weight, sums.a, own.a);
      own.b = fma(weight, sums.b, own.b);
    }
    __syncwarp();
    if (p.dx != nullptr) {
      TwoSums means = merge_row<0, true>(own, exchange, turn);
      // rstd is multiplied into the terms of the formula.
      means.a *= rstd * rstd * inverse, means.b *= rstd * inverse;
      for (int t = 0; t < p.split.turns; ++t) {
        const Mine mine = share.mine(t);
        const float weight = rstd * (t == 0 ? first_weight : p.weight(channel + mine.channel));
        for_packs(share, mine, in, [&](int i, const Pack<T, N>(&q)[2]) {
          if (N > 1 && more && i < p.split.held) next[0].copy_pack(i), next[1].copy_pack(i);
          float v[N];
#pragma unroll
          for (int j = 0; j < N; ++j)
            v[j] = norm_gradient(fma(q[1][j], weight, -means.b), q[0][j] - mean, means.a, 1.0f);
          Pack<T, N> out;
          out.set(v);
          store(dx + int64_t(i) * N, out);
        });
      }
    }
    dx = dx_step(dx, sections), in[0] = next[0], in[1] = next[1];
    sections.go_on();
    if (N == 1 || p.dx == nullptr) {
      __syncthreads();
      if (more) in[0].copy(share), in[1].copy(share);
    }
    copies_commit();
  }
  if (p.split.blocks > 1) {
    cluster_arrive();
    cluster_wait();
  }
}

// Sections of up to so many bytes have one block; longer ones a cluster of blocks that hold so much, as far as clusters reach.
constexpr int64_t kBlockBytes = 84 << 10;
constexpr int kMostBlocks = 16;

struct Plan {
  Split split;
  size_t shared;
  int64_t clusters;  // that run at a time
};

template <auto Kernel, class T, int N, int Images>
Plan plan_of(int64_t channels, int64_t places, int64_t longest) {
  constexpr int kPerWord = Image<T, N>::kPerWord, kEdges = Image<T, N>::kEdges;
  TIGON_CHECK(kOp, places / N <= INT32_MAX && channels <= INT32_MAX,
              "a channel has at most 2^31 places, got ", places);
  const int most = device_facts().shared_per_block - 2048;  // bytes
  static ClusterRoom room;
  Plan plan = {};
  for (int blocks = 1; blocks <= kMostBlocks; blocks *= 2) {
    Split split = split_of(channels, places / N, blocks, longest, N > 1);
    int64_t part = 0;
    for (int64_t r = 0; r < blocks; ++r)
      part = std::max(part, split.start((r + 1) * split.of_block()) - split.start(r * split.of_block()));
    split.held = int(std::min<int64_t>(part, int64_t(most / 16 / Images - kEdges) * kPerWord));
    const size_t shared = size_t(split.held / kPerWord + kEdges) * Images * 16;
    const int clusters = room.of(kOp, Kernel, blocks, split.threads, shared);
    if (clusters > 0) plan = {split, shared, clusters};
    if (plan.clusters > 0 && part * int64_t(sizeof(T)) * N * Images <= kBlockBytes) break;
  }
  return plan;
}

template <auto Kernel, class P>
void run(Context& ctx, const P& p, const Plan& plan) {
  const int blocks = plan.split.blocks;
  launch(kOp, ctx, Kernel,
         {.blocks = std::min(p.samples * p.groups, plan.clusters) * blocks,
          .threads = plan.split.threads,
          .shared = plan.shared,
          .early = true,
          .cluster = blocks},
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
constexpr int64_t kShortBytes = 24 << 10;  // 16 KB: 6.4 us there, 6.8 here; 49 KB: 76 and 62

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
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr auto kKernel = forward_kernel<T>;
    const Plan plan = plan_of<kKernel, T, 16 / sizeof(T), 1>(channels, places, 16);
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
                            .samples = a.x.rows,
                            .groups = a.groups,
                            .split = plan.split},
                 plan);
  });
}

void group_norm_bwd(Context& ctx, const GroupNormBwd& a) {
  const int64_t channels = a.channels / a.groups, places = a.x.cols / a.channels;
  Vector dweight = a.dweight, dbias = a.dbias;
  dweight.size = dbias.size = a.channels;  // partial rows hold both
  auto backward = [&]<class T, int N>(Type<T>, std::integral_constant<int, N>) {
    constexpr auto kKernel = backward_kernel<T, N>;
    const Plan plan = plan_of<kKernel, T, N, 2>(channels, places, 8);
    const int64_t parts = a.x.rows * plan.split.pieces;
    Backward<T> p{.dy = a.dy.row<T>(0),
                  .x = a.x.row<T>(0),
                  .dx = a.dx.row<T>(0),
                  .dy_stride = a.dy.stride,
                  .x_stride = a.x.stride,
                  .dx_stride = a.dx.stride,
                  .weight = by_channel<T>(a.weight, 1.0f),
                  .mean = a.mean.as<float>(),
                  .rstd = a.rstd.as<float>(),
                  .partials = nullptr,
                  .samples = a.x.rows,
                  .groups = a.groups,
                  .split = plan.split};
    if (dweight || dbias) p.partials = ctx.scratch_of<float>(parts * 2 * a.channels);
    run<kKernel>(ctx, p, plan);
    sum_partials(kOp, ctx, p.partials, parts, {dweight, dbias});
  };
  const bool packs = in_packs(places, {&a.x, &a.dy, &a.dx});
  dispatch_float(kOp, "x", a.x.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    constexpr int N = 16 / sizeof(T);
    packs ? backward(Type<T>{}, std::integral_constant<int, N>{})
          : backward(Type<T>{}, std::integral_constant<int, 1>{});
  });
}

}  // namespace tigon::cuda
