#include "tigon/ops/loss_head/loss_head.h"

#include <algorithm>

#include "tigon/base/matrix_gemm.h"
#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_head";

#define TIGON_BACKEND(call) on_device(kOp, ctx, [&] { cpu::call; }, TIGON_ON_CUDA(cuda::call))

// Returns how many rows count if the host can know it, otherwise a negative number. On the CPU it checks the
// labels before anything is written.
int64_t known_count(Context& ctx, const LinearHead& a, const LossHeadLabels& labels) {
  if (ctx.device() != Device::cpu) return labels.valid_rows;
  const int64_t* target = labels.target.as<int64_t>();
  int64_t count = 0, v = a.weight.rows;
  for (int64_t r = 0; r < labels.target.size; ++r) {
    if (target[r] == labels.ignore_index) continue;
    TIGON_CHECK(a.op, target[r] >= 0 && target[r] < v, "target must be in [0, ", v, ") or ",
                labels.ignore_index, " (ignored), got ", target[r], " in row ", r);
    ++count;
  }
  TIGON_CHECK(a.op, labels.valid_rows < 0 || labels.valid_rows == count,
              "valid_rows must be the number of labels that are not ", labels.ignore_index, ", ", count,
              ", got ", labels.valid_rows);
  return count;
}

Matrix as_row(const Vector& v, int64_t count) {
  return {.data = v.data, .dtype = v.dtype, .rows = 1, .cols = count, .stride = count};
}
Matrix as_column(const Vector& v, int64_t count) {
  return {.data = v.data, .dtype = v.dtype, .rows = count, .cols = 1, .stride = 1};
}

void fill_zero(Context& ctx, const Matrix& m) {
  if (m.data && m.rows * m.cols > 0) TIGON_BACKEND(loss_head_zero(ctx, m));
}

}  // namespace

void loss_head_pad(Context& ctx, const Matrix& logits) {
  if (ctx.device() != Device::cpu) return;
  Matrix room = logits;
  room.data = static_cast<char*>(logits.data) + logits.cols * int64_t(size_of(logits.dtype));
  room.cols = logits.stride - logits.cols;
  fill_zero(ctx, room);
}

void loss_head_check(const LinearHead& a) {
  int64_t rows = a.hidden.rows, h = a.hidden.cols, v = a.weight.rows;
  DType dtype = a.hidden.dtype;
  require_float(a.op, "hidden", dtype);
  TIGON_CHECK(a.op, h >= 1, "hidden must have at least one column, got ", h);
  TIGON_CHECK(a.op, v >= 1, "weight must have at least one row, got ", v);
  require_matrix(a.op, "weight", a.weight, v, h, dtype);
  if (a.bias) {
    TIGON_CHECK(a.op, a.bias.size == v, "bias must be [", v, "], got [", a.bias.size, "]");
    TIGON_CHECK(a.op, a.bias.dtype == dtype || a.bias.dtype == DType::f32, "bias must be ", name_of(dtype),
                " or float32, got ", name_of(a.bias.dtype));
  }
  bool lora = a.lora_a.data != nullptr;
  TIGON_CHECK(a.op, lora == (a.lora_b.data != nullptr), "lora must have both A and B, got one");
  if (lora) {
    require_matrix(a.op, "lora A", a.lora_a, a.lora_a.rows, h, dtype);
    require_matrix(a.op, "lora B", a.lora_b, v, a.lora_a.rows, dtype);
  }
  TIGON_CHECK(a.op, lora || (!a.dlora_a.data && !a.dlora_b.data),
              "lora must be given for its gradients, got none");
  if (a.dhidden.data) require_matrix(a.op, "dhidden", a.dhidden, rows, h, dtype);
  if (a.dweight.data) {
    DType narrow = loss_head_dweight(dtype, true);
    require_matrix(a.op, "dweight", a.dweight, v, h, a.dweight.dtype == narrow ? narrow : DType::f32);
  }
  if (a.dbias) require_vector(a.op, "dbias", a.dbias, v, DType::f32);
  if (a.dlora_a.data) require_matrix(a.op, "dlora_a", a.dlora_a, a.lora_a.rows, h, DType::f32);
  if (a.dlora_b.data) require_matrix(a.op, "dlora_b", a.dlora_b, v, a.lora_a.rows, DType::f32);
}

LossHeadLabels loss_head_labels(Context& ctx, const char* op, const LossHeadLabels& given) {
  LossHeadLabels labels = given;
  LossHeadShift& by = labels.shift;
  int64_t rows = given.target.size, length = by.length;
  if (by.length == 0) by.length = rows;
  TIGON_CHECK(op, by.shift >= 0, "shift must be >= 0, got ", by.shift);
  if (by.shift == 0 || rows == 0) return given;
  require_dtype(op, "target", given.target.dtype, DType::i64);
  TIGON_CHECK(op, by.length > 0 && rows % by.length == 0, "length must divide ", rows, " rows, got ", length);
  if (by.position_ids) require_vector(op, "position_ids", by.position_ids, rows, DType::i64);
  labels.target = loss_head_vector(ctx, rows, DType::i64);
  TIGON_BACKEND(loss_head_shift(
      ctx, {.target = given.target, .ignore_index = given.ignore_index, .by = by, .out = labels.target}));
  return labels;
}

void loss_head_check(const char* op, const LogitFormula& f) {
  TIGON_CHECK(op, f.temperature > 0.0f, "temperature must be > 0, got ", f.temperature);
  TIGON_CHECK(op, f.softcap >= 0.0f, "softcap must be > 0 or none, got ", f.softcap);
}

void loss_head_check(const char* op, const LossReduction& r) {
  if (r.kind == Reduction::none) return;
  require_vector(op, "total", r.total, 1, DType::f32);
  require_vector(op, "scale", r.scale, 1, DType::f32);
}

LossHeadRows loss_head_rows(Context& ctx, const LinearHead& a, const LossHeadLabels& labels) {
  int64_t all = a.hidden.rows;
  require_vector(a.op, "target", labels.target, all, DType::i64);
  TIGON_CHECK(a.op, labels.valid_rows >= -1 && labels.valid_rows <= all, "valid_rows must be in [0, ", all,
              "] (or None), got ", labels.valid_rows);
  int64_t known = known_count(ctx, a, labels);
  if (known < 0 || known >= all) return {.count = all, .labels = labels.target};
  LossHeadRows r = {.count = known,
                    .listed = true,
                    .labels = loss_head_vector(ctx, known, DType::i64),
                    .index = loss_head_vector(ctx, known, DType::i64),
                    .position = loss_head_vector(ctx, all, DType::i64),
                    .fault = loss_head_vector(ctx, 1)};
  loss_head_compact(ctx, {.target = labels.target,
                          .ignore_index = labels.ignore_index,
                          .index = r.index,
                          .labels = r.labels,
                          .position = r.position,
                          .fault = r.fault});
  return r;
}

int64_t loss_head_limit(Context& ctx, const LinearHead& a, int64_t rows, int64_t chunk_rows, bool lean) {
  TIGON_CHECK(a.op, chunk_rows >= 0, "chunk_rows must be >= 1 (or None), got ", chunk_rows);
  int64_t wanted = chunk_rows > 0 ? chunk_rows
                                  : loss_head_chunk_rows({.cuda = ctx.device() == Device::cuda,
                                                          .dtype = int64_t(a.hidden.dtype),
                                                          .worked = rows,
                                                          .hidden = a.hidden.cols,
                                                          .vocab = a.weight.rows,
                                                          .train_weight = a.dweight.data != nullptr,
                                                          .main_grad = a.add_dweight,
                                                          .lean = lean});
  return std::min(wanted, std::max<int64_t>(rows, 1));
}

void loss_head_check_chunks(const LinearHead& a, int64_t chunks) {
  bool sums = chunks > 1 || a.add_dweight;
  TIGON_CHECK(a.op, !a.dweight.data || !sums || a.dweight.dtype == DType::f32,
              "dweight must be float32 where it is summed over chunks, got ", name_of(a.dweight.dtype));
}

int64_t loss_head_group_limit(const LinearHead& a, int64_t limit) {
  constexpr int64_t kMostBytes = int64_t(1) << 30;
  return std::max(limit,
                  kMostBytes / (loss_head_logit_stride(a.weight.rows) * int64_t(size_of(a.hidden.dtype))));
}

std::vector<LossHeadSpan> loss_head_spans(const LinearHead& a, const std::vector<int64_t>& group_rows,
                                          int64_t limit) {
  int64_t most = loss_head_group_limit(a, limit);
  for (size_t g = 0; g < group_rows.size(); ++g) {
    TIGON_CHECK(a.op, group_rows[g] >= 0, "groups must have >= 0 rows, got ", group_rows[g], " in group ", g);
    TIGON_CHECK(a.op, group_rows[g] <= most, "groups must have at most ", most,
                " rows (logits of 1 GiB), got ", group_rows[g], " in group ", g);
    limit = std::max(limit, group_rows[g]);
  }
  std::vector<LossHeadSpan> spans;
  for (int64_t g = 0; g < int64_t(group_rows.size()); ++g) {
    int64_t rows = group_rows[size_t(g)];
    if (spans.empty())
      spans.push_back({});
    else if (spans.back().count + rows > limit)
      spans.push_back({.begin = spans.back().begin + spans.back().count, .group = g});
    spans.back().count += rows, ++spans.back().groups;
  }
  return spans;
}

LossHeadWorkspace loss_head_workspace(Context& ctx, const LinearHead& a, const LossHeadRows& rows,
                                      const LossHeadWorkspaceSizes& m) {
  DType dtype = a.hidden.dtype;
  int64_t v = a.weight.rows, h = a.hidden.cols, r = a.lora_a.rows, lora_ld = (r + 7) / 8 * 8;
  LossHeadWorkspace w;
  if (m.logits) {
    int64_t rows_of_logits = m.logits_rows > 0 ? m.logits_rows : m.chunk;
    w.logits = loss_head_matrix(ctx, rows_of_logits, v, loss_head_logit_stride(v), dtype);
    loss_head_pad(ctx, w.logits);
  }
  int64_t rows_of_part = m.f32_rows;
  if (rows_of_part == 0 && a.wide_logits && dtype != DType::f32)
    rows_of_part = std::min(m.chunk, loss_head_wide_rows(ctx.device() == Device::cuda, v));
  if (rows_of_part > 0)
    w.wide = loss_head_matrix(ctx, rows_of_part, v, loss_head_logit_stride(v), DType::f32);
  bool scales = m.factored && (a.dweight.data || a.dlora_a.data || a.dlora_b.data);
  if (rows.listed || scales) w.hidden = loss_head_matrix(ctx, m.chunk, h, h, dtype);
  if (rows.listed && a.dhidden.data) w.dhidden = loss_head_matrix(ctx, m.chunk, h, h, dtype);
  if (a.lora_a.data)
    w.lora_u = loss_head_matrix(ctx, m.chunk, r, lora_ld, dtype),
    w.lora_t = loss_head_matrix(ctx, m.chunk, r, lora_ld, dtype);
  if (a.dbias) {
    w.ones = loss_head_vector(ctx, std::max<int64_t>(m.chunk, 1), dtype);
    TIGON_BACKEND(loss_head_ones(ctx, w.ones));
    if (m.factored) w.column = loss_head_vector(ctx, m.chunk, dtype);
  }
  return w;
}

LossHeadChunk loss_head_chunk(const LinearHead& a, const LossHeadRows& rows, const LossHeadWorkspace& w,
                              int64_t begin, int64_t count) {
  Matrix none;
  return {.begin = begin,
          .count = count,
          .logits = rows_from(w.logits, 0, count),
          .padded = w.logits.data != nullptr,
          .wide = w.wide,
          .index = rows.listed ? loss_head_slice(rows.index, begin, count) : Vector{},
          .hidden = rows.listed ? rows_from(w.hidden, 0, count) : rows_from(a.hidden, begin, count),
          .dhidden = !a.dhidden.data ? none
                     : rows.listed   ? rows_from(w.dhidden, 0, count)
                                     : rows_from(a.dhidden, begin, count),
          .gathered = !rows.listed,
          .scaled = rows_from(w.hidden, 0, count),
          .lora_u = rows_from(w.lora_u, 0, count),
          .lora_t = rows_from(w.lora_t, 0, count),
          .ones = w.ones,
          .column = w.column};
}

namespace {

// Copies rows of the call's hidden to `to`, times factor.
void take_rows(Context& ctx, const LinearHead& a, const LossHeadChunk& c, const Matrix& to,
               const Vector& factor) {
  loss_head_move(ctx, {.from = c.index ? a.hidden : rows_from(a.hidden, c.begin, c.count),
                       .to = to,
                       .index = c.index,
                       .factor = factor});
}

}  // namespace

// The low-rank part comes first: it is written, not added, and rounded while it is small.
void loss_head_logits(Context& ctx, const LinearHead& a, LossHeadChunk& c) {
  bool lora = a.lora_a.data != nullptr;
  if (!c.gathered) take_rows(ctx, a, c, c.hidden, {});
  c.gathered = true;
  if (lora) {
    gemm(ctx, {.a = c.hidden, .b = a.lora_a, .c = c.lora_u, .trans_b = true, .alpha = a.lora_scale});
    gemm(ctx, {.a = c.lora_u, .b = a.lora_b, .c = c.logits, .trans_b = true, .unrounded = true});
    c.has_u = true;
  }
  gemm(ctx, {.a = c.hidden,
             .b = a.weight,
             .c = c.logits,
             .trans_b = true,
             .beta = lora ? 1.0f : 0.0f,
             .unrounded = true});
}

// Computes dweight = dlogits^T . diag(factor) . hidden and dhidden = diag(factor) . dlogits . weight, so that
// dlogits stay as they are.
void loss_head_gradients(Context& ctx, const LinearHead& a, LossHeadChunk& c, const LossHeadPass& pass) {
  const Matrix& dlogits = c.logits;
  const Vector& factor = pass.factor;
  bool low = a.lora_a.data && (a.dhidden.data || a.dlora_a.data);
  float beta = pass.first ? 0.0f : 1.0f;
  Matrix hidden = c.hidden;
  if (a.dweight.data || a.dlora_a.data || (a.dlora_b.data && !c.has_u)) {
    if (factor) hidden = c.scaled;
    if (factor || !c.gathered) take_rows(ctx, a, c, hidden, factor);
    c.gathered = c.gathered && !(factor && hidden.data == c.hidden.data);
  }
  if (low)
    gemm(ctx, {.a = dlogits, .b = a.lora_b, .c = c.lora_t, .alpha = a.lora_scale, .padded_a = c.padded});
  if (low && a.dhidden.data) gemm(ctx, {.a = c.lora_t, .b = a.lora_a, .c = c.dhidden});
  if (a.dhidden.data)
    gemm(ctx, {.a = dlogits, .b = a.weight, .c = c.dhidden, .beta = low ? 1.0f : 0.0f, .padded_a = c.padded});
  if (a.dweight.data)
    gemm(ctx,
         {.a = dlogits, .b = hidden, .c = a.dweight, .trans_a = true, .beta = a.add_dweight ? 1.0f : beta});
  if (a.dbias) {
    if (factor)
      loss_head_move(
          ctx, {.from = as_column(c.ones, c.count), .to = as_column(c.column, c.count), .factor = factor});
    gemm(ctx, {.a = as_row(factor ? c.column : c.ones, c.count),
               .b = dlogits,
               .c = as_row(a.dbias, a.dbias.size),
               .beta = beta,
               .reduce_rows = true});
  }
  if (a.dlora_b.data) {
    if (!c.has_u)
      gemm(ctx, {.a = hidden, .b = a.lora_a, .c = c.lora_u, .trans_b = true, .alpha = a.lora_scale});
    else if (factor)
      loss_head_move(ctx, {.from = c.lora_u, .to = c.lora_u, .factor = factor});
    gemm(ctx, {.a = dlogits, .b = c.lora_u, .c = a.dlora_b, .trans_a = true, .beta = beta});
  }
  if (a.dlora_a.data) gemm(ctx, {.a = c.lora_t, .b = hidden, .c = a.dlora_a, .trans_a = true, .beta = beta});
  if (a.dhidden.data && (c.index || factor)) {
    Matrix to = c.index ? a.dhidden : c.dhidden;
    loss_head_move(
        ctx, {.from = c.dhidden, .to = to, .index = c.index, .factor = factor, .scatter = bool(c.index)});
  }
}

bool loss_head_statistics(Context& ctx, [[maybe_unused]] const LinearHead& a,
                          [[maybe_unused]] const LossHeadRows& rows, [[maybe_unused]] const LogitFormula& f,
                          [[maybe_unused]] const Matrix& parts) {
  bool done = false;
  on_device(kOp, ctx, [] {}, TIGON_ON_CUDA(done = cuda::loss_head_statistics(ctx, a, rows, f, parts)));
  return done;
}

void loss_head_clear(Context& ctx, const LinearHead& a, const LossHeadRows& rows) {
  if (rows.listed) fill_zero(ctx, a.dhidden);
  if (rows.count > 0) return;
  if (!a.add_dweight) fill_zero(ctx, a.dweight);
  if (a.dbias) fill_zero(ctx, as_row(a.dbias, a.dbias.size));
  fill_zero(ctx, a.dlora_a);
  fill_zero(ctx, a.dlora_b);
}

Vector loss_head_slice(const Vector& v, int64_t begin, int64_t count) {
  if (!v || v.size == 1) return v;
  return {.data = static_cast<char*>(v.data) + begin * int64_t(size_of(v.dtype)),
          .dtype = v.dtype,
          .size = count};
}

Matrix loss_head_matrix(Context& ctx, int64_t rows, int64_t cols, int64_t stride, DType dtype) {
  void* data = ctx.scratch(size_of(dtype) * size_t(std::max<int64_t>(rows, 1) * stride));
  return {.data = data, .dtype = dtype, .rows = rows, .cols = cols, .stride = stride};
}

Vector loss_head_vector(Context& ctx, int64_t n, DType dtype) {
  return {.data = ctx.scratch(size_of(dtype) * size_t(std::max<int64_t>(n, 1))), .dtype = dtype, .size = n};
}

void loss_head_compact(Context& ctx, const LossHeadCompact& a) {
  require_dtype(kOp, "target", a.target.dtype, DType::i64);
  require_vector(kOp, "labels", a.labels, a.index.size, DType::i64);
  require_dtype(kOp, "index", a.index.dtype, DType::i64);
  require_vector(kOp, "position", a.position, a.target.size, DType::i64);
  require_vector(kOp, "fault", a.fault, 1, DType::f32);
  TIGON_BACKEND(loss_head_compact(ctx, a));
}

void loss_head_factors(Context& ctx, const LossHeadFactors& a) {
  require_dtype(kOp, "factors", a.out.dtype, DType::f32);
  if (a.out.size > 0) TIGON_BACKEND(loss_head_factors(ctx, a));
}

void loss_head_results(Context& ctx, const LossHeadResults& a) {
  for (int k = 0; k < a.count; ++k) {
    const LossHeadResult& r = a.result[k];
    TIGON_CHECK(kOp, r.to.dtype == DType::f32 || r.to.dtype == DType::i64,
                "results must be float32 or int64, got ", name_of(r.to.dtype));
    require_vector(kOp, "result", r.to, a.target.size, r.from.dtype);
    if (r.factor) require_vector(kOp, "factor", r.factor, a.target.size, DType::f32);
  }
  if (a.count > 0 && a.target.size > 0) TIGON_BACKEND(loss_head_results(ctx, a));
}

void loss_head_move(Context& ctx, const LossHeadMove& a) {
  if (a.rows() > 0 && a.to.cols > 0) TIGON_BACKEND(loss_head_move(ctx, a));
}

void loss_head_finish(Context& ctx, const LossHeadFinish& a) {
  require_matrix(kOp, "gradient", a.out, a.in.rows, a.in.cols, a.out.dtype);
  require_vector(kOp, "upstream gradient", a.dloss, 1, DType::f32);
  if (a.scale) require_vector(kOp, "scale", a.scale, 1, DType::f32);
  if (a.in.rows == 0 || a.in.cols == 0) return;
  TIGON_CHECK(kOp, a.in.stride == a.in.cols && a.out.stride == a.out.cols, "gradients must be contiguous");
  if (a.in.data == a.out.data && !a.scale && a.in.dtype == a.out.dtype)
    return cross_entropy_rescale(ctx, {.grad = a.out, .factor = a.dloss});
  TIGON_BACKEND(loss_head_finish(ctx, a));
}
#undef TIGON_BACKEND

}  // namespace tigon
