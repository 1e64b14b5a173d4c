// Computes base and adapters as one GEMM on sm_90a: they follow each other along K.
#include <algorithm>
#include <cmath>

#include "tigon/base/cuda/matmul/epilogue_store.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/base/matrix_gemm.h"
#include "tigon/ops/lora_linear/lora_linear.h"

namespace tigon::cuda {
namespace {

constexpr const char* kOp = "lora_linear";
// This is enough for q, k and v, and the adapters of all.
constexpr size_t kMost = 4;

template <class T, matmul::Major kMajorB>
bool run(Context& ctx, std::span<const MatrixGemm> gemms) {
  using Kernel =
      matmul::Matmul<T, matmul::Major::K, kMajorB, matmul::StoreEpilogue<T>, matmul::Groups::none, kMost>;
  if (!Kernel::is_available(kOp)) return false;
  std::array<Gemm, kMost> sources{};
  std::transform(gemms.begin(), gemms.end(), sources.begin(), gemm_of);
  const Matrix& c = gemms[0].c;
  Kernel::run(
      kOp, ctx, sources,
      {matmul::make_tensor_map(kOp, c.data, matmul::kTensorMapType<T>, c.cols, c.rows, c.stride, 64)});
  return true;
}

}  // namespace

bool lora_gemms(Context& ctx, std::span<const MatrixGemm> gemms) {
  auto fits = [](const Matrix& m) {
    return matmul::is_tma_matrix(m.data, m.stride) && m.rows <= INT32_MAX / 2 && m.cols <= INT32_MAX / 2;
  };
  const Matrix& c = gemms[0].c;
  const bool all = std::all_of(gemms.begin(), gemms.end(),
                               [&](const MatrixGemm& p) { return fits(p.a) && fits(p.b) && fits(p.c); });
  if (ctx.deterministic || c.dtype == DType::f32 || !all || gemms.size() < 2 || gemms.size() > kMost)
    return false;
  // The GEMM is faster than cuBLASLt's, which has smaller tiles, if at least this part of the last wave's
  // tiles is filled.
  constexpr double kFilled = 0.9;
  const double tiles = double(c.rows) * double(c.cols) / (matmul::kTileM * matmul::kCluster * matmul::kTileN),
               at_once = std::max(1, device_facts().sms / matmul::kCluster);
  if (tiles < kFilled * at_once * std::ceil(tiles / at_once)) return false;
  using matmul::Major;
  const bool k_major = gemms[0].trans_b;
  if (c.dtype == DType::bf16)
    return k_major ? run<__nv_bfloat16, Major::K>(ctx, gemms) : run<__nv_bfloat16, Major::MN>(ctx, gemms);
  return k_major ? run<__half, Major::K>(ctx, gemms) : run<__half, Major::MN>(ctx, gemms);
}

}  // namespace tigon::cuda
