#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_cross_entropy";

bool wants_gradients(const LinearCrossEntropy& a) {
  return a.dhidden.data || a.dweight.data || a.dbias || a.dlora_a.data || a.dlora_b.data;
}

void check_result(const char* name, const Vector& v, int64_t rows, DType dtype) {
  if (v) require_vector(kOp, name, v, rows, dtype);
}

// Operands of the products, and what the row pass reads besides.
void check_operands(const LinearCrossEntropy& a) {
  int64_t rows = a.hidden.rows, h = a.hidden.cols, v = a.weight.rows;
  DType dtype = a.hidden.dtype;
  require_float(kOp, "hidden", dtype);
  TIGON_CHECK(kOp, h >= 1, "hidden must have at least one column, got ", h);
  TIGON_CHECK(kOp, v >= 1, "weight must have at least one row, got ", v);
  require_matrix(kOp, "weight", a.weight, v, h, dtype);
  require_vector(kOp, "target", a.target, rows, DType::i64);
  if (a.bias) {
    TIGON_CHECK(kOp, a.bias.size == v, "bias must be [", v, "], got [", a.bias.size, "]");
    TIGON_CHECK(kOp, a.bias.dtype == dtype || a.bias.dtype == DType::f32, "bias must be ", name_of(dtype),
                " or float32, got ", name_of(a.bias.dtype));
  }
  if (a.class_weight) require_vector(kOp, "class_weight", a.class_weight, v, DType::f32);
  if (a.token_weight) require_vector(kOp, "token_weight", a.token_weight, rows, DType::f32);
  if (a.upstream) require_vector(kOp, "upstream", a.upstream, rows, DType::f32);
  if (a.entropy_upstream) require_vector(kOp, "entropy_upstream", a.entropy_upstream, rows, DType::f32);
  TIGON_CHECK(kOp, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
  bool lora = a.lora_a.data != nullptr;
  TIGON_CHECK(kOp, lora == (a.lora_b.data != nullptr), "lora must have both A and B, got one");
  if (lora) {
    require_matrix(kOp, "lora A", a.lora_a, a.lora_a.rows, h, dtype);
    require_matrix(kOp, "lora B", a.lora_b, v, a.lora_a.rows, dtype);
  }
  TIGON_CHECK(kOp, lora || (!a.dlora_a.data && !a.dlora_b.data),
              "lora must be given for its gradients, got none");
}

void check_results(const LinearCrossEntropy& a) {
  int64_t rows = a.hidden.rows, h = a.hidden.cols, v = a.weight.rows;
  check_result("loss", a.loss, rows, DType::f32);
  check_result("z_term", a.z_term, rows, DType::f32);
  check_result("log_prob", a.log_prob, rows, DType::f32);
  check_result("lse", a.lse, rows, DType::f32);
  check_result("entropy", a.entropy, rows, DType::f32);
  check_result("predicted", a.predicted, rows, DType::i64);
  if (a.dhidden.data) require_matrix(kOp, "dhidden", a.dhidden, rows, h, a.hidden.dtype);
  if (a.dweight.data) {
    DType narrow = linear_cross_entropy_dweight(a.hidden.dtype, true);
    require_matrix(kOp, "dweight", a.dweight, v, h, a.dweight.dtype == narrow ? narrow : DType::f32);
  }
  if (a.dbias) require_vector(kOp, "dbias", a.dbias, v, DType::f32);
  if (a.dlora_a.data) require_matrix(kOp, "dlora_a", a.dlora_a, a.lora_a.rows, h, DType::f32);
  if (a.dlora_b.data) require_matrix(kOp, "dlora_b", a.dlora_b, v, a.lora_a.rows, DType::f32);
}

void check(const LinearCrossEntropy& a) {
  check_operands(a);
  check_results(a);
  require_vector(kOp, "loss", a.loss, a.hidden.rows, DType::f32);
  bool scalar = a.reduction != Reduction::none;
  if (scalar) {
    require_vector(kOp, "total", a.total, 1, DType::f32);
    require_vector(kOp, "scale", a.scale, 1, DType::f32);
  }
  TIGON_CHECK(kOp, a.chunk_rows >= 0, "chunk_rows must be >= 1 (or None), got ", a.chunk_rows);
  TIGON_CHECK(kOp, a.valid_rows >= -1 && a.valid_rows <= a.hidden.rows, "valid_rows must be in [0, ",
              a.hidden.rows, "] (or None), got ", a.valid_rows);
  TIGON_CHECK(kOp, !wants_gradients(a) || scalar || a.upstream,
              "upstream must be given for the gradients of per-row losses");
}

// How many rows count, where the host can know it; on the CPU labels are looked at before anything is written.
int64_t known_count(Context& ctx, const LinearCrossEntropy& a) {
  if (ctx.device() != Device::cpu) return a.valid_rows;
  const int64_t* target = a.target.as<int64_t>();
  int64_t count = 0, v = a.weight.rows;
  for (int64_t r = 0; r < a.target.size; ++r) {
    if (target[r] == a.ignore_index) continue;
    TIGON_CHECK(kOp, target[r] >= 0 && target[r] < v, "target must be in [0, ", v, ") or ", a.ignore_index,
                " (ignored), got ", target[r], " in row ", r);
    ++count;
  }
  TIGON_CHECK(kOp, a.valid_rows < 0 || a.valid_rows == count,
              "valid_rows must be the number of labels that are not ", a.ignore_index, ", ", count, ", got ",
              a.valid_rows);
  return count;
}

Matrix rows_from(const Matrix& m, int64_t first, int64_t count) {
  Matrix part = m;
  part.rows = count;
  if (m.data) part.data = static_cast<char*>(m.data) + first * m.stride * int64_t(size_of(m.dtype));
  return part;
}

Vector part_of(const Vector& v, int64_t first, int64_t count) {
  if (!v || v.size == 1) return v;  // [1]: for all rows
  return {.data = static_cast<char*>(v.data) + first * int64_t(size_of(v.dtype)),
          .dtype = v.dtype,
          .size = count};
}

Vector new_vector(Context& ctx, int64_t n, DType dtype = DType::f32) {
  return {.data = ctx.scratch(size_of(dtype) * size_t(std::max<int64_t>(n, 1))), .dtype = dtype, .size = n};
}
Matrix new_matrix(Context& ctx, int64_t rows, int64_t cols, int64_t stride, DType dtype) {
  void* data = ctx.scratch(size_of(dtype) * size_t(std::max<int64_t>(rows, 1) * stride));
  return {.data = data, .dtype = dtype, .rows = rows, .cols = cols, .stride = stride};
}
Matrix as_row(const Vector& v) {
  return {.data = v.data, .dtype = v.dtype, .rows = 1, .cols = v.size, .stride = v.size};
}

#define TIGON_BACKEND(call) on_device(kOp, ctx, [&] { cpu::call; }, TIGON_ON_CUDA(cuda::call))

void fill_zero(Context& ctx, const Matrix& m) {
  if (m.data && m.rows * m.cols > 0) TIGON_BACKEND(linear_cross_entropy_zero(ctx, m));
}

Vector make_ones(Context& ctx, DType dtype, int64_t n) {
  Vector ones = new_vector(ctx, n, dtype);
  TIGON_BACKEND(linear_cross_entropy_ones(ctx, ones));
  return ones;
}

// The rows a call works on, all of them or the list of those that count; and what the row pass reads and writes for them.
struct Rows {
  int64_t count = 0;
  bool listed = false;
  LinearCrossEntropyCompact list;
  Vector labels, factor, entropy_factor;
  Vector loss, lse, log_prob, entropy, predicted;
};

Vector factors(Context& ctx, const LinearCrossEntropy& a, const Rows& rows, const Vector& token_weight,
               const Vector& upstream, const Vector& scale) {
  Vector out = new_vector(ctx, rows.count);
  LinearCrossEntropyFactors f = {.target = a.target,
                                 .ignore_index = a.ignore_index,
                                 .index = rows.list.index,
                                 .token_weight = token_weight,
                                 .upstream = upstream,
                                 .scale = scale,
                                 .out = out};
  if (rows.count > 0) TIGON_BACKEND(linear_cross_entropy_factors(ctx, f));
  return out;
}

Rows choose_rows(Context& ctx, const LinearCrossEntropy& a) {
  int64_t all = a.hidden.rows, known = known_count(ctx, a);
  Rows r = {.count = all,
            .labels = a.target,
            .loss = a.loss,
            .lse = a.lse,
            .log_prob = a.log_prob,
            .entropy = a.entropy,
            .predicted = a.predicted};
  if (known >= 0 && known < all) {
    r.listed = true;
    r.count = known;
    r.list = {.target = a.target,
              .ignore_index = a.ignore_index,
              .index = new_vector(ctx, known, DType::i64),
              .labels = new_vector(ctx, known, DType::i64),
              .position = new_vector(ctx, all, DType::i64),
              .fault = new_vector(ctx, 1)};
    linear_cross_entropy_compact(ctx, r.list);
    r.labels = r.list.labels;
    r.loss = new_vector(ctx, known);
    if (a.log_prob) r.log_prob = new_vector(ctx, known);
    if (a.entropy) r.entropy = new_vector(ctx, known);
    if (a.predicted) r.predicted = new_vector(ctx, known, DType::i64);
  }
  if (a.z_term || (r.listed && a.lse)) r.lse = r.listed || !a.lse ? new_vector(ctx, r.count) : a.lse;
  if (!wants_gradients(a)) return r;
  Vector scale = a.upstream || !linear_cross_entropy_scales_early(a.hidden.dtype) ? Vector{} : a.scale;
  bool computed = a.token_weight || (r.listed && a.upstream);
  r.factor = computed     ? factors(ctx, a, r, a.token_weight, a.upstream, scale)
             : a.upstream ? a.upstream
                          : scale;
  if (a.entropy_upstream)
    r.entropy_factor = r.listed ? factors(ctx, a, r, {}, a.entropy_upstream, {}) : a.entropy_upstream;
  return r;
}

// From the rows worked on to all rows, with zeros where the label is ignored.
void write_results(Context& ctx, const LinearCrossEntropy& a, const Rows& r) {
  bool more = r.listed || a.token_weight || a.z_term || a.log_prob || a.lse || a.entropy || a.predicted;
  if (!more || a.hidden.rows == 0) return;
  LinearCrossEntropyResults results = {.target = a.target,
                                       .position = r.list.position,
                                       .fault = r.list.fault,
                                       .token_weight = a.token_weight,
                                       .ignore_index = a.ignore_index,
                                       .z_loss = a.z_loss,
                                       .loss = r.loss,
                                       .lse = r.lse,
                                       .log_prob = r.log_prob,
                                       .entropy = r.entropy,
                                       .predicted = r.predicted,
                                       .out_loss = a.loss,
                                       .out_z_term = a.z_term,
                                       .out_lse = a.lse,
                                       .out_log_prob = a.log_prob,
                                       .out_entropy = a.entropy,
                                       .out_predicted = a.predicted};
  TIGON_BACKEND(linear_cross_entropy_results(ctx, results));
}

// Memory of one chunk, used by all.
struct Workspace {
  Matrix logits, hidden, dhidden, lora_u,
      lora_t;  // hidden, dhidden: gathered rows; empty: the caller's own are used
  Vector ones;
};

Workspace make_workspace(Context& ctx, const LinearCrossEntropy& a, int64_t chunk, bool listed) {
  DType dtype = a.hidden.dtype;
  int64_t v = a.weight.rows, h = a.hidden.cols, r = a.lora_a.rows, lora_ld = (r + 7) / 8 * 8;
  int64_t ld =
      (v + 63) / 64 * 64;  // whole 128-byte lines, so that an odd vocabulary costs the products nothing
  Workspace w;
  if (!a.kept.data) w.logits = new_matrix(ctx, chunk, v, ld, dtype);
  if (listed) w.hidden = new_matrix(ctx, chunk, h, h, dtype);
  if (listed && a.dhidden.data) w.dhidden = new_matrix(ctx, chunk, h, h, dtype);
  if (a.lora_a.data)
    w.lora_u = new_matrix(ctx, chunk, r, lora_ld, dtype),
    w.lora_t = new_matrix(ctx, chunk, r, lora_ld, dtype);
  if (a.dbias) w.ones = make_ones(ctx, dtype, std::max<int64_t>(chunk, 1));
  return w;
}

// c (+)= alpha op(a) op(b); the shape of the product is c's.
struct Product {
  Matrix a, b, c;
  bool trans_a = false, trans_b = false;
  float alpha = 1.0f, beta = 0.0f;
};
void multiply(Context& ctx, const Product& p) {
  ctx.gemm({.m = p.c.rows,
            .n = p.c.cols,
            .k = p.trans_a ? p.a.rows : p.a.cols,
            .a = p.a.data,
            .lda = p.a.stride,
            .trans_a = p.trans_a,
            .b = p.b.data,
            .ldb = p.b.stride,
            .trans_b = p.trans_b,
            .c = p.c.data,
            .ldc = p.c.stride,
            .ab_dtype = p.a.dtype,
            .c_dtype = p.c.dtype,
            .alpha = p.alpha,
            .beta = p.beta});
}

// The low-rank part comes first: written, not added, and rounded where it is small.
void make_logits(Context& ctx, const LinearCrossEntropy& a, const Matrix& hidden, const Workspace& w) {
  bool lora = a.lora_a.data != nullptr;
  if (lora) {
    multiply(ctx, {.a = hidden, .b = a.lora_a, .c = w.lora_u, .trans_b = true, .alpha = a.lora_scale});
    multiply(ctx, {.a = w.lora_u, .b = a.lora_b, .c = w.logits, .trans_b = true});
  }
  multiply(ctx, {.a = hidden, .b = a.weight, .c = w.logits, .trans_b = true, .beta = lora ? 1.0f : 0.0f});
}

// The products of dlogits, which lie where the logits did. `first`: what is summed over chunks is written, not added to.
void make_gradients(Context& ctx, const LinearCrossEntropy& a, const Matrix& hidden, const Matrix& dhidden,
                    const Workspace& w, bool first) {
  const Matrix& dlogits = w.logits;
  bool lora = a.lora_a.data != nullptr, low = lora && (dhidden.data || a.dlora_a.data);
  float beta = first ? 0.0f : 1.0f;  // the first chunk writes: nothing is zero-filled
  if (low) multiply(ctx, {.a = dlogits, .b = a.lora_b, .c = w.lora_t, .alpha = a.lora_scale});
  if (low && dhidden.data) multiply(ctx, {.a = w.lora_t, .b = a.lora_a, .c = dhidden});
  if (dhidden.data) multiply(ctx, {.a = dlogits, .b = a.weight, .c = dhidden, .beta = low ? 1.0f : 0.0f});
  if (a.dweight.data)
    multiply(
        ctx,
        {.a = dlogits, .b = hidden, .c = a.dweight, .trans_a = true, .beta = a.add_dweight ? 1.0f : beta});
  if (a.dbias) {
    Matrix ones = as_row(w.ones);
    ones.cols = dlogits.rows;
    multiply(ctx, {.a = ones, .b = dlogits, .c = as_row(a.dbias), .beta = beta});
  }
  if (a.dlora_b.data)
    multiply(ctx, {.a = dlogits, .b = w.lora_u, .c = a.dlora_b, .trans_a = true, .beta = beta});
  if (a.dlora_a.data)
    multiply(ctx, {.a = w.lora_t, .b = hidden, .c = a.dlora_a, .trans_a = true, .beta = beta});
}

CrossEntropyRows row_pass(const LinearCrossEntropy& a, const Matrix& logits) {
  return {.logits = logits,
          .target = a.target,
          .bias = a.bias,
          .class_weight = a.class_weight,
          .ignore_index = a.ignore_index,
          .logit_scale = a.logit_scale,
          .softcap = a.softcap,
          .temperature = a.temperature,
          .label_smoothing = a.label_smoothing,
          .z_loss = a.z_loss};
}

int64_t chunk_of(Context& ctx, const LinearCrossEntropy& a, int64_t rows) {
  int64_t wanted = a.chunk_rows;
  if (wanted == 0)
    wanted = a.kept.data ? rows
                         : linear_cross_entropy_chunk({.device = ctx.device(),
                                                       .dtype = a.hidden.dtype,
                                                       .rows = rows,
                                                       .hidden = a.hidden.cols,
                                                       .vocab = a.weight.rows,
                                                       .dweight = a.dweight.data != nullptr,
                                                       .add_dweight = a.add_dweight});
  bool sums = wanted < rows || a.add_dweight;
  TIGON_CHECK(kOp, !a.dweight.data || !sums || a.dweight.dtype == DType::f32,
              "dweight must be float32 where it is summed over chunks, got ", name_of(a.dweight.dtype));
  return std::min(wanted, rows);
}

void run_chunk(Context& ctx, const LinearCrossEntropy& a, const Rows& r, int64_t begin, int64_t count,
               Workspace w) {
  if (a.kept.data) w.logits = rows_from(a.kept, begin, count);
  w.logits.rows = w.hidden.rows = w.dhidden.rows = w.lora_u.rows = w.lora_t.rows = count;
  Vector index = part_of(r.list.index, begin, count);
  auto move = [&](const Matrix& from, const Matrix& to, bool scatter) {
    LinearCrossEntropyMove m = {.from = from, .to = to, .index = index, .scatter = scatter};
    TIGON_BACKEND(linear_cross_entropy_move(ctx, m));
  };
  if (r.listed) {
    index.size = count;
    move(a.hidden, w.hidden, false);
  }
  Matrix hidden = r.listed ? w.hidden : rows_from(a.hidden, begin, count);
  Matrix dhidden = !a.dhidden.data ? Matrix{} : r.listed ? w.dhidden : rows_from(a.dhidden, begin, count);
  make_logits(ctx, a, hidden, w);
  CrossEntropyRows pass = row_pass(a, w.logits);
  bool gradients = wants_gradients(a) || a.kept.data;
  pass.target = part_of(r.labels, begin, count);
  pass.loss = part_of(r.loss, begin, count);
  pass.lse = part_of(r.lse, begin, count);
  pass.log_prob = part_of(r.log_prob, begin, count);
  pass.entropy = part_of(r.entropy, begin, count);
  pass.predicted = part_of(r.predicted, begin, count);
  if (gradients) {
    pass.dlogits = w.logits;
    pass.scale = part_of(r.factor, begin, count);
    pass.entropy_scale = part_of(r.entropy_factor, begin, count);
  }
  cross_entropy_rows(ctx, pass);
  make_gradients(ctx, a, hidden, dhidden, w, begin == 0);
  if (r.listed && dhidden.data) move(dhidden, a.dhidden, true);
}

void check_kept(const LinearCrossEntropy& a, int64_t count) {
  require_matrix(kOp, "kept", a.kept, std::max(a.kept.rows, count), a.weight.rows, a.hidden.dtype);
  TIGON_CHECK(kOp, !a.lora_a.data && !a.entropy_upstream,
              "kept gradients must be without lora and entropies");
}

// Nothing will write these.
void clear_gradients(Context& ctx, const LinearCrossEntropy& a) {
  if (!a.add_dweight) fill_zero(ctx, a.dweight);
  if (a.dbias) fill_zero(ctx, as_row(a.dbias));
  fill_zero(ctx, a.dlora_a);
  fill_zero(ctx, a.dlora_b);
}

}  // namespace

namespace {
// Rows of a chunk where there are several.
int64_t most_rows(const LinearCrossEntropySizes& s) {
  constexpr int64_t kLeast = 1024, kSmallLogits = int64_t(512) << 20;
  if (s.device == Device::cpu) return kLeast;
  int64_t most = std::max(kLeast, kSmallLogits / (std::max<int64_t>(s.vocab, 1) * int64_t(size_of(s.dtype))));
  return s.dweight ? std::max(most, s.hidden) : most;
}
}  // namespace

int64_t linear_cross_entropy_whole(const LinearCrossEntropySizes& s) {
  bool sums_cost = s.device == Device::cuda && s.dweight && !s.add_dweight && s.dtype != DType::f32;
  int64_t most = most_rows(s);
  return std::max(most + most / 4, sums_cost ? s.hidden * 23 / 10 : 0);
}

int64_t linear_cross_entropy_chunk(const LinearCrossEntropySizes& s) {
  if (s.rows <= linear_cross_entropy_whole(s)) return std::max<int64_t>(s.rows, 1);
  int64_t most = most_rows(s), chunks = (s.rows + most - 1) / most;
  return ((s.rows + chunks - 1) / chunks + 127) / 128 * 128;
}

void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& a) {
  check(a);
  if (a.reduction != Reduction::none)
    cross_entropy_scale(ctx, {.target = a.target,
                              .class_weight = a.class_weight,
                              .ignore_index = a.ignore_index,
                              .mean = a.reduction == Reduction::mean,
                              .denominator = a.denominator,
                              .host_denominator = a.host_denominator,
                              .has_host_denominator = a.has_host_denominator,
                              .scale = a.scale});
  Rows rows = choose_rows(ctx, a);
  if (a.kept.data) check_kept(a, rows.count);
  if (rows.count == 0) clear_gradients(ctx, a);
  if (rows.listed) fill_zero(ctx, a.dhidden);
  if (rows.count > 0) {
    int64_t chunk = chunk_of(ctx, a, rows.count);
    Workspace workspace = make_workspace(ctx, a, chunk, rows.listed);
    for (int64_t begin = 0; begin < rows.count; begin += chunk)
      run_chunk(ctx, a, rows, begin, std::min(chunk, rows.count - begin), workspace);
  }
  write_results(ctx, a, rows);
  if (a.reduction != Reduction::none)
    cross_entropy_total(ctx, {.loss = a.loss, .scale = a.scale, .total = a.total});
}

void linear_cross_entropy_kept_gradient(Context& ctx, const LinearCrossEntropy& a) {
  check_operands(a);
  check_results(a);
  require_vector(kOp, "upstream", a.upstream, a.hidden.rows, DType::f32);
  Rows r = choose_rows(ctx, a);
  check_kept(a, r.count);
  if (r.listed) fill_zero(ctx, a.dhidden);
  if (r.count == 0) return clear_gradients(ctx, a);
  Vector factor = factors(ctx, a, r, a.token_weight, a.upstream, {});
  DType dtype = a.hidden.dtype;
  int64_t h = a.hidden.cols;
  auto move = [&](const Matrix& from, const Matrix& to, const Vector& index, bool scatter) {
    LinearCrossEntropyMove m = {.from = from, .to = to, .index = index, .factor = factor, .scatter = scatter};
    TIGON_BACKEND(linear_cross_entropy_move(ctx, m));
  };
  // dweight = dlogits^T . diag(factor) . hidden, dhidden = diag(factor) . dlogits . weight: dlogits stay as they are.
  Workspace w = {.logits = rows_from(a.kept, 0, r.count)};
  Matrix hidden = new_matrix(ctx, r.count, h, h, dtype);
  if (a.dweight.data) move(a.hidden, hidden, r.list.index, false);
  if (a.dbias) {
    w.ones = make_ones(ctx, dtype, r.count);
    Matrix column = {.data = w.ones.data, .dtype = dtype, .rows = r.count, .cols = 1, .stride = 1};
    move(column, column, {}, false);
  }
  Matrix dhidden = a.dhidden.data && r.listed ? new_matrix(ctx, r.count, h, h, dtype) : a.dhidden;
  make_gradients(ctx, a, hidden, dhidden, w, true);
  if (dhidden.data) move(dhidden, a.dhidden, r.list.index, true);
}

void linear_cross_entropy_chunk_logits(Context& ctx, const LinearCrossEntropy& a, Matrix logits) {
  check_operands(a);
  check_results(a);
  if (a.hidden.rows == 0) return;
  require_matrix(kOp, "workspace", logits, a.hidden.rows, a.weight.rows, a.hidden.dtype);
  Workspace w = {.logits = logits};
  TIGON_CHECK(kOp, !a.lora_a.data, "lora must not be given here");
  make_logits(ctx, a, a.hidden, w);
  CrossEntropyRows pass = row_pass(a, logits);
  pass.loss = a.loss;
  pass.lse = a.lse;
  pass.log_prob = a.log_prob;
  pass.entropy = a.entropy;
  pass.predicted = a.predicted;
  cross_entropy_rows(ctx, pass);
  Rows all = {.count = a.hidden.rows,
              .labels = a.target,
              .loss = a.loss,
              .lse = a.lse,
              .log_prob = a.log_prob,
              .entropy = a.entropy,
              .predicted = a.predicted};
  write_results(ctx, a, all);
}

void linear_cross_entropy_chunk_gradient(Context& ctx, const LinearCrossEntropy& a, Matrix logits,
                                         bool first) {
  check_operands(a);
  check_results(a);
  require_vector(kOp, "upstream", a.upstream, a.hidden.rows, DType::f32);
  if (a.hidden.rows == 0) return first ? clear_gradients(ctx, a) : void();
  require_matrix(kOp, "workspace", logits, a.hidden.rows, a.weight.rows, a.hidden.dtype);
  Workspace w = {.logits = logits};
  if (a.dbias) w.ones = make_ones(ctx, a.hidden.dtype, a.hidden.rows);
  CrossEntropyRows pass = row_pass(a, logits);
  pass.dlogits = logits;
  pass.scale = a.upstream;
  pass.entropy_scale = a.entropy_upstream;
  cross_entropy_rows(ctx, pass);
  make_gradients(ctx, a, a.hidden, a.dhidden, w, first);
}

void linear_cross_entropy_compact(Context& ctx, const LinearCrossEntropyCompact& a) {
  require_dtype(kOp, "target", a.target.dtype, DType::i64);
  require_vector(kOp, "labels", a.labels, a.index.size, DType::i64);
  require_dtype(kOp, "index", a.index.dtype, DType::i64);
  require_vector(kOp, "position", a.position, a.target.size, DType::i64);
  require_vector(kOp, "fault", a.fault, 1, DType::f32);
  TIGON_BACKEND(linear_cross_entropy_compact(ctx, a));
}

void linear_cross_entropy_columns(Context& ctx, const LinearCrossEntropyColumns& a) {
  require_matrix(kOp, "result", a.to, a.from.rows, a.to.cols, a.from.dtype);
  if (a.to.rows > 0 && a.to.cols > 0) TIGON_BACKEND(linear_cross_entropy_columns(ctx, a));
}

void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a) {
  require_matrix(kOp, "gradient", a.out, a.in.rows, a.in.cols, a.out.dtype);
  require_vector(kOp, "upstream gradient", a.dloss, 1, DType::f32);
  if (a.scale) require_vector(kOp, "scale", a.scale, 1, DType::f32);
  if (a.in.rows == 0 || a.in.cols == 0) return;
  TIGON_CHECK(kOp, a.in.stride == a.in.cols && a.out.stride == a.out.cols, "gradients must be contiguous");
  if (a.in.data == a.out.data && !a.scale && a.in.dtype == a.out.dtype)
    return cross_entropy_rescale(ctx, {.grad = a.out, .factor = a.dloss});
  TIGON_BACKEND(linear_cross_entropy_finish(ctx, a));
}
#undef TIGON_BACKEND

}  // namespace tigon
