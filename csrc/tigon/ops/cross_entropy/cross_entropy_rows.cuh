// Holds what the row kernels of cross_entropy on CUDA share: their arguments, loads, z, statistics, results
// of a row, and gradient.
#pragma once

#include <algorithm>
#include <type_traits>

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_reduce.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/base/softcap.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon::cuda {

template <class T>
struct CrossEntropyParams {
  const T* logits;
  // May be null, or equal to logits. Has a type D of the kernel's own: T, or 16 bits if T is float.
  void* dlogits;
  const int64_t* target;
  // From here to the results, each may be null.
  const void* bias;
  const float *class_weight, *scale, *entropy_scale;
  float *loss, *lse, *target_logit, *log_prob, *entropy;
  int64_t* predicted;
  float *row_max, *log_sum, *smoothing;
  // In a shard the logits are columns [first_class, first_class + cols) of `classes`. These may be null;
  // class_weight begins at the first column.
  const float *log_mass, *all_lse, *all_log_prob, *known_max, *known_log_sum, *all_entropy, *weight_sum;
  int64_t first_class, classes;
  int64_t rows, stride, dlogits_stride, scale_step, ignore_index;
  // `slice` is the number of columns of a CTA.
  int cols, slice;
  bool bias_is_f32;
  // Say how logits become z: z = top * tanh(logit_scale * x / softcap), or logit_scale * x; dz/dx = gain *
  // slope.
  float logit_scale, softcap, top, gain;
  float label_smoothing, z_loss;
  // Holds the constants of a softcap, in units of ln 2.
  SoftcapConstants cap;
};

// Takes rows without bias and smoothing, whose z rises with the logit; predicted is as with only_label.
// Returns false, with nothing launched, if no variant fits.
template <class T, class D>
bool cross_entropy_plain(Context& ctx, const CrossEntropyParams<T>& p);
// Takes those of these rows that have a softcap. Also returns false if no variant fits.
template <class T, class D>
bool cross_entropy_staged(Context& ctx, const CrossEntropyParams<T>& p);
// Computes the gradient of rows that have known_max, for rows without bias, softcap, smoothing and entropies.
template <class T>
void cross_entropy_known(Context& ctx, CrossEntropyParams<T> p);

namespace {

#include "tigon/base/softcap_polynomial.inc"
#include "tigon/ops/cross_entropy/cross_entropy_math.inc"

constexpr const char* kOp = "cross_entropy";

// True for a label of another shard, which is no column of this row.
template <class T>
__device__ __forceinline__ bool is_elsewhere(const CrossEntropyParams<T>& p, int64_t y) {
  return y >= 0 && y < p.classes && (y < p.first_class || y >= p.first_class + p.cols);
}

// Returns z of the logit in column c, and dz/du if asked.
template <class T>
__device__ __forceinline__ float z_of(const CrossEntropyParams<T>& p, float x, int c,
                                      float* slope = nullptr) {
  if (p.bias != nullptr)
    x += p.bias_is_f32 ? static_cast<const float*>(p.bias)[c] : widen(static_cast<const T*>(p.bias)[c]);
  x *= p.logit_scale;
  if (p.softcap == 0.0f) return x;
  if (slope != nullptr) *slope = softcap_slope(x, p.softcap);
  return softcap_bend(x, p.softcap) * p.top;
}

// Computes z from a logit: z in units of kUnit, e^z as a power of 2. kReach says what is known of the logit
// (softcap_polynomial.inc).
struct Linear {
  static constexpr bool kCapped = false;
  static constexpr float kUnit = 1.0f, kToLog2 = kLog2e;
  float scale;
  template <class T>
  __device__ __forceinline__ explicit Linear(const CrossEntropyParams<T>& p) : scale(p.logit_scale) {}
  __device__ __forceinline__ float z(float x) const { return x * scale; }
  // Returns z - m without rounding z.
  template <int kReach>
  __device__ __forceinline__ float z_minus(float x, float m) const {
    return fma(x, scale, -m);
  }
  // Returns factor * dz/dx, with dz/dx as a multiple of CrossEntropyParams::gain.
  template <int kReach>
  __device__ __forceinline__ float times_slope(float, float factor) const {
    return factor;
  }
  // True if an extent(), of one or more vectors, is within a reach.
  template <class T, int kReach>
  __device__ __forceinline__ bool reaches(uint32_t) const {
    return true;
  }
  // Returns what z is subtracted from: a maximum of -inf would give NaN.
  __device__ __forceinline__ static float reference(float m) { return finite_max(m); }
  // Returns z - m as a factor of e^(z - m), which is 0 if z is -inf.
  __device__ __forceinline__ static float finite(float d) { return fmaxf(d, -1e30f); }
};
struct Capped {
  static constexpr bool kCapped = true;
  static constexpr float kUnit = 0.693147181f, kToLog2 = 1.0f;
  const SoftcapConstants& cap;
  template <class T>
  __device__ __forceinline__ explicit Capped(const CrossEntropyParams<T>& p) : cap(p.cap) {}
  __device__ __forceinline__ float z(float x) const { return softcap_z(x, cap); }
  template <int kReach>
  __device__ __forceinline__ float z_minus(float x, float m) const {
    return softcap_z_minus<kReach>(x, m, cap);
  }
  template <int kReach>
  __device__ __forceinline__ float times_slope(float x, float factor) const {
    return softcap_times_slope<kReach>(x, factor, cap);
  }
  // NaN may be within reach: the polynomial propagates it.
  template <class T, int kReach>
  __device__ __forceinline__ bool reaches(uint32_t extent) const {
    const float limit = kReach == kClose ? cap.close_limit : cap.limit;
    if constexpr (sizeof(T) == 4)
      return __uint_as_float(extent) <= limit;
    else if constexpr (std::is_same_v<T, __half>)
      return __hble2(reinterpret_cast<const __half2&>(extent), __half2half2(__float2half_rd(limit)));
    else
      return __hble2(reinterpret_cast<const __nv_bfloat162&>(extent),
                     __bfloat162bfloat162(__float2bfloat16_rd(limit)));
  }
  __device__ __forceinline__ static float reference(float m) { return m; }
  __device__ __forceinline__ static float finite(float d) { return d; }
};
// Returns the largest absolute values of elements, from a word of their maxima and one of their minima.
template <class T>
__device__ __forceinline__ uint32_t extent(uint32_t top, uint32_t bottom) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(fmaxf(__uint_as_float(top), -__uint_as_float(bottom)));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const Pair r =
        __hmax2(reinterpret_cast<const Pair&>(top), __hneg2(reinterpret_cast<const Pair&>(bottom)));
    return reinterpret_cast<const uint32_t&>(r);
  }
}
template <class Z>
__device__ __forceinline__ float exp_of_distance(float d) {
  return exp2_approx(d * Z::kToLog2);
}

// The label of a row is its column or one of these: the row is not read and gets zeros; it is read for its
// lse; it is out of range; it is a column of another shard.
enum : int { kSkipped = -1, kIgnored = -2, kOutOfRange = -3, kElsewhere = -4 };
template <class T>
__device__ __forceinline__ int label_of(const CrossEntropyParams<T>& p, int64_t y) {
  if (y == p.ignore_index) return p.lse != nullptr || p.entropy != nullptr ? kIgnored : kSkipped;
  if (is_elsewhere(p, y)) return kElsewhere;
  y -= p.first_class;
  return y < 0 || y >= p.cols ? kOutOfRange : int(y);
}

// Loads 16 bytes, or -inf in every column. With InOrder loads stay in program order, which takes registers;
// otherwise the compiler schedules them.
template <class T, bool InOrder>
__device__ __forceinline__ uint4 load_or_minus_inf(bool valid, const T* from) {
  constexpr uint32_t none = kMinusInf<T>;
  if constexpr (InOrder)
    return ld_global_predicated(valid, from, none);
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

// Returns a vector with -inf in one element.
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

// Calls fn(j, x_j, x_(j+1)) for the pairs of elements of a vector, in a loop.
template <class T, class Fn>
__device__ __forceinline__ void for_pairs(uint4 words, Fn&& fn) {
#pragma unroll 1
  for (int j = 0; j < AlignedRow<T>::N; j += 2) {
    if constexpr (sizeof(T) == 4) {
      fn(j, __uint_as_float(words.x), __uint_as_float(words.y));
      words.x = words.z, words.y = words.w;
    } else {
      fn(j, low(words.x, T{}), high(words.x, T{}));
      words.x = words.y, words.y = words.z, words.z = words.w;
    }
  }
}

// Gives the position of a column, if this thread holds it: the tile, of every `threads`-th vector, or -1; and
// the element within the vector.
struct ElementCoord {
  int tile, element, vecs_before;  // counts the row's vectors
  template <class T>
  __device__ __forceinline__ ElementCoord(const PeeledRow<T>& peeled, int column, int threads) {
    const int at = column - peeled.head, vec = at / PeeledRow<T>::N;
    element = at % PeeledRow<T>::N;
    tile = at >= 0 && vec < peeled.vecs && vec % threads == int(threadIdx.x) ? vec / threads : -1;
    vecs_before = at >= 0 ? vec : 0;
  }
};

// Returns the sum of e^(z - m) of a vector within a reach. If `heat` is given, adds the sum of e^(z - m) (z -
// m) to it.
template <class T, int kReach = kNear, class Z>
__device__ __forceinline__ float sum_of(const uint4& words, const Z& z, float m, float* heat = nullptr) {
  constexpr int N = AlignedRow<T>::N;
  float e[N];
  unpack<T>(words, e);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float d = z.template z_minus<kReach>(e[j], m);
    e[j] = exp_of_distance<Z>(d);
    if (heat != nullptr) *heat = fma(e[j], Z::finite(d), *heat);
  }
#pragma unroll
  for (int step = N / 2; step > 0; step /= 2)
#pragma unroll
    for (int j = 0; j < step; ++j) e[j] += e[j + step];
  return e[0];
}

// Does the same for any logits, without element `skipped`, in a loop of few instructions.
template <class T, class Z>
__device__ __forceinline__ float sum_of_any(uint4 words, const Z& z, float m, int skipped, float& heat) {
  float s = 0.0f;
  for_pairs<T>(words, [&](int j, float a, float b) {
    const float da = z.template z_minus<kAny>(a, m), db = z.template z_minus<kAny>(b, m);
    const float ea = j == skipped ? 0.0f : exp_of_distance<Z>(da);
    const float eb = j + 1 == skipped ? 0.0f : exp_of_distance<Z>(db);
    heat = fma(ea, Z::finite(da), fma(eb, Z::finite(db), heat));
    s += ea + eb;
  });
  return s;
}

// Holds the statistics of a part of a row. The sum leaves out the label's column, which is added at the end,
// so that p - 1 and log p are accurate if the label has nearly all probability.
template <class T>
using Sums = OnlineSoftmax<T>;
// Also sums e^(z - m) (z - m); both sums are in units of Z. m and s are bitwise equal to those of Sums.
template <class T, class Z>
struct alignas(16) EntropySums {
  float m, s, heat, unused;
  __device__ static EntropySums identity() { return {-INFINITY, 0.0f, 0.0f, 0.0f}; }
  __device__ __forceinline__ void rescale(float top) {  // top > m
    const float d = m - top, f = Z::kCapped ? exp_of_distance<Z>(d) : exp_minus_max<T>(m, top);
    heat = f * fma(fmaxf(d, -1e30f), s, heat);
    s *= f, m = top;
  }
  template <int Width>
  __device__ __forceinline__ void all_reduce_lanes() {
    const float top = extreme_of_lanes<Max, Width>(m);
    if (m != top) rescale(top);
    s = reduce_lanes<Sum, Width>(s), heat = reduce_lanes<Sum, Width>(heat);
  }
};

// The gradient of a row is e * each, and in the label's column (z_loss_slope * own - weight * others) *
// share, where own is its e. Entropies' gradients add e * (tilt * (z - m) + lift). Label smoothing adds -
// push * w * scale, and the sum of its weights is part of z_loss_slope.
struct Gradient {
  float m, each, others, weight, z_loss_slope, share, own, tilt, lift, push = 0.0f;
  // `below` is z - m of the label.
  template <bool kEntropy>
  __device__ __forceinline__ float of_label(float below) const {
    const float of_loss = fma(z_loss_slope, own, -weight * others) * share;
    return kEntropy ? of_loss + own * fma(tilt, fmaxf(below, -200.0f), lift) : of_loss;
  }
};
// Returns the gradient of logits: slope * e * (each + tilt * (z - m)), with the second term only for
// kEntropy. A tilt of 0 leaves the result bitwise equal.
template <class Z, bool kEntropy>
struct LogitGradient {
  Z z;
  float m, each, tilt;
  template <int kReach = kAny>
  __device__ __forceinline__ float of(float x) const {
    const float d = z.template z_minus<kReach>(x, m), e = exp_of_distance<Z>(d);
    // Below -1e30, e is 0: classes at -inf add nothing.
    const float factor = kEntropy ? fma(tilt, Z::finite(d), each) : each;
    return e * z.template times_slope<kReach>(x, factor);
  }
};

// Holds z of a row's label, and its difference to the maximum.
struct LabelZ {
  float z, below;
};

// Sums w (reference - z) and w over a row, for label smoothing.
struct SmoothingSums {
  float reference, gap, weight;
};

// Writes the results of a row (one thread) and returns its gradient. `y` is the label's z, known to every
// thread; `heat` is the sum over the other columns.
template <bool kEntropy = false, bool kSmoothing = false, class T>
__device__ __forceinline__ Gradient finish(const CrossEntropyParams<T>& p, int64_t row, int label, Sums<T> a,
                                           LabelZ y, float scale, bool writes, float heat = 0.0f,
                                           SmoothingSums smoothing = {}) {
  const float own = label >= 0 ? exp2_approx(y.below * kLog2e) : 0.0f, s = label >= 0 ? a.s + own : a.s;
  Gradient g{a.m, 0.0f, a.s, 1.0f, 0.0f, 0.0f, own, 0.0f, 0.0f};
  scale *= p.gain;
  if (p.class_weight != nullptr && label >= 0) g.weight = __ldg(p.class_weight + label);
  if (p.class_weight != nullptr && label == kElsewhere)
    g.weight = __ldg(p.class_weight + (p.target[row] - p.first_class));
  if constexpr (kSmoothing) {
    g.push = p.label_smoothing / float(p.classes), g.weight *= 1.0f - p.label_smoothing;
    g.z_loss_slope = g.push * (p.class_weight == nullptr ? float(p.classes)
                               : p.weight_sum != nullptr ? *p.weight_sum
                                                         : smoothing.weight);
  }
  float log_mass = p.log_mass != nullptr ? p.log_mass[row] : 0.0f;
  if ((kEntropy || (writes && p.entropy)) && label >= 0) heat = fma(own, fmaxf(y.below, -1e30f), heat);
  float log_s = 0.0f;
  if (writes || p.z_loss != 0.0f || kEntropy || p.all_lse != nullptr) {
    log_s = logf(s);
    const float lse = a.m + log_s;
    if (p.all_lse != nullptr) log_mass = lse - p.all_lse[row];
    if (p.z_loss != 0.0f) {
      const float slope = 2.0f * p.z_loss * (lse - log_mass);
      g.z_loss_slope = kSmoothing ? g.z_loss_slope + slope : slope;
    }
    if (writes) {
      const bool leads = label >= 0 && y.z == a.m && fabsf(y.z) < INFINITY;
      const float neg_log_prob = leads ? log1pf(a.s) : log_s - y.below;  // -log p
      float loss = g.weight * neg_log_prob;
      if constexpr (kSmoothing) {
        const float all = smoothing.weight * ((a.m - smoothing.reference) + log_s) + smoothing.gap;
        if (p.smoothing) p.smoothing[row] = all;
        if (g.push > 0.0f) loss = fma(g.push, all, loss);
      }
      if (p.z_loss != 0.0f) loss += p.z_loss * lse * lse;
      bool ignored = label == kIgnored, bad = label == kOutOfRange, elsewhere = label == kElsewhere;
      if (p.loss) p.loss[row] = ignored || elsewhere ? 0.0f : bad ? NAN : loss;
      if (p.target_logit) p.target_logit[row] = ignored || elsewhere ? 0.0f : bad ? NAN : y.z;
      if (p.log_prob) p.log_prob[row] = ignored ? 0.0f : bad ? NAN : elsewhere ? -INFINITY : -neg_log_prob;
      if (p.lse) p.lse[row] = lse;
      if (p.entropy) p.entropy[row] = log_s - heat / s;
      if (p.row_max) p.row_max[row] = a.m;
      if (p.log_sum)
        p.log_sum[row] = leads ? log1pf(a.s) : a.m == -INFINITY && a.s == 0.0f ? -INFINITY : log_s;
    }
  }
  g.share = (label == kOutOfRange ? NAN : scale) / s;
  g.each = (g.weight + g.z_loss_slope) * g.share;
  if (kEntropy && p.entropy_scale != nullptr) {
    g.tilt = -p.entropy_scale[row] * p.gain / s;
    g.lift = -g.tilt * (heat / s);
  }
  // Columns of a shard by themselves, all at -inf, have no mass either.
  if (p.row_max != nullptr && a.m == -INFINITY && a.s == 0.0f) log_mass = -INFINITY;
  if (p.log_mass != nullptr || p.all_lse != nullptr || log_mass != 0.0f) {  // p = e / s * part
    const float part = expf(log_mass);
    g.each *= part, g.z_loss_slope *= part;
    // This is s (1 - p) of the label.
    g.others = p.all_lse != nullptr ? -s * expm1f(p.all_log_prob[row]) : a.s * part - s * expm1f(log_mass);
    if (kEntropy && p.entropy_scale != nullptr) {
      g.tilt *= part;
      g.lift = g.tilt * (p.all_entropy[row] - log_s + log_mass);
    }
    // Every class of this shard is at -inf: p = 0.
    if (log_mass == -INFINITY) {
      g.m = g.z_loss_slope = g.own = g.tilt = g.lift = 0.0f, g.others = 1.0f;
      g.share = label == kOutOfRange ? NAN : scale, g.each = 0.0f * g.share;
    }
  }
  return g;
}
// Returns the largest element of a vector before element `end`.
template <class T>
__device__ __forceinline__ float max_before(const uint4& words, int end) {
  constexpr int N = AlignedRow<T>::N;
  float x[N], top = -INFINITY;
  unpack<T>(words, x);
#pragma unroll
  for (int j = 0; j < N; ++j) top = j < end ? fmaxf(top, x[j]) : top;
  return top;
}

// Holds the shared memory of write_predicted().
template <bool kCluster>
struct TieStorage {
  __device__ __forceinline__ void init() {}
};
template <>
struct TieStorage<true> : ReduceStorage<SumArray<1>> {};

// One thread writes the label if it is the first argmax, or else another class. `earlier()` returns the
// largest z before the label's that this thread has. All threads of the row call it, with the same label, z
// and a; z and a.m may be in any unit.
template <bool kCluster, class T, class Earlier>
__device__ __forceinline__ void write_predicted(const CrossEntropyParams<T>& p, int64_t row, int label,
                                                Sums<T> a, float z, TieStorage<kCluster>& storage,
                                                bool writes, Earlier earlier) {
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
__device__ __forceinline__ void finish_skipped(const CrossEntropyParams<T>& p, int64_t row) {
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

// Packs two results in storage.
template <class D>
__device__ __forceinline__ void shift_in(uint4& words, float a, float b) {
  if constexpr (sizeof(D) == 4)
    words = make_uint4(words.z, words.w, __float_as_uint(a), __float_as_uint(b));
  else
    words = make_uint4(words.y, words.z, words.w, narrow_two<D>(a, b));
}
// Returns the gradient of a vector, except for the label's column, which gets what another column would.
// Results of f32 logits in 16 bits are the last two words.
template <class T, class D, class Fn>
__device__ __forceinline__ uint4 gradient_of(const uint4& words, const Fn& of) {
  constexpr int N = AlignedRow<T>::N;
  float v[N];
  unpack<T>(words, v);
  uint4 r = {};
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = of(v[j]);
#pragma unroll
  for (int j = 0; j < N; j += 2) shift_in<D>(r, v[j], v[j + 1]);
  return r;
}

// Stores gradient_of() a vector of T, aligned (to 16 bytes, if D is T) or not.
template <class T, class D>
__device__ __forceinline__ void store_words(D* to, const uint4& words, bool aligned) {
  if constexpr (sizeof(D) < sizeof(T)) {
    if (reinterpret_cast<uintptr_t>(to) % 8 == 0) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words.z, words.w);
    } else {
      auto* elements = reinterpret_cast<uint16_t*>(to);
      elements[0] = uint16_t(words.z), elements[1] = uint16_t(words.z >> 16);
      elements[2] = uint16_t(words.w), elements[3] = uint16_t(words.w >> 16);
    }
  } else if (aligned) {
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

// Launches a cluster (or CTA) per row, whatever the limit of a grid.
template <class T, class Kernel>
void launch_rows(Context& ctx, Kernel kernel, LaunchConfig grid, const CrossEntropyParams<T>& p) {
  const int64_t most = INT32_MAX / grid.cluster;
  for (int64_t first = 0; first < p.rows; first += most) {
    grid.blocks = std::min<int64_t>(p.rows - first, most) * grid.cluster;
    launch(kOp, ctx, kernel, grid, p, first);
  }
}

}  // namespace
}  // namespace tigon::cuda
