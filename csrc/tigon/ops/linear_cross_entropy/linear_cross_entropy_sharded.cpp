#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_sharded.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_cross_entropy_sharded";

Matrix columns_from(const Matrix& m, int64_t first, int64_t count) {
  Matrix part = m;
  part.cols = count;
  part.data = static_cast<char*>(m.data) + first * int64_t(size_of(m.dtype));
  return part;
}

// A call, with what is the same in all chunks.
struct Sharded {
  Context& ctx;
  Communicator& ranks;
  const LinearCrossEntropySharded& call;
  const LinearCrossEntropy& a;
  int64_t shares, rows;  // rows of a share
  CrossEntropyKinds kinds;
  LinearHead head;
  Matrix part, parts;  // statistics of a chunk: of this rank, of all
  Vector log_share, factor, predicted;
  Matrix hidden, dhidden;  // of a chunk's rows of all ranks; empty: the caller's own

  bool empty() const { return head.weight.rows == 0; }

  // Rows of share s of a chunk, in a vector of all rows, and in one of the chunk's.
  Vector share_part(const Vector& v, int64_t s, int64_t begin, int64_t count) const {
    return linear_head_part(v, s * rows + begin, count);
  }

  CrossEntropyRows pass(int64_t s, int64_t begin, int64_t count, const Matrix& logits) const {
    return {.logits = rows_from(logits, s * count, count),
            .target = share_part(a.labels.target, s, begin, count),
            .bias = a.head.bias,
            .class_weight = a.class_weight,
            .first_class = call.first_class,
            .classes = call.classes,
            .weight_sum = call.weight_sum,
            .ignore_index = a.labels.ignore_index,
            .logit_scale = a.formula.logit_scale,
            .softcap = a.formula.softcap,
            .temperature = a.formula.temperature,
            .label_smoothing = a.label_smoothing,
            .z_loss = a.z_loss};
  }

  Vector row_of(const Matrix& m, int64_t row, int64_t first, int64_t count) const {
    return {.data = m.row<float>(row) + first, .size = count};
  }

  void statistics(int64_t begin, int64_t count, const Matrix& logits) {
    if (empty()) return cross_entropy_empty_part(ctx, {.part = part});
    for (int64_t s = 0; s < shares; ++s) {
      CrossEntropyRows p = pass(s, begin, count, logits);
      p.row_max = row_of(part, 0, s * count, count);
      p.log_sum = row_of(part, 1, s * count, count);
      p.log_prob = row_of(part, 2, s * count, count);
      if (kinds.entropy) p.entropy = row_of(part, kinds.entropy_at(), s * count, count);
      if (kinds.smoothing) p.smoothing = row_of(part, kinds.smoothing_at(), s * count, count);
      cross_entropy_rows(ctx, p);
    }
  }

  void combine(int64_t begin, int64_t count) {
    for (int64_t s = 0; s < shares; ++s)
      cross_entropy_combine(ctx, {.parts = columns_from(parts, s * count, count),
                                  .kinds = kinds,
                                  .shards = ranks.size(),
                                  .shard = ranks.rank(),
                                  .target = share_part(a.labels.target, s, begin, count),
                                  .class_weight = a.class_weight,
                                  .shard_weight = call.shard_weight,
                                  .token_weight = share_part(a.token_weight, s, begin, count),
                                  .classes = call.classes,
                                  .ignore_index = a.labels.ignore_index,
                                  .label_smoothing = a.label_smoothing,
                                  .z_loss = a.z_loss,
                                  .loss = share_part(a.results.loss, s, begin, count),
                                  .z_term = share_part(a.results.z_term, s, begin, count),
                                  .log_prob = share_part(a.results.log_prob, s, begin, count),
                                  .lse = share_part(a.results.lse, s, begin, count),
                                  .entropy = share_part(a.results.entropy, s, begin, count),
                                  .log_share = linear_head_part(log_share, s * count, count)});
  }

  // Logits become their gradients.
  void differentiate(int64_t begin, int64_t count, const Matrix& logits) {
    if (empty()) return;
    const bool late =
        a.upstream || a.reduction.kind == Reduction::none || !linear_head_scales_early(a.head.hidden.dtype);
    for (int64_t s = 0; s < shares; ++s) {
      CrossEntropyRows p = pass(s, begin, count, logits);
      p.dlogits = p.logits;
      p.log_share = linear_head_part(log_share, s * count, count);
      p.scale = linear_head_part(factor, s * count, count);
      linear_head_factors(ctx, {.target = p.target,
                                .ignore_index = a.labels.ignore_index,
                                .token_weight = share_part(a.token_weight, s, begin, count),
                                .upstream = share_part(a.upstream, s, begin, count),
                                .scale = late ? Vector{} : a.reduction.scale,
                                .out = p.scale});
      cross_entropy_rows(ctx, p);
    }
  }

  // The chunk's gradient of hidden, with its sum over the ranks, and of A.
  void replicated(int64_t begin, int64_t count, LinearHeadChunk c) {
    LinearHead only = head;
    only.dweight = {}, only.dbias = {}, only.dlora_b = {};
    Matrix own = rows_from(a.head.dhidden, begin, count);
    c.dhidden = shares > 1 ? rows_from(dhidden, 0, shares * count) : own;
    const int64_t n = count * a.head.hidden.cols;
    if (empty())
      linear_head_clear(ctx, {.op = kOp, .dweight = c.dhidden}, {.count = 0});
    else
      linear_head_gradients(ctx, only, c, {.first = begin == 0});
    if (!a.head.dhidden.data) return;
    if (shares > 1)
      ranks.reduce_scatter(c.dhidden.data, own.data, n, own.dtype, ctx.stream());
    else
      ranks.all_reduce(own.data, n, own.dtype, ctx.stream());
  }
};

LinearHead checked(const LinearCrossEntropySharded& call, int64_t shares) {
  const LinearCrossEntropy& a = call.head;
  LinearHead head = a.head;
  head.op = kOp;
  const int64_t all = a.head.hidden.rows * shares;
  if (a.head.weight.rows > 0) linear_head_check(head);
  if (a.head.dlora_a.data) {
    require_matrix(kOp, "dlora_a", a.head.dlora_a, a.head.lora_a.rows, a.head.hidden.cols, DType::f32);
    TIGON_CHECK(kOp, a.head.dlora_a.stride == a.head.dlora_a.cols,
                "dlora_a must have adjacent rows, got stride ", a.head.dlora_a.stride);
  }
  TIGON_CHECK(kOp, !a.head.wide_logits, "wide_logits must be false");
  TIGON_CHECK(kOp, !a.kept.unit.data && !a.kept.dlogits.data && !a.entropy_upstream && !a.results.predicted,
              "unit, kept, entropy_upstream and predicted must not be given");
  TIGON_CHECK(kOp, a.labels.valid_rows < 0, "valid_rows must be -1, got ", a.labels.valid_rows);
  linear_head_check(kOp, a.formula);
  linear_head_check(kOp, a.reduction);
  TIGON_CHECK(kOp, call.first_class >= 0 && call.first_class + a.head.weight.rows <= call.classes,
              "first_class must leave room for ", a.head.weight.rows, " of ", call.classes, " classes, got ",
              call.first_class);
  TIGON_CHECK(kOp,
              a.head.hidden.stride == a.head.hidden.cols || (shares == 1 && !a.head.dhidden.data) ||
                  a.head.hidden.rows <= 1,
              "hidden must have adjacent rows, got stride ", a.head.hidden.stride);
  TIGON_CHECK(kOp, !a.head.dhidden.data || a.head.dhidden.stride == a.head.dhidden.cols,
              "dhidden must have adjacent rows, got stride ", a.head.dhidden.stride);
  require_vector(kOp, "target", a.labels.target, all, DType::i64);
  require_vector(kOp, "loss", a.results.loss, all, DType::f32);
  for (const Vector* v : {&a.token_weight, &a.upstream, &a.results.z_term, &a.results.log_prob,
                          &a.results.lse, &a.results.entropy})
    if (*v) require_vector(kOp, "rows", *v, all, DType::f32);
  TIGON_CHECK(kOp, a.label_smoothing >= 0.0f && a.label_smoothing <= 1.0f,
              "label_smoothing must be in [0, 1], got ", a.label_smoothing);
  if (a.label_smoothing > 0.0f)
    require_vector(kOp, "shard_weight", call.shard_weight, call.shard_weight.size, DType::f32);
  TIGON_CHECK(kOp, !head.wants_gradients() || a.reduction.kind != Reduction::none || a.upstream,
              "upstream must be given for the gradients of per-row losses");
  return head;
}

}  // namespace

void linear_cross_entropy_sharded(Context& ctx, Communicator& ranks, const LinearCrossEntropySharded& call) {
  const LinearCrossEntropy& a = call.head;
  const int64_t shares = call.sequence_parallel ? ranks.size() : 1, h = a.head.hidden.cols;
  LinearHead head = checked(call, shares);
  if (a.label_smoothing > 0.0f)
    require_vector(kOp, "shard_weight", call.shard_weight, ranks.size(), DType::f32);
  const bool gradients = head.wants_gradients() || a.head.dhidden.data;
  linear_head_scale(ctx, a.reduction, a.labels, a.class_weight);
  // The same chunks on every rank: from the mean number of columns, whatever this rank has.
  const int64_t mean_columns = std::max<int64_t>((call.classes + ranks.size() - 1) / ranks.size(), 1);
  const int64_t whole = linear_head_chunk_rows({.cuda = ctx.device() == Device::cuda,
                                                .dtype = int64_t(a.head.hidden.dtype),
                                                .worked = a.head.hidden.rows * shares,
                                                .hidden = h,
                                                .vocab = mean_columns,
                                                .train_weight = a.head.dweight.data != nullptr,
                                                .main_grad = a.head.add_dweight});
  TIGON_CHECK(kOp, a.labels.chunk_rows >= 0, "chunk_rows must be >= 0, got ", a.labels.chunk_rows);
  const int64_t wanted =
      std::max<int64_t>((a.labels.chunk_rows > 0 ? a.labels.chunk_rows : whole) / shares, 1);
  const int64_t limit = std::min(wanted, std::max<int64_t>(a.head.hidden.rows, 1)), most = limit * shares;
  if (a.head.weight.rows > 0) linear_head_check_chunks(head, (a.head.hidden.rows + limit - 1) / limit);

  Sharded run = {.ctx = ctx,
                 .ranks = ranks,
                 .call = call,
                 .a = a,
                 .shares = shares,
                 .rows = a.head.hidden.rows,
                 .kinds = {.entropy = bool(a.results.entropy), .smoothing = a.label_smoothing > 0.0f},
                 .head = head};
  const int64_t kinds = run.kinds.count(), size = ranks.size();
  float* own = ctx.scratch_of<float>(kinds * most);
  float* gathered = ctx.scratch_of<float>(size * kinds * most);
  run.log_share = linear_head_vector(ctx, most);
  run.factor = linear_head_vector(ctx, most);
  LinearHeadRows all = {.count = most};
  LinearHead worked = head;
  if (shares > 1) {
    run.hidden = linear_head_matrix(ctx, most, h, h, a.head.hidden.dtype);
    worked.hidden = run.hidden;
    if (a.head.dhidden.data) {
      run.dhidden = linear_head_matrix(ctx, most, h, h, a.head.hidden.dtype);
      worked.dhidden = run.dhidden;
    }
  }
  run.head = worked;
  LinearHeadWorkspace workspace;
  if (!run.empty()) workspace = linear_head_workspace(ctx, worked, all, {.chunk = most});
  LinearHead params = worked;
  params.dhidden = {}, params.dlora_a = {};

  for (int64_t begin = 0; begin < a.head.hidden.rows; begin += limit) {
    const int64_t count = std::min(limit, a.head.hidden.rows - begin), chunk = count * shares;
    Matrix hidden = rows_from(a.head.hidden, begin, count);
    if (shares > 1) {
      ranks.all_gather(hidden.data, run.hidden.data, size_of(hidden.dtype) * size_t(count * h), ctx.stream());
      hidden = rows_from(run.hidden, 0, chunk);
    }
    run.part = {.data = own, .rows = kinds, .cols = chunk, .stride = chunk};
    run.parts = {.data = gathered, .rows = size * kinds, .cols = chunk, .stride = chunk};
    LinearHeadChunk c = {.count = chunk, .hidden = hidden};
    if (!run.empty()) {
      c = linear_head_chunk(worked, all, workspace, 0, chunk);
      c.hidden = hidden;
      linear_head_logits(ctx, worked, c);
    }
    run.statistics(begin, count, c.logits);
    ranks.all_gather(own, gathered, sizeof(float) * size_t(kinds * chunk), ctx.stream());
    run.combine(begin, count);
    if (!gradients) continue;
    run.differentiate(begin, count, c.logits);
    if (a.head.dhidden.data || a.head.dlora_a.data) run.replicated(begin, count, c);
    if (!run.empty()) linear_head_gradients(ctx, params, c, {.first = begin == 0});
  }
  if (a.head.hidden.rows == 0 && !run.empty()) linear_head_clear(ctx, head, {.count = 0});
  if (a.head.dlora_a.data) {  // a sum over the classes of all ranks
    if (run.empty()) linear_head_clear(ctx, {.op = kOp, .dlora_a = a.head.dlora_a}, {.count = 0});
    ranks.all_reduce(a.head.dlora_a.data, a.head.dlora_a.rows * h, DType::f32, ctx.stream());
  }
  linear_head_total(ctx, a.reduction, a.results.loss);
}

}  // namespace tigon
