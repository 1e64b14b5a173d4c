#include "tigon/ops/contrastive/contrastive.h"

#include "tigon/base/matrix_gemm.h"
#include "tigon/base/op.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/loss_head/engine.h"

namespace tigon {
namespace {

constexpr const char* kOp = "contrastive";

// Handles the similarities of a chunk of queries, and those of the guide.
class ContrastivePass : public RowPass {
 public:
  explicit ContrastivePass(const ContrastiveScores& a) : a_(a) {}

  void memory(LossHeadRun& run) override {
    const int64_t m = a_.d.rows;
    if (a_.guide_q.data)
      guide_ = loss_head_matrix(run.ctx, run.limit, m, loss_head_logit_stride(m), DType::f32);
  }

 protected:
  // Returns the rows as the kernels read them.
  ContrastiveChunk chunk(Context& ctx, const LossHeadPart& p) const {
    if (guide_.data)
      gemm(ctx, {.a = rows_from(a_.guide_q, p.begin, p.count),
                 .b = a_.guide_d,
                 .c = rows_from(guide_, 0, p.count),
                 .trans_b = true,
                 .unrounded = true});
    return {.scores = p.logits.data,
            .guide = static_cast<const float*>(guide_.data),
            .rows = p.count,
            .cols = a_.d.rows,
            .stride = p.logits.stride,
            .scale = a_.scale.as<float>(),
            .labels = a_.labels.data ? a_.labels.row<int64_t>(p.begin) : nullptr,
            .label_count = a_.labels.cols,
            .label_stride = a_.labels.stride,
            .q_ids = loss_head_slice(a_.q_ids, p.begin, p.count).as<int64_t>(),
            .d_ids = a_.d_ids.as<int64_t>(),
            .limit = loss_head_slice(a_.limit, p.begin, p.count).as<float>()};
  }

 private:
  const ContrastiveScores& a_;
  Matrix guide_;  // memory for a chunk of the guide's similarities
};

class StatisticsPass final : public ContrastivePass {
 public:
  explicit StatisticsPass(const ContrastiveFwd& a) : ContrastivePass(a), a_(a) {}

  void memory(LossHeadRun& run) override {
    const int64_t m = a_.d.rows, panels = contrastive_panels(m), blocks = contrastive_blocks(run.limit);
    double* col_lse = a_.col_lse.as<double>();
    if (run.spans.empty() && col_lse) return merge(run.ctx, {.size = m, .out = col_lse, .fresh = true});
    if (a_.row_lse) row_parts_ = run.ctx.scratch_of<float>(2 * panels * run.limit);
    if (col_lse) col_parts_ = run.ctx.scratch_of<float>(2 * blocks * m);
    ContrastivePass::memory(run);
  }

  void rows(const LossHeadRun& run, const LossHeadPart& p) override {
    ContrastiveChunk part = chunk(run.ctx, p);
    part.row_parts = row_parts_, part.col_parts = col_parts_;
    if (a_.picked) part.picked = a_.picked.as<float>() + p.begin * part.label_count;
    on_device(
        kOp, run.ctx, [&] { cpu::contrastive_statistics(run.ctx, a_.q.dtype, part); },
        TIGON_ON_CUDA(cuda::contrastive_statistics(run.ctx, a_.q.dtype, part)));
    if (row_parts_)
      merge(run.ctx, {.parts = row_parts_,
                      .count = contrastive_panels(part.cols),
                      .size = part.rows,
                      .out = a_.row_lse.as<double>() + p.begin,
                      .fresh = true});
    if (col_parts_)
      merge(run.ctx, {.parts = col_parts_,
                      .count = contrastive_blocks(part.rows),
                      .size = part.cols,
                      .out = a_.col_lse.as<double>(),
                      .fresh = p.begin == 0});
  }

 private:
  static void merge(Context& ctx, const ContrastiveMerge& a) { TIGON_RUN(kOp, ctx, contrastive_merge, a); }

  const ContrastiveFwd& a_;
  float *row_parts_ = nullptr, *col_parts_ = nullptr;
};

class GradientPass final : public ContrastivePass {
 public:
  explicit GradientPass(const ContrastiveBwd& a) : ContrastivePass(a), a_(a) {}

  void memory(LossHeadRun& run) override {
    const int64_t n = a_.q.rows, panels = contrastive_panels(a_.d.rows), most = run.limit;
    tiles_ = contrastive_blocks(most) * panels;
    if (a_.dlog_scale)
      slopes_ = loss_head_vector(run.ctx, n / most * tiles_ + contrastive_blocks(n % most) * panels);
    ContrastivePass::memory(run);
  }

  void rows(const LossHeadRun& run, const LossHeadPart& p) override {
    ContrastiveChunk part = chunk(run.ctx, p);
    auto from = [&](const Vector& v) { return loss_head_slice(v, p.begin, p.count); };
    part.row_lse = from(a_.row_lse).as<double>(), part.drow = from(a_.drow).as<float>();
    part.col_lse = a_.col_lse.as<double>(), part.dcol = a_.dcol.as<float>();
    if (a_.dpicked) part.dpicked = a_.dpicked.as<float>() + p.begin * part.label_count;
    if (a_.dlog_scale) part.slope_parts = slopes_.as<float>() + p.begin / run.limit * tiles_;
    on_device(
        kOp, run.ctx, [&] { cpu::contrastive_gradient(run.ctx, a_.q.dtype, part); },
        TIGON_ON_CUDA(cuda::contrastive_gradient(run.ctx, a_.q.dtype, part)));
  }

  void finish(const LossHeadRun& run) override {
    if (a_.dlog_scale) cross_entropy_total(run.ctx, {.loss = slopes_, .total = a_.dlog_scale});
    const Matrix& sum = run.a.head.dweight;
    if (sum.data == a_.dd.data) return;
    const Vector one = loss_head_vector(run.ctx, 1);
    TIGON_RUN(kOp, run.ctx, loss_head_ones, one);
    Matrix dd = a_.dd;
    if (dd.stride != dd.cols) dd = loss_head_matrix(run.ctx, dd.rows, dd.cols, dd.cols, dd.dtype);
    loss_head_finish(run.ctx, {.in = sum, .dloss = one, .out = dd});
    if (dd.data != a_.dd.data) loss_head_move(run.ctx, {.from = dd, .to = a_.dd});
  }

 private:
  const ContrastiveBwd& a_;
  int64_t tiles_ = 0;  // tiles of a chunk
  Vector slopes_;
};

LossHead head_of(const ContrastiveScores& a) {
  return {.head = {.op = kOp, .hidden = a.q, .weight = a.d},
          .labels = {.chunk_rows = a.chunk_rows},
          .labelled = false};
}

void run(Context& ctx, const ContrastiveFwd& a) {
  StatisticsPass pass(a);
  loss_head_run(ctx, head_of(a), pass);
}

void run(Context& ctx, const ContrastiveBwd& a) {
  TIGON_CHECK(kOp, bool(a.row_lse) == bool(a.drow) && bool(a.col_lse) == bool(a.dcol),
              "gradients of statistics must be given with them");
  LossHead call = head_of(a);
  LinearHead& head = call.head;
  head.dhidden = a.dq, head.dweight = a.dd;
  // A sum over chunks is f32 first.
  if (a.dd.data && a.dd.dtype != DType::f32 && loss_head_limit(ctx, head, a.q.rows, a.chunk_rows) < a.q.rows)
    head.dweight = loss_head_matrix(ctx, a.d.rows, a.d.cols, a.d.cols, DType::f32);
  GradientPass pass(a);
  loss_head_run(ctx, call, pass);
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
