// Registers the operator of base/symmetric_gemm.h. It returns false if it did nothing; the caller then
// uses PyTorch's matmul.
#include "tigon/base/symmetric_gemm.h"

#include <algorithm>
#include <array>

#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "symmetric_matmul";

const void* matrices_of(const char* name, const Tensor& t, const Tensor& like, std::array<int64_t, 3> sizes) {
  check_same_device(kOp, name, t, like);
  const Shape shape(t.get());
  TIGON_CHECK(kOp, shape.dims == 3 && std::equal(sizes.begin(), sizes.end(), shape.sizes), name, " must be [",
              sizes[0], ", ", sizes[1], ", ", sizes[2], "], got others of ", shape.numel, " elements");
  TIGON_CHECK(kOp, shape.is_contiguous() && dtype_of(kOp, name, t) == DType::f16, name,
              " must be contiguous and float16");
  return data_of(kOp, name, t);
}

std::tuple<bool> matmul(Tensor out, Tensor a, Tensor b, OptionalTensor c, bool trans, double alpha,
                        double beta, double gamma) {
  const auto ctx = make_context(a);
  if (ctx->device() == Device::cpu || a.dim() != 3 || dtype_of(kOp, "a", a) != DType::f16) return {false};
  SymmetricGemm p = {.count = a.size(0),
                     .n = a.size(trans ? 2 : 1),
                     .k = a.size(trans ? 1 : 2),
                     .trans = trans,
                     .alpha = float(alpha),
                     .beta = float(beta),
                     .gamma = float(gamma)};
  const std::array<int64_t, 3> factor = {p.count, a.size(1), a.size(2)}, square = {p.count, p.n, p.n};
  p.a = matrices_of("a", a, a, factor), p.b = matrices_of("b", b, a, factor);
  if (c.has_value()) p.c = matrices_of("c", *c, a, square);
  p.d = const_cast<void*>(matrices_of("out", out, a, square));
  if (p.count == 0 || p.n == 0 || p.k == 0) return {false};
#if TIGON_WITH_CUDA
  return {cuda::symmetric_gemm(*ctx, p)};
#else
  return {false};
#endif
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define(m,
         "symmetric_matmul_(Tensor(a!) out, Tensor a, Tensor b, Tensor? c, bool trans, float alpha, float "
         "beta, float gamma) -> bool");
}
TIGON_TORCH_KERNELS(m) { m.impl("symmetric_matmul_", TORCH_BOX(&matmul)); }

}  // namespace tigon::torch_shim
