// The pieces of the kernels for cross_entropy's rows without options: loads, statistics, results of a row, gradient.
#pragma once

#include <type_traits>

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/ops/cross_entropy/cross_entropy_params.cuh"

namespace tigon::cuda {
namespace {

template <class T>
using Params = CrossEntropyParams<T>;

// The label of a row is its column or one of: the row is not read and gets zeros; it is read for
// its lse; it is out of range; it is a column of another shard.
enum : int { kSkipped = -1, kIgnored = -2, kOutOfRange = -3, kElsewhere = -4 };
template <class T>
__device__ __forceinline__ int label_of(const Params<T>& p, int64_t y) {
  if (y == p.ignore_index) return p.lse != nullptr || p.entropy != nullptr ? kIgnored : kSkipped;
  if (is_elsewhere(p, y)) return kElsewhere;
  y -= p.first_class;
  return y < 0 || y >= p.cols ? kOutOfRange : int(y);
}

// Loads 16 bytes, or -inf in every column. InOrder: loads stay in program order, which takes
// registers; else the compiler schedules them.
template <class T, bool InOrder>
__device__ __forceinline__ uint4 load_or_minus_inf(bool valid, const T* from) {
  constexpr uint32_t none = kMinusInf<T>;
  if constexpr (InOrder)
    return load_predicated(valid, static_cast<const void*>(from), none);
  else
    return valid ? *reinterpret_cast<const uint4*>(from) : make_uint4(none, none, none, none);
}

template <class T, int K>
__device__ __forceinline__ float max_of(const uint4 (&q)[K]) {
  uint32_t t = max_words<T>(q[0]);
#pragma unroll
  for (int k = 1; k < K; ++k) t = max_words<T>(t, max_words<T>(q[k]));
  return max_of_word<T>(t);
}

__device__ __forceinline__ float exp_of(float z, float m) { return exp2_approx((z - m) * kLog2e); }
// Of a logit x: its z is x * scale, rounded nowhere.
__device__ __forceinline__ float exp_of(float x, float scale, float m) {
  return exp2_approx(fma(x, scale, -m) * kLog2e);
}

// A vector with -inf in one element.
template <class T>
__device__ __forceinline__ uint4 mask_element(const uint4& q, int element) {
  const int word = element * int(sizeof(T)) / 4;
  // Selects bytes of the word (0 to 3) or of -inf (4 to 7).
  const uint32_t bytes = sizeof(T) == 4 ? 0x7654u : element % 2 == 0 ? 0x3254u : 0x5410u, none = kMinusInf<T>;
  return make_uint4(__byte_perm(q.x, none, word == 0 ? bytes : 0x3210u),
                    __byte_perm(q.y, none, word == 1 ? bytes : 0x3210u),
                    __byte_perm(q.z, none, word == 2 ? bytes : 0x3210u),
                    __byte_perm(q.w, none, word == 3 ? bytes : 0x3210u));
}

// The position of a column, if this thread holds it: the tile, of every `threads`-th vector, or -1;
// the element within the vector.
struct ElementCoord {
  int tile, element, vecs_before;  // of the row's vectors
  template <class T>
  __device__ __forceinline__ ElementCoord(const PeeledRow<T>& peeled, int column, int threads) {
    const int at = column - peeled.head, vec = at / PeeledRow<T>::N;
    element = at % PeeledRow<T>::N;
    tile = at >= 0 && vec < peeled.vecs && vec % threads == int(threadIdx.x) ? vec / threads : -1;
    vecs_before = at >= 0 ? vec : 0;
  }
};

// The sum of e^(z - m) of a vector; to `heat`, if there, it adds the sum of e^(z - m) (z - m).
template <class T>
__device__ __forceinline__ float sum_of(const uint4& words, float scale, float m, float* heat = nullptr) {
  constexpr int N = AlignedRow<T>::N;
  float e[N];
  unpack<T>(words, e);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float d = fma(e[j], scale, -m);
    e[j] = exp2_approx(d * kLog2e);
    if (heat != nullptr) *heat = fma(e[j], fmaxf(d, -1e30f), *heat);  // a class at -inf adds nothing
  }
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) e[j] += e[j + step];
  return e[0];
}

// Statistics of a part of a row. The sum leaves out the label's column, which is added at the end
// so that p - 1 and log p are accurate where the label has nearly all probability.
template <class T>
using Sums = OnlineSoftmax<T>;
// And the sum of e^(z - m) (z - m).
struct alignas(16) EntropySums {
  float m, s, heat, unused;
  __device__ static EntropySums identity() { return {-INFINITY, 0.0f, 0.0f, 0.0f}; }
  __device__ __forceinline__ void rescale(float top) {  // top > m
    const float d = m - top, f = exp2_approx(d * kLog2e);
    heat = f * fma(fmaxf(d, -1e30f), s, heat);
    s *= f, m = top;
  }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
#pragma unroll
    for (int step = Width / 2; step > 0; step >>= 1) {
      EntropySums b = {__shfl_xor_sync(~0u, m, step), __shfl_xor_sync(~0u, s, step),
                       __shfl_xor_sync(~0u, heat, step), 0.0f};
      if (b.m > m) rescale(b.m);
      if (m > b.m) b.rescale(m);
      s += b.s, heat += b.heat;
    }
  }
};

// The gradient of a row: e * each; in the label's column (z_loss_slope * e - weight * others) *
// share.
struct Gradient {
  float m, each, others, weight, z_loss_slope, share, logit_scale;
  __device__ __forceinline__ float of(float x) const { return exp_of(x, logit_scale, m) * each; }
  __device__ __forceinline__ float of_label(float z) const {
    return fma(z_loss_slope, exp_of(z, m), -weight * others) * share;
  }
};

// Writes the results of a row (one thread) and returns its gradient. `z`: the label's, in every
// thread.
template <class T>
__device__ __forceinline__ Gradient finish(const Params<T>& p, int64_t row, int label, Sums<T> a, float z,
                                           float scale, bool writes, float heat = 0.0f) {
  Gradient g{a.m, 0.0f, a.s, 1.0f, 0.0f, 0.0f, p.logit_scale};
  const float own = label >= 0 ? exp_of(z, a.m) : 0.0f, s = label >= 0 ? a.s + own : a.s;
  scale *= p.gain;
  if (p.class_weight != nullptr && label >= 0) g.weight = __ldg(p.class_weight + label);
  if (p.class_weight != nullptr && label == kElsewhere)
    g.weight = __ldg(p.class_weight + (p.target[row] - p.first_class));
  const float log_share = p.log_share != nullptr ? p.log_share[row] : 0.0f;
  if (writes || p.z_loss != 0.0f) {
    float log_s = logf(s), lse = a.m + log_s;
    if (p.z_loss != 0.0f) g.z_loss_slope = 2.0f * p.z_loss * (lse - log_share);
    if (writes) {
      const bool leads = label >= 0 && z == a.m && fabsf(z) < INFINITY;
      const float neg_log_prob = leads ? log1pf(a.s) : (a.m - z) + log_s;  // -log p
      float loss = g.weight * neg_log_prob;
      if (p.z_loss != 0.0f) loss += p.z_loss * lse * lse;
      bool ignored = label == kIgnored, bad = label == kOutOfRange, elsewhere = label == kElsewhere;
      if (p.loss) p.loss[row] = ignored || elsewhere ? 0.0f : bad ? NAN : loss;
      if (p.target_logit) p.target_logit[row] = ignored || elsewhere ? 0.0f : bad ? NAN : z;
      if (p.log_prob) p.log_prob[row] = ignored ? 0.0f : bad ? NAN : elsewhere ? -INFINITY : -neg_log_prob;
      if (p.lse) p.lse[row] = lse;
      if (p.entropy) {
        if (label >= 0) heat = fma(own, fmaxf(z - a.m, -1e30f), heat);
        p.entropy[row] = log_s - heat / s;
      }
      if (p.row_max) p.row_max[row] = a.m;
      if (p.log_sum)
        p.log_sum[row] = leads ? log1pf(a.s) : a.m == -INFINITY && a.s == 0.0f ? -INFINITY : log_s;
    }
  }
  g.share = (label == kOutOfRange ? NAN : scale) / s;
  g.each = (g.weight + g.z_loss_slope) * g.share;
  if (p.log_share != nullptr) {  // p = e / s * part
    const float part = expf(log_share);
    g.each *= part, g.z_loss_slope *= part;
    g.others = a.s * part - s * expm1f(log_share);  // s (1 - p) of the label
    if (log_share == -INFINITY) {                   // every class here is at -inf: p = 0
      g.m = g.z_loss_slope = 0.0f, g.others = 1.0f;
      g.share = label == kOutOfRange ? NAN : scale, g.each = 0.0f * g.share;
    }
  }
  return g;
}
// The largest element of a vector before element `end`.
template <class T>
__device__ __forceinline__ float max_before(const uint4& words, int end) {
  constexpr int N = AlignedRow<T>::N;
  float x[N], top = -INFINITY;
  unpack<T>(words, x);
#pragma unroll
  for (int j = 0; j < N; ++j) top = j < end ? fmaxf(top, x[j]) : top;
  return top;
}

// Shared memory of write_predicted().
template <bool kCluster>
struct TieStorage {
  __device__ __forceinline__ void init() {}
};
template <>
struct TieStorage<true> : ReduceStorage<SumArray<1>> {};

// One thread writes the label, where it is the first argmax, or another class. `earlier()`: the largest z
// before the label's that this thread has. All threads of the row call it, with the same label, z and a.
template <bool kCluster, class T, class Earlier>
__device__ __forceinline__ void write_predicted(const Params<T>& p, int64_t row, int label, Sums<T> a,
                                                float z, TieStorage<kCluster>& storage, bool writes,
                                                Earlier earlier) {
  bool is_first = label >= 0 && z == a.m && a.s == a.s;
  if (is_first) {
    if constexpr (kCluster)
      is_first =
          all_reduce_row<0, true>(SumArray<1>{{earlier() == z ? 1.0f : 0.0f}}, storage, 0).s[0] == 0.0f;
    else
      is_first = !__syncthreads_or(earlier() == z);
  }
  if (writes) p.predicted[row] = label == kIgnored ? -1 : is_first ? label : label == 0;
}
template <class T>
__device__ __forceinline__ void finish_skipped(const Params<T>& p, int64_t row) {
  if (p.loss) p.loss[row] = 0.0f;
  if (p.target_logit) p.target_logit[row] = 0.0f;
  if (p.log_prob) p.log_prob[row] = 0.0f;
  if (p.row_max) p.row_max[row] = 0.0f;
  if (p.log_sum) p.log_sum[row] = 0.0f;
  if (p.predicted) p.predicted[row] = -1;
}

template <class T>
__device__ __forceinline__ uint32_t narrow_two(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 r = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(r);
  } else {
    __nv_bfloat162 r = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(r);
  }
}

// Stores the gradient of a vector of f32 logits in 16 bits, aligned or not.
template <class D>
__device__ __forceinline__ void store_narrow(D* to, const uint4& words, const Gradient& g) {
  float v[4];
  unpack<float>(words, v);
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = g.of(v[j]);
  uint2 r = make_uint2(narrow_two<D>(v[0], v[1]), narrow_two<D>(v[2], v[3]));
  if (reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = r;
  } else {
    auto* elements = reinterpret_cast<uint16_t*>(to);
    elements[0] = uint16_t(r.x), elements[1] = uint16_t(r.x >> 16);
    elements[2] = uint16_t(r.y), elements[3] = uint16_t(r.y >> 16);
  }
}

// The gradient of a vector without the label's column.
template <class T>
__device__ __forceinline__ uint4 gradient_of(const uint4& words, const Gradient& g) {
  constexpr int N = AlignedRow<T>::N;
  float v[N];
  unpack<T>(words, v);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = g.of(v[j]);
  if constexpr (sizeof(T) == 4)
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
  else
    return make_uint4(narrow_two<T>(v[0], v[1]), narrow_two<T>(v[2], v[3]), narrow_two<T>(v[4], v[5]),
                      narrow_two<T>(v[6], v[7]));
}

// Stores 16 bytes, aligned or not.
template <class T>
__device__ __forceinline__ void store_words(T* to, const uint4& words, bool aligned) {
  if (aligned) {
    store_v4(to, reinterpret_cast<const Vec<T, AlignedRow<T>::N>&>(words));
  } else {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        reinterpret_cast<uint32_t*>(to)[i] = w[i];
      } else {
        reinterpret_cast<uint16_t*>(to)[2 * i] = uint16_t(w[i]);
        reinterpret_cast<uint16_t*>(to)[2 * i + 1] = uint16_t(w[i] >> 16);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void clear(T* x, int n) {
  PeeledRow<T> peeled(x, n);
  for (int k = int(threadIdx.x); k < peeled.vecs; k += int(blockDim.x))
    *reinterpret_cast<uint4*>(peeled.vec(k)) = make_uint4(0, 0, 0, 0);
  int c = peeled.edge_column(n);
  if (c >= 0) x[c] = narrow<T>(0.0f);
}

}  // namespace
}  // namespace tigon::cuda
