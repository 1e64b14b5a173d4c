// The CUDA backend of cross_entropy around the rows computes the factor of a reduction and the total, and
// rescales a stored gradient. For several labels per row it has a thread per row if labels are compared, and
// otherwise a thread per label (threads of the same label write the same value). cross_entropy_combine has a
// thread per row. Nothing synchronises with the host.
#include <algorithm>
#include <cmath>

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/each.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/cross_entropy/cross_entropy_labels.inc"
#include "tigon/ops/cross_entropy/cross_entropy_shards.inc"

constexpr const char* kOp = "cross_entropy";

// Sums are in double: over chunks by CTAs, then over the CTAs. The order depends on n only.
constexpr int kSumThreads = 1024;
constexpr int64_t kSumChunk = 8192, kSumBlocks = 512;

struct Losses {
  const float* loss;
  __device__ double operator()(int64_t i) const { return double(loss[i]); }
};
// `mask` is a mask of bytes; there are then no labels and no class weights. These may be null anyway.
struct Weights {
  const void* target;
  bool mask;
  const float* class_weight;
  int64_t classes, ignore_index;
  __device__ double operator()(int64_t i) const {
    int64_t y =
        mask ? int64_t(static_cast<const uint8_t*>(target)[i]) : static_cast<const int64_t*>(target)[i];
    if (y == ignore_index) return 0.0;
    if (class_weight == nullptr) return 1.0;
    // If the label is out of range, the row's loss is NaN.
    return y >= 0 && y < classes ? double(class_weight[y]) : 0.0;
  }
};
struct Partials {
  const double* sums;
  __device__ double operator()(int64_t i) const { return sums[i]; }
};
// Says what is done with the whole sum; the factor may be null.
struct Result {
  bool reciprocal;
  const float* factor;
  float* out;
};

template <class F>
__global__ __launch_bounds__(kSumThreads) void sum_kernel(F f, int64_t n, int64_t chunk, double* partials,
                                                          Result result) {
  __shared__ double slots[32];
  double s = 0.0;
  int64_t first = int64_t(blockIdx.x) * chunk, end = min(n, first + chunk);
  for (int64_t i = first + threadIdx.x; i < end; i += kSumThreads) s += f(i);
  for (int step = 16; step > 0; step >>= 1) s += __shfl_xor_sync(0xffffffffu, s, step);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  s = slots[threadIdx.x];
  for (int step = 16; step > 0; step >>= 1) s += __shfl_xor_sync(0xffffffffu, s, step);
  if (threadIdx.x != 0) return;
  if (partials != nullptr)
    partials[blockIdx.x] = s;
  else
    *result.out = float(result.reciprocal ? 1.0 / s : result.factor ? s * double(*result.factor) : s);
}

template <class F>
void sum_into(Context& ctx, const F& f, int64_t n, const Result& result) {
  if (n <= kSumChunk) {
    launch(kOp, ctx, sum_kernel<F>, {.blocks = 1, .threads = kSumThreads}, f, n, kSumChunk, nullptr, result);
    return;
  }
  int64_t chunk = std::max(kSumChunk, ceil_div(n, kSumBlocks)), blocks = ceil_div(n, chunk);
  double* partials = ctx.scratch_of<double>(blocks);
  launch(kOp, ctx, sum_kernel<F>, {.blocks = blocks, .threads = kSumThreads}, f, n, chunk, partials, result);
  launch(kOp, ctx, sum_kernel<Partials>, {.blocks = 1, .threads = kSumThreads}, Partials{partials}, blocks,
         blocks, nullptr, result);
}

__global__ void reciprocal_kernel(const void* value, DType dtype, double number, float* out) {
  if (value != nullptr)
    number = dtype == DType::f64   ? *static_cast<const double*>(value)
             : dtype == DType::i64 ? double(*static_cast<const int64_t*>(value))
             : dtype == DType::i32 ? double(*static_cast<const int32_t*>(value))
                                   : double(*static_cast<const float*>(value));
  *out = float(1.0 / number);
}

constexpr int kRescaleThreads = 256, kRescaleVecs = 4;

// Takes tiles of vectors, row by row. A matrix without gaps is treated as one row.
template <class T>
__global__ __launch_bounds__(kRescaleThreads) void rescale_kernel(T* grad, int64_t rows, int64_t cols,
                                                                  int64_t stride, const float* factor) {
  constexpr int N = AlignedRow<T>::N, kTile = kRescaleThreads * kRescaleVecs;
  float f = *factor;
  if (f == 1.0f) return;
  int64_t tiles = (cols + N - 1 + N - 1) / N / kTile + 1;
  for (int64_t tile = blockIdx.x; tile < rows * tiles; tile += gridDim.x) {
    T* row = grad + tile / tiles * stride;
    int lead = int(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    int64_t column[kRescaleVecs];
    uint4 vecs[kRescaleVecs];
#pragma unroll
    for (int h = 0; h < kRescaleVecs; ++h) {
      column[h] = (tile % tiles * kTile + h * kRescaleThreads + threadIdx.x) * N - lead;
      if (column[h] >= 0 && column[h] + N <= cols) vecs[h] = *reinterpret_cast<const uint4*>(row + column[h]);
    }
#pragma unroll
    for (int h = 0; h < kRescaleVecs; ++h) {
      if (column[h] >= 0 && column[h] + N <= cols) {
        float x[N];
        Vec<T, N> r;
        unpack<T>(vecs[h], x);
#pragma unroll
        for (int j = 0; j < N; ++j) r.set(j, x[j] * f);
        store(row + column[h], r);
      } else {
        for (int64_t c = max(column[h], int64_t(0)); c < min(column[h] + N, cols); ++c)
          row[c] = narrow<T>(widen(row[c]) * f);
      }
    }
  }
}

struct LabelTargets {
  CrossEntropyLabels p;
  __device__ void operator()(int64_t row) const { label_target(p, row); }
};
template <class T>
struct LabelScores {
  CrossEntropyLabels p;
  __device__ void operator()(int64_t i) const {
    label_scores<T>(p, i, [](T x) { return widen(x); });
  }
};
template <class T>
struct LabelGradients {
  CrossEntropyLabels p;
  __device__ void operator()(int64_t at) const {
    const int64_t i = at / p.count, k = at % p.count;
    if (label_has_gradient(p, i, k))
      p.dlogits.row<T>(i)[labels_of(p, i)[k]] = narrow<T>(float(label_gradient(p, i, k)));
  }
};
struct LabelResults {
  CrossEntropyLabels p;
  __device__ void operator()(int64_t at) const { label_result(p, at / p.count, at % p.count); }
};
template <class T>
struct Renormalize {
  CrossEntropyRenormalize p;
  __device__ void operator()(int64_t row) const {
    renormalize_row<T>(p, row, [](float x) { return narrow<T>(x); }, [](T x) { return widen(x); });
  }
};
struct CombineRows {
  CrossEntropyCombine p;
  __device__ void operator()(int64_t row) const { combine_row(p, row); }
};

}  // namespace

void cross_entropy_scale(Context& ctx, const CrossEntropyScale& a) {
  float* out = a.scale.as<float>();
  if (!a.denominator && a.mean) {
    Weights weights{a.target.data, a.target.dtype == DType::u8, a.class_weight.as<float>(),
                    a.class_weight.size, a.ignore_index};
    sum_into(ctx, weights, a.target.size, {.reciprocal = true, .factor = nullptr, .out = out});
    return;
  }
  launch(kOp, ctx, reciprocal_kernel, {.blocks = 1, .threads = 1}, a.denominator.data, a.denominator.dtype,
         a.host_denominator, out);
}

void cross_entropy_total(Context& ctx, const CrossEntropyTotal& a) {
  sum_into(ctx, Losses{a.loss.as<float>()}, a.loss.size,
           {.reciprocal = false, .factor = a.scale.as<float>(), .out = a.total.as<float>()});
}

void cross_entropy_rescale(Context& ctx, const CrossEntropyRescale& a) {
  bool flat = a.grad.stride == a.grad.cols || a.grad.rows == 1;
  int64_t rows = flat ? 1 : a.grad.rows, cols = flat ? a.grad.rows * a.grad.cols : a.grad.cols;
  dispatch_float(kOp, "grad", a.grad.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    int64_t tiles = rows * (ceil_div(cols, AlignedRow<T>::N * kRescaleThreads * kRescaleVecs) + 1);
    int64_t blocks = std::min<int64_t>(tiles, int64_t(device_facts().sms) * 8);
    launch(kOp, ctx, rescale_kernel<T>, {.blocks = blocks, .threads = kRescaleThreads}, a.grad.row<T>(0),
           rows, cols, a.grad.stride, a.factor.as<float>());
  });
}

void cross_entropy_label_targets(Context& ctx, const CrossEntropyLabels& a) {
  for_each(kOp, ctx, a.target.size, LabelTargets{a});
}

void cross_entropy_label_scores(Context& ctx, const CrossEntropyLabels& a) {
  dispatch_float(kOp, "logits", a.logits.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    for_each(kOp, ctx, a.chosen.size, LabelScores<T>{a});
  });
}

void cross_entropy_label_gradient(Context& ctx, const CrossEntropyLabels& a) {
  dispatch_float(kOp, "dlogits", a.dlogits.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    for_each(kOp, ctx, a.chosen.size * a.count, LabelGradients<T>{a});
  });
}

void cross_entropy_label_results(Context& ctx, const CrossEntropyLabels& a) {
  for_each(kOp, ctx, a.labels.size, LabelResults{a});
}

void cross_entropy_renormalize(Context& ctx, const CrossEntropyRenormalize& a) {
  dispatch_float(kOp, "dlogits", a.dlogits.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    for_each(kOp, ctx, a.target.size, Renormalize<T>{a});
  });
}

void cross_entropy_combine(Context& ctx, const CrossEntropyCombine& a) {
  for_each(kOp, ctx, a.target.size, CombineRows{a});
}

}  // namespace tigon::cuda
