// CUDA backend of GroupNorm. Forward: the engine of the norm family, a group is a section and a parameter spans the places of its
// channel. Backward: a block a group.
//
// Bytes per element (b = element size): forward 2b; backward 3b, 5b where the groups in flight outgrow the L2 cache; besides,
// 8 bytes a group of statistics and 8 bytes a sample and channel of partial sums.
// Instructions: about 8 per element forward, 15 backward, against a budget of 31 and 46 at the speed of the memory (bf16).
#include "tigon/base/cuda/norm_backward.cuh"
#include "tigon/ops/group_norm/group_norm.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/group_norm/group_norm_math.inc"

constexpr const char* kOp = "group_norm";
constexpr int kThreads = 1024;
constexpr int kChain = 16;  // packs added up in fp32; the blocks of so many, in double

template <class X>
struct Forward {
  using Element = X;
  static constexpr int kIn = 1, kParams = 2;
  using Spans = void;
  static constexpr bool kCentred = true, kKeeps = false, round_h = false;
  __device__ float value(const float (&x)[1]) const { return x[0]; }
  __device__ float result(float h, const float (&param)[2], const float (&)[1]) const {
    return group_norm_y(h, param[0], param[1]);
  }
};

template <class X, class W>
struct Backward {
  const X *dy, *x;
  X* dx;  // may be null
  int64_t dy_stride, x_stride, dx_stride;
  const W* weight;  // null: ones
  const float *mean, *rstd;
  float* partials;  // [samples, 2, groups * channels]
  int64_t groups;
  int channels, places;  // of a group, of a channel
  int across;            // threads that share a channel: a power of two <= 32
};

template <class X, class W, int N>
__global__ __launch_bounds__(kThreads) void backward_kernel(const __grid_constant__ Backward<X, W> p) {
  __shared__ float slots[2 * 32];
  wait_for_kernel_ahead();
  let_next_kernel_start();
  const int64_t sample = blockIdx.x / p.groups, group = blockIdx.x % p.groups;
  const int64_t size = int64_t(p.channels) * p.places, before = group * size;
  const X *x = p.x + sample * p.x_stride + before, *dy = p.dy + sample * p.dy_stride + before;
  const float mean = p.mean[blockIdx.x], rstd = p.rstd[blockIdx.x];
  const W* weight = p.weight ? p.weight + group * p.channels : nullptr;
  const int lane = threadIdx.x % p.across, team = threadIdx.x / p.across, teams = kThreads / p.across;
  float means[2] = {};  // of g * h and of g
  for (int base = 0; base < p.channels; base += teams) {
    const int c = base + team;
    double gh = 0.0, g = 0.0;
    if (c < p.channels) {
      const int step = p.across * N, block = step * kChain;
      for (int first = lane * N; first < p.places; first += block) {
        const int end = p.places - first < block ? p.places : first + block;
        float block_gh = 0.0f, block_g = 0.0f;
#pragma unroll 4
        for (int i = first; i < end; i += step) {
          auto a = load_stream<X, N>(x + int64_t(c) * p.places + i);
          auto d = load_stream<X, N>(dy + int64_t(c) * p.places + i);
          float pack_gh = 0.0f, pack_g = 0.0f;
#pragma unroll
          for (int j = 0; j < N; ++j) {
            pack_gh = fma(d[j], (a[j] - mean) * rstd, pack_gh);
            pack_g += d[j];
          }
          block_gh += pack_gh, block_g += pack_g;
        }
        gh += double(block_gh), g += double(block_g);
      }
    }
    for (int step = p.across / 2; step > 0; step /= 2) {
      gh += __shfl_xor_sync(0xffffffffu, gh, step);
      g += __shfl_xor_sync(0xffffffffu, g, step);
    }
    if (lane != 0 || c >= p.channels) continue;
    const int64_t all = p.groups * p.channels;
    float* part = p.partials + sample * 2 * all + group * p.channels + c;
    part[0] = float(gh), part[all] = float(g);
    const float w = weight ? widen(weight[c]) : 1.0f;
    means[0] = fma(w, float(gh), means[0]);
    means[1] = fma(w, float(g), means[1]);
  }
  if (p.dx == nullptr) return;
  __syncwarp();
  reduce_row<Sum, kThreads>(means, slots);
  means[0] /= float(size), means[1] /= float(size);
  X* dx = p.dx + sample * p.dx_stride + before;
#pragma unroll 2
  for (int64_t i = int64_t(threadIdx.x) * N; i < size; i += kThreads * N) {
    auto a = load_stream<X, N>(x + i);
    auto d = load_stream<X, N>(dy + i);
    const float w = weight ? widen(weight[i / p.places]) : 1.0f;
    Pack<X, N> out;
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j)
      v[j] = norm_detail::norm_gradient(d[j] * w - means[1], (a[j] - mean) * rstd, means[0], rstd);
    out.set(v);
    store(dx + i, out);
  }
}

}  // namespace

void group_norm_fwd(Context& ctx, const GroupNormFwd& a) {
  with_weight_types(kOp, a.x.dtype, a.weight ? a.weight : a.bias, [&]<class X, class W>(Type<X>, Type<W>) {
    norm_forward(kOp, ctx,
                 NormForward<Forward<X>, W, X>{.in = {a.x.row<X>(0)},
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

void group_norm_bwd(Context& ctx, const GroupNormBwd& a) {
  Vector dweight = a.dweight, dbias = a.dbias;
  dweight.size = dbias.size = a.channels;  // partial rows hold both
  int64_t places = a.x.cols / a.channels;
  with_weight_types(kOp, a.x.dtype, a.weight, [&]<class X, class W>(Type<X>, Type<W>) {
    constexpr int kPack = 16 / sizeof(X);
    auto packs = [&](const Matrix& m) {
      return m.data == nullptr || packs_align(m.data, m.stride, m.cols, sizeof(X));
    };
    bool wide = packs(a.x) && packs(a.dy) && packs(a.dx) && places % kPack == 0;
    int across = 1;
    while (across < 32 && across < places / (wide ? kPack : 1)) across *= 2;
    Backward<X, W> p{.dy = a.dy.row<X>(0),
                     .x = a.x.row<X>(0),
                     .dx = a.dx.row<X>(0),
                     .dy_stride = a.dy.stride,
                     .x_stride = a.x.stride,
                     .dx_stride = a.dx.stride,
                     .weight = a.weight.as<W>(),
                     .mean = a.mean.as<float>(),
                     .rstd = a.rstd.as<float>(),
                     .partials = ctx.scratch_of<float>(a.x.rows * 2 * a.channels),
                     .groups = a.groups,
                     .channels = int(a.channels / a.groups),
                     .places = int(places),
                     .across = across};
    Grid grid{.blocks = a.x.rows * a.groups, .threads = kThreads, .early = true};
    if (wide)
      launch(kOp, ctx, backward_kernel<X, W, kPack>, grid, p);
    else
      launch(kOp, ctx, backward_kernel<X, W, 1>, grid, p);
    sum_partials(kOp, ctx, p.partials, a.x.rows, {dweight, dbias});
  });
}

}  // namespace tigon::cuda
