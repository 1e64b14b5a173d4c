// CUDA backend of cross_entropy.
//
// Bytes per element (b = element size): 2b with the gradient, b without.
// Instructions per element: about 14 with the gradient, two of them ex2, of 31 while memory-bound.
//
// Variants, of which the first that fits runs:
//   plain      Rows without options: cross_entropy_plain_cuda.cu.
//   smem       A row lies in the shared memory of a CTA or of a cluster of 2, 4 or 8 (sm_90): read
//              once by cp.async, maximum and sum of exponentials found as it arrives, gradient
//              formed from shared memory. Slices are small enough for three CTAs per SM.
//   looped     Longer rows: two passes by one CTA, the second partly out of L2.
// A row may start at any element; the partial vectors at its ends are moved element by element.
#include <algorithm>

#include "tigon/base/cuda/aligned_row.cuh"
#include "tigon/base/cuda/launch.cuh"
#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_vectors.cuh"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "cross_entropy";
constexpr int kThreads = 512, kLoopThreads = 1024, kMaxCluster = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

template <int Threads>
struct ReduceStorage {
  Sums warp[Threads / 32];
  unsigned key[Threads / 32];
  Sums cta[2][kMaxCluster];  // double-buffered: a CTA may be one row ahead
  float cta_key[2][kMaxCluster];
};

__device__ __forceinline__ float shuffle(float x, int step) { return __shfl_xor_sync(kAllLanes, x, step); }
template <bool General>
__device__ __forceinline__ Sums all_reduce_warp(Sums a) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    Sums b{shuffle(a.m, step), shuffle(a.s, step), 0.0f, 0.0f, 0.0f};
    if constexpr (General)
      b.smoothing_sum = shuffle(a.smoothing_sum, step), b.weight = shuffle(a.weight, step),
      b.entropy_sum = shuffle(a.entropy_sum, step);
    a = combine<General>(a, b);
  }
  return a;
}

// All-reduces the statistics of a row over the CTA or cluster.
template <bool General, class ReduceStorage>
__device__ __forceinline__ Sums all_reduce_row(Sums a, ReduceStorage& x, int parity) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  a = all_reduce_warp<General>(a);
  if (lane == 0) x.warp[warp] = a;
  __syncthreads();
  a = all_reduce_warp<General>(lane < warps ? x.warp[lane] : identity());
  Sums r = identity();  // lane 0's bits for all
  r.m = __shfl_sync(kAllLanes, a.m, 0), r.s = __shfl_sync(kAllLanes, a.s, 0);
  if constexpr (General) {
    r.smoothing_sum = __shfl_sync(kAllLanes, a.smoothing_sum, 0),
    r.weight = __shfl_sync(kAllLanes, a.weight, 0);
    r.entropy_sum = __shfl_sync(kAllLanes, a.entropy_sum, 0);
  }
  unsigned blocks = cluster_size();
  if (blocks == 1) return r;
  if (threadIdx.x < blocks) {
    Sums& slot = x.cta[parity][cluster_rank()];
    st_shared_cluster(&slot.m, threadIdx.x, r.m), st_shared_cluster(&slot.s, threadIdx.x, r.s);
    if constexpr (General) {
      st_shared_cluster(&slot.smoothing_sum, threadIdx.x, r.smoothing_sum),
          st_shared_cluster(&slot.weight, threadIdx.x, r.weight);
      st_shared_cluster(&slot.entropy_sum, threadIdx.x, r.entropy_sum);
    }
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  r = x.cta[parity][0];
  for (unsigned i = 1; i < blocks; ++i) r = combine<General>(r, x.cta[parity][i]);
  return r;
}

// The row's minimum key: the column of a NaN, or 2^31 + the column of a maximum, or 2^32 - 1.
template <class ReduceStorage>
__device__ __forceinline__ unsigned min_key(unsigned key, ReduceStorage& x, int parity) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  key = __reduce_min_sync(kAllLanes, key);
  if (lane == 0) x.key[warp] = key;
  __syncthreads();
  key = __reduce_min_sync(kAllLanes, lane < warps ? x.key[lane] : ~0u);
  unsigned blocks = cluster_size();
  if (blocks == 1) return key;
  if (threadIdx.x < blocks)
    st_shared_cluster(&x.cta_key[parity][cluster_rank()], threadIdx.x, __uint_as_float(key));
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  for (unsigned i = 0; i < blocks; ++i) key = min(key, __float_as_uint(x.cta_key[parity][i]));
  return key;
}
template <class T>
__device__ __forceinline__ unsigned key_of_vec(const Params<T>& p, const AlignedRow<const T>& row, int k,
                                               const uint4& words, float m, unsigned key) {
  constexpr int N = AlignedRow<T>::N;
  float z[N];
  z_of_vec<true>(p, row, k, words, z);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    unsigned c = unsigned(row.column(k) + j);
    if (!row.has(int(c))) continue;
    if (z[j] != z[j]) key = min(key, c);
    if (z[j] == m) key = min(key, c | 0x80000000u);
  }
  return key;
}

// The label's z is part of the maximum, so it has been read before any CTA may overwrite it.
__device__ __forceinline__ Sums initial_sums(float label_z, bool has_label) {
  return {has_label ? fmaxf(-INFINITY, label_z) : -INFINITY, 0.0f, 0.0f, 0.0f, 0.0f};
}

// The label of a row, and what follows from it before the logits are read.
struct Label {
  bool ignored, bad;
  int column;  // -1 when ignored, bad or of another shard
  float z, weight, reference;
  __device__ __forceinline__ bool is_elsewhere() const { return column < 0 && !ignored && !bad; }
};
template <bool General, class T>
__device__ __forceinline__ Label label_of(const Params<T>& p, int64_t row, const T* x) {
  Label l;
  int64_t y = p.target[row];
  l.ignored = y == p.ignore_index;
  l.bad = !l.ignored && (y < 0 || y >= p.classes);
  y -= p.first_class;
  l.column = l.ignored || l.bad || y < 0 || y >= p.cols ? -1 : int(y);
  l.z = l.weight = l.reference = 0.0f;
  if (l.column >= 0) {
    l.z = widen(x[l.column]);
    if constexpr (General) l.z = z_of(p, l.z, l.column);
    l.weight = weight_at(p.class_weight, l.column);
  } else if (l.is_elsewhere()) {
    l.weight = p.class_weight != nullptr ? p.class_weight[y] : 1.0f;
  }
  if constexpr (General) {
    if (p.label_smoothing > 0.0f) l.reference = z_of(p, widen(x[0]), 0);
    if (!isfinite(l.reference)) l.reference = 0.0f;
  }
  return l;
}

// Writes the results of a row (one thread) and returns what the gradient needs.
template <bool General, class T>
__device__ __forceinline__ RowGradient finish(const Params<T>& p, int64_t row, const Label& l, const Sums& a,
                                              bool writes) {
  bool has = l.column >= 0, is_max = has && l.z == a.m && isfinite(l.z);
  float own = has ? exp2_approx((l.z - a.m) * kLog2e) : 0.0f, s = a.s + own;
  float log_s = is_max ? log1pf(a.s) : logf(s), lse = a.m + log_s;
  float entropy_sum = General && has ? fma(own, fmaxf(l.z - a.m, -1e30f), a.entropy_sum) : a.entropy_sum;
  float keep = General ? 1.0f - p.label_smoothing : 1.0f;
  float share = General ? p.label_smoothing / float(p.classes) : 0.0f;
  if (writes) {
    float loss = keep * l.weight * ((a.m - l.z) + log_s);
    if (General && p.label_smoothing > 0.0f)
      loss += share * (a.weight * ((a.m - l.reference) + log_s) + a.smoothing_sum);
    if (p.z_loss != 0.0f) loss += p.z_loss * lse * lse;
    if (p.loss) p.loss[row] = l.ignored || l.is_elsewhere() ? 0.0f : l.bad ? NAN : loss;
    if (p.target_logit) p.target_logit[row] = l.bad ? NAN : l.z;
    if (p.log_prob)
      p.log_prob[row] = l.ignored ? 0.0f : l.bad ? NAN : l.is_elsewhere() ? -INFINITY : (l.z - a.m) - log_s;
    if (p.lse) p.lse[row] = lse;
    if (General && p.entropy) p.entropy[row] = log_s - entropy_sum / s;
    if (p.row_max) p.row_max[row] = a.m;
    if (p.log_sum) p.log_sum[row] = a.m == -INFINITY && a.s == 0.0f ? -INFINITY : log_s;
    if (General && p.smoothing) p.smoothing[row] = a.weight * ((a.m - l.reference) + log_s) + a.smoothing_sum;
  }
  const float log_share = p.log_share != nullptr ? p.log_share[row] : 0.0f;
  float all_weights = p.class_weight == nullptr ? float(p.classes)
                      : p.weight_sum != nullptr ? *p.weight_sum
                                                : a.weight;
  float rest = General ? share * all_weights : 0.0f;
  if (p.z_loss != 0.0f) rest += 2.0f * p.z_loss * (lse - log_share);
  float pull = keep * l.weight + rest;
  float scale = p.scale != nullptr ? p.scale[row * p.scale_step] : 1.0f;
  RowGradient g;
  g.m = a.m, g.share = pull / s, g.smoothing_push = share, g.factor = l.bad ? NAN : scale * p.gain;
  g.others = a.s, g.target_share = keep * l.weight / s, g.rest_share = rest / s, g.target = l.column;
  g.entropy_slope = g.entropy_bias = 0.0f;
  if (General && p.entropy_scale != nullptr) {
    g.entropy_slope = -p.entropy_scale[row] * p.gain / s;
    g.entropy_bias = -g.entropy_slope * (entropy_sum / s);
  }
  if (p.log_share != nullptr) {  // p = e / s * part
    const float part = expf(log_share);
    g.share *= part, g.rest_share *= part;
    g.others = a.s * part - s * expm1f(log_share);  // s (1 - p) of the label
    if (General && p.entropy_scale != nullptr) {
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

// A cluster per row. Every thread works on the vectors that it copied itself.
template <bool General, class T, class D>
__global__ __launch_bounds__(kThreads,
                             General ? 2 : 3) void smem_kernel(const __grid_constant__ Params<T> p) {
  constexpr int N = AlignedRow<T>::N, kCopyGroups = 4;
  extern __shared__ uint4 slice[];
  __shared__ ReduceStorage<kThreads> storage;
  unsigned blocks = cluster_size(), rank = cluster_rank();
  bool cluster_started = blocks == 1;  // a CTA's shared memory may be written once it has started
  if (!cluster_started) cluster_arrive();
  int64_t step = gridDim.x / blocks;
  int parity = 0;
  for (int64_t r = blockIdx.x / blocks; r < p.rows; r += step) {
    const T* x = p.logits + r * p.stride;
    AlignedRow<const T> row(x, p.cols);
    AlignedRow<D> out(static_cast<D*>(p.dlogits) + r * p.dlogits_stride, p.cols);
    int first = int(rank) * p.slice, count = min(p.slice, row.vecs - first);
    int steps = count > 0 ? (count + int(blockDim.x) - 1) / int(blockDim.x) : 0;
    const int per_block = (out.vecs + int(blocks) - 1) / int(blocks), out_first = int(rank) * per_block,
              out_end = min(out_first + per_block, out.vecs);
    bool writes = rank == 0 && threadIdx.x == 0;
    int64_t y = p.target[r];
    if (y == p.ignore_index && !(p.lse || (General && (p.entropy || p.predicted)))) {
      if (p.dlogits) clear(out, out_first, out_end);
      if (writes && p.loss) p.loss[r] = 0.0f;
      if (writes && p.target_logit) p.target_logit[r] = 0.0f;
      if (writes && p.log_prob) p.log_prob[r] = 0.0f;
      if (writes && p.row_max) p.row_max[r] = 0.0f;
      if (writes && p.log_sum) p.log_sum[r] = 0.0f;
      if (writes && p.smoothing) p.smoothing[r] = 0.0f;
      continue;
    }
#pragma unroll
    for (int g = 0; g < kCopyGroups; ++g) {
      for (int i = steps * g / kCopyGroups; i < steps * (g + 1) / kCopyGroups; ++i) {
        int k = i * int(blockDim.x) + int(threadIdx.x);
        if (k >= count) break;
        if (row.is_full(first + k)) {
          cp_async(slice + k, row.base + int64_t(first + k) * N);
        } else {
          slice[k] = load_vec(row, first + k);
        }
      }
      cp_async_commit_group();
    }
    Label label = label_of<General>(p, r, x);
    Sums a = initial_sums(label.z, label.column >= 0);
#pragma unroll 1
    for (int g = 0; g < kCopyGroups; ++g) {
      if (g == 0) cp_async_wait_group<3>();
      if (g == 1) cp_async_wait_group<2>();
      if (g == 2) cp_async_wait_group<1>();
      if (g == 3) cp_async_wait_group<0>();
      for (int i = steps * g / kCopyGroups; i < steps * (g + 1) / kCopyGroups; ++i) {
        int k = i * int(blockDim.x) + int(threadIdx.x);
        if (k < count) accumulate<General>(p, row, first + k, slice[k], label.column, label.reference, a);
      }
    }
    if (!cluster_started) cluster_wait();
    cluster_started = true;
    a = all_reduce_row<General>(a, storage, parity);
    if constexpr (General) {
      if (p.predicted != nullptr) {
        unsigned key = ~0u;
        for (int k = threadIdx.x; k < count; k += blockDim.x)
          key = key_of_vec(p, row, first + k, slice[k], a.m, key);
        key = min_key(key, storage, parity);
        if (writes) p.predicted[r] = key == ~0u ? 0 : int64_t(key & 0x7fffffffu);
      }
    }
    RowGradient gradient = finish<General>(p, r, label, a, writes);
    if (p.dlogits != nullptr) {
      if (label.ignored) {
        clear(out, out_first, out_end);
      } else {
        for (int k = threadIdx.x; k < count; k += blockDim.x)
          write_gradient<General>(p, row, out, first + k, slice[k], gradient);
      }
    }
    __syncthreads();  // the storage is free again
    parity ^= 1;
  }
}

// A CTA per row. The second pass runs backwards: the end of the row is still in L2.
template <bool General, class T, class D>
__global__ __launch_bounds__(kLoopThreads, 1) void looped_kernel(const __grid_constant__ Params<T> p) {
  constexpr int kVecsPerThread = General ? 2 : 4, kStep = kVecsPerThread * kLoopThreads;
  __shared__ ReduceStorage<kLoopThreads> storage;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const T* x = p.logits + r * p.stride;
    AlignedRow<const T> row(x, p.cols);
    AlignedRow<D> out(static_cast<D*>(p.dlogits) + r * p.dlogits_stride, p.cols);
    bool writes = threadIdx.x == 0;
    Label label = label_of<General>(p, r, x);
    bool wanted = !label.ignored || p.lse || (General && (p.entropy || p.predicted));
    Sums a = initial_sums(label.z, label.column >= 0);
    auto load_tile = [&](int base, uint4(&loaded)[kVecsPerThread]) {
#pragma unroll
      for (int h = 0; h < kVecsPerThread; ++h)
        loaded[h] = load_vec(row, base + h * kLoopThreads + int(threadIdx.x));
    };
    for (int base = 0; wanted && base < row.vecs; base += kStep) {
      uint4 loaded[kVecsPerThread];
      load_tile(base, loaded);
#pragma unroll
      for (int h = 0; h < kVecsPerThread; ++h)
        accumulate<General>(p, row, base + h * kLoopThreads + int(threadIdx.x), loaded[h], label.column,
                            label.reference, a);
    }
    a = all_reduce_row<General>(a, storage, 0);
    if constexpr (General) {
      if (p.predicted != nullptr) {
        unsigned key = ~0u;
        for (int k = threadIdx.x; k < row.vecs; k += kLoopThreads)
          key = key_of_vec(p, row, k, load_vec(row, k), a.m, key);
        key = min_key(key, storage, 0);
        if (writes) p.predicted[r] = key == ~0u ? 0 : int64_t(key & 0x7fffffffu);
      }
    }
    RowGradient gradient = finish<General>(p, r, label, a, writes);
    if (p.dlogits != nullptr) {
      if (label.ignored) {
        clear(out, 0, out.vecs);
      } else {
        for (int base = (row.vecs - 1) / kStep * kStep; base >= 0; base -= kStep) {
          uint4 loaded[kVecsPerThread];
          load_tile(base, loaded);
#pragma unroll
          for (int h = 0; h < kVecsPerThread; ++h)
            write_gradient<General>(p, row, out, base + h * kLoopThreads + int(threadIdx.x), loaded[h],
                                    gradient);
        }
      }
    }
    __syncthreads();  // the storage is free again
  }
}

// Raises the limit of dynamic shared memory.
template <bool General, class T, class D>
void allow_shared(int bytes) {
  static OncePerDevice prepared;
  prepared.run(kOp, [&] {
    auto kernel = &smem_kernel<General, T, D>;
    TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    TIGON_CUDA_CHECK(kOp, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                               cudaSharedmemCarveoutMaxShared));
  });
}

// Returns false when no such cluster fits on the device.
template <bool General, class D, class T>
bool launch_smem(Context& ctx, Params<T> p, int64_t vecs, int cluster, int max_shared) {
  p.slice = int(ceil_div(vecs, cluster));
  constexpr int kVecsPerThreadTarget = 8;
  int threads = int(std::clamp<int64_t>(ceil_div(p.slice, kVecsPerThreadTarget * 32) * 32, 32, kThreads));
  allow_shared<General, T, D>(max_shared);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(std::min<int64_t>(p.rows, INT32_MAX / kMaxCluster) * cluster));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(p.slice) * 16;
  config.stream = static_cast<cudaStream_t>(ctx.stream());
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  cudaError_t status = cudaLaunchKernelEx(&config, &smem_kernel<General, T, D>, p);
  if (status != cudaSuccess && cluster > 1) {
    cudaGetLastError();
    return false;
  }
  TIGON_CUDA_SUCCESS(kOp, status, "kernel launch");
  return true;
}

template <bool General, class D, class T>
void run_rows(Context& ctx, const Params<T>& p, bool aligned) {
  constexpr int N = AlignedRow<T>::N;
  const DeviceFacts& facts = device_facts();
  int64_t vecs = aligned ? p.cols / N : (p.cols + N - 2) / N + 1;
  constexpr int kReservedShared = 1024,
                kStorageBytes = int(sizeof(ReduceStorage<kThreads>));  // per CTA
  int max_shared_per_block = facts.shared_per_block - kStorageBytes;
  int third_of_sm = ((facts.shared_per_block + kReservedShared) / 3 - kReservedShared - kStorageBytes) / 128 *
                    128;  // three CTAs per SM
  auto slice = [&](int cluster) { return ceil_div(vecs, cluster) * 16; };
  int cluster = 1;
  if (facts.capability >= 90)
    while (cluster < kMaxCluster && slice(cluster) > third_of_sm) cluster *= 2;
  // Gradients in fp16 are rare: their rows are looped.
  if constexpr (!std::is_same_v<D, __half>)
    if (slice(cluster) <= max_shared_per_block &&
        launch_smem<General, D>(ctx, p, vecs, cluster, max_shared_per_block))
      return;
  launch(kOp, ctx, looped_kernel<General, T, D>,
         {.blocks = std::min<int64_t>(p.rows, INT32_MAX), .threads = kLoopThreads}, p);
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
  const bool plain = !a.bias && a.label_smoothing == 0.0f && (!a.predicted || a.only_label) && inner > 0.0f &&
                     (a.softcap == 0.0f || softcap_is_in_range(cap));
  const bool general =
      !plain || inner != 1.0f || a.softcap != 0.0f || a.entropy || a.entropy_scale || a.predicted;
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
    bool aligned = is_vectorizable(a.logits.data, a.logits.stride, a.logits.cols, sizeof(T));
    auto run = [&]<class D>(D*) {
      if (plain && cross_entropy_plain<T, D>(ctx, p)) return;
      dispatch_bool(general, [&](auto g) { run_rows<decltype(g)::value, D>(ctx, p, aligned); });
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
