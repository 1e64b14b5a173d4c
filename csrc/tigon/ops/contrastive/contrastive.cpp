#include "tigon/ops/contrastive/contrastive.h"

#include <algorithm>

#include "tigon/base/op.h"
#include "tigon/base/product.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/loss_head/loss_head.h"

namespace tigon {
namespace {

constexpr const char* kOp = "contrastive";

// pass(chunk of the head, its rows as the kernels read them) for every chunk of queries, whose similarities are there.
template <class Pass>
void for_chunks(Context& ctx, const ContrastiveScores& a, const LinearHead& head, const Pass& pass) {
  const int64_t n = a.q.rows, m = a.d.rows, most = linear_head_limit(ctx, head, n, a.chunk_rows);
  const LinearHeadRows rows = {.count = n};
  const LinearHeadWorkspace workspace = linear_head_workspace(ctx, head, rows, {.chunk = most});
  Matrix guide;
  if (a.guide_q.data) guide = linear_head_matrix(ctx, most, m, linear_head_logit_stride(m), DType::f32);
  for (int64_t first = 0; first < n; first += most) {
    const int64_t count = std::min(most, n - first);
    LinearHeadChunk chunk = linear_head_chunk(head, rows, workspace, first, count);
    linear_head_logits(ctx, head, chunk);
    if (guide.data)
      multiply(ctx, {.a = rows_from(a.guide_q, first, count),
                     .b = a.guide_d,
                     .c = rows_from(guide, 0, count),
                     .trans_b = true,
                     .unrounded = true});
    const Vector q_ids = linear_head_part(a.q_ids, first, count),
                 limit = linear_head_part(a.limit, first, count);
    ContrastiveChunk part = {.scores = chunk.logits.data,
                             .guide = static_cast<const float*>(guide.data),
                             .rows = count,
                             .cols = m,
                             .stride = chunk.logits.stride,
                             .scale = a.scale.as<float>(),
                             .labels = a.labels.data ? a.labels.row<int64_t>(first) : nullptr,
                             .label_count = a.labels.cols,
                             .label_stride = a.labels.stride,
                             .q_ids = q_ids.as<int64_t>(),
                             .d_ids = a.d_ids.as<int64_t>(),
                             .limit = limit.as<float>()};
    pass(chunk, part);
  }
}

void run(Context& ctx, const ContrastiveFwd& a) {
  const LinearHead head = {.op = kOp, .hidden = a.q, .weight = a.d};
  const int64_t n = a.q.rows, m = a.d.rows;
  auto merge = [&](const ContrastiveMerge& merge) { TIGON_RUN(kOp, ctx, contrastive_merge, merge); };
  double* col_lse = a.col_lse.as<double>();
  if (n == 0 && col_lse) return merge({.count = 0, .size = m, .out = col_lse, .fresh = true});
  const int64_t most = linear_head_limit(ctx, head, n, a.chunk_rows), panels = contrastive_panels(m);
  float* row_parts = a.row_lse ? ctx.scratch_of<float>(2 * panels * most) : nullptr;
  float* col_parts = col_lse ? ctx.scratch_of<float>(2 * contrastive_blocks(most) * m) : nullptr;
  for_chunks(ctx, a, head, [&](LinearHeadChunk& chunk, ContrastiveChunk& part) {
    part.row_parts = row_parts, part.col_parts = col_parts;
    if (a.picked) part.picked = a.picked.as<float>() + chunk.begin * part.label_count;
    on_device(
        kOp, ctx, [&] { cpu::contrastive_statistics(ctx, a.q.dtype, part); },
        TIGON_ON_CUDA(cuda::contrastive_statistics(ctx, a.q.dtype, part)));
    if (row_parts)
      merge({.parts = row_parts,
             .count = panels,
             .size = part.rows,
             .out = a.row_lse.as<double>() + chunk.begin,
             .fresh = true});
    if (col_parts)
      merge({.parts = col_parts,
             .count = contrastive_blocks(part.rows),
             .size = m,
             .out = col_lse,
             .fresh = chunk.begin == 0});
  });
}

void run(Context& ctx, const ContrastiveBwd& a) {
  LinearHead head = {.op = kOp, .hidden = a.q, .weight = a.d, .dhidden = a.dq, .dweight = a.dd};
  TIGON_CHECK(kOp, bool(a.row_lse) == bool(a.drow) && bool(a.col_lse) == bool(a.dcol),
              "gradients of statistics must be given with them");
  const int64_t n = a.q.rows, most = std::max<int64_t>(linear_head_limit(ctx, head, n, a.chunk_rows), 1);
  const bool sums = most < n;
  if (a.dd.data && sums && a.dd.dtype != DType::f32)
    head.dweight = linear_head_matrix(ctx, a.d.rows, a.d.cols, a.d.cols, DType::f32);
  linear_head_clear(ctx, head, {.count = n});
  const int64_t tiles = contrastive_blocks(most) * contrastive_panels(a.d.rows);  // of a chunk
  Vector slopes;
  if (a.dlog_scale)
    slopes = linear_head_vector(
        ctx, n / most * tiles + contrastive_blocks(n % most) * contrastive_panels(a.d.rows));
  for_chunks(ctx, a, head, [&](LinearHeadChunk& chunk, ContrastiveChunk& part) {
    auto from = [&](const Vector& v) { return linear_head_part(v, chunk.begin, chunk.count); };
    part.row_lse = from(a.row_lse).as<double>(), part.drow = from(a.drow).as<float>();
    part.col_lse = a.col_lse.as<double>(), part.dcol = a.dcol.as<float>();
    if (a.dpicked) part.dpicked = a.dpicked.as<float>() + chunk.begin * part.label_count;
    if (a.dlog_scale) part.slope_parts = slopes.as<float>() + chunk.begin / most * tiles;
    on_device(
        kOp, ctx, [&] { cpu::contrastive_gradient(ctx, a.q.dtype, part); },
        TIGON_ON_CUDA(cuda::contrastive_gradient(ctx, a.q.dtype, part)));
    linear_head_gradients(ctx, head, chunk, {.first = chunk.begin == 0});
  });
  if (a.dlog_scale) cross_entropy_total(ctx, {.loss = slopes, .total = a.dlog_scale});
  if (head.dweight.data == a.dd.data) return;
  const Vector one = linear_head_vector(ctx, 1);
  TIGON_RUN(kOp, ctx, linear_head_ones, one);
  Matrix dd = a.dd;
  if (dd.stride != dd.cols) dd = linear_head_matrix(ctx, dd.rows, dd.cols, dd.cols, dd.dtype);
  linear_head_finish(ctx, {.in = head.dweight, .dloss = one, .out = dd});
  if (dd.data != a.dd.data) linear_head_columns(ctx, {.from = dd, .to = a.dd});
}

}  // namespace

namespace cpu {
void contrastive_fwd(Context& ctx, const ContrastiveFwd& a) { run(ctx, a); }
void contrastive_bwd(Context& ctx, const ContrastiveBwd& a) { run(ctx, a); }
}  // namespace cpu
namespace cuda {
void contrastive_fwd(Context& ctx, const ContrastiveFwd& a) { run(ctx, a); }
void contrastive_bwd(Context& ctx, const ContrastiveBwd& a) { run(ctx, a); }
}  // namespace cuda

}  // namespace tigon
