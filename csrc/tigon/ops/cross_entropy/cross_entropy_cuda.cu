// The CUDA backend of cross_entropy moves 2b bytes per element with the gradient, and b without (b = element
// size). An element takes about 14 instructions with the gradient, two of them ex2, of 31 while memory-bound.
// There are three variants:
//   known      takes gradients of a shard whose statistics are known: cross_entropy_known_cuda.cu.
//   plain      takes rows without options: cross_entropy_plain_cuda.cu.
//   looped     takes all others, and the longest: two passes by one CTA, the second from L2 if the rows in
//              flight fit there.
// A row may start at any element; the partial vectors at its ends are moved element by element.
#include <algorithm>

#include "tigon/base/dispatch.h"
#include "tigon/ops/cross_entropy/cross_entropy_rows.cuh"

namespace tigon::cuda {
namespace {

// A CTA has a thread for eight vectors of the row, up to kMostThreads.
constexpr int kMostThreads = 512, kBlocksPerSm = 2;
constexpr int kVecsPerThread = 2;

// Holds the statistics of a part of a row: some without the label's column, some of all columns.
template <class T>
struct alignas(16) OptionSums {
  EntropySums<T, Linear> others;
  float gap, weight;
  __device__ static OptionSums identity() { return {EntropySums<T, Linear>::identity(), 0.0f, 0.0f}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    others.template all_reduce_lanes<Width>();
    gap = reduce_lanes<Sum, Width>(gap), weight = reduce_lanes<Sum, Width>(weight);
  }
};

template <class T>
__device__ __forceinline__ void z_of_vec(const CrossEntropyParams<T>& p, const AlignedRow<const T>& row,
                                         int k, const uint4& words, float (&z)[AlignedRow<T>::N],
                                         float* slopes = nullptr) {
  constexpr int N = AlignedRow<T>::N;
  unpack<T>(words, z);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    int c = row.column(k) + j;
    z[j] = row.has(c) ? z_of(p, z[j], c, slopes ? slopes + j : nullptr) : -INFINITY;
  }
}

// Runs the first pass over a vector.
template <class T>
__device__ __forceinline__ void accumulate(const CrossEntropyParams<T>& p, const AlignedRow<const T>& row,
                                           int k, const uint4& words, int label, float reference,
                                           OptionSums<T>& a) {
  constexpr int N = AlignedRow<T>::N;
  float z[N], e[N];
  z_of_vec(p, row, k, words, z);
  float top = z[0];
#pragma unroll
  for (int j = 1; j < N; ++j) top = fmaxf(top, z[j]);
  if (top > a.others.m) a.others.rescale(top);
  const float m = finite_max(a.others.m);
#pragma unroll
  for (int j = 0; j < N; ++j) e[j] = exp2_approx((z[j] - m) * kLog2e);
  if (const int at = label - row.column(k); label >= 0 && unsigned(at) < unsigned(N)) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (at == j) e[j] = 0.0f;
  }
  if (p.entropy != nullptr || p.entropy_scale != nullptr)
#pragma unroll
    for (int j = 0; j < N; ++j) a.others.heat = fma(e[j], Linear::finite(z[j] - m), a.others.heat);
  if (p.label_smoothing > 0.0f) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int c = row.column(k) + j;
      if (!row.has(c)) continue;
      const float w = p.class_weight != nullptr ? __ldg(p.class_weight + c) : 1.0f;
      a.gap = fma(w, reference - z[j], a.gap), a.weight += w;
    }
  }
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) e[j] += e[j + step];
  a.others.s += e[0];
}

// Runs the second pass over a vector: stores its gradient, by elements if the offsets differ.
template <class T, class D>
__device__ __forceinline__ void write_gradient(const CrossEntropyParams<T>& p, const AlignedRow<const T>& row,
                                               D* out, int k, const uint4& words, int label,
                                               const Gradient& g, float factor) {
  constexpr int N = AlignedRow<T>::N;
  float z[N], slopes[N];
#pragma unroll
  for (int j = 0; j < N; ++j) slopes[j] = 1.0f;
  z_of_vec(p, row, k, words, z, slopes);
  const int first = row.column(k);
  Vec<D, N> r;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float d = z[j] - g.m, e = exp2_approx(d * kLog2e);
    float push = g.push;
    if (push != 0.0f && p.class_weight != nullptr)
      push *= row.has(first + j) ? __ldg(p.class_weight + first + j) : 0.0f;
    // The product is rounded like of_label(): in a row of one class they cancel.
    if (push != 0.0f) push *= factor;
    float v = first + j == label ? __fadd_rn(g.of_label<false>(d), -push) : cross_entropy_dz(e, g.each, push);
    // Below -200, e is 0: classes at -inf add nothing.
    if (p.entropy_scale != nullptr) v = fma(e, fma(g.tilt, fmaxf(d, -200.0f), g.lift), v);
    r.set(j, v * slopes[j]);
  }
  D* to = out + first;
  if (row.is_full(k) && reinterpret_cast<uintptr_t>(to) % sizeof(r) == 0) {
    store(to, r);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (row.has(first + j)) to[j] = r.v[j];
  }
}

// Reduces to the row's minimum key: the column of a NaN, or 2^31 + the column of a maximum, or 2^32 - 1.
struct Key {
  unsigned value;
  __device__ static Key identity() { return {~0u}; }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    static_assert(Width == 32);
    value = __reduce_min_sync(~0u, value);
  }
};
template <class T>
__device__ __forceinline__ unsigned key_of_vec(const CrossEntropyParams<T>& p, const AlignedRow<const T>& row,
                                               int k, const uint4& words, float m, unsigned key) {
  constexpr int N = AlignedRow<T>::N;
  float z[N];
  z_of_vec(p, row, k, words, z);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    unsigned c = unsigned(row.column(k) + j);
    if (!row.has(int(c))) continue;
    if (z[j] != z[j]) key = min(key, c);
    if (z[j] == m) key = min(key, c | 0x80000000u);
  }
  return key;
}

// Each row has a CTA. The second pass runs backwards: the row's last tile is still in registers, and those
// before it are in L2.
template <class T, class D>
__global__ __launch_bounds__(kMostThreads, kBlocksPerSm) void looped_kernel(
    const __grid_constant__ CrossEntropyParams<T> p) {
  constexpr int kVecs = kVecsPerThread;
  __shared__ ReduceStorage<OptionSums<T>> storage;
  __shared__ ReduceStorage<Key> keys;
  const int threads = int(blockDim.x), step = kVecs * threads;
  const bool writes = threadIdx.x == 0;
  int phase = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const T* x = p.logits + r * p.stride;
    D* out = static_cast<D*>(p.dlogits) + r * p.dlogits_stride;
    const AlignedRow<const T> row(x, p.cols);
    auto load_tile = [&](int base, uint4(&loaded)[kVecs]) {
#pragma unroll
      for (int h = 0; h < kVecs; ++h) loaded[h] = load_vec(row, base + h * threads + int(threadIdx.x));
    };
    uint4 loaded[kVecs];
    load_tile(0, loaded);
    int label = label_of(p, p.target[r]);
    if (label == kSkipped && p.predicted != nullptr) label = kIgnored;
    if (label == kSkipped) {
      if (p.dlogits != nullptr) clear(out, p.cols);
      if (writes) finish_skipped(p, r);
      if (writes && p.smoothing != nullptr) p.smoothing[r] = 0.0f;
      continue;
    }
    const float z = label >= 0 ? z_of(p, widen(x[label]), label) : -INFINITY;
    float reference = p.label_smoothing > 0.0f ? z_of(p, widen(x[0]), 0) : 0.0f;
    if (!isfinite(reference)) reference = 0.0f;
    OptionSums<T> a = OptionSums<T>::identity();
    // The label's z is part of the maximum, so it has been read before any thread may overwrite it.
    a.others.m = fmaxf(a.others.m, z);
    for (int base = 0; base < row.vecs; base += step) {
      if (base > 0) load_tile(base, loaded);
#pragma unroll
      for (int h = 0; h < kVecs; ++h)
        accumulate(p, row, base + h * threads + int(threadIdx.x), loaded[h], label, reference, a);
    }
    a = all_reduce_row<0, false>(a, storage, phase);
    if (p.predicted != nullptr) {
      unsigned key = ~0u;
      for (int k = threadIdx.x; k < row.vecs; k += threads)
        key = key_of_vec(p, row, k, load_vec(row, k), a.others.m, key);
      key = all_reduce_row<0, false>(Key{key}, keys, phase).value;
      if (writes) p.predicted[r] = key == ~0u ? 0 : int64_t(key & 0x7fffffffu);
    }
    ++phase;
    const float scale = p.scale != nullptr ? p.scale[r * p.scale_step] : 1.0f;
    const Gradient g = finish<true, true>(p, r, label, Sums<T>{a.others.m, a.others.s}, {z, z - a.others.m},
                                          scale, writes, a.others.heat, {reference, a.gap, a.weight});
    if (p.dlogits == nullptr) continue;
    if (label == kIgnored) {
      clear(out, p.cols);
      continue;
    }
    for (int base = (row.vecs - 1) / step * step; base >= 0; base -= step) {
      if (base + step < row.vecs) load_tile(base, loaded);
#pragma unroll
      for (int h = 0; h < kVecs; ++h)
        write_gradient(p, row, out, base + h * threads + int(threadIdx.x), loaded[h], label, g,
                       scale * p.gain);
    }
  }
}

}  // namespace

void cross_entropy_rows(Context& ctx, const CrossEntropyRows& a) {
  constexpr int64_t kMostColumns = INT32_MAX - 64;
  TIGON_CHECK(kOp, a.logits.cols <= kMostColumns, "logits must have at most ", kMostColumns,
              " columns on CUDA, got ", a.logits.cols);
  float gain = a.logit_scale / a.temperature, inner = a.softcap > 0.0f ? a.logit_scale : gain;
  // These are the constants of z in units of ln 2.
  const SoftcapConstants cap =
      a.softcap > 0.0f ? softcap_constants(inner, a.softcap, 1.4426950408889634 * a.softcap / a.temperature)
                       : SoftcapConstants{};
  const bool plain =
      !a.bias && a.label_smoothing == 0.0f && inner > 0.0f && (a.softcap == 0.0f || softcap_is_in_range(cap));
  const bool first_argmax = a.predicted && !a.only_label;
  dispatch_float(kOp, "logits", a.logits.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    CrossEntropyParams<T> p = {
        .logits = a.logits.row<T>(0),
        .dlogits = a.dlogits.data,
        .target = a.target.as<int64_t>(),
        .bias = a.bias.data,
        .class_weight = a.class_weight ? a.class_weight.as<float>() + a.first_class : nullptr,
        .scale = a.scale.as<float>(),
        .entropy_scale = a.entropy_scale.as<float>(),
        .loss = a.loss.as<float>(),
        .lse = a.lse.as<float>(),
        .target_logit = a.target_logit.as<float>(),
        .log_prob = a.log_prob.as<float>(),
        .entropy = a.entropy.as<float>(),
        .predicted = a.predicted.as<int64_t>(),
        .row_max = a.row_max.as<float>(),
        .log_sum = a.log_sum.as<float>(),
        .smoothing = a.smoothing.as<float>(),
        .log_mass = a.classes > 0 ? a.log_mass.as<float>() : nullptr,
        .all_lse = a.all_lse.as<float>(),
        .all_log_prob = a.all_log_prob.as<float>(),
        .known_max = a.known_max.as<float>(),
        .known_log_sum = a.known_log_sum.as<float>(),
        .all_entropy = a.all_entropy.as<float>(),
        .weight_sum = a.classes > 0 ? a.weight_sum.as<float>() : nullptr,
        .first_class = a.first_class,
        .classes = a.classes > 0 ? a.classes : a.logits.cols,
        .rows = a.logits.rows,
        .stride = a.logits.stride,
        .dlogits_stride = a.dlogits.stride,
        .scale_step = a.scale.size == 1 ? 0 : 1,
        .ignore_index = a.ignore_index,
        .cols = int(a.logits.cols),
        .slice = 0,
        .bias_is_f32 = a.bias.dtype == DType::f32,
        .logit_scale = inner,
        .softcap = a.softcap,
        .top = a.softcap / a.temperature,
        .gain = gain,
        .label_smoothing = a.label_smoothing,
        .z_loss = a.z_loss,
        .cap = cap};
    auto run = [&]<class D>(D*) {
      auto launch_looped = [&](const CrossEntropyParams<T>& p) {
        constexpr int kWarpColumns = AlignedRow<T>::N * 8 * 32;
        const int threads = int(std::min<int64_t>(ceil_div(p.cols, kWarpColumns) * 32, kMostThreads));
        launch(kOp, ctx, looped_kernel<T, D>,
               {.blocks = std::min<int64_t>(p.rows, INT32_MAX), .threads = threads}, p);
      };
      // The other results are those of a call without it.
      if (plain && first_argmax && ctx.deterministic) {
        CrossEntropyParams<T> argmax = p;
        argmax.dlogits = nullptr, p.predicted = nullptr;
        launch_looped(argmax);
      }
      const bool fits = plain && (!first_argmax || ctx.deterministic);
      if (!fits || !cross_entropy_plain<T, D>(ctx, p)) launch_looped(p);
    };
    DType out = a.dlogits.data != nullptr ? a.dlogits.dtype : a.logits.dtype;
    if constexpr (sizeof(T) == 4) {
      if (out == DType::bf16) return run(static_cast<__nv_bfloat16*>(nullptr));
      if (out == DType::f16) return run(static_cast<__half*>(nullptr));
    }
    // Deterministic gradients are those of a pass over whole rows.
    if (a.known_max && p.log_mass != nullptr && plain && a.softcap == 0.0f && !a.entropy_scale &&
        !ctx.deterministic)
      cross_entropy_known(ctx, p);
    else
      run(static_cast<T*>(nullptr));
  });
}

}  // namespace tigon::cuda
