// The CUDA backend of attention over earlier values moves b bytes per element of values forward and 2b
// backward (b = element size), and also y, dy and two vectors of columns, and CTAs * cols * 4 bytes of
// partial sums through L2. One kernel has persistent CTAs, which take one row at a time. A pass computes the
// sums of each value, a warp the factors, and a second pass the results. The values of an aligned row are
// copied to shared memory, all at once, if they fit, and their sums are formed as they arrive. Otherwise the
// second pass reads them again, from L2 if they are still there. A thread reads only vectors that it copied
// itself.
#include <algorithm>

#include "tigon/base/cuda/math.cuh"
#include "tigon/base/cuda/ptx.cuh"
#include "tigon/base/cuda/row_shapes.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/attention_residual/attention_residual.h"

namespace tigon::cuda {
namespace {

#include "tigon/ops/attention_residual/attention_residual_math.inc"

constexpr const char* kOp = "attention_residual";
constexpr int kMaxThreads = 512, kColumnThreads = 256;
// A thread forms the sums of kGroup values at a time; copies come in kMostWaves waves.
constexpr int kGroup = 4, kMostWaves = 8;

// Holds the factors of one value of a row.
struct Factors {
  AttentionScore<float> of;
  float upstream, alpha;
  AttentionSlope<float> slope;
};

template <class T>
struct Problem {
  const T *values, *dy;
  // Null means not wanted.
  T *y, *dvalues;
  int64_t rows, stride, dy_stride, y_stride, dvalues_stride;
  // The key is query * norm_weight.
  const float* key;
  // [CTAs, cols]; null if not wanted.
  float* partials;
  int count, cols;
  float eps, inv_cols;
  // `cached`: values and dy of a row are in shared memory. `sums_in_shared`: sums of a CTA are.
  bool cached, sums_in_shared;
};

template <int N>
__device__ __forceinline__ void load_floats(const float* p, float (&x)[N]) {
  const Vec<float, N> vec = load<float, N>(p);
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = vec[j];
}

// Warp 0 computes the factors of all values, from the sums of each warp, [count, kSums, warps].
template <int kSums, class T>
__device__ void find_factors(const Problem<T>& p, const float* sums, int warps, Factors* factors) {
  const int lane = threadIdx.x;
  float top = -INFINITY, total = 0.0f, upstream = 0.0f;
  for (int n = lane; n < p.count; n += 32) {
    float s[kSums] = {};
    for (int k = 0; k < kSums; ++k)
      for (int w = 0; w < warps; ++w) s[k] += sums[(n * kSums + k) * warps + w];
    Factors& f = factors[n];
    f.of = attention_score(s[0] * p.inv_cols, s[1], p.eps);
    if constexpr (kSums > 2) f.upstream = s[2];
    top = fmaxf(top, f.of.score);
  }
  top = reduce_lanes<Max, 32>(top);
  for (int n = lane; n < p.count; n += 32) {
    Factors& f = factors[n];
    f.alpha = exp(f.of.score - top);
    total += f.alpha;
    if constexpr (kSums > 2) upstream = fma(f.alpha, f.upstream, upstream);
  }
  total = reduce_lanes<Sum, 32>(total);
  if constexpr (kSums > 2) upstream = reduce_lanes<Sum, 32>(upstream) / total;
  for (int n = lane; n < p.count; n += 32) {
    Factors& f = factors[n];
    f.alpha /= total;
    if constexpr (kSums > 2) f.slope = attention_slope(f.of, f.alpha, f.upstream, upstream, p.inv_cols);
  }
}

// Adds the sum of alpha * value(n) to y, some values at a time.
template <int N, class Value>
__device__ __forceinline__ void add_values(int count, const Factors* factors, Value&& value, float (&y)[N]) {
  for (int first = 0; first < count; first += kValuesOfSum) {
    float some[N] = {};
#pragma unroll 4
    for (int n = first; n < min(count, first + kValuesOfSum); ++n) {
      const auto v = value(n);
#pragma unroll
      for (int j = 0; j < N; ++j) some[j] = fma(factors[n].alpha, v[j], some[j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] += some[j];
  }
}

template <class T, int N, bool kBackward>
__global__ __launch_bounds__(kMaxThreads) void attention_kernel(const __grid_constant__ Problem<T> p) {
  constexpr int kSums = kBackward ? 3 : 2;
  constexpr bool kCanCache = sizeof(T) * N == 16;
  extern __shared__ __align__(16) unsigned char memory[];
  const int vecs = p.cols / N, warps = int(blockDim.x) / 32, warp = int(threadIdx.x) / 32,
            lane = int(threadIdx.x) % 32;
  const bool cached = kCanCache && p.cached;
  Vec<T, N>* const cache = reinterpret_cast<Vec<T, N>*>(memory);
  float* next = reinterpret_cast<float*>(memory + (cached ? size_t(p.count + kBackward) * vecs * 16 : 0));
  float* u = nullptr;
  if (kBackward && p.partials) {
    u = p.sums_in_shared ? next : p.partials + int64_t(blockIdx.x) * p.cols;
    if (p.sums_in_shared) next += p.cols;
  }
  float* const sums = next;
  Factors* const factors = reinterpret_cast<Factors*>(sums + p.count * kSums * warps);
  const int64_t pitch = p.rows * p.stride;

  if (u)
    for (int k = threadIdx.x; k < vecs; k += blockDim.x)
      for (int j = 0; j < N; ++j) u[k * N + j] = 0.0f;
  const int per_wave = (p.count + kMostWaves * kGroup - 1) / (kMostWaves * kGroup) * kGroup,
            waves = (p.count + per_wave - 1) / per_wave;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T *values = p.values + row * p.stride, *dy = kBackward ? p.dy + row * p.dy_stride : nullptr;
    if constexpr (kCanCache) {
      if (cached) {
        if constexpr (kBackward)
          for (int k = threadIdx.x; k < vecs; k += blockDim.x)
            cp_async(cache + p.count * vecs + k, dy + k * N);
        for (int first = 0; first < p.count; first += per_wave) {
          for (int n = first; n < min(p.count, first + per_wave); ++n)
            for (int k = threadIdx.x; k < vecs; k += blockDim.x)
              cp_async(cache + n * vecs + k, values + n * pitch + k * N);
          cp_async_commit_group();
        }
      }
    }
    auto value = [&](int n, int k) {
      return cached ? cache[n * vecs + k] : load<T, N>(values + n * pitch + int64_t(k) * N);
    };
    auto upstream = [&](int k) {
      return cached ? cache[p.count * vecs + k] : load<T, N>(dy + int64_t(k) * N);
    };
    for (int first = 0; first < p.count; first += kGroup) {
      if (cached && first % per_wave == 0) cp_async_wait_group(waves - 1 - first / per_wave);
      const int values_left = p.count - first;
      float s[kSums][kGroup] = {};
      for (int k = threadIdx.x; k < vecs; k += blockDim.x) {
        float key[N];
        load_floats<N>(p.key + k * N, key);
        Vec<T, N> d;
        if constexpr (kBackward) d = upstream(k);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          if (i >= values_left) break;
          const Vec<T, N> v = value(first + i, k);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            s[0][i] = fma(v[j], v[j], s[0][i]);
            s[1][i] = fma(key[j], v[j], s[1][i]);
            if constexpr (kBackward) s[2][i] = fma(d[j], v[j], s[2][i]);
          }
        }
      }
      const int own = reduced_value<kGroup>(lane);
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        const float sum = reduce_values<Sum>(s[k]);
        if (lane < kGroup && own < values_left) sums[((first + own) * kSums + k) * warps + warp] = sum;
      }
    }
    __syncthreads();
    if (warp == 0) find_factors<kSums>(p, sums, warps, factors);
    __syncthreads();
    for (int k = threadIdx.x; k < vecs; k += blockDim.x) {
      const int c = k * N;
      if constexpr (!kBackward) {
        float y[N] = {};
        add_values<N>(p.count, factors, [&](int n) { return value(n, k); }, y);
        Vec<T, N> out;
        out.set(y);
        store(p.y + row * p.y_stride + c, out);
      } else {
        const Vec<T, N> d = upstream(k);
        float key[N], added[N] = {};
        load_floats<N>(p.key + c, key);
        for (int first = 0; first < p.count; first += kValuesOfSum) {
          float some[N] = {};
#pragma unroll 2
          for (int n = first; n < min(p.count, first + kValuesOfSum); ++n) {
            const Vec<T, N> v = value(n, k);
            const float alpha = factors[n].alpha;
            const AttentionSlope<float> of = factors[n].slope;
            float dv[N];
#pragma unroll
            for (int j = 0; j < N; ++j) {
              some[j] = fma(of.slope, v[j], some[j]);
              dv[j] = attention_dv(d[j], v[j], key[j], alpha, of.slope, of.pull);
            }
            if (p.dvalues) {
              Vec<T, N> out;
              out.set(dv);
              store(p.dvalues + (n * p.rows + row) * p.dvalues_stride + c, out);
            }
          }
#pragma unroll
          for (int j = 0; j < N; ++j) added[j] += some[j];
        }
        if (u)
#pragma unroll
          for (int j = 0; j < N; ++j) u[c + j] += added[j];
      }
    }
  }
  if (u && p.sums_in_shared)
    for (int k = threadIdx.x; k < vecs; k += blockDim.x)
      for (int j = 0; j < N; ++j) p.partials[int64_t(blockIdx.x) * p.cols + k * N + j] = u[k * N + j];
}

template <class W>
__global__ __launch_bounds__(kColumnThreads) void key_kernel(const W* query, const W* norm_weight,
                                                             int64_t cols, float* key) {
  const int64_t c = int64_t(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (c < cols) key[c] = widen(query[c]) * widen(norm_weight[c]);
}
template <class W>
__global__ __launch_bounds__(kColumnThreads) void key_gradients_kernel(const W* query, const W* norm_weight,
                                                                       const float* u, int64_t cols,
                                                                       W* dquery, W* dnorm_weight) {
  const int64_t c = int64_t(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (c >= cols) return;
  if (dquery) dquery[c] = narrow<W>(widen(norm_weight[c]) * u[c]);
  if (dnorm_weight) dnorm_weight[c] = narrow<W>(widen(query[c]) * u[c]);
}

template <class Fn>
void with_parameter_type(const Vector& query, Fn&& fn) {
  dispatch_float(kOp, "query", query.dtype,
                 [&](auto t) { fn(Type<typename DeviceType<typename decltype(t)::type>::type>{}); });
}
LaunchConfig column_grid(int64_t cols) {
  return {.blocks = ceil_div(cols, kColumnThreads), .threads = kColumnThreads};
}

// Holds the sums of a backward as partial rows.
struct Partials {
  const float* rows;
  int64_t count;
};

template <class T, int N, bool kBackward>
Partials run(Context& ctx, Problem<T> p, bool wants_sums) {
  constexpr int kSums = kBackward ? 3 : 2;
  const int64_t vecs = p.cols / N, limit = device_facts().shared_per_block;
  const auto of_values = [&](int threads) {
    return p.count * (int64_t(sizeof(float)) * kSums * (threads / 32) + int64_t(sizeof(Factors)));
  };
  int threads = int(std::clamp<int64_t>(ceil_div(vecs, 64) * 32, 32, kMaxThreads));
  while (threads > 32 && of_values(threads) > limit) threads -= 32;
  int64_t shared = of_values(threads);
  const int64_t cache = (p.count + kBackward) * vecs * 16, sums = p.cols * int64_t(sizeof(float));
  p.cached = sizeof(T) * N == 16 && shared + cache <= limit;
  if (p.cached) shared += cache;
  p.sums_in_shared = wants_sums && shared + sums <= limit;
  if (p.sums_in_shared) shared += sums;
  const auto kernel = attention_kernel<T, N, kBackward>;
  static OccupancyCache occupancy;
  const int64_t resident = occupancy.max_active(kOp, kernel, 1, threads, size_t(shared));
  TIGON_CHECK(kOp, resident > 0, "no CTA with ", shared, " bytes of shared memory fits on this device");
  const int64_t blocks = std::min(p.rows, resident);
  if (wants_sums) p.partials = ctx.scratch_of<float>(blocks * p.cols);
  launch(kOp, ctx, kernel, {.blocks = blocks, .threads = threads, .shared = size_t(shared)}, p);
  return {p.partials, blocks};
}

// Takes vectors of 16 bytes if all rows consist of them, else single elements.
template <bool kBackward, class T>
Partials run(Context& ctx, const Problem<T>& p, bool wants_sums) {
  constexpr int N = 16 / sizeof(T);
  auto fits = [&](const T* rows, int64_t stride) {
    return rows == nullptr || is_vectorizable(rows, stride, p.cols, sizeof(T));
  };
  return fits(p.values, p.stride) && fits(p.dy, p.dy_stride) && fits(p.y, p.y_stride) &&
                 fits(p.dvalues, p.dvalues_stride)
             ? run<T, N, kBackward>(ctx, p, wants_sums)
             : run<T, 1, kBackward>(ctx, p, wants_sums);
}

// Calls fn(problem) with what both directions have.
template <class Args, class Fn>
void with_problem(Context& ctx, const Args& a, Fn&& fn) {
  const int64_t cols = a.values.cols;
  TIGON_CHECK(kOp, cols <= INT32_MAX, "values must have less than 2^31 columns, got ", cols);
  float* key = ctx.scratch_of<float>(cols);
  with_parameter_type(a.query, [&]<class W>(Type<W>) {
    launch(kOp, ctx, key_kernel<W>, column_grid(cols), a.query.template as<const W>(),
           a.norm_weight.template as<const W>(), cols, key);
  });
  dispatch_float(kOp, "values", a.values.dtype, [&](auto t) {
    using T = typename DeviceType<typename decltype(t)::type>::type;
    fn(Problem<T>{.values = a.values.template row<T>(0),
                  .rows = a.values.rows / a.count,
                  .stride = a.values.stride,
                  .key = key,
                  .count = int(a.count),
                  .cols = int(cols),
                  .eps = a.eps,
                  .inv_cols = 1.0f / float(cols)});
  });
}

}  // namespace

void attention_residual_fwd(Context& ctx, const AttentionResidualFwd& a) {
  with_problem(ctx, a, [&]<class T>(Problem<T> p) {
    p.y = a.y.row<T>(0), p.y_stride = a.y.stride;
    run<false>(ctx, p, false);
  });
}

void attention_residual_bwd(Context& ctx, const AttentionResidualBwd& a) {
  const int64_t cols = a.values.cols;
  if (a.values.rows == 0) {
    for (const Vector& v : {a.dquery, a.dnorm_weight})
      if (v)
        TIGON_CUDA_CHECK(kOp, cudaMemsetAsync(v.data, 0, size_of(v.dtype) * size_t(v.size),
                                              static_cast<cudaStream_t>(ctx.stream())));
    return;
  }
  with_problem(ctx, a, [&]<class T>(Problem<T> p) {
    p.dy = a.dy.row<T>(0), p.dy_stride = a.dy.stride;
    p.dvalues = a.dvalues.row<T>(0), p.dvalues_stride = a.dvalues.stride;
    const bool wants_sums = a.dquery || a.dnorm_weight;
    const Partials partials = run<true>(ctx, p, wants_sums);
    if (!wants_sums) return;
    const Vector u{ctx.scratch_of<float>(cols), DType::f32, cols};
    sum_partials(kOp, ctx, partials.rows, partials.count, {u});
    with_parameter_type(a.query, [&]<class W>(Type<W>) {
      launch(kOp, ctx, key_gradients_kernel<W>, column_grid(cols), a.query.as<const W>(),
             a.norm_weight.as<const W>(), u.as<const float>(), cols, a.dquery.as<W>(),
             a.dnorm_weight.as<W>());
    });
  });
}

}  // namespace tigon::cuda
