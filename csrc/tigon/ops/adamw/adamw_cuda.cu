// In the CUDA backend of AdamW a CTA updates one chunk of one tensor of the list. An element in bf16 moves 14
// bytes. At the speed of memory an H200 has about 90 instructions for them. An update takes about 45 (square
// root and division correctly rounded), 6 more for random bits, and 4 for each stream that they round.
#include <algorithm>
#include <type_traits>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/tensor_list.cuh"
#include "tigon/base/cuda/vec.cuh"
#include "tigon/ops/adamw/adamw_constants.h"

namespace tigon::cuda {
namespace {

using namespace adamw_detail;
#include "tigon/ops/adamw/adamw_bits.inc"
#include "tigon/ops/adamw/adamw_math.inc"

constexpr const char* kOp = "adamw";
constexpr int kThreads = 256, kMinBlocks = 4;

// Says how a tensor is read. The first four are compiled for the dtypes that models have.
enum class Path : uint8_t {
  bf16,       // all streams are bf16
  bf16_wide,  // param and grad are bf16, moments f32
  f32,        // all streams are f32
  f32_half,   // param and grad are f32, moments bf16
  aligned,    // any dtypes, in vectors of four elements
  unaligned,  // any dtypes, element by element
};

struct Entry {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* most;   // max_exp_avg_sq, or null
  void* extra;  // low or master, or null
  int64_t size;
  int64_t first;
  int32_t first_chunk;
  uint32_t constants;
  DType param_type, grad_type, avg_type, sq_type;
  Path path;
};
static_assert(sizeof(Entry) == 80);
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

// --- one unit: N elements of all streams ------------------------------------------------------

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

template <int N, class P, class G, class M, class W, AdamwRounding R>
struct Unit {
  Words<P, N> param;
  Words<G, N> grad;
  Words<M, N> avg;
  Words<W, N> sq, most;
  Words<uint16_t, N> low;
  Words<float, N> master;

  // Returns true for this rounding of a 16-bit parameter, and false also if the table says that it has 32
  // bits.
  __device__ __forceinline__ static bool rounds(const Entry& e, AdamwRounding r) {
    if constexpr (std::is_same_v<P, float>) return false;
    return R == r && (!std::is_same_v<P, Any> || e.param_type != DType::f32);
  }
  template <class T>
  __device__ __forceinline__ static bool draws(const Scalars& s, DType t) {
    if constexpr (std::is_same_v<T, float>) return false;
    return s.draws_moments && (!std::is_same_v<T, Any> || t != DType::f32);
  }
  template <class T>
  __device__ __forceinline__ static void store_moment(const Scalars& s, void* p, DType t, int64_t i,
                                                      const float (&x)[N], const RandomBits<N>& random,
                                                      uint32_t factor) {
    if (draws<T>(s, t))
      store_stochastic<T, N>(p, t, i, x, random, factor);
    else
      store_as<T, N>(p, t, i, x);
  }

  __device__ __forceinline__ void load(const Entry& e, int64_t i) {
    const bool masters = rounds(e, AdamwRounding::master);
    if (!masters) param.load(e.param, e.param_type, i);
    if (masters) master.load(e.extra, DType::f32, i);
    if (rounds(e, AdamwRounding::split)) low.load(e.extra, DType::i16, i);
    grad.load(e.grad, e.grad_type, i);
    avg.load(e.exp_avg, e.avg_type, i);
    sq.load(e.exp_avg_sq, e.sq_type, i);
    if (e.most != nullptr) most.load(e.most, e.sq_type, i);
  }

  __device__ __forceinline__ void update(const Entry& e, const Constants& c, float factor, const Scalars& s,
                                         int64_t i) const {
    float p[N], m[N], v[N];
    const bool masters = rounds(e, AdamwRounding::master), splits = rounds(e, AdamwRounding::split);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      p[k] = masters ? master.get(k, DType::f32) : param.get(k, e.param_type);
      if (splits) p[k] = __uint_as_float(joined(__float_as_uint(p[k]) >> 16, uint32_t(low.v.v[k])));
      m[k] = avg.get(k, e.avg_type), v[k] = sq.get(k, e.sq_type);
    }
    if (e.most != nullptr) {
      float u[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        u[k] = most.get(k, e.sq_type);
        adamw_update(mul(grad.get(k, e.grad_type), factor), c, p[k], m[k], v[k], &u[k]);
      }
      // The bits are drawn again for u, which would not fit the registers together with p, m, v and the bits.
      const RandomBits<N> random(draws<W>(s, e.sq_type), e.first + i, c.step, s.keys);
      store_moment<W>(s, e.most, e.sq_type, i, u, random, kSqFactor);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k)
        adamw_update(mul(grad.get(k, e.grad_type), factor), c, p[k], m[k], v[k],
                     static_cast<float*>(nullptr));
    }
    // Parameters come first: their values need not be kept while random bits are made.
    const bool draws_param = rounds(e, AdamwRounding::stochastic);
    if (!draws_param) store_param(e, i, p);
    const RandomBits<N> random(draws_param || draws<M>(s, e.avg_type) || draws<W>(s, e.sq_type), e.first + i,
                               c.step, s.keys);
    if (draws_param) store_stochastic<P, N>(e.param, e.param_type, i, p, random, kParamFactor);
    store_moment<M>(s, e.exp_avg, e.avg_type, i, m, random, kAvgFactor);
    store_moment<W>(s, e.exp_avg_sq, e.sq_type, i, v, random, kSqFactor);
  }

  // Stores p rounded to nearest, and what the rounding keeps of it.
  __device__ __forceinline__ static void store_param(const Entry& e, int64_t i, const float (&p)[N]) {
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

// Updates elements [begin, begin + count) of a tensor, with U units of N elements per thread in flight.
template <int N, int U, class P, class G, class M, class W, AdamwRounding R>
__device__ __forceinline__ void update_chunk(const Entry& e, const Constants& c, float factor,
                                             const Scalars& s, int64_t begin, int count) {
  using Units = Unit<N, P, G, M, W, R>;
  const int units = count / N;
#pragma unroll 1
  for (int u = threadIdx.x; u < units; u += kThreads * U) {
    Units x[U];
#pragma unroll
    for (int h = 0; h < U; ++h)
      if (u + h * kThreads < units) x[h].load(e, begin + (u + h * kThreads) * N);
#pragma unroll
    for (int h = 0; h < U; ++h)
      if (u + h * kThreads < units) x[h].update(e, c, factor, s, begin + (u + h * kThreads) * N);
  }
  if constexpr (N > 1) {
    const int at = units * N + int(threadIdx.x);
    if (at < count) {
      Unit<1, P, G, M, W, R> one;
      one.load(e, begin + at);
      one.update(e, c, factor, s, begin + at);
    }
  }
}

// --- kernels ----------------------------------------------------------------------------------

// Reads the table: the entries, and the constants unless they were computed on the device.
template <AdamwRounding R, size_t Bytes>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    adamw_kernel(const unsigned char* table, const TableConstants* computed, int constants, int count,
                 const Scalars s, const __grid_constant__ TableBlock<Bytes> block) {
  using B = __nv_bfloat16;
  if (s.found_inf != nullptr && *s.found_inf != 0.0f) return;
  if (table == nullptr) table = block.bytes;
  const auto* listed = reinterpret_cast<const TableConstants*>(table);
  const auto* entries = reinterpret_cast<const Entry*>(listed + constants);
  const int chunk = int(blockIdx.x);
  // The entry is in shared memory, so that the addresses and constants take no registers between their uses.
  __shared__ Entry e;
  __shared__ Constants c;
  if (threadIdx.x < 32) {
    const int of = find_entry(entries, count, chunk);
    constexpr int kWords = sizeof(Entry) / 4, kConstants = sizeof(Constants) / 4;
    const auto* words = reinterpret_cast<const uint32_t*>(entries + of);
    if (threadIdx.x < kWords) reinterpret_cast<uint32_t*>(&e)[threadIdx.x] = words[threadIdx.x];
    const auto* all =
        reinterpret_cast<const uint32_t*>((computed != nullptr ? computed : listed) + entries[of].constants);
    if (threadIdx.x < kConstants) reinterpret_cast<uint32_t*>(&c)[threadIdx.x] = all[threadIdx.x];
  }
  __syncthreads();
  const float factor = factor_of(c.sign, s.clip, s.grad_scale);
  const int64_t begin = int64_t(chunk - e.first_chunk) * kChunk;
  const int n = int(min(kChunk, e.size - begin));
  switch (e.path) {
    case Path::bf16: return update_chunk<8, 1, B, B, B, B, R>(e, c, factor, s, begin, n);
    case Path::bf16_wide: return update_chunk<4, 1, B, B, float, float, R>(e, c, factor, s, begin, n);
    case Path::f32: return update_chunk<4, 1, float, float, float, float, R>(e, c, factor, s, begin, n);
    case Path::f32_half: return update_chunk<8, 1, float, float, B, B, R>(e, c, factor, s, begin, n);
    case Path::aligned: return update_chunk<4, 1, Any, Any, Any, Any, R>(e, c, factor, s, begin, n);
    case Path::unaligned: return update_chunk<1, 2, Any, Any, Any, Any, R>(e, c, factor, s, begin, n);
  }
}

// Holds what the constants of a tensor follow from.
struct Progress {
  float* step;  // null to use `steps`
  uint32_t steps;
  uint32_t group;
};
static_assert(sizeof(AdamwGroup) % 8 == 0 && sizeof(Progress) % 8 == 0);

template <size_t Bytes>
__global__ void prepare_kernel(const unsigned char* table, int groups, int count, const float* found_inf,
                               TableConstants* constants, const __grid_constant__ TableBlock<Bytes> block) {
  if (table == nullptr) table = block.bytes;
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count || (found_inf != nullptr && *found_inf != 0.0f)) return;
  const auto* listed = reinterpret_cast<const AdamwGroup*>(table);
  const Progress of = reinterpret_cast<const Progress*>(listed + groups)[i];
  const AdamwGroup group = listed[of.group];
  const float done = of.step != nullptr ? *of.step : float(of.steps);
  const uint32_t step = (of.step != nullptr ? uint32_t(done) : of.steps) + 1;
  if (of.step != nullptr) *of.step = done + 1.0f;
  const double lr = group.lr_on_device != nullptr ? double(*group.lr_on_device) : group.lr;
  static_cast<Constants&>(constants[i]) = constants_of(group, lr, step);
}

// --- host -------------------------------------------------------------------------------------

bool on_device(const Adamw& a) {
  return std::any_of(a.groups.begin(), a.groups.end(),
                     [](const AdamwGroup& g) { return g.lr_on_device != nullptr; }) ||
         std::any_of(a.tensors.begin(), a.tensors.end(), [](const AdamwTensor& t) { return bool(t.step); });
}

TableConstants* prepare(Context& ctx, const Adamw& a) {
  constexpr int kPrepareThreads = 128;
  const size_t groups = a.groups.size(), n = a.tensors.size();
  auto* constants = ctx.scratch_of<TableConstants>(int64_t(n));
  TableWriter table(kOp, ctx, groups * sizeof(AdamwGroup) + n * sizeof(Progress));
  for (const AdamwGroup& g : a.groups) table.append(g);
  for (const AdamwTensor& t : a.tensors)
    table.append(
        Progress{.step = t.step.as<float>(), .steps = uint32_t(t.steps), .group = uint32_t(t.group)});
  table.finish([&](const unsigned char* at, const auto& block) {
    launch(kOp, ctx, prepare_kernel<sizeof(block)>,
           {.blocks = ceil_div(int64_t(n), kPrepareThreads), .threads = kPrepareThreads}, at, int(groups),
           int(n), a.found_inf.as<float>(), constants, block);
  });
  return constants;
}

// True if a tensor takes random bits.
bool draws(const Entry& e, const Adamw& a) {
  return (a.rounding == AdamwRounding::stochastic && is_half(e.param_type)) ||
         (a.moment_rounding == AdamwRounding::stochastic && (is_half(e.avg_type) || is_half(e.sq_type)));
}

// True if vectors of n elements, a power of two, begin at aligned addresses.
bool is_aligned(const Entry& e, size_t n, const Adamw& a) {
  auto begins = [n](const void* p, DType t) {
    return (reinterpret_cast<uintptr_t>(p) & (n * size_of(t) - 1)) == 0;
  };
  const DType extra = a.rounding == AdamwRounding::split ? DType::i16 : DType::f32;
  return begins(e.param, e.param_type) && begins(e.grad, e.grad_type) && begins(e.exp_avg, e.avg_type) &&
         begins(e.exp_avg_sq, e.sq_type) && begins(e.most, e.sq_type) && begins(e.extra, extra) &&
         (!draws(e, a) || e.first % int64_t(n) == 0);
}

Path path_of(const Entry& e, const Adamw& a) {
  auto are = [&](DType p, DType moments) {
    return e.param_type == p && e.grad_type == p && e.avg_type == moments && e.sq_type == moments;
  };
  const bool by_eight = is_aligned(e, 8, a);
  if (by_eight && are(DType::bf16, DType::bf16)) return Path::bf16;
  if (by_eight && are(DType::f32, DType::bf16)) return Path::f32_half;
  if (!is_aligned(e, 4, a)) return Path::unaligned;
  if (are(DType::bf16, DType::f32)) return Path::bf16_wide;
  return are(DType::f32, DType::f32) ? Path::f32 : Path::aligned;
}

Entry entry_of(const AdamwTensor& t, const Adamw& a) {
  Entry e{.param = t.param.data,
          .grad = t.grad.data,
          .exp_avg = t.exp_avg.data,
          .exp_avg_sq = t.exp_avg_sq.data,
          .most = t.max_exp_avg_sq.data,
          .extra = t.low ? t.low.data : t.master.data,
          .size = t.param.size,
          .first = t.first,
          .first_chunk = 0,
          .constants = 0,
          .param_type = t.param.dtype,
          .grad_type = t.grad.dtype,
          .avg_type = t.exp_avg.dtype,
          .sq_type = t.exp_avg_sq.dtype,
          .path = Path::unaligned};
  e.path = path_of(e, a);
  return e;
}

// True if a tensor has the constants of the previous one.
bool shares_constants(const Adamw& a, size_t i) {
  return i > 0 && a.tensors[i].group == a.tensors[i - 1].group &&
         a.tensors[i].steps == a.tensors[i - 1].steps;
}

template <AdamwRounding R>
void run(Context& ctx, const Adamw& a) {
  const size_t n = a.tensors.size();
  const TableConstants* computed = on_device(a) ? prepare(ctx, a) : nullptr;
  size_t constants = 0;
  if (computed == nullptr)
    for (size_t i = 0; i < n; ++i) constants += !shares_constants(a, i);
  TableWriter table(kOp, ctx, constants * sizeof(TableConstants) + n * sizeof(Entry));
  if (computed == nullptr)
    for (size_t i = 0; i < n; ++i)
      if (!shares_constants(a, i)) {
        const AdamwGroup& group = a.groups[size_t(a.tensors[i].group)];
        table.append(TableConstants{constants_of(group, group.lr, uint32_t(a.tensors[i].steps + 1))});
      }
  int64_t chunks = 0, used = -1;
  for (size_t i = 0; i < n; ++i) {
    Entry e = entry_of(a.tensors[i], a);
    used += computed != nullptr || !shares_constants(a, i);
    e.first_chunk = int32_t(chunks), e.constants = uint32_t(used);
    chunks += ceil_div(e.size, kChunk);
    TIGON_CHECK(kOp, chunks <= INT32_MAX, "tensors must have fewer than 2^45 elements in all");
    table.append(e);
  }
  const Scalars scalars{.clip = a.clip.as<float>(),
                        .grad_scale = a.grad_scale.as<float>(),
                        .found_inf = a.found_inf.as<float>(),
                        .keys = philox_keys(a.seed),
                        .draws_moments = a.moment_rounding == AdamwRounding::stochastic};
  table.finish([&](const unsigned char* at, const auto& block) {
    launch(kOp, ctx, adamw_kernel<R, sizeof(block)>, {.blocks = chunks, .threads = kThreads}, at, computed,
           int(constants), int(n), scalars, block);
  });
}

}  // namespace

void adamw(Context& ctx, const Adamw& a) {
  switch (a.rounding) {
    case AdamwRounding::nearest: return run<AdamwRounding::nearest>(ctx, a);
    case AdamwRounding::stochastic: return run<AdamwRounding::stochastic>(ctx, a);
    case AdamwRounding::split: return run<AdamwRounding::split>(ctx, a);
    case AdamwRounding::master: return run<AdamwRounding::master>(ctx, a);
  }
}

}  // namespace tigon::cuda
