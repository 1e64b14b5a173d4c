// In the CUDA backend of AdamW with 8-bit codes a warp updates one block of 256 elements at a time, eight per
// lane. Moments stay in registers from the read of their old codes to the write of the new ones; a reduction
// of the warp finds their absmax. Codes are looked up in shared memory, so CTAs are persistent, and each of
// their warps takes chunks of its own.
#include <algorithm>

#include "tigon/ops/adamw/adamw_codes.h"
#include "tigon/ops/adamw/adamw_unit.cuh"

namespace tigon::cuda::adamw_unit {
namespace {

// A CTA fills an SM, so that there is one table of the codes' values in it.
constexpr int kThreads = 768;
constexpr int kPerLane = kCodedBlock / 32;
// A warp looks an entry up once for a chunk of so many elements.
constexpr int64_t kCodedChunk = 8192;
static_assert(kCodedChunk % kCodedBlock == 0);

__device__ constexpr CodeMaps kCodeMaps = code_maps();

TIGON_FN uint32_t code_bits(float x) { return __float_as_uint(x); }
TIGON_FN float code_value(uint32_t bits) { return __uint_as_float(bits); }
TIGON_FN uint32_t clamped(float y, float lowest) { return __float_as_uint(fmaxf(fabsf(y), lowest)); }
#include "tigon/ops/adamw/adamw_codes.inc"

// Says how a tensor is read. The first two are compiled for the dtypes that models have.
enum class Path : uint8_t {
  bf16,       // param and grad are bf16
  f32,        // param and grad are f32
  aligned,    // any dtypes, in vectors of eight elements
  unaligned,  // any dtypes, element by element
};

struct Entry {
  void* param;
  const void* grad;
  uint8_t *avg, *root;
  float *avg_absmax, *root_absmax;
  void* extra;  // low or master, or null
  int64_t size;
  int64_t first;
  int32_t first_chunk;
  uint32_t constants;
  DType param_type, grad_type;
  Path path;
};
static_assert(sizeof(Entry) == 88);

// Holds the codes of N elements.
template <int N>
struct Codes {
  uint32_t w[N == 8 ? 2 : 1];

  __device__ __forceinline__ void load(const uint8_t* p) {
    if constexpr (N == 8) {
      const uint2 x = *reinterpret_cast<const uint2*>(global<uint8_t>(p));
      w[0] = x.x, w[1] = x.y;
    } else {
      w[0] = *global<uint8_t>(p);
    }
  }
  __device__ __forceinline__ void store(uint8_t* p) const {
    auto* to = const_cast<uint8_t*>(global<uint8_t>(p));
    if constexpr (N == 8)
      *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
    else
      *to = uint8_t(w[0]);
  }
  __device__ __forceinline__ uint32_t get(int k) const { return w[k / 4] >> (8 * (k % 4)) & 0xffu; }
  __device__ __forceinline__ void add(int k, uint32_t code) { w[k / 4] |= code << (8 * (k % 4)); }
};

// Holds what a warp knows of its chunk.
struct alignas(16) Chunk {
  Entry e;
  Constants c;
};

// Each lane has its own copy of the values, in its own bank: no two wait for each other.
struct Shared {
  float values[256][2][32];  // of a code of exp_avg, and of a code of the root of exp_avg_sq
  CodeMaps::Cells cells;

  // What each warp knows of its chunk lies behind.
  __device__ __forceinline__ Chunk& chunk(int warp) { return reinterpret_cast<Chunk*>(this + 1)[warp]; }
  // Returns the values of the k-th code of a word.
  __device__ __forceinline__ const float* of(uint32_t word, int k) const {
    // Byte 1 is the code and byte 0 the place of the lane: together the offset.
    const uint32_t offset = prmt(word, 4 * (threadIdx.x % 32), 0x5504u | uint32_t(k) << 4);
    return reinterpret_cast<const float*>(reinterpret_cast<const char*>(values) + offset);
  }
  __device__ __forceinline__ float avg(uint32_t word, int k) const { return of(word, k)[0]; }
  __device__ __forceinline__ float root(uint32_t word, int k) const { return of(word, k)[32]; }
};

// Updates a block. A lane has N = 8 adjacent elements of a whole block, or with N = 1 every 32nd of `count`.
template <int N, class P, class G, AdamwRounding R>
struct Block {
  static constexpr int kUnits = kPerLane / N;

  __device__ __forceinline__ static int place(int unit) {
    const int lane = int(threadIdx.x % 32);
    return N == 8 ? 8 * lane : lane + 32 * unit;
  }
  __device__ __forceinline__ static bool has(int unit, int count) { return N == 8 || place(unit) < count; }

  __device__ __forceinline__ static void update(const Entry& e, const Constants& c, const Shared& shared,
                                                float factor, const Scalars& s, int64_t begin, int count) {
    const int64_t block = begin / kCodedBlock;
    const float avg_absmax = *global<float>(e.avg_absmax + block),
                root_absmax = *global<float>(e.root_absmax + block);
    float m[kUnits][N], r[kUnits][N];
    uint32_t most_avg = 0, most_root = 0;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (!has(u, count)) continue;
      const int64_t i = begin + place(u);
      ParamUnit<N, P, G, R> param;
      Codes<N> avg, root;
      param.load(e, i), avg.load(e.avg + i), root.load(e.root + i);
      float p[N];
      param.get(e, p);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        m[u][k] = mul(shared.avg(avg.w[k / 4], k % 4), avg_absmax);
        const float x = mul(shared.root(root.w[k / 4], k % 4), root_absmax);
        float v = mul(x, x);
        adamw_update(mul(param.grad.get(k, e.grad_type), factor), c, p[k], m[u][k], v,
                     static_cast<float*>(nullptr));
        r[u][k] = sqrt(v);
        most_avg = max(most_avg, code_bits(m[u][k]) & 0x7fffffffu);
        most_root = max(most_root, code_bits(r[u][k]) & 0x7fffffffu);
      }
      store_param(e, c, s, param, i, p);
    }
    most_avg = __reduce_max_sync(0xffffffffu, most_avg);
    most_root = __reduce_max_sync(0xffffffffu, most_root);
    const float over_avg = over_absmax(most_avg), over_root = over_absmax(most_root);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (!has(u, count)) continue;
      Codes<N> avg{}, root{};
#pragma unroll
      for (int k = 0; k < N; ++k) {
        avg.add(k, avg_code(shared.cells, mul(m[u][k], over_avg)));
        root.add(k, root_code(shared.cells, r[u][k], mul(r[u][k], over_root)));
      }
      avg.store(e.avg + begin + place(u)), root.store(e.root + begin + place(u));
    }
    if (threadIdx.x % 32 == 0) store_absmax(e, block, most_avg, most_root);
  }

  __device__ __forceinline__ static void store_param(const Entry& e, const Constants& c, const Scalars& s,
                                                     const ParamUnit<N, P, G, R>& param, int64_t i,
                                                     const float (&p)[N]) {
    if (param.rounds(e, AdamwRounding::stochastic)) {
      const RandomBits<N> random(true, e.first + i, c.step, s.keys);
      store_stochastic<P, N>(e.param, e.param_type, i, p, random, kParamFactor);
    } else {
      param.store(e, i, p);
    }
  }
  __device__ __forceinline__ static void store_absmax(const Entry& e, int64_t block, uint32_t avg,
                                                      uint32_t root) {
    const_cast<float*>(global<float>(e.avg_absmax))[block] = kept_absmax(avg);
    const_cast<float*>(global<float>(e.root_absmax))[block] = kept_absmax(root);
  }
};

// Updates any block. It is a function of its own, so that its registers are not those of the loop over usual
// blocks.
template <int N, class P, class G, AdamwRounding R>
[[gnu::noinline]] __device__ void update_any(const Entry& e, const Constants& c, const Shared& shared,
                                             float factor, const Scalars& s, int64_t begin, int count) {
  Block<N, P, G, R>::update(e, c, shared, factor, s, begin, count);
}

// --- usual blocks -----------------------------------------------------------------------------

// Stands for a value in the range below, with its root, which is computed if it is read. Roots and quotients
// of such values need no special cases, so no branch keeps the elements of a lane from being interleaved.
// Newton's steps from the approximations of the hardware round both correctly.
struct Usual {
  float v, root;
  TIGON_FN Usual(float x) : v(x) {
    const float over = rsqrt_approx_ftz(x), near = mul(over, x);
    root = fma(fma(-near, near, x), mul(over, 0.5f), near);
  }
  TIGON_FN operator float() const { return v; }
};
TIGON_FN Usual sqrt(Usual x) { return x.root; }
TIGON_FN Usual operator/(Usual a, Usual b) {
  float over = rcp_approx_ftz(b);
  over = fma(over, fma(-b.v, over, 1.0f), over);
  const float near = mul(a, over);
  return fma(over, fma(-b.v, near, a), near);
}
// The formula asks whether an old value is infinite. The new one would be NaN and so not usual.
TIGON_FN bool gt(Usual, Usual) { return false; }

constexpr float kLeastAvg = 0x1p-76f, kMostAvg = 0x1p40f, kLeastSq = 0x1p-100f, kMostSq = 0x1p40f;
// Returns true if the formula needs no other steps than a usual block takes, and no divisor is out of range.
TIGON_FN bool is_usual(const Constants& c) {
  return c.l2 == 0.0f && c.weight1 <= 0.5f && c.weight2 <= 0.5f && c.scale >= 1.0f && c.scale <= 0x1p27f &&
         c.eps >= 0.0f && c.eps <= 0x1p27f;
}

// Updates whole blocks whose values are usual.
template <class P, class G, AdamwRounding R>
struct UsualBlock {
  // Where the lane's elements of the block are: `first` is that of the first one.
  Entry at;
  ParamUnit<8, P, G, R> param;
  Codes<8> avg, root;
  float avg_absmax, root_absmax;
  float m[8], r[8], most_avg;
  uint32_t most_sq;

  __device__ __forceinline__ UsualBlock(const Entry& e, int64_t begin) : at(e) {
    move(begin + 8 * int(threadIdx.x % 32), begin / kCodedBlock);
  }
  __device__ __forceinline__ void move(int64_t elements, int64_t blocks) {
    constexpr int kExtra = R == AdamwRounding::split ? 2 : 4;
    at.param = static_cast<char*>(at.param) + elements * int(sizeof(P));
    at.grad = static_cast<const char*>(at.grad) + elements * int(sizeof(G));
    if (at.extra != nullptr) at.extra = static_cast<char*>(at.extra) + elements * kExtra;
    at.avg += elements, at.root += elements, at.first += elements;
    at.avg_absmax += blocks, at.root_absmax += blocks;
  }
  // Loads the block that is so many blocks further.
  __device__ __forceinline__ void load(int blocks) {
    const int i = blocks * kCodedBlock;
    param.load(at, i), avg.load(at.avg + i), root.load(at.root + i);
    avg_absmax = *global<float>(at.avg_absmax + blocks);
    root_absmax = *global<float>(at.root_absmax + blocks);
  }

  // Updates moments and parameters from what was loaded. Returns false, and has written nothing, if the block
  // is not usual.
  __device__ __forceinline__ bool update(const Constants& c, const Shared& shared, float factor,
                                         const Scalars& s) {
    float p[8], least_avg = kMostAvg;
    uint32_t sq[8], least_sq = 0xffffffffu;
    most_avg = 0.0f, most_sq = 0;
    param.get(at, p);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      Usual p_k = p[k], m_k = mul(shared.avg(avg.w[k / 4], k % 4), avg_absmax);
      const float x = mul(shared.root(root.w[k / 4], k % 4), root_absmax);
      Usual v = mul(x, x);
      adamw_update(Usual(mul(param.grad.get(k, at.grad_type), factor)), c, p_k, m_k, v,
                   static_cast<Usual*>(nullptr));
      p[k] = p_k, m[k] = m_k, r[k] = v.root;
      least_avg = fminf(least_avg, fabsf(m_k)), most_avg = max_NaN(most_avg, fabsf(m_k));
      sq[k] = code_bits(v);
    }
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      least_sq = min(min(sq[k], sq[k + 1]), least_sq);
      most_sq = max(max(sq[k], sq[k + 1]), most_sq);
    }
    const bool usual = least_avg >= kLeastAvg && most_avg <= kMostAvg && least_sq >= code_bits(kLeastSq) &&
                       most_sq <= code_bits(kMostSq);
    if (!__all_sync(0xffffffffu, usual)) return false;
    Block<8, P, G, R>::store_param(at, c, s, param, 0, p);
    return true;
  }
  __device__ __forceinline__ void store_codes(const Shared& shared) const {
    const float avg_max = code_value(__reduce_max_sync(0xffffffffu, code_bits(most_avg)));
    // A root grows with its square.
    const float root_max = Usual(code_value(__reduce_max_sync(0xffffffffu, most_sq))).root;
    const float over_avg = Usual(1.0f) / Usual(avg_max), over_root = Usual(1.0f) / Usual(root_max);
    Codes<8> new_avg, new_root;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      uint32_t distance[4], code[4], signs[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t bits = code_bits(mul(m[4 * w + k], over_avg));
        distance[k] = code_word(shared.cells.of_avg, max(bits << 1 | bits >> 31, AvgCells::kLowestZ));
        const float y = fmaxf(mul(r[4 * w + k], over_root), RootCells::kLowest);
        code[k] = code_word(shared.cells.of_roots, code_bits(y));
        signs[k] = code_bits(m[4 * w + k]);
      }
      new_avg.w[w] = avg_codes(bytes<2>(distance), bytes<11>(signs)), new_root.w[w] = bytes<2>(code);
    }
    new_avg.store(at.avg), new_root.store(at.root);
    if (threadIdx.x % 32 == 0)
      Block<8, P, G, R>::store_absmax(at, 0, code_bits(avg_max), code_bits(root_max));
  }

  // Joins a byte of each word. Byte 8 + k is the sign of byte k.
  template <uint32_t Byte>
  __device__ __forceinline__ static uint32_t bytes(const uint32_t (&x)[4]) {
    constexpr uint32_t kBytes = (Byte | (Byte + 4) << 4) * 0x101u;
    return prmt(prmt(x[0], x[1], kBytes), prmt(x[2], x[3], kBytes), 0x5410u);
  }
};

// Updates elements [begin, begin + count) of a tensor.
template <int N, class P, class G, AdamwRounding R>
__device__ __forceinline__ void update_chunk(const Entry& e, const Constants& c, const Shared& shared,
                                             float factor, const Scalars& s, int64_t begin, int count) {
  const int whole = N == 8 ? count / kCodedBlock * kCodedBlock : 0;
  if constexpr (N == 8) {
    if (std::is_same_v<P, Any> || !is_usual(c)) {
#pragma unroll 1
      for (int at = 0; at < whole; at += kCodedBlock)
        update_any<8, P, G, R>(e, c, shared, factor, s, begin + at, kCodedBlock);
    } else {
      Constants known = c;
      __builtin_assume(known.l2 == 0.0f);
      __builtin_assume(known.weight1 <= 0.5f);
      __builtin_assume(known.weight2 <= 0.5f);
#pragma unroll 1
      for (int at = 0; at < whole; at += kCodedBlock) {
        UsualBlock<P, G, R> x(e, begin + at);
        x.load(0);
#pragma unroll 1
        while (x.update(known, shared, factor, s)) {
          at += kCodedBlock;
          // The next block is on its way while the codes of this one are found.
          if (at < whole) x.load(1);
          x.store_codes(shared);
          if (at >= whole) break;
          x.move(kCodedBlock, 1);
        }
        if (at < whole) update_any<8, P, G, R>(e, c, shared, factor, s, begin + at, kCodedBlock);
      }
    }
  }
#pragma unroll 1
  for (int at = whole; at < count; at += kCodedBlock)
    update_any<1, Any, Any, R>(e, c, shared, factor, s, begin + at, min(kCodedBlock, count - at));
}

template <AdamwRounding R>
__global__ void __launch_bounds__(kThreads, 1)
    adamw_codes_kernel(const unsigned char* table, const TableConstants* computed, int constants, int count,
                       int chunks, const __grid_constant__ Scalars s,
                       const __grid_constant__ SmallTable block) {
  using B = __nv_bfloat16;
  if (s.found_inf != nullptr && *s.found_inf != 0.0f) return;
  if (table == nullptr) table = block.bytes;
  extern __shared__ uint4 dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), warps = int(blockDim.x / 32);
#pragma unroll 1
  for (int code = warp; code < 256; code += warps)
    shared.values[code][0][lane] = kCodeMaps.avg[code], shared.values[code][1][lane] = kCodeMaps.root[code];
  constexpr int kWords = int(sizeof(shared.cells) / 4);
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kWords; i += 32 * warps)
    reinterpret_cast<uint32_t*>(&shared.cells)[i] = reinterpret_cast<const uint32_t*>(&kCodeMaps.cells)[i];
  __syncthreads();
  auto& [e, c] = shared.chunk(warp);
#pragma unroll 1
  for (int64_t chunk = blockIdx.x + int64_t(gridDim.x) * warp; chunk < chunks;
       chunk += int64_t(gridDim.x) * warps) {
    __syncwarp();
    fetch_entry(table, computed, constants, count, int(chunk), e, c);
    __syncwarp();
    const float factor = factor_of(c.sign, s.clip, s.grad_scale);
    const int64_t begin = int64_t(chunk - e.first_chunk) * kCodedChunk;
    const int n = int(min(kCodedChunk, e.size - begin));
    switch (e.path) {
      case Path::bf16: update_chunk<8, B, B, R>(e, c, shared, factor, s, begin, n); break;
      case Path::f32: update_chunk<8, float, float, R>(e, c, shared, factor, s, begin, n); break;
      case Path::aligned: update_chunk<8, Any, Any, R>(e, c, shared, factor, s, begin, n); break;
      case Path::unaligned: update_chunk<1, Any, Any, R>(e, c, shared, factor, s, begin, n); break;
    }
  }
}

Path path_of(const Entry& e, const Adamw& a) {
  const auto begins = [](const void* p, size_t element) {
    return reinterpret_cast<uintptr_t>(p) % (8 * element) == 0;
  };
  const bool draws = a.rounding == AdamwRounding::stochastic && is_half(e.param_type);
  if (!begins(e.param, size_of(e.param_type)) || !begins(e.grad, size_of(e.grad_type)) ||
      !begins(e.extra, a.rounding == AdamwRounding::split ? 2 : 4) || !begins(e.avg, 1) ||
      !begins(e.root, 1) || (draws && e.first % 8 != 0))
    return Path::unaligned;
  if (e.param_type != e.grad_type || e.param_type == DType::f16) return Path::aligned;
  return e.param_type == DType::bf16 ? Path::bf16 : Path::f32;
}

Entry entry_of(const AdamwTensor& t, const Adamw& a) {
  Entry e{.param = t.param.data,
          .grad = t.grad.data,
          .avg = static_cast<uint8_t*>(t.exp_avg.data),
          .root = static_cast<uint8_t*>(t.exp_avg_sq.data),
          .avg_absmax = t.avg_absmax.as<float>(),
          .root_absmax = t.root_absmax.as<float>(),
          .extra = t.low ? t.low.data : t.master.data,
          .size = t.param.size,
          .first = t.first,
          .first_chunk = 0,
          .constants = 0,
          .param_type = t.param.dtype,
          .grad_type = t.grad.dtype,
          .path = Path::unaligned};
  e.path = path_of(e, a);
  return e;
}

template <AdamwRounding R>
void run(Context& ctx, const Adamw& a, const TableConstants* computed) {
  static OccupancyCache occupancy;
  launch_list(
      ctx, a, computed, true, kCodedChunk, [&](const AdamwTensor& t) { return entry_of(t, a); },
      [&](const unsigned char* table, int64_t chunks, int constants, int count, const SmallTable& block) {
        const auto kernel = adamw_codes_kernel<R>;
        // A GPU with less shared memory takes fewer warps.
        const int room = (device_facts().shared_per_block - int(sizeof(Shared))) / int(sizeof(Chunk));
        const int warps = std::min(kThreads / 32, room);
        const size_t shared = sizeof(Shared) + size_t(warps) * sizeof(Chunk);
        const int64_t resident = std::max(1, occupancy.max_active(kOp, kernel, 1, 32 * warps, shared));
        launch(kOp, ctx, kernel,
               {.blocks = std::min(chunks, resident), .threads = 32 * warps, .shared = shared}, table,
               computed, constants, count, int(chunks), scalars_of(a), block);
      });
}

}  // namespace

void launch_coded(Context& ctx, const Adamw& a, const TableConstants* computed) {
  switch (a.rounding) {
    case AdamwRounding::nearest: return run<AdamwRounding::nearest>(ctx, a, computed);
    case AdamwRounding::stochastic: return run<AdamwRounding::stochastic>(ctx, a, computed);
    case AdamwRounding::split: return run<AdamwRounding::split>(ctx, a, computed);
    case AdamwRounding::master: return run<AdamwRounding::master>(ctx, a, computed);
  }
}

}  // namespace tigon::cuda::adamw_unit
