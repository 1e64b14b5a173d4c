// CUDA backend of cross_entropy.
//
// Bytes per element (b = element size): 2b with the gradient, b without.
// Instructions per element: about 14 with the gradient, two of them ex2, of 31 while memory-bound.
//
// Variants
//   plain      Rows without options: cross_entropy_plain_cuda.cu.
//   looped     All others, and the longest: two passes by one CTA, the second out of L2 where the rows in flight fit there.
// A row may start at any element; the partial vectors at its ends are moved element by element.
#include <algorithm>

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_params.cuh"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "cross_entropy";
// A thread for eight vectors of the row, at most these.
constexpr int kMostThreads = 512, kBlocksPerSm = 2;
constexpr int kVecsPerThread = 2;

template <class T>
using Params = CrossEntropyParams<T>;

// Statistics of a part of a row: maximum; sum of e^(z - m) without the label's column, which is
// added at the end so that p - 1 and log p are accurate where the label has nearly all probability;
// sums of w (reference - z), w, and e^(z - m) (z - m) without the label's column.
struct Sums {
  float m, s, smoothing_sum, weight, entropy_sum;
  __device__ static Sums identity() { return {-INFINITY, 0.0f, 0.0f, 0.0f, 0.0f}; }
  __device__ __forceinline__ void rescale(float top) {  // top > m
    const float d = m - top, f = exp2_approx(d * kLog2e);
    entropy_sum = f * fma(fmaxf(d, -1e30f), s, entropy_sum);
    s *= f, m = top;
  }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    static_assert(Width == 32);
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      auto other = [&](float x) { return __shfl_xor_sync(~0u, x, step); };
      Sums b{other(m), other(s), other(smoothing_sum), other(weight), other(entropy_sum)};
      const float top = fmaxf(m, b.m);
      if (m != top) rescale(top);
      if (b.m != top) b.rescale(top);
      s += b.s, smoothing_sum += b.smoothing_sum, weight += b.weight, entropy_sum += b.entropy_sum;
    }
  }
};

template <class T>
__device__ __forceinline__ void z_of_vec(const Params<T>& p, const AlignedRow<const T>& row, int k,
                                         const uint4& words, float (&z)[AlignedRow<T>::N],
                                         float* slopes = nullptr) {
  constexpr int N = AlignedRow<T>::N;
  unpack<T>(words, z);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    int c = row.column(k) + j;
    z[j] = row.has(c) ? z_of(p, z[j], c, slopes ? slopes + j : nullptr) : -INFINITY;
  }
}

__device__ __forceinline__ float weight_at(const float* class_weight, int c) {
  return class_weight != nullptr ? __ldg(class_weight + c) : 1.0f;
}

// First pass over a vector. `target`: the label's column, or -1; `reference`: of smoothing_sum.
template <class T>
__device__ __forceinline__ void accumulate(const Params<T>& p, const AlignedRow<const T>& row, int k,
                                           const uint4& words, int target, float reference, Sums& a) {
  constexpr int N = AlignedRow<T>::N;
  float z[N], e[N];
  z_of_vec(p, row, k, words, z);
  float top = z[0];
#pragma unroll
  for (int j = 1; j < N; ++j) top = fmaxf(top, z[j]);
  if (top > a.m) a.rescale(top);
  float m = a.m == -INFINITY ? 0.0f : a.m;  // -inf alone adds nothing; NaN propagates
#pragma unroll
  for (int j = 0; j < N; ++j) e[j] = exp2_approx((z[j] - m) * kLog2e);
  if (int at = target - row.column(k); unsigned(at) < unsigned(N) && target >= 0) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (at == j) e[j] = 0.0f;
  }
  if (p.entropy != nullptr || p.entropy_scale != nullptr)
#pragma unroll
    for (int j = 0; j < N; ++j) a.entropy_sum = fma(e[j], fmaxf(z[j] - m, -1e30f), a.entropy_sum);
  if (p.label_smoothing > 0.0f) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int c = row.column(k) + j;
      if (!row.has(c)) continue;
      float w = weight_at(p.class_weight, c);
      a.smoothing_sum = fma(w, reference - z[j], a.smoothing_sum);
      a.weight += w;
    }
  }
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) e[j] += e[j + step];
  a.s += e[0];
}

// What the second pass needs: the gradient is
//   factor * slope * (e * share - smoothing_push * w)                   in other columns,
//   factor * slope * (e * rest_share - others * target_share - smoothing_push * w)  in the label's,
//   plus slope * e * (entropy_slope * (z - m) + entropy_bias) for the entropy.
struct RowGradient {
  float m, share, smoothing_push, factor;
  float others, target_share, rest_share;
  float entropy_slope, entropy_bias;
  int target;  // column, or -1
};

// Second pass over a vector: stores its gradient, by elements where the offsets differ.
template <class T, class D>
__device__ __forceinline__ void write_gradient(const Params<T>& p, const AlignedRow<const T>& row,
                                               const AlignedRow<D>& out, int k, const uint4& words,
                                               const RowGradient& g) {
  constexpr int N = AlignedRow<T>::N;
  float z[N], slopes[N];
#pragma unroll
  for (int j = 0; j < N; ++j) slopes[j] = 1.0f;
  z_of_vec(p, row, k, words, z, slopes);
  int first = row.column(k), at = g.target - first;
  Vec<D, N> r;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    float e = exp2_approx((z[j] - g.m) * kLog2e), push = g.smoothing_push;
    if (push != 0.0f && p.class_weight != nullptr)
      push *= row.has(first + j) ? __ldg(p.class_weight + first + j) : 0.0f;
    float v = cross_entropy_dz(e, g.share, push);
    // p - 1 is minus the share of the other columns; it is rounded to storage once.
    if (at == j) v = fma(-g.others, g.target_share, cross_entropy_dz(e, g.rest_share, push));
    v *= g.factor * slopes[j];
    // Below -200 e is 0: classes at -inf add nothing.
    if (p.entropy_scale != nullptr)
      v += slopes[j] * e * fma(g.entropy_slope, fmaxf(z[j] - g.m, -200.0f), g.entropy_bias);
    r.set(j, v);
  }
  D* to = out.base + int64_t(out.lead) + first;
  if (row.is_full(k) && reinterpret_cast<uintptr_t>(to) % sizeof(r) == 0) {
    store(to, r);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (row.has(first + j)) to[j] = r.v[j];
  }
}

template <class T>
__device__ __forceinline__ void clear(const AlignedRow<T>& out) {
  constexpr int N = AlignedRow<T>::N;
  for (int k = threadIdx.x; k < out.vecs; k += blockDim.x) {
    if (out.is_full(k)) {
      *reinterpret_cast<uint4*>(out.base + int64_t(k) * N) = make_uint4(0, 0, 0, 0);
    } else {
      for (int j = 0; j < N; ++j)
        if (out.has(out.column(k) + j)) out.base[int64_t(k) * N + j] = narrow<T>(0.0f);
    }
  }
}

// The row's minimum key: the column of a NaN, or 2^31 + the column of a maximum, or 2^32 - 1.
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
__device__ __forceinline__ unsigned key_of_vec(const Params<T>& p, const AlignedRow<const T>& row, int k,
                                               const uint4& words, float m, unsigned key) {
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

// The label of a row, and what follows from it before the logits are read.
struct Label {
  bool ignored, bad;
  int column;  // -1 when ignored, bad or of another shard
  float z, weight, reference;
  __device__ __forceinline__ bool is_elsewhere() const { return column < 0 && !ignored && !bad; }
};
template <class T>
__device__ __forceinline__ Label label_of(const Params<T>& p, int64_t row, const T* x) {
  Label l;
  int64_t y = p.target[row];
  l.ignored = y == p.ignore_index;
  l.bad = !l.ignored && (y < 0 || y >= p.classes);
  y -= p.first_class;
  l.column = l.ignored || l.bad || y < 0 || y >= p.cols ? -1 : int(y);
  l.z = l.weight = l.reference = 0.0f;
  if (l.column >= 0) {
    l.z = z_of(p, widen(x[l.column]), l.column);
    l.weight = weight_at(p.class_weight, l.column);
  } else if (l.is_elsewhere()) {
    l.weight = p.class_weight != nullptr ? p.class_weight[y] : 1.0f;
  }
  if (p.label_smoothing > 0.0f) l.reference = z_of(p, widen(x[0]), 0);
  if (!isfinite(l.reference)) l.reference = 0.0f;
  return l;
}

// Writes the results of a row (one thread) and returns what the gradient needs.
template <class T>
__device__ __forceinline__ RowGradient finish(const Params<T>& p, int64_t row, const Label& l, const Sums& a,
                                              bool writes) {
  bool has = l.column >= 0, is_max = has && l.z == a.m && isfinite(l.z);
  float own = has ? exp2_approx((l.z - a.m) * kLog2e) : 0.0f, s = a.s + own;
  float log_s = is_max ? log1pf(a.s) : logf(s), lse = a.m + log_s;
  float entropy_sum = has ? fma(own, fmaxf(l.z - a.m, -1e30f), a.entropy_sum) : a.entropy_sum;
  float keep = 1.0f - p.label_smoothing, share = p.label_smoothing / float(p.classes);
  if (writes) {
    float loss = keep * l.weight * ((a.m - l.z) + log_s);
    if (p.label_smoothing > 0.0f)
      loss += share * (a.weight * ((a.m - l.reference) + log_s) + a.smoothing_sum);
    if (p.z_loss != 0.0f) loss += p.z_loss * lse * lse;
    if (p.loss) p.loss[row] = l.ignored || l.is_elsewhere() ? 0.0f : l.bad ? NAN : loss;
    if (p.target_logit) p.target_logit[row] = l.bad ? NAN : l.z;
    if (p.log_prob)
      p.log_prob[row] = l.ignored ? 0.0f : l.bad ? NAN : l.is_elsewhere() ? -INFINITY : (l.z - a.m) - log_s;
    if (p.lse) p.lse[row] = lse;
    if (p.entropy) p.entropy[row] = log_s - entropy_sum / s;
    if (p.row_max) p.row_max[row] = a.m;
    if (p.log_sum) p.log_sum[row] = a.m == -INFINITY && a.s == 0.0f ? -INFINITY : log_s;
    if (p.smoothing) p.smoothing[row] = a.weight * ((a.m - l.reference) + log_s) + a.smoothing_sum;
  }
  const float log_share = p.log_share != nullptr ? p.log_share[row] : 0.0f;
  float all_weights = p.class_weight == nullptr ? float(p.classes)
                      : p.weight_sum != nullptr ? *p.weight_sum
                                                : a.weight;
  float rest = share * all_weights;
  if (p.z_loss != 0.0f) rest += 2.0f * p.z_loss * (lse - log_share);
  float pull = keep * l.weight + rest;
  float scale = p.scale != nullptr ? p.scale[row * p.scale_step] : 1.0f;
  RowGradient g;
  g.m = a.m, g.share = pull / s, g.smoothing_push = share, g.factor = l.bad ? NAN : scale * p.gain;
  g.others = a.s, g.target_share = keep * l.weight / s, g.rest_share = rest / s, g.target = l.column;
  g.entropy_slope = g.entropy_bias = 0.0f;
  if (p.entropy_scale != nullptr) {
    g.entropy_slope = -p.entropy_scale[row] * p.gain / s;
    g.entropy_bias = -g.entropy_slope * (entropy_sum / s);
  }
  if (p.log_share != nullptr) {  // p = e / s * part
    const float part = expf(log_share);
    g.share *= part, g.rest_share *= part;
    g.others = a.s * part - s * expm1f(log_share);  // s (1 - p) of the label
    if (p.entropy_scale != nullptr) {
      g.entropy_slope *= part;
      g.entropy_bias = g.entropy_slope * (p.all_entropy[row] - log_s + log_share);
    }
    if (log_share == -INFINITY) {  // every class here is at -inf: p = 0
      g.m = 0.0f, g.share = g.rest_share = g.entropy_slope = g.entropy_bias = 0.0f;
      g.others = 1.0f, g.target_share = keep * l.weight;
    }
  }
  return g;
}

// A CTA per row. The second pass runs backwards: the row's last tile is still in registers, those before it in L2.
template <class T, class D>
__global__ __launch_bounds__(kMostThreads,
                             kBlocksPerSm) void looped_kernel(const __grid_constant__ Params<T> p) {
  constexpr int kVecs = kVecsPerThread;
  __shared__ ReduceStorage<Sums> storage;
  __shared__ ReduceStorage<Key> keys;
  const int threads = int(blockDim.x), step = kVecs * threads;
  int phase = 0;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x, ++phase) {
    const T* x = p.logits + r * p.stride;
    AlignedRow<const T> row(x, p.cols);
    AlignedRow<D> out(static_cast<D*>(p.dlogits) + r * p.dlogits_stride, p.cols);
    bool writes = threadIdx.x == 0;
    auto load_tile = [&](int base, uint4(&loaded)[kVecs]) {
#pragma unroll
      for (int h = 0; h < kVecs; ++h) loaded[h] = load_vec(row, base + h * threads + int(threadIdx.x));
    };
    uint4 loaded[kVecs];
    load_tile(0, loaded);
    Label label = label_of(p, r, x);
    bool wanted = !label.ignored || p.lse || p.entropy || p.predicted;
    Sums a = Sums::identity();
    // The label's z is part of the maximum, so it has been read before any thread may overwrite it.
    if (label.column >= 0) a.m = fmaxf(a.m, label.z);
    for (int base = 0; wanted && base < row.vecs; base += step) {
      if (base > 0) load_tile(base, loaded);
#pragma unroll
      for (int h = 0; h < kVecs; ++h)
        accumulate(p, row, base + h * threads + int(threadIdx.x), loaded[h], label.column, label.reference,
                   a);
    }
    a = all_reduce_row<0, false>(a, storage, phase);
    if (p.predicted != nullptr) {
      unsigned key = ~0u;
      for (int k = threadIdx.x; k < row.vecs; k += threads)
        key = key_of_vec(p, row, k, load_vec(row, k), a.m, key);
      key = all_reduce_row<0, false>(Key{key}, keys, phase).value;
      if (writes) p.predicted[r] = key == ~0u ? 0 : int64_t(key & 0x7fffffffu);
    }
    RowGradient gradient = finish(p, r, label, a, writes);
    if (p.dlogits != nullptr) {
      if (label.ignored) {
        clear(out);
      } else {
        for (int base = (row.vecs - 1) / step * step; base >= 0; base -= step) {
          if (base + step < row.vecs) load_tile(base, loaded);
#pragma unroll
          for (int h = 0; h < kVecs; ++h)
            write_gradient(p, row, out, base + h * threads + int(threadIdx.x), loaded[h], gradient);
        }
      }
    }
  }
}

}  // namespace

void cross_entropy_rows(Context& ctx, const CrossEntropyRows& a) {
  constexpr int64_t kMostColumns = INT32_MAX - 64;
  TIGON_CHECK(kOp, a.logits.cols <= kMostColumns, "logits must have at most ", kMostColumns,
              " columns on CUDA, got ", a.logits.cols);
  float gain = a.logit_scale / a.temperature, inner = a.softcap > 0.0f ? a.logit_scale : gain;
  // Of z in units of ln 2.
  const SoftcapConstants cap =
      a.softcap > 0.0f ? softcap_constants(inner, a.softcap, 1.4426950408889634 * a.softcap / a.temperature)
                       : SoftcapConstants{};
  const bool plain =
      !a.bias && a.label_smoothing == 0.0f && inner > 0.0f && (a.softcap == 0.0f || softcap_is_in_range(cap));
  const bool first_argmax = a.predicted && !a.only_label;
  dispatch_float(kOp, "logits", a.logits.dtype, [&](auto type) {
    using T = typename DeviceType<typename decltype(type)::type>::type;
    Params<T> p = {.logits = a.logits.row<T>(0),
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
                   .log_share = a.classes > 0 ? a.log_share.as<float>() : nullptr,
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
      auto launch_looped = [&](const Params<T>& p) {
        constexpr int kWarpColumns = AlignedRow<T>::N * 8 * 32;
        const int threads = int(std::min<int64_t>(ceil_div(p.cols, kWarpColumns) * 32, kMostThreads));
        launch(kOp, ctx, looped_kernel<T, D>,
               {.blocks = std::min<int64_t>(p.rows, INT32_MAX), .threads = threads}, p);
      };
      if (plain && first_argmax && ctx.deterministic) {  // the other results are those of a call without it
        Params<T> argmax = p;
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
    run(static_cast<T*>(nullptr));
  });
}

}  // namespace tigon::cuda
