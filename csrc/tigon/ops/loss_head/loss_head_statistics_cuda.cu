// Computes losses without gradients on sm_90a: the epilogue of the logits' GEMM forms their statistics, and
// no logits are written.
#include "tigon/base/cuda/matmul/epilogue_statistics.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/dispatch.h"
#include "tigon/ops/loss_head/loss_head.h"

namespace tigon::cuda {
namespace {

// Limits the bytes of the tiles' statistics, which bounds the rows of a launch.
constexpr int64_t kMostBytes = int64_t(16) << 20;

// R is the type that logits are rounded to.
template <class T, class R>
using Matmul = matmul::Matmul<T, matmul::Major::K, matmul::Major::K, matmul::StatisticsEpilogue<R>>;

template <class T, class R>
bool statistics(Context& ctx, const LinearHead& a, const LossHeadRows& rows, float scale,
                const Matrix& parts) {
  if (!Matmul<T, R>::is_available(a.op)) return false;
  const int64_t v = a.weight.rows, h = a.hidden.cols, tiles = ceil_div(v, int64_t(matmul::kTileN));
  constexpr int64_t kRows = matmul::kTileM * matmul::kCluster;
  const int64_t most =
      std::min(rows.count, std::max(kMostBytes / (tiles * int64_t(sizeof(float2))) / kRows * kRows, kRows));
  LossHeadWorkspace workspace;
  if (rows.listed) workspace.hidden = loss_head_matrix(ctx, most, h, h, a.hidden.dtype);
  auto* tile_parts = ctx.scratch_of<float2>(most * tiles);
  auto* target_logit = ctx.scratch_of<float>(most);
  for (int64_t begin = 0; begin < rows.count; begin += most) {
    const LossHeadChunk c = loss_head_chunk(a, rows, workspace, begin, std::min(most, rows.count - begin));
    if (rows.listed) cuda::loss_head_move(ctx, {.from = a.hidden, .to = c.hidden, .index = c.index});
    const matmul::StatisticsParams p = {.parts = tile_parts,
                                        .target = rows.labels.as<int64_t>() + begin,
                                        .target_logit = target_logit,
                                        .rows = int(c.count),
                                        .cols = int(v),
                                        .scale = scale};
    Matmul<T, R>::run(a.op, ctx,
                      {Gemm{.m = c.count,
                            .n = v,
                            .k = h,
                            .a = c.hidden.data,
                            .lda = c.hidden.stride,
                            .b = a.weight.data,
                            .ldb = a.weight.stride}},
                      p);
    launch(a.op, ctx, matmul::combine_statistics_kernel,
           {.blocks = ceil_div(c.count, int64_t(32)), .threads = matmul::kCombineWarps * 32}, p,
           parts.row<float>(0) + begin, parts.row<float>(1) + begin, parts.row<float>(2) + begin);
  }
  return true;
}

}  // namespace

bool loss_head_statistics(Context& ctx, const LinearHead& a, const LossHeadRows& rows, const LogitFormula& f,
                          const Matrix& parts) {
  const bool plain = !a.bias && !a.lora_a.data && f.softcap == 0.0f && f.logit_scale > 0.0f;
  const bool fits = matmul::is_tma_matrix(a.hidden.data, a.hidden.stride) &&
                    matmul::is_tma_matrix(a.weight.data, a.weight.stride) &&
                    a.weight.rows <= INT32_MAX - matmul::kTileN;
  if (ctx.deterministic || a.hidden.dtype == DType::f32 || !plain || !fits ||
      (rows.listed && a.hidden.cols % 8 != 0))
    return false;
  const float scale = f.logit_scale / f.temperature;
  const bool wide = a.wide_logits;
  if (a.hidden.dtype == DType::f16)
    return wide ? statistics<__half, float>(ctx, a, rows, scale, parts)
                : statistics<__half, __half>(ctx, a, rows, scale, parts);
  return wide ? statistics<__nv_bfloat16, float>(ctx, a, rows, scale, parts)
              : statistics<__nv_bfloat16, __nv_bfloat16>(ctx, a, rows, scale, parts);
}

}  // namespace tigon::cuda
