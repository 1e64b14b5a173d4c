// In the CUDA backend of AdamW with 8-bit codes a warp updates one block of 256 elements at a time, eight per
// lane. Moments stay in registers from the read of their old codes to the write of the new ones; a reduction
// of the warp finds their absmax. Codes are looked up in shared memory, so CTAs are persistent and copy the
// tables once.
#include <algorithm>

#include "tigon/ops/adamw/adamw_codes.h"
#include "tigon/ops/adamw/adamw_unit.cuh"

namespace tigon::cuda::adamw_unit {
namespace {

constexpr int kThreads = 256, kMinBlocks = 4, kWarps = kThreads / 32;
constexpr int kPerLane = kCodedBlock / 32;
// A CTA looks an entry up once for a chunk of so many elements.
constexpr int64_t kCodedChunk = 65536;
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

// Updates a block. A lane has N = 8 adjacent elements of a whole block, or with N = 1 every 32nd of `count`.
template <int N, class P, class G, AdamwRounding R>
struct Block {
  static constexpr int kUnits = kPerLane / N;

  __device__ __forceinline__ static int place(int unit) {
    const int lane = int(threadIdx.x % 32);
    return N == 8 ? 8 * lane : lane + 32 * unit;
  }
  __device__ __forceinline__ static bool has(int unit, int count) { return N == 8 || place(unit) < count; }

  __device__ __forceinline__ static void update(const Entry& e, const Constants& c, const CodeMaps& maps,
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
        m[u][k] = mul(maps.avg[avg.get(k)], avg_absmax);
        const float x = mul(maps.root[root.get(k)], root_absmax);
        float v = mul(x, x);
        adamw_update(mul(param.grad.get(k, e.grad_type), factor), c, p[k], m[u][k], v,
                     static_cast<float*>(nullptr));
        r[u][k] = sqrt(v);
        most_avg = max(most_avg, code_bits(m[u][k]) & 0x7fffffffu);
        most_root = max(most_root, code_bits(r[u][k]) & 0x7fffffffu);
      }
      if (param.rounds(e, AdamwRounding::stochastic)) {
        const RandomBits<N> random(true, e.first + i, c.step, s.keys);
        store_stochastic<P, N>(e.param, e.param_type, i, p, random, kParamFactor);
      } else {
        param.store(e, i, p);
      }
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
        avg.add(k, avg_code(maps, mul(m[u][k], over_avg)));
        root.add(k, root_code(maps, r[u][k], mul(r[u][k], over_root)));
      }
      avg.store(e.avg + begin + place(u)), root.store(e.root + begin + place(u));
    }
    if (threadIdx.x % 32 == 0) {
      const_cast<float*>(global<float>(e.avg_absmax))[block] = kept_absmax(most_avg);
      const_cast<float*>(global<float>(e.root_absmax))[block] = kept_absmax(most_root);
    }
  }
};

// Updates elements [begin, begin + count) of a tensor. Warps take blocks in turn, and read what is no whole
// block element by element.
template <int N, class P, class G, AdamwRounding R>
__device__ __forceinline__ void update_chunk(const Entry& e, const Constants& c, const CodeMaps& maps,
                                             float factor, const Scalars& s, int64_t begin, int count) {
  const int warp = int(threadIdx.x / 32), whole = N == 8 ? count / kCodedBlock : 0;
#pragma unroll 1
  for (int b = warp; b < whole; b += kWarps) {
    Block<N, P, G, R>::update(e, c, maps, factor, s, begin + b * kCodedBlock, kCodedBlock);
  }
#pragma unroll 1
  for (int b = warp; b * kCodedBlock < count; b += kWarps) {
    if (b < whole) continue;
    const int n = min(kCodedBlock, count - b * kCodedBlock);
    Block<1, Any, Any, R>::update(e, c, maps, factor, s, begin + b * kCodedBlock, n);
  }
}

template <AdamwRounding R>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    adamw_codes_kernel(const unsigned char* table, const TableConstants* computed, int constants, int count,
                       int chunks, const Scalars s, const __grid_constant__ SmallTable block) {
  using B = __nv_bfloat16;
  if (s.found_inf != nullptr && *s.found_inf != 0.0f) return;
  if (table == nullptr) table = block.bytes;
  __shared__ CodeMaps maps;
  __shared__ Entry e;
  __shared__ Constants c;
  constexpr int kVectors = int(sizeof(CodeMaps) / 16);
  for (int i = int(threadIdx.x); i < kVectors; i += kThreads)
    reinterpret_cast<uint4*>(&maps)[i] = reinterpret_cast<const uint4*>(&kCodeMaps)[i];
#pragma unroll 1
  for (int chunk = int(blockIdx.x); chunk < chunks; chunk += int(gridDim.x)) {
    __syncthreads();
    fetch_entry(table, computed, constants, count, chunk, e, c);
    __syncthreads();
    const float factor = factor_of(c.sign, s.clip, s.grad_scale);
    const int64_t begin = int64_t(chunk - e.first_chunk) * kCodedChunk;
    const int n = int(min(kCodedChunk, e.size - begin));
    switch (e.path) {
      case Path::bf16: update_chunk<8, B, B, R>(e, c, maps, factor, s, begin, n); break;
      case Path::f32: update_chunk<8, float, float, R>(e, c, maps, factor, s, begin, n); break;
      case Path::aligned: update_chunk<8, Any, Any, R>(e, c, maps, factor, s, begin, n); break;
      case Path::unaligned: update_chunk<1, Any, Any, R>(e, c, maps, factor, s, begin, n); break;
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
        const int64_t resident = std::max(1, occupancy.max_active(kOp, kernel, 1, kThreads));
        launch(kOp, ctx, kernel, {.blocks = std::min(chunks, resident), .threads = kThreads}, table, computed,
               constants, count, int(chunks), scalars_of(a), block);
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
