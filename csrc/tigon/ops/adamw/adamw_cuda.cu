// In the CUDA backend of AdamW a CTA updates one chunk of one tensor of the list. An element in bf16 moves 14
// bytes. At the speed of memory an H200 has about 90 instructions for them. An update takes about 45 (square
// root and division correctly rounded), 6 more for random bits, and 4 for each stream that they round.
#include <algorithm>
#include <type_traits>

#include "tigon/ops/adamw/adamw_unit.cuh"

namespace tigon::cuda {
namespace {

using namespace adamw_unit;

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

// --- one unit: N elements of all streams ------------------------------------------------------

template <int N, class P, class G, class M, class W, AdamwRounding R>
struct Unit : ParamUnit<N, P, G, R> {
  using Param = ParamUnit<N, P, G, R>;
  using Param::grad, Param::rounds;
  Words<M, N> avg;
  Words<W, N> sq, most;

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
    Param::load(e, i);
    avg.load(e.exp_avg, e.avg_type, i);
    sq.load(e.exp_avg_sq, e.sq_type, i);
    if (e.most != nullptr) most.load(e.most, e.sq_type, i);
  }

  __device__ __forceinline__ void update(const Entry& e, const Constants& c, float factor, const Scalars& s,
                                         int64_t i) const {
    float p[N], m[N], v[N];
    Param::get(e, p);
#pragma unroll
    for (int k = 0; k < N; ++k) m[k] = avg.get(k, e.avg_type), v[k] = sq.get(k, e.sq_type);
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
    if (!draws_param) Param::store(e, i, p);
    const RandomBits<N> random(draws_param || draws<M>(s, e.avg_type) || draws<W>(s, e.sq_type), e.first + i,
                               c.step, s.keys);
    if (draws_param) store_stochastic<P, N>(e.param, e.param_type, i, p, random, kParamFactor);
    store_moment<M>(s, e.exp_avg, e.avg_type, i, m, random, kAvgFactor);
    store_moment<W>(s, e.exp_avg_sq, e.sq_type, i, v, random, kSqFactor);
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
template <AdamwRounding R>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    adamw_kernel(const unsigned char* table, const TableConstants* computed, int constants, int count,
                 const Scalars s, const __grid_constant__ SmallTable block) {
  using B = __nv_bfloat16;
  if (s.found_inf != nullptr && *s.found_inf != 0.0f) return;
  if (table == nullptr) table = block.bytes;
  const int chunk = int(blockIdx.x);
  // The entry is in shared memory, so that the addresses and constants take no registers between their uses.
  __shared__ Entry e;
  __shared__ Constants c;
  if (threadIdx.x < 32) fetch_entry(table, computed, constants, count, chunk, e, c);
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

__global__ void prepare_kernel(const unsigned char* table, int groups, int count, const float* found_inf,
                               TableConstants* constants, const __grid_constant__ SmallTable block) {
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
  table.finish([&](const unsigned char* at, const SmallTable& block) {
    launch(kOp, ctx, prepare_kernel,
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

template <AdamwRounding R>
void run(Context& ctx, const Adamw& a, const TableConstants* computed) {
  launch_list(
      ctx, a, computed, false, kChunk, [&](const AdamwTensor& t) { return entry_of(t, a); },
      [&](const unsigned char* table, int64_t chunks, int constants, int count, const SmallTable& block) {
        launch(kOp, ctx, adamw_kernel<R>, {.blocks = chunks, .threads = kThreads}, table, computed, constants,
               count, scalars_of(a), block);
      });
}

}  // namespace

void adamw(Context& ctx, const Adamw& a) {
  const TableConstants* computed = on_device(a) ? prepare(ctx, a) : nullptr;
  switch (a.rounding) {
    case AdamwRounding::nearest: run<AdamwRounding::nearest>(ctx, a, computed); break;
    case AdamwRounding::stochastic: run<AdamwRounding::stochastic>(ctx, a, computed); break;
    case AdamwRounding::split: run<AdamwRounding::split>(ctx, a, computed); break;
    case AdamwRounding::master: run<AdamwRounding::master>(ctx, a, computed); break;
  }
  launch_coded(ctx, a, computed);
}

}  // namespace tigon::cuda
