// Computes base and adapters as one GEMM on sm_90a: they follow each other along K.
#include <algorithm>
#include <cmath>

#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/base/product.h"
#include "tigon/ops/lora_linear/lora_linear.h"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "lora_linear";
// This is enough for q, k and v, and the adapters of all.
constexpr size_t kMost = 4;

template <class T, matmul::Major kMajorB, bool kFp8 = false>
bool run(Context& ctx, std::span<const Product> products, const LoraFirst* first = nullptr) {
  using Kernel = matmul::Matmul<T, matmul::Major::K, kMajorB, matmul::StoreEpilogue<T>, matmul::Groups::none,
                                kMost, false, kFp8>;
  if (!Kernel::is_available(kOp)) return false;
  const Matrix& c = products[0].c;
  std::array<Gemm, kMost> sources{};
  matmul::Options options;
  if (kFp8) {  // two bytes as one element
    sources[0] = {.m = c.rows,
                  .n = c.cols,
                  .k = first->a.cols / 2,
                  .a = first->a.data,
                  .lda = first->a.stride / 2,
                  .b = first->b.data,
                  .ldb = first->b.stride / 2};
    options.a_scales = first->a_scales.as<float>(), options.b_scales = first->b_scales.as<float>();
  }
  std::transform(products.begin(), products.end(), sources.begin() + kFp8, gemm_of);
  Kernel::run(kOp, ctx, sources,
              {matmul::make_tensor_map(kOp, c.data, matmul::kTensorMapType<T>, c.cols, c.rows, c.stride, 64)},
              options);
  return true;
}

}  // namespace

bool lora_products(Context& ctx, std::span<const Product> products, const LoraFirst* first) {
  auto fits = [](const Matrix& m) {
    return matmul::is_tma_matrix(m.data, m.stride) && m.rows <= INT32_MAX / 2 && m.cols <= INT32_MAX / 2;
  };
  const Matrix& c = products[0].c;
  const bool all = std::all_of(products.begin(), products.end(),
                               [&](const Product& p) { return fits(p.a) && fits(p.b) && fits(p.c); });
  const size_t count = products.size() + (first != nullptr);
  if (ctx.deterministic || c.dtype == DType::f32 || !all || count < 2 || count > kMost) return false;
  // The GEMM is faster than cuBLASLt's, which has smaller tiles, if at least this part of the last wave's
  // tiles is filled.
  constexpr double kFilled = 0.9;
  const double tiles = double(c.rows) * double(c.cols) / (matmul::kTileM * matmul::kCluster * matmul::kTileN),
               at_once = std::max(1, device_facts().sms / matmul::kCluster);
  if (tiles < kFilled * at_once * std::ceil(tiles / at_once)) return false;
  using matmul::Major;
  if (first != nullptr) {
    const bool fits8 = matmul::is_tma_matrix(first->a.data, first->a.stride / 2) &&
                       matmul::is_tma_matrix(first->b.data, first->b.stride / 2);
    return c.dtype == DType::bf16 && fits8 && run<__nv_bfloat16, Major::K, true>(ctx, products, first);
  }
  const bool k_major = products[0].trans_b;
  if (c.dtype == DType::bf16)
    return k_major ? run<__nv_bfloat16, Major::K>(ctx, products)
                   : run<__nv_bfloat16, Major::MN>(ctx, products);
  return k_major ? run<__half, Major::K>(ctx, products) : run<__half, Major::MN>(ctx, products);
}

}  // namespace tigon::cuda
