// Holds what the kernels of AdamW share: streams in registers, random bits, a parameter with its rounding,
// and the launch of a list.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/tensor_list.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/adamw/adamw_constants.h"

namespace tigon::cuda::adamw_unit {

using namespace adamw_detail;
#include "tigon/ops/adamw/adamw_bits.inc"
#include "tigon/ops/adamw/adamw_math.inc"

constexpr const char* kOp = "adamw";

// A table holds these, so their size must be a multiple of 8.
struct alignas(8) TableConstants : Constants {};

// --- one stream in registers ------------------------------------------------------------------

// Tells the compiler that a pointer of the table points to global memory.
template <class T>
__device__ __forceinline__ const T* global(const void* p) {
  __builtin_assume(__isGlobal(p));
  return static_cast<const T*>(p);
}

// Stands for a stream whose dtype is in the table.
struct Any {};

template <class T, int N>
struct Words {
  Vec<T, N> v;

  __device__ __forceinline__ void load(const void* p, DType, int64_t i) {
    v = load_stream<T, N>(global<T>(p) + i);
  }
  __device__ __forceinline__ float get(int k, DType) const { return v[k]; }
};
// Keeps 16-bit elements two to a word.
template <int N>
struct Words<Any, N> {
  uint32_t w[N];

  __device__ __forceinline__ void load(const void* p, DType t, int64_t i) {
    if (t == DType::f32) {
      const Vec<float, N> x = load_stream<float, N>(global<float>(p) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) w[k] = __float_as_uint(x.v[k]);
    } else {
      const Vec<uint16_t, N> x = load_stream<uint16_t, N>(global<uint16_t>(p) + i);
#pragma unroll
      for (int k = 0; k < N; ++k) w[k / 2] = k % 2 == 0 ? x.v[k] : w[k / 2] | uint32_t(x.v[k]) << 16;
    }
  }
  __device__ __forceinline__ float get(int k, DType t) const {
    if (t == DType::f32) return __uint_as_float(w[k]);
    const uint32_t word = w[k / 2];
    if (t == DType::bf16) return __uint_as_float(k % 2 == 0 ? word << 16 : word & 0xffff0000u);
    return __half2float(__ushort_as_half(uint16_t(k % 2 == 0 ? word : word >> 16)));
  }
};

template <class T, int N>
__device__ __forceinline__ void store_values(T* p, const Vec<T, N>& x) {
  if constexpr (sizeof(T) * N % 16 == 0)
    store_v4<T, N>(p, x);
  else
    store<T, N>(p, x);
}
template <class T, int N>
__device__ __forceinline__ void store_as(void* p, DType t, int64_t i, const float (&x)[N]) {
  if constexpr (std::is_same_v<T, Any>) {
    if (t == DType::f32) return store_as<float, N>(p, t, i, x);
    if (t == DType::bf16) return store_as<__nv_bfloat16, N>(p, t, i, x);
    return store_as<__half, N>(p, t, i, x);
  } else {
    Vec<T, N> y;
    y.set(x);
    store_values<T, N>(const_cast<T*>(global<T>(p)) + i, y);
  }
}
template <int N>
__device__ __forceinline__ void store_bits(void* p, int64_t i, const uint16_t (&x)[N]) {
  Vec<uint16_t, N> y;
#pragma unroll
  for (int k = 0; k < N; ++k) y.v[k] = x[k];
  store_values<uint16_t, N>(const_cast<uint16_t*>(global<uint16_t>(p)) + i, y);
}

// Holds the random bits of elements [at, at + N) of the stream, for N = 8, 4 or 1, at a multiple of N.
template <int N>
struct RandomBits {
  uint32_t w0 = 0, w1 = 0, w2 = 0, w3 = 0;
  int offset = 0;
  __device__ __forceinline__ RandomBits(bool draws, int64_t at, uint32_t step, const PhiloxKeys& keys) {
    if (!draws) return;
    offset = int(at % 8);
    const Random r = random_block(uint64_t(at) / 8, step, keys);
    w0 = r.word[0], w1 = r.word[1], w2 = r.word[2], w3 = r.word[3];
  }
  __device__ __forceinline__ uint32_t get(int k, uint32_t factor) const {
    const int i = N == 8 ? k : offset + k;
    const uint32_t low = i & 2 ? w1 : w0, high = i & 2 ? w3 : w2;
    return (i & 4 ? high : low) * factor >> (16 * (i & 1)) & 0xffffu;
  }
};

// Rounds x to 16 bits by the random bits of its elements. Whether there is a NaN is asked once for all
// elements, by a sum of zeros: its lower bits are cleared, since a carry would run through them to the sign.
template <class T, int N>
__device__ __forceinline__ void store_stochastic(void* p, DType t, int64_t i, const float (&x)[N],
                                                 const RandomBits<N>& random, uint32_t factor) {
  if (!std::is_same_v<T, __nv_bfloat16> && t != DType::bf16) {
    uint16_t bits[N];
#pragma unroll
    for (int k = 0; k < N; ++k)
      bits[k] = uint16_t(stochastic_f16(__float_as_uint(x[k]), random.get(k, factor)));
    return store_bits<N>(p, i, bits);
  }
  float zero = 0.0f;
  uint32_t b[N];
#pragma unroll
  for (int k = 0; k < N; ++k) zero = fma(x[k], 0.0f, zero), b[k] = __float_as_uint(x[k]);
  if (zero != 0.0f) {
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (x[k] != x[k]) b[k] = 0x7fff0000u;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) b[k] += random.get(k, factor);
  if constexpr (N == 1) {
    store_bits<1>(p, i, {uint16_t(b[0] >> 16)});
  } else {
    Vec<uint32_t, N / 2> y;
#pragma unroll
    for (int k = 0; k < N / 2; ++k) y.v[k] = __byte_perm(b[2 * k], b[2 * k + 1], 0x7632);
    auto* to = const_cast<uint16_t*>(global<uint16_t>(p)) + i;
    store_values<uint32_t, N / 2>(reinterpret_cast<uint32_t*>(to), y);
  }
}

// Holds what all units of a launch share.
struct Scalars {
  const float *clip, *grad_scale, *found_inf;  // null if absent
  PhiloxKeys keys;
  bool draws_moments;  // rounds moments of 16 bits at random
};

// Holds N elements of a parameter and of its gradient, and what the rounding keeps in addition.
template <int N, class P, class G, AdamwRounding R>
struct ParamUnit {
  Words<P, N> param;
  Words<G, N> grad;
  Words<uint16_t, N> low;
  Words<float, N> master;

  // Returns true for this rounding of a 16-bit parameter, and false also if the table says that it has 32
  // bits.
  template <class Entry>
  __device__ __forceinline__ static bool rounds(const Entry& e, AdamwRounding r) {
    if constexpr (std::is_same_v<P, float>) return false;
    return R == r && (!std::is_same_v<P, Any> || e.param_type != DType::f32);
  }
  template <class Entry>
  __device__ __forceinline__ void load(const Entry& e, int64_t i) {
    const bool masters = rounds(e, AdamwRounding::master);
    if (!masters) param.load(e.param, e.param_type, i);
    if (masters) master.load(e.extra, DType::f32, i);
    if (rounds(e, AdamwRounding::split)) low.load(e.extra, DType::i16, i);
    grad.load(e.grad, e.grad_type, i);
  }
  template <class Entry>
  __device__ __forceinline__ void get(const Entry& e, float (&p)[N]) const {
    const bool masters = rounds(e, AdamwRounding::master), splits = rounds(e, AdamwRounding::split);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      p[k] = masters ? master.get(k, DType::f32) : param.get(k, e.param_type);
      if (splits) p[k] = __uint_as_float(joined(__float_as_uint(p[k]) >> 16, uint32_t(low.v.v[k])));
    }
  }
  // Stores p rounded to nearest, and what the rounding keeps of it.
  template <class Entry>
  __device__ __forceinline__ static void store(const Entry& e, int64_t i, const float (&p)[N]) {
    const bool masters = rounds(e, AdamwRounding::master);
    if (masters) store_as<float, N>(e.extra, DType::f32, i, p);
    if (rounds(e, AdamwRounding::split) || (masters && e.param_type == DType::bf16)) {
      uint16_t bits[N], lows[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const uint32_t x = splittable(__float_as_uint(p[k]));
        bits[k] = uint16_t(upper_half(x)), lows[k] = uint16_t(x);
      }
      if (!masters) store_bits<N>(e.extra, i, lows);
      return store_bits<N>(e.param, i, bits);
    }
    store_as<P, N>(e.param, e.param_type, i, p);
  }
};

// --- lists ------------------------------------------------------------------------------------

// Reads the entry of a chunk and its constants, with a warp.
template <class Entry>
__device__ __forceinline__ void fetch_entry(const unsigned char* table, const TableConstants* computed,
                                            int constants, int count, int chunk, Entry& e, Constants& c) {
  const int lane = int(threadIdx.x % 32);
  const auto* listed = reinterpret_cast<const TableConstants*>(table);
  const auto* entries = reinterpret_cast<const Entry*>(listed + constants);
  const int of = find_entry(entries, count, chunk);
  constexpr int kWords = sizeof(Entry) / 4, kConstants = sizeof(Constants) / 4;
  static_assert(kWords <= 32 && kConstants <= 32);
  const auto* words = reinterpret_cast<const uint32_t*>(entries + of);
  if (lane < kWords) reinterpret_cast<uint32_t*>(&e)[lane] = words[lane];
  const auto* all =
      reinterpret_cast<const uint32_t*>((computed != nullptr ? computed : listed) + entries[of].constants);
  if (lane < kConstants) reinterpret_cast<uint32_t*>(&c)[lane] = all[lane];
}

inline Scalars scalars_of(const Adamw& a) {
  return {.clip = a.clip.as<float>(),
          .grad_scale = a.grad_scale.as<float>(),
          .found_inf = a.found_inf.as<float>(),
          .keys = philox_keys(a.seed),
          .draws_moments = a.moment_rounding == AdamwRounding::stochastic};
}

inline bool is_coded(const AdamwTensor& t) { return t.exp_avg.dtype == DType::u8; }

// Launches the tensors of a call that are coded, or those that are not, in chunks of `chunk` elements. It
// calls run(table, chunks, constants, entries, block), whose entries entry_of(t) has made. `computed` has the
// constants of all tensors, or is null.
template <class EntryOf, class Run>
void launch_list(Context& ctx, const Adamw& a, const TableConstants* computed, bool coded, int64_t chunk,
                 const EntryOf& entry_of, const Run& run) {
  using Entry = decltype(entry_of(a.tensors[0]));
  std::vector<uint32_t> listed;
  for (size_t i = 0; i < a.tensors.size(); ++i)
    if (is_coded(a.tensors[i]) == coded) listed.push_back(uint32_t(i));
  if (listed.empty()) return;
  // Returns true if the k-th has the constants of the previous one.
  const auto shares = [&](size_t k) {
    const auto& [t, before] = std::pair(a.tensors[listed[k]], a.tensors[listed[k > 0 ? k - 1 : 0]]);
    return k > 0 && t.group == before.group && t.steps == before.steps;
  };
  size_t constants = 0;
  if (computed == nullptr)
    for (size_t k = 0; k < listed.size(); ++k) constants += !shares(k);
  TableWriter table(kOp, ctx, constants * sizeof(TableConstants) + listed.size() * sizeof(Entry));
  for (size_t k = 0; computed == nullptr && k < listed.size(); ++k)
    if (!shares(k)) {
      const AdamwTensor& t = a.tensors[listed[k]];
      const AdamwGroup& group = a.groups[size_t(t.group)];
      table.append(TableConstants{constants_of(group, group.lr, uint32_t(t.steps + 1))});
    }
  int64_t chunks = 0, used = -1;
  for (size_t k = 0; k < listed.size(); ++k) {
    Entry e = entry_of(a.tensors[listed[k]]);
    used += computed == nullptr && !shares(k);
    e.first_chunk = int32_t(chunks), e.constants = computed != nullptr ? listed[k] : uint32_t(used);
    chunks += ceil_div(e.size, chunk);
    TIGON_CHECK(kOp, chunks <= INT32_MAX, "tensors must have fewer than 2^45 elements in all");
    table.append(e);
  }
  if (chunks == 0) return;
  table.finish([&](const unsigned char* at, const SmallTable& block) {
    run(at, chunks, int(constants), int(listed.size()), block);
  });
}

// Updates the coded tensors of a call. `computed` has the constants of all tensors, or is null.
void launch_coded(Context& ctx, const Adamw& a, const TableConstants* computed);

}  // namespace tigon::cuda::adamw_unit
