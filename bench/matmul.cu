// Our own matmuls: exact checks of every layout and of tails, then their rate beside cuBLASLt's in
// one process.
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -DTIGON_WITH_CUDA=1 -Icsrc -o gate
//       bench/matmul.cu csrc/tigon/base/{error,dynlib}.cpp
//     csrc/tigon/base/cuda/{gemm_cublaslt.cpp,context_cuda.cu} -ldl
//   gate check | gate time [rounds [milliseconds of a slot]]
// -DTIGON_MBARRIER_TRAP=1000000 ends a kernel that waits for ever.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tigon/base/cuda/cublaslt_api.h"
#include "tigon/base/cuda/gemm_cublaslt.h"
#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/make_context.h"

using namespace tigon;
using namespace tigon::cuda;
using matmul::Major;

#define CK(expr) TIGON_CUDA_CHECK("gate", expr)

namespace {

template <class T, Major kA, Major kB>
void run_layout(Context& ctx, const Gemm& g) {
  const CUtensorMap d = matmul::make_tensor_map("gate", g.c, matmul::kTensorMapType<T>, g.n, g.m, g.ldc, 64);
  matmul::Matmul<T, kA, kB, matmul::StoreEpilogue<T>>::run("gate", ctx, {g}, {d});
}
template <class T>
void run(Context& ctx, const Gemm& g) {
  if (g.trans_a)
    g.trans_b ? run_layout<T, Major::MN, Major::K>(ctx, g) : run_layout<T, Major::MN, Major::MN>(ctx, g);
  else
    g.trans_b ? run_layout<T, Major::K, Major::K>(ctx, g) : run_layout<T, Major::K, Major::MN>(ctx, g);
}

// --- data: integers of -2 .. 2, whose sums fp32 holds, or normal numbers -----------------------------

__device__ uint32_t hash(uint64_t x) {
  x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
  return uint32_t(x);
}
template <class T>
__global__ void fill(T* p, int64_t rows, int64_t cols, int64_t stride, uint64_t seed, bool normal) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < rows * cols;
       i += int64_t(gridDim.x) * blockDim.x) {
    const uint32_t h = hash(seed << 40 ^ i), h2 = hash(h ^ (seed + 7) << 32 ^ i);
    const float x =
        normal ? sqrtf(-2 * logf((h + 0.5f) * 0x1p-32f)) * cospif(2 * h2 * 0x1p-32f) : float(int(h % 5) - 2);
    p[i / cols * stride + i % cols] = T(x);
  }
}

// Counts results that are not the rounded exact sum, and without `exact` those whose error is above the
// rounding and what sums in fp32 may lose.
template <class T>
__global__ void count_wrong(Gemm g, bool exact, int64_t step, unsigned long long* wrong) {
  for (int64_t at = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; at * step < g.m * g.n;
       at += int64_t(gridDim.x) * blockDim.x) {
    const int64_t i = min(at * step + hash(at) % step, g.m * g.n - 1), m = i / g.n, n = i % g.n;
    double sum = 0, magnitude = 0;
    for (int64_t k = 0; k < g.k; ++k) {
      const double product = double(float(((const T*)g.a)[g.trans_a ? k * g.lda + m : m * g.lda + k])) *
                             float(((const T*)g.b)[g.trans_b ? n * g.ldb + k : k * g.ldb + n]);
      sum += product, magnitude += fabs(product);
    }
    const float got = float(((const T*)g.c)[m * g.ldc + n]);
    const double bound = fabs(sum) * (std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8) + magnitude * 2e-6;
    if (exact ? got != float(T(float(sum))) : !(fabs(got - sum) <= bound)) atomicAdd(wrong, 1ull);
  }
}
template <class T>
int64_t wrong_results(const Gemm& g, bool exact, int64_t step = 1) {
  unsigned long long *wrong, count;
  CK(cudaMallocManaged(&wrong, sizeof *wrong));
  *wrong = 0;
  count_wrong<T><<<2048, 256>>>(g, exact, step, wrong);
  CK(cudaDeviceSynchronize());
  count = *wrong;
  CK(cudaFree(wrong));
  return int64_t(count);
}

// A matrix with NaN before, behind and between its rows.
template <class T>
struct Guarded {
  static constexpr int64_t kGuard = 4096;
  int64_t rows, cols, stride;
  T* all = nullptr;
  Guarded(int64_t rows, int64_t cols, int64_t pad) : rows(rows), cols(cols), stride(cols + pad) {
    CK(cudaMallocManaged(&all, size() * sizeof(T)));
    memset(static_cast<void*>(all), 0xff, size() * sizeof(T));
  }
  ~Guarded() { cudaFree(all); }
  size_t size() const { return size_t(rows * stride + 2 * kGuard); }
  T* data() const { return all + kGuard; }
  bool is_whole() const {
    for (int64_t i = -kGuard; i < rows * stride + kGuard; ++i)
      if (i < 0 || i >= rows * stride || i % stride >= cols)
        if (reinterpret_cast<const uint16_t*>(data())[i] != 0xffff) return false;
    return true;
  }
};

template <class T>
bool check_one(Context& ctx, int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, bool exact,
               int64_t pad) {
  Guarded<T> a(trans_a ? k : m, trans_a ? m : k, pad), b(trans_b ? n : k, trans_b ? k : n, 2 * pad),
      c(m, n, pad);
  for (Guarded<T>* x : {&a, &b})
    fill<<<512, 256>>>(x->data(), x->rows, x->cols, x->stride, uint64_t(x == &a ? 1 : 2), !exact);
  const Gemm g = {.m = m,
                  .n = n,
                  .k = k,
                  .a = a.data(),
                  .lda = a.stride,
                  .trans_a = trans_a,
                  .b = b.data(),
                  .ldb = b.stride,
                  .trans_b = trans_b,
                  .c = c.data(),
                  .ldc = c.stride};
  run<T>(ctx, g);
  const int64_t wrong = wrong_results<T>(g, exact);
  const bool whole = c.is_whole();
  if (wrong || !whole)
    printf("WRONG m %ld n %ld k %ld A:%c B:%c: %ld results%s\n", long(m), long(n), long(k),
           trans_a ? 'M' : 'K', trans_b ? 'K' : 'N', long(wrong), whole ? "" : ", written outside");
  return wrong == 0 && whole;
}

int check(Context& ctx) {
  int failed = 0, done = 0;
  uint32_t seed = 12345;
  auto random = [&](int most) {
    return 8 + int((seed = seed * 1664525u + 1013904223u) >> 8) % (most / 8) * 8;
  };
  for (int layout = 0; layout < 4; ++layout) {
    auto one = [&](int64_t m, int64_t n, int64_t k, bool exact, int64_t pad) {
      done += 2;
      failed += !check_one<__nv_bfloat16>(ctx, m, n, k, layout & 1, layout & 2, exact, pad);
      failed += !check_one<__half>(ctx, m, n, k, layout & 1, layout & 2, exact, pad);
    };
    one(128, 256, 64, true, 0), one(256, 512, 64, true, 0), one(256, 512, 640, true, 8),
        one(8, 8, 8, true, 0);
    for (int i = 0; i < 5; ++i) one(random(1200), random(1600), random(900), true, 8 * (i % 2));
    one(8192, 5000, 136, true, 0), one(1000, 1000, 1000, false, 0);
  }
  printf("check: %d of %d failed\n", failed, done);
  return failed != 0;
}

// --- times ---------------------------------------------------------------------------------------

struct Cublas {
  static constexpr size_t kWorkspace = size_t(32) << 20;
  const lt::Api& api = lt::api();
  lt::Handle handle{};
  lt::MatmulDesc desc{};
  lt::Layout a{}, b{}, c{};
  void* workspace{};
  std::vector<lt::HeuristicResult> algos;
  explicit Cublas(const Gemm& g) : algos(12) {
    api.create(&handle);
    CK(cudaMalloc(&workspace, kWorkspace));
    api.matmul_desc_create(&desc, lt::kCompute32F, lt::kR32F);
    const int op_a = g.trans_b ? lt::kOpT : lt::kOpN, op_b = g.trans_a ? lt::kOpT : lt::kOpN;
    api.matmul_desc_set(desc, lt::kDescTransA, &op_a, sizeof op_a);
    api.matmul_desc_set(desc, lt::kDescTransB, &op_b, sizeof op_b);
    api.layout_create(&a, lt::kR16BF, uint64_t(g.trans_b ? g.k : g.n), uint64_t(g.trans_b ? g.n : g.k),
                      g.ldb);
    api.layout_create(&b, lt::kR16BF, uint64_t(g.trans_a ? g.m : g.k), uint64_t(g.trans_a ? g.k : g.m),
                      g.lda);
    api.layout_create(&c, lt::kR16BF, uint64_t(g.n), uint64_t(g.m), g.ldc);
    lt::Preference preference{};
    api.preference_create(&preference);
    api.preference_set(preference, lt::kPrefMaxWorkspace, &kWorkspace, sizeof kWorkspace);
    int found = 0;
    api.heuristic(handle, desc, a, b, c, c, preference, int(algos.size()), algos.data(), &found);
    algos.resize(size_t(found));
  }
  ~Cublas() { cudaFree(workspace); }
  void run(const Gemm& g, size_t algo) {
    const float one = 1, zero = 0;
    const int status = api.matmul(handle, desc, &one, g.b, a, g.a, b, &zero, g.c, c, g.c, c,
                                  &algos[algo].algo, workspace, kWorkspace, nullptr);
    TIGON_CHECK("gate", status == 0, "cublasLtMatmul failed with cublasStatus_t ", status);
  }
};

struct Problem {
  const char* name;
  int64_t m, n, k;
  bool trans_a, trans_b;
};
constexpr Problem kProblems[] = {
    {"head", 8192, 128256, 4096, false, true},      {"up", 8192, 14336, 4096, false, true},
    {"down", 8192, 4096, 14336, false, true},       {"8192^3", 8192, 8192, 8192, false, true},
    {"head dX", 8192, 4096, 128256, false, false},  {"up dX", 8192, 4096, 14336, false, false},
    {"down dX", 8192, 14336, 4096, false, false},   {"8192^3 dX", 8192, 8192, 8192, false, false},
    {"head dW", 128256, 4096, 8192, true, false},   {"up dW", 14336, 4096, 8192, true, false},
    {"down dW", 4096, 14336, 8192, true, false},    {"8192^3 dW", 8192, 8192, 8192, true, false},
    {"head 2048", 8192, 151680, 2048, false, true},
};

void time_problems(Context& ctx, int rounds, double slot_ms) {
  const int64_t most = int64_t(151680) * 8192;
  __nv_bfloat16* memory[3];
  for (auto*& x : memory) {
    CK(cudaMalloc(&x, size_t(most) * 2));
    fill<<<4096, 256>>>(x, 1, most, most, uint64_t(&x - memory), true);
  }
  cudaEvent_t start, stop;
  CK(cudaEventCreate(&start));
  CK(cudaEventCreate(&stop));
  for (const Problem& p : kProblems) {
    const Gemm g = {.m = p.m,
                    .n = p.n,
                    .k = p.k,
                    .a = memory[0],
                    .lda = p.trans_a ? p.m : p.k,
                    .trans_a = p.trans_a,
                    .b = memory[1],
                    .ldb = p.trans_b ? p.k : p.n,
                    .trans_b = p.trans_b,
                    .c = memory[2],
                    .ldc = p.n};
    Cublas cublas(g);
    const double flop = 2.0 * double(p.m) * double(p.n) * double(p.k);
    // A slot has the same duration whatever the shape: the power limit looks at the last milliseconds.
    auto rate = [&](const std::function<void()>& fn) {
      const int launches = std::max(1, int(slot_ms * 1e-3 / (flop / 700e12) + 0.5));
      fn();
      CK(cudaEventRecord(start));
      for (int i = 0; i < launches; ++i) fn();
      CK(cudaEventRecord(stop));
      CK(cudaEventSynchronize(stop));
      float ms;
      CK(cudaEventElapsedTime(&ms, start, stop));
      return flop * launches / ms * 1e-9;
    };
    size_t best = 0;
    std::vector<double> first(cublas.algos.size());
    for (int warm = 0; warm < 2; ++warm)
      for (size_t i = 0; i < first.size(); ++i) first[i] = rate([&] { cublas.run(g, i); });
    best = size_t(std::max_element(first.begin(), first.end()) - first.begin());
    std::vector<double> theirs, ratios;
    for (int r = 0; r < rounds; ++r) {
      theirs.push_back(rate([&] { cublas.run(g, best); }));
      ratios.push_back(rate([&] { run<__nv_bfloat16>(ctx, g); }) / theirs.back());
    }
    auto median = [](std::vector<double> x) { return std::sort(x.begin(), x.end()), x[x.size() / 2]; };
    const int64_t wrong = wrong_results<__nv_bfloat16>(g, false, p.m * p.n / 30000);
    printf("%-10s cuBLASLt %.0f TFLOP/s, ours %.3f of it%s\n", p.name, median(theirs), median(ratios),
           wrong ? ", WRONG" : "");
    fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::unique_ptr<Context> ctx = make_cuda_context();
  if (argc > 1 && !strcmp(argv[1], "check")) return check(*ctx);
  time_problems(*ctx, argc > 2 ? atoi(argv[2]) : 9, argc > 3 ? atof(argv[3]) : 15);
}
