// The gate of our own matrix products: exact checks of every layout and tail, then times beside cuBLASLt's in one run.
//   gate check | gate time [problem...]
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tigon/base/cuda/cublaslt_api.h"
#include "tigon/base/cuda/matmul/epilogue_statistics.cuh"
#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/make_context.h"

using namespace tigon;
using namespace tigon::cuda;
using matmul::Major;

#define CK(expr)                                                                         \
  do {                                                                                   \
    cudaError_t s_ = (expr);                                                             \
    if (s_ != cudaSuccess)                                                               \
      printf("FAILED %s: %s\n", #expr, cudaGetErrorString(s_)), fflush(stdout), exit(1); \
  } while (0)

struct Raster {
  int group;
  bool along_n;
  int lead = 0;
};
static int sms = 0;

// --- launch --------------------------------------------------------------------------------------
struct Statistics {
  float2* parts;
  const int64_t* target;
  float *target_logit, *row_max, *log_sum, *log_prob;
};
static Context& context() {
  static std::unique_ptr<Context> ctx = make_cuda_context();
  return *ctx;
}
template <class T, Major kA, Major kB>
void run_matmul(const Gemm& g, Raster raster, cudaStream_t) {
  using Epilogue = matmul::StoreEpilogue<T>;
  const auto d = matmul::make_tensor_map("matmul", g.c, matmul::kTensorMapType<T>, g.n, g.m, g.ldc, 64);
  matmul::Matmul<T, kA, kB, Epilogue>::run("matmul", context(), g, {d}, raster.group, raster.along_n,
                                           raster.lead);
}
template <class T>
void run_layout(const Gemm& g, Raster raster, cudaStream_t stream) {
  auto* run = g.trans_a
                  ? g.trans_b ? &run_matmul<T, Major::MN, Major::K> : &run_matmul<T, Major::MN, Major::MN>
              : g.trans_b ? &run_matmul<T, Major::K, Major::K>
                          : &run_matmul<T, Major::K, Major::MN>;
  run(g, raster, stream);
}
// By chunks of rows whose parts have 16 MiB at most.
void run_statistics(const Gemm& g, Raster raster, cudaStream_t stream, const Statistics& s, float scale) {
  const int64_t tiles = (g.n + matmul::kTileN - 1) / matmul::kTileN;
  const int64_t chunk = std::max<int64_t>((16 << 20) / (8 * tiles) / 256 * 256, 256);
  for (int64_t first = 0; first < g.m; first += chunk) {
    Gemm part = g;
    part.m = std::min(chunk, g.m - first);
    part.a = static_cast<const __nv_bfloat16*>(g.a) + first * g.lda;
    const matmul::StatisticsEpilogue::Params p{s.parts,     s.target + first, s.target_logit + first,
                                               int(part.m), int(g.n),         scale};
    matmul::Matmul<__nv_bfloat16, Major::K, Major::K, matmul::StatisticsEpilogue>::run(
        "matmul", context(), part, p, raster.group, raster.along_n, raster.lead);
    matmul::
        combine_statistics_kernel<<<unsigned((part.m + 31) / 32), matmul::kCombineWarps * 32, 0, stream>>>(
            p, s.row_max + first, s.log_sum + first, s.log_prob + first);
  }
}
struct Variant {
  const char* name;
  Raster raster;
};
static const Variant kVariants[] = {
    {"g16m", {16, false}}, {"g16m L1", {16, false, 1}}, {"g16m L2", {16, false, 2}},
    {"g16n", {16, true}},  {"g16n L2", {16, true, 2}},
};

// --- data ----------------------------------------------------------------------------------------
__device__ uint32_t hash(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return uint32_t(x);
}
// Integers of -2..2, whose sums are exact, or normal numbers.
template <class T>
__global__ void fill(T* p, int64_t n, uint64_t seed, bool normal) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * blockDim.x) {
    const uint32_t h = hash(seed * 0x9e3779b97f4a7c15ull + i), h2 = hash(h ^ seed << 32 ^ 0x1234567ull + i);
    float x = float(int(h % 5) - 2);
    if (normal) x = sqrtf(-2 * logf((h + 0.5f) * 2.3283064e-10f)) * cospif(2 * h2 * 2.3283064e-10f);
    p[i] = T(x);
  }
}
template <class T>
struct Error {
  unsigned long long wrong;
  int m[8], n[8];
  float got[8], want[8];
  float worst;  // relative to the sum of magnitudes
};
// step > 1: a sample of the results.
template <class T>
__global__ void compare(Gemm g, Error<T>* e, bool exact, int64_t step) {
  for (int64_t at = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x); at * step < g.m * g.n;
       at += int64_t(gridDim.x) * blockDim.x) {
    int64_t i = at * step;
    if (step > 1) i += hash(at) % step, i = min(i, g.m * g.n - 1);
    const int64_t m = i / g.n, n = i % g.n;
    double sum = 0, magnitude = 0;
    for (int64_t k = 0; k < g.k; ++k) {
      const float a = float(((const T*)g.a)[g.trans_a ? k * g.lda + m : m * g.lda + k]),
                  b = float(((const T*)g.b)[g.trans_b ? n * g.ldb + k : k * g.ldb + n]);
      sum += double(a) * b, magnitude += fabs(double(a) * b);
    }
    const float got = float(((const T*)g.c)[m * g.ldc + n]), want = float(T(float(sum)));
    const double rounding = sizeof(T) == 2 && std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
    bool bad = exact ? !(got == want) : !(fabs(got - sum) <= fabs(sum) * rounding + magnitude * 2e-6 + 1e-6);
    if (!exact)
      atomicMax((int*)&e->worst,
                __float_as_int(float(fabs(got - sum) / (fabs(sum) * rounding + magnitude * 2e-6 + 1e-6))));
    if (bad) {
      const unsigned long long w = atomicAdd(&e->wrong, 1ull);
      if (w < 8) e->m[w] = int(m), e->n[w] = int(n), e->got[w] = got, e->want[w] = want;
    }
  }
}

static std::string layout_of(const Gemm& g) {
  return std::string(g.trans_a ? "A:M" : "A:K") + (g.trans_b ? " B:K" : " B:N");
}
template <class T>
bool report(const Gemm& g, const char* what, bool exact, int64_t step = 1) {
  Error<T>*e, h;
  CK(cudaMalloc(&e, sizeof *e));
  CK(cudaMemset(e, 0, sizeof *e));
  compare<T><<<2048, 256>>>(g, e, exact, step);
  CK(cudaMemcpy(&h, e, sizeof h, cudaMemcpyDeviceToHost));
  CK(cudaFree(e));
  if (h.wrong) {
    printf("WRONG %s %s m %lld n %lld k %lld: %llu of %lld;", what, layout_of(g).c_str(), (long long)g.m,
           (long long)g.n, (long long)g.k, h.wrong, (long long)(g.m * g.n / step));
    for (unsigned i = 0; i < 8 && i < h.wrong; ++i)
      printf(" (%d,%d) %g/%g", h.m[i], h.n[i], h.got[i], h.want[i]);
    printf("\n");
  } else if (!exact) {
    fprintf(stderr, "error %.3f of the bound: %s\n", h.worst, what);
  }
  return h.wrong == 0;
}

// --- checks --------------------------------------------------------------------------------------
template <class T>
struct Buffer {  // rows x ld elements with guards before, behind and between
  static constexpr int64_t kGuard = 4096;
  T* all = nullptr;
  int64_t rows, cols, ld;
  Buffer(int64_t rows, int64_t cols, int64_t pad) : rows(rows), cols(cols), ld(cols + pad) {
    CK(cudaMalloc(&all, (rows * ld + 2 * kGuard) * sizeof(T)));
    CK(cudaMemset(all, 0xff, (rows * ld + 2 * kGuard) * sizeof(T)));  // NaN
  }
  ~Buffer() { cudaFree(all); }
  T* data() const { return all + kGuard; }
  bool guarded() const {
    std::vector<uint16_t> h(size_t(rows * ld + 2 * kGuard));
    CK(cudaMemcpy(h.data(), all, h.size() * 2, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < int64_t(h.size()); ++i) {
      const int64_t at = i - kGuard;
      const bool inside = at >= 0 && at < rows * ld && at % ld < cols;
      if (!inside && h[size_t(i)] != 0xffff) return printf("WRITTEN outside at %lld\n", (long long)at), false;
    }
    return true;
  }
};
template <class T>
__global__ void fill_rows(T* p, int64_t rows, int64_t cols, int64_t ld, const T* from) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * cols;
       i += int64_t(gridDim.x) * blockDim.x)
    p[i / cols * ld + i % cols] = from[i];
}

template <class T>
bool check_one(const char* name, Raster raster, int64_t m, int64_t n, int64_t k, bool ta, bool tb, bool exact,
               int64_t pad) {
  Buffer<T> a(ta ? k : m, ta ? m : k, pad), b(tb ? n : k, tb ? k : n, 2 * pad), c(m, n, pad);
  for (Buffer<T>* x : {&a, &b}) {
    T* dense;
    CK(cudaMalloc(&dense, x->rows * x->cols * sizeof(T)));
    fill<<<512, 256>>>(dense, x->rows * x->cols, uint64_t(x == &a ? 17 : 99) + uint64_t(m * 3 + k), !exact);
    fill_rows<<<512, 256>>>(x->data(), x->rows, x->cols, x->ld, dense);
    CK(cudaDeviceSynchronize());
    CK(cudaFree(dense));
  }
  Gemm g{};
  g.m = m, g.n = n, g.k = k, g.a = a.data(), g.lda = a.ld, g.trans_a = ta, g.b = b.data(), g.ldb = b.ld,
  g.trans_b = tb;
  g.c = c.data(), g.ldc = c.ld;
  run_layout<T>(g, raster, nullptr);
  const cudaError_t status = cudaDeviceSynchronize();
  if (status != cudaSuccess) {
    printf("CRASH %s %s m %lld n %lld k %lld: %s\n", name, layout_of(g).c_str(), (long long)m, (long long)n,
           (long long)k, cudaGetErrorString(status));
    fflush(stdout);
    exit(1);
  }
  return report<T>(g, name, exact) & c.guarded();
}

// One CTA a row, in double.
__global__ void check_statistics_kernel(Gemm g, Statistics s, float scale, float* worst,
                                        unsigned long long* wrong) {
  __shared__ double most[256], sum[256];
  const int64_t row = blockIdx.x;
  auto z = [&](int64_t c) {
    double d = 0;
    for (int64_t k = 0; k < g.k; ++k)
      d += double(float(((const __nv_bfloat16*)g.a)[row * g.lda + k])) *
           float(((const __nv_bfloat16*)g.b)[c * g.ldb + k]);
    return d * scale;
  };
  double m = -INFINITY, t = 0;
  for (int64_t c = threadIdx.x; c < g.n; c += 256) {
    const double x = z(c), n = fmax(m, x);
    t = t * exp(m - n) + exp(x - n), m = n;
  }
  most[threadIdx.x] = m, sum[threadIdx.x] = t;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < 256; ++i) {
    const double n = fmax(m, most[i]);
    t = t * exp(m - n) + (most[i] == -INFINITY ? 0 : sum[i] * exp(most[i] - n)), m = n;
  }
  const double lse = m + log(t), log_prob = z(s.target[row]) - lse;
  const float e =
      float(fmax(fabs(double(s.row_max[row]) + s.log_sum[row] - lse), fabs(s.log_prob[row] - log_prob)) /
            (2e-6 * (1 + fabs(lse) + fabs(log_prob))));
  if (!(e <= 1)) atomicAdd(wrong, 1ull);
  atomicMax((int*)worst, __float_as_int(e != e ? 1e30f : e));
}
struct StatisticsMemory {
  Statistics s{};
  StatisticsMemory(int64_t rows, int64_t cols) {
    const int64_t tiles = (cols + 255) / 256;
    CK(cudaMalloc(&s.parts, std::max<int64_t>(16 << 20, tiles * 256 * 8)));
    for (float** x : {&s.target_logit, &s.row_max, &s.log_sum, &s.log_prob}) CK(cudaMalloc(x, rows * 4));
    std::vector<int64_t> t(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) t[size_t(i)] = i == 0 ? cols - 1 : i * 7919 % cols;
    int64_t* target;
    CK(cudaMalloc(&target, rows * 8));
    CK(cudaMemcpy(target, t.data(), size_t(rows) * 8, cudaMemcpyHostToDevice));
    s.target = target;
  }
};
__global__ void scale_down(__nv_bfloat16* p, int64_t n, float by) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * blockDim.x)
    p[i] = __nv_bfloat16(float(p[i]) * by);
}
bool check_statistics(int64_t m, int64_t n, int64_t k) {
  __nv_bfloat16 *a, *b;
  CK(cudaMalloc(&a, m * k * 2));
  CK(cudaMalloc(&b, n * k * 2));
  fill<<<512, 256>>>(a, m * k, 5, true);
  fill<<<512, 256>>>(b, n * k, 6, true);
  scale_down<<<512, 256>>>(b, n * k, 2.0f / sqrtf(float(k)));
  StatisticsMemory memory(m, n);
  Gemm g{};
  g.m = m, g.n = n, g.k = k, g.a = a, g.lda = k, g.b = b, g.ldb = k, g.trans_b = true;
  run_statistics(g, {4, false, 2}, nullptr, memory.s, 0.7f);
  float* worst;
  CK(cudaMalloc(&worst, 16));
  CK(cudaMemset(worst, 0, 16));
  check_statistics_kernel<<<unsigned(m), 256>>>(g, memory.s, 0.7f, worst, (unsigned long long*)(worst + 2));
  float h[4];
  CK(cudaMemcpy(h, worst, 16, cudaMemcpyDeviceToHost));
  unsigned long long wrong;
  memcpy(&wrong, h + 2, 8);
  printf("statistics m %lld n %lld k %lld: %llu wrong, error %.3f of the bound\n", (long long)m, (long long)n,
         (long long)k, wrong, h[0]);
  cudaFree(a), cudaFree(b);
  return wrong == 0;
}

int check(const char* only) {
  int failed = 0, done = 0;
  uint32_t seed = 12345;
  auto random = [&](int most) {
    return 8 + int((seed = seed * 1664525u + 1013904223u) >> 8) % (most / 8) * 8;
  };
  for (const Variant& v : kVariants) {
    if (only && strcmp(only, v.name)) continue;
    for (int layout = 0; layout < 4; ++layout) {
      const bool ta = layout & 1, tb = layout < 2;
      int bad = 0;
      auto one = [&](int64_t m, int64_t n, int64_t k, bool exact, int64_t pad) {
        ++done;
        if (!check_one<__nv_bfloat16>(v.name, v.raster, m, n, k, ta, tb, exact, pad)) ++bad;
      };
      one(128, 256, 64, true, 0);
      one(256, 512, 64, true, 0);
      one(128, 256, 256, true, 0);
      if (bad == 0) {
        one(256, 512, 640, true, 8);
        one(8, 8, 8, true, 0);
        for (int i = 0; i < 5; ++i) one(random(1200), random(1600), random(900), true, 8 * (i % 2));
        one(8192, 5000, 136, true, 0);
        one(1000, 1000, 1000, false, 0);
      }
      if (bad)
        printf("%s %s: %s\n", v.name,
               layout == 0   ? "KK"
               : layout == 1 ? "MK"
               : layout == 2 ? "KN"
                             : "MN",
               bad ? "FAILED" : "ok");
      fflush(stdout);
      failed += bad;
    }
  }
  for (int layout = 0; layout < 4; ++layout) {
    const bool ta = layout & 1, tb = layout < 2;
    ++done;
    if (!check_one<__half>("fp16", {8, false}, 1000, 1000, 1000, ta, tb, false, 0)) ++failed;
  }
  for (auto [m, n, k] :
       {std::array<int64_t, 3>{300, 1000, 512}, {1, 8, 64}, {2000, 5003, 1024}, {513, 50257, 768}})
    ++done, failed += !check_statistics(m, n, k);
  printf("CHECK: %d of %d failed\n", failed, done);
  return failed != 0;
}

// --- cuBLASLt ------------------------------------------------------------------------------------
struct Cublas {
  const lt::Api& api = lt::api();
  lt::Handle handle{};
  void* workspace{};
  static constexpr size_t kWorkspace = 32 << 20;
  lt::MatmulDesc desc{};
  lt::Layout a{}, b{}, c{};
  std::vector<lt::HeuristicResult> algos;
  Cublas() {
    if (api.create(&handle)) printf("cublasLtCreate failed\n"), exit(2);
    CK(cudaMalloc(&workspace, kWorkspace));
  }
  void plan(const Gemm& g) {
    api.matmul_desc_create(&desc, lt::kCompute32F, lt::kR32F);
    int op_a = g.trans_b ? lt::kOpT : lt::kOpN, op_b = g.trans_a ? lt::kOpT : lt::kOpN;
    api.matmul_desc_set(desc, lt::kDescTransA, &op_a, sizeof op_a);
    api.matmul_desc_set(desc, lt::kDescTransB, &op_b, sizeof op_b);
    api.layout_create(&a, lt::kR16BF, uint64_t(g.trans_b ? g.k : g.n), uint64_t(g.trans_b ? g.n : g.k),
                      g.ldb);
    api.layout_create(&b, lt::kR16BF, uint64_t(g.trans_a ? g.m : g.k), uint64_t(g.trans_a ? g.k : g.m),
                      g.lda);
    api.layout_create(&c, lt::kR16BF, uint64_t(g.n), uint64_t(g.m), g.ldc);
    lt::Preference pref{};
    api.preference_create(&pref);
    size_t ws = kWorkspace;
    api.preference_set(pref, lt::kPrefMaxWorkspace, &ws, sizeof ws);
    algos.resize(12);
    int found = 0;
    int s = api.heuristic(handle, desc, a, b, c, c, pref, int(algos.size()), algos.data(), &found);
    algos.resize(size_t(found));
    if (s || !found) printf("cuBLASLt has no kernel\n"), exit(2);
  }
  void run(const Gemm& g, size_t algo) {
    const float one = 1, zero = 0;
    int s = api.matmul(handle, desc, &one, g.b, a, g.a, b, &zero, g.c, c, g.c, c, &algos[algo].algo,
                       workspace, kWorkspace, nullptr);
    if (s) printf("cublasLtMatmul failed: %d\n", s), exit(2);
  }
};

// --- times ---------------------------------------------------------------------------------------
struct Problem {
  const char* name;
  int64_t m, n, k;
  bool ta, tb;
};
static const Problem kProblems[] = {
    {"head  fwd", 8192, 128256, 4096, false, true},  {"up    fwd", 8192, 14336, 4096, false, true},
    {"down  fwd", 8192, 4096, 14336, false, true},   {"8192^3 fwd", 8192, 8192, 8192, false, true},
    {"head  dX", 8192, 4096, 128256, false, false},  {"up    dX", 8192, 4096, 14336, false, false},
    {"down  dX", 8192, 14336, 4096, false, false},   {"8192^3 dX", 8192, 8192, 8192, false, false},
    {"head  dW", 128256, 4096, 8192, true, false},   {"up    dW", 14336, 4096, 8192, true, false},
    {"down  dW", 4096, 14336, 8192, true, false},    {"8192^3 dW", 8192, 8192, 8192, true, false},
    {"head  2048", 8192, 151680, 2048, false, true}, {"head gpt2", 8192, 50304, 768, false, true},
};

int time_problems(int rounds, double slot_ms, int first, int last, bool normal) {
  Cublas cublas;
  __nv_bfloat16 *a, *b, *c;
  const int64_t most = int64_t(151680) * 8192;
  for (auto** x : {&a, &b, &c}) CK(cudaMalloc(x, most * 2));
  fill<<<4096, 256>>>(a, most, 1, normal);
  fill<<<4096, 256>>>(b, most, 2, normal);
  cudaEvent_t start, stop;
  for (auto* x : {&start, &stop}) CK(cudaEventCreate(x));
  double log_sum[32] = {}, least[32];
  std::fill(least, least + 32, 9.0);
  int problems = 0;
  for (int i = first; i < last; ++i) {
    const Problem& p = kProblems[i];
    Gemm g{};
    g.m = p.m, g.n = p.n, g.k = p.k, g.a = a, g.b = b, g.c = c, g.trans_a = p.ta, g.trans_b = p.tb;
    g.lda = p.ta ? p.m : p.k, g.ldb = p.tb ? p.k : p.n, g.ldc = (p.n + 7) / 8 * 8;
    cublas.plan(g);
    const double flop = 2.0 * double(p.m) * double(p.n) * double(p.k);
    // A slot has the same duration whatever the shape.
    const int launches = std::max(1, int(slot_ms * 1e-3 / (flop / 700e12) + 0.5));
    auto time = [&](const std::function<void()>& fn, int count) {
      fn();
      CK(cudaEventRecord(start));
      for (int j = 0; j < count; ++j) fn();
      CK(cudaEventRecord(stop));
      CK(cudaEventSynchronize(stop));
      float ms;
      CK(cudaEventElapsedTime(&ms, start, stop));
      return flop * count / ms * 1e-9;
    };
    size_t best = 0;
    double best_rate = 0;
    std::string rates;
    for (int pass = 0; pass < 2; ++pass)
      for (size_t j = 0; j < cublas.algos.size(); ++j) {
        const double rate = time([&] { cublas.run(g, j); }, std::max(1, launches / 2));
        if (pass == 0) continue;
        int tile = 0;
        size_t written;
        cublas.api.algo_get(&cublas.algos[j].algo, lt::kAlgoTile, &tile, sizeof tile, &written);
        rates += " " + std::to_string(int(rate)) + "(" + std::to_string(tile) + ")";
        if (rate > best_rate) best = j, best_rate = rate;
      }
    std::vector<std::function<void()>> slots{[&] { cublas.run(g, best); }};
    for (const Variant& v : kVariants)
      slots.push_back([&] { run_layout<__nv_bfloat16>(g, v.raster, nullptr); });
    const bool head = p.n > 50000 && p.tb;
    StatisticsMemory memory(head ? p.m : 8, head ? p.n : 8);
    for (Raster r :
         {Raster{4, false}, {16, false}, {16, false, 1}, {16, false, 2}, {16, false, 3}, {4, false, 2}})
      if (head) slots.push_back([&, r] { run_statistics(g, r, nullptr, memory.s, 0.001f); });
    std::vector<std::vector<double>> rate(slots.size());
    for (int r = 0; r < rounds; ++r)
      for (size_t j = 0; j < slots.size(); ++j) {
        const size_t s = (j * 3 + size_t(r)) % slots.size();  // not always behind the same one
        rate[s].push_back(time(slots[s], launches));
      }
    for (size_t v = 0; v < 2; ++v) {  // cuBLASLt's too, which shows whether the bound is fair
      CK(cudaMemset(c, 0xff, size_t(p.m * g.ldc * 2)));
      slots[v]();
      report<__nv_bfloat16>(g, v ? "ours" : "cublas", !normal,
                            std::max<int64_t>(1, p.m * p.n * p.k / 4000000000ll));
    }
    auto median = [](std::vector<double> x) { return std::sort(x.begin(), x.end()), x[x.size() / 2]; };
    fprintf(stderr, "%s cublas tiles:%s\n", p.name, rates.c_str());
    printf("%-10s %.0f |", p.name, median(rate[0]));
    for (size_t s = 1; s < slots.size(); ++s) {
      // Ratio within a round, then the median over rounds.
      std::vector<double> ratios;
      for (int r = 0; r < rounds; ++r) ratios.push_back(rate[s][size_t(r)] / rate[0][size_t(r)]);
      const double ratio = median(ratios);
      log_sum[s] += std::log(ratio), least[s] = std::min(least[s], ratio);
      printf("%s %.3f", s == std::size(kVariants) + 1 ? "; statistics" : "", ratio);
    }
    printf("\n");
    ++problems;
    fflush(stdout);
  }
  printf("geomean   ");
  for (size_t s = 0; s < std::size(kVariants); ++s)
    printf(" %s %.3f least %.3f;", kVariants[s].name, std::exp(log_sum[s + 1] / problems), least[s + 1]);
  printf("\n");
  return 0;
}

int main(int argc, char** argv) {
  CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  if (argc > 1 && !strcmp(argv[1], "check")) return check(argc > 2 ? argv[2] : nullptr);
  auto number = [&](int i, double otherwise) { return argc > i ? atof(argv[i]) : otherwise; };
  return time_problems(int(number(2, 7)), number(3, 20), int(number(4, 0)),
                       int(number(5, std::size(kProblems))), number(6, 1) != 0);
}
