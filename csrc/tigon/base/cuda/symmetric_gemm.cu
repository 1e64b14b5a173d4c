#include "tigon/base/symmetric_gemm.h"

#include "tigon/base/cuda/matmul/epilogue_symmetric.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "symmetric_matmul";

template <matmul::Major kMajor>
bool run(Context& ctx, const SymmetricGemm& p) {
  using T = __half;
  using Matmul = matmul::Matmul<T, kMajor, kMajor, matmul::SymmetricEpilogue<T>>;
  if (!Matmul::is_available(kOp)) return false;
  const int64_t stride = kMajor == matmul::Major::K ? p.k : p.n;
  for (const void* x : {p.a, p.b, static_cast<const void*>(p.d)})
    if (!matmul::is_tma_matrix(x, stride) || !matmul::is_tma_matrix(x, p.n)) return false;
  const auto d = matmul::make_tensor_map(kOp, p.d, matmul::kTensorMapType<T>, p.n, p.n, p.n, 64, p.count);
  Matmul::run(kOp, ctx,
              {Gemm{.m = p.n, .n = p.n, .k = p.k, .a = p.a, .lda = stride, .b = p.b, .ldb = stride}},
              {.d = d,
               .c = static_cast<const T*>(p.c),
               .alpha = p.alpha,
               .beta = p.beta,
               .gamma = p.gamma,
               .size = int(p.n)},
              {.count = p.count, .lower = true});
  return true;
}

}  // namespace

bool symmetric_gemm(Context& ctx, const SymmetricGemm& p) {
  return p.trans ? run<matmul::Major::MN>(ctx, p) : run<matmul::Major::K>(ctx, p);
}

}  // namespace tigon::cuda
