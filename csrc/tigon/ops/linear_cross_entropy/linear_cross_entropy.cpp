#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_cross_entropy";

void check_result(const char* name, const Vector& v, int64_t rows, DType dtype) {
  if (v) require_vector(kOp, name, v, rows, dtype);
}

// What the engine sees of a call.
LinearHead head_of(const LinearCrossEntropy& a) {
  return {.op = kOp,
          .hidden = a.hidden,
          .weight = a.weight,
          .bias = a.bias,
          .lora_a = a.lora_a,
          .lora_b = a.lora_b,
          .lora_scale = a.lora_scale,
          .wide_logits = a.wide_logits,
          .dhidden = a.dhidden,
          .dweight = a.dweight,
          .add_dweight = a.add_dweight,
          .dbias = a.dbias,
          .dlora_a = a.dlora_a,
          .dlora_b = a.dlora_b};
}

// Operands and results, in the engine's and the row pass's terms.
LinearHead checked(const LinearCrossEntropy& a) {
  LinearHead head = head_of(a);
  int64_t rows = a.hidden.rows;
  linear_head_check(head);
  require_vector(kOp, "target", a.target, rows, DType::i64);
  check_result("class_weight", a.class_weight, a.weight.rows, DType::f32);
  check_result("token_weight", a.token_weight, rows, DType::f32);
  check_result("upstream", a.upstream, rows, DType::f32);
  check_result("entropy_upstream", a.entropy_upstream, rows, DType::f32);
  TIGON_CHECK(kOp, a.temperature > 0.0f, "temperature must be > 0, got ", a.temperature);
  check_result("loss", a.loss, rows, DType::f32);
  check_result("z_term", a.z_term, rows, DType::f32);
  check_result("log_prob", a.log_prob, rows, DType::f32);
  check_result("lse", a.lse, rows, DType::f32);
  check_result("entropy", a.entropy, rows, DType::f32);
  check_result("predicted", a.predicted, rows, DType::i64);
  return head;
}

void check_call(const LinearCrossEntropy& a, const LinearHead& head) {
  require_vector(kOp, "loss", a.loss, a.hidden.rows, DType::f32);
  bool scalar = a.reduction != Reduction::none;
  if (scalar) {
    require_vector(kOp, "total", a.total, 1, DType::f32);
    require_vector(kOp, "scale", a.scale, 1, DType::f32);
  }
  TIGON_CHECK(kOp, a.chunk_rows >= 0, "chunk_rows must be >= 1 (or None), got ", a.chunk_rows);
  TIGON_CHECK(kOp, !head.wants_gradients() || scalar || a.upstream,
              "upstream must be given for the gradients of per-row losses");
}

void check_between(const LinearCrossEntropy& a) {
  if (a.unit.data) require_matrix(kOp, "unit", a.unit, a.hidden.rows, a.hidden.cols, a.hidden.dtype);
  if (a.kept.data) require_matrix(kOp, "kept", a.kept, a.kept.rows, a.weight.rows, a.hidden.dtype);
  bool any = a.unit.data || a.kept.data;
  TIGON_CHECK(kOp, !any || (a.reduction == Reduction::none && !a.entropy_upstream),
              "unit and kept must be of per-row losses, without gradients of entropies");
}

Vector factors(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows,
               const Vector& token_weight, const Vector& upstream, const Vector& scale) {
  Vector out = linear_head_vector(ctx, rows.count);
  linear_head_factors(ctx, {.target = a.target,
                            .ignore_index = a.ignore_index,
                            .index = rows.index,
                            .token_weight = token_weight,
                            .upstream = upstream,
                            .scale = scale,
                            .out = out});
  return out;
}

// A call with several labels a row as one with one: any that counts, and the sum of their upstream gradients.
LinearCrossEntropy of_one_label(Context& ctx, const LinearCrossEntropy& a) {
  if (!a.labels) return a;
  int64_t rows = a.hidden.rows, size = rows * a.label_count;
  TIGON_CHECK(kOp, a.label_count >= 1, "target must have at least one label a row, got ", a.label_count);
  require_vector(kOp, "target", a.labels, size, DType::i64);
  if (a.label_upstream) require_vector(kOp, "upstream", a.label_upstream, size, DType::f32);
  check_result("label_log_prob", a.label_log_prob, size, DType::f32);
  bool plain = a.reduction == Reduction::none && !a.class_weight && !a.token_weight && !a.log_prob &&
               !a.unit.data && !a.kept.data && a.label_smoothing == 0.0f && a.z_loss == 0.0f &&
               a.shift.shift == 0;
  TIGON_CHECK(kOp, plain, "several labels a row must have log-probabilities alone, and no shift");
  LinearCrossEntropy one = a;
  one.target = linear_head_vector(ctx, rows, DType::i64);
  if (a.label_upstream) one.upstream = linear_head_vector(ctx, rows);
  cross_entropy_label_targets(ctx, {.labels = a.labels,
                                    .count = a.label_count,
                                    .ignore_index = a.ignore_index,
                                    .classes = a.weight.rows,
                                    .upstream = a.label_upstream,
                                    .target = one.target,
                                    .factor = one.upstream});
  return one;
}

// The same call with the labels of its rows.
LinearCrossEntropy with_labels(Context& ctx, const LinearCrossEntropy& a) {
  LinearCrossEntropy b = a;
  b.target = linear_head_labels(ctx, kOp, a.target, a.ignore_index, a.shift);
  return b;
}

// What the row pass reads and writes for the rows worked on.
struct Values {
  Vector factor, entropy_factor;
  Vector loss, lse, log_prob, entropy, predicted;
  CrossEntropyLabels labels;  // count 0: one label a row
};

Values make_values(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, bool gradients) {
  Values v = {
      .loss = a.loss, .lse = a.lse, .log_prob = a.log_prob, .entropy = a.entropy, .predicted = a.predicted};
  if (rows.listed) {
    v.loss = linear_head_vector(ctx, rows.count);
    if (a.log_prob) v.log_prob = linear_head_vector(ctx, rows.count);
    if (a.entropy) v.entropy = linear_head_vector(ctx, rows.count);
    if (a.predicted) v.predicted = linear_head_vector(ctx, rows.count, DType::i64);
  }
  if (a.labels) {
    v.log_prob = linear_head_vector(ctx, rows.count);
    if (a.entropy_upstream && !v.entropy) v.entropy = linear_head_vector(ctx, rows.count);
    v.labels = {.labels = a.labels,
                .count = a.label_count,
                .ignore_index = a.ignore_index,
                .classes = a.weight.rows,
                .upstream = a.label_upstream,
                .target = a.target,
                .chosen = rows.labels,
                .scores = linear_head_vector(ctx, rows.count * a.label_count),
                .top = linear_head_vector(ctx, rows.count),
                .bias = a.bias,
                .logit_scale = a.logit_scale,
                .softcap = a.softcap,
                .temperature = a.temperature,
                .log_prob = v.log_prob,
                .position = rows.position,
                .fault = rows.fault,
                .out = a.label_log_prob};
  }
  if (a.z_term || (rows.listed && a.lse))
    v.lse = rows.listed || !a.lse ? linear_head_vector(ctx, rows.count) : a.lse;
  if (!gradients) return v;
  Vector scale = a.upstream || !linear_head_scales_early(a.hidden.dtype) ? Vector{} : a.scale;
  bool computed = a.token_weight || (rows.listed && a.upstream);
  v.factor = computed     ? factors(ctx, a, rows, a.token_weight, a.upstream, scale)
             : a.upstream ? a.upstream
                          : scale;
  if (a.entropy_upstream)
    v.entropy_factor = rows.listed ? factors(ctx, a, rows, {}, a.entropy_upstream, {}) : a.entropy_upstream;
  return v;
}

// The labels of a part of the rows worked on.
CrossEntropyLabels labels_of_part(const Values& v, const LinearHeadRows& rows, const LinearHeadPart& p) {
  CrossEntropyLabels l = v.labels;
  auto part = [&](const Vector& of) { return linear_head_part(of, p.begin, p.count); };
  l.begin = p.begin;
  l.index = rows.listed ? part(rows.index) : Vector{};
  l.chosen = part(l.chosen), l.top = part(l.top), l.log_prob = part(l.log_prob);
  l.scores = linear_head_part(l.scores, p.begin * l.count, p.count * l.count);
  l.entropy = part(v.entropy), l.entropy_scale = part(v.entropy_factor);
  l.logits = p.logits, l.dlogits = p.to;
  return l;
}

// From the rows worked on to all rows, with zeros where the label is ignored.
void write_results(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, const Values& v) {
  bool more = rows.listed || a.token_weight || a.z_term || a.log_prob || a.lse || a.entropy || a.predicted;
  if (!more) return;
  LinearHeadResults results = {
      .target = a.target, .ignore_index = a.ignore_index, .position = rows.position, .fault = rows.fault};
  results.add({.from = v.loss, .to = a.loss, .factor = a.token_weight});
  results.add({.from = v.lse, .to = a.z_term, .factor = a.token_weight, .gain = a.z_loss, .square = true});
  results.add({.from = v.lse, .to = a.lse});
  results.add({.from = v.log_prob, .to = a.log_prob});
  results.add({.from = v.entropy, .to = a.entropy});
  results.add({.from = v.predicted, .to = a.predicted});
  linear_head_results(ctx, results);
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

// Logits of a chunk and what the row pass makes of them: the results in `v`, and dlogits where they are wanted.
void pass_rows(Context& ctx, const LinearCrossEntropy& a, const LinearHead& head, const LinearHeadRows& rows,
               const Values& v, LinearHeadChunk& c, bool gradients) {
  linear_head_parts(ctx, head, c, [&](const LinearHeadPart& p) {
    auto part = [&](const Vector& of) { return linear_head_part(of, p.begin, p.count); };
    CrossEntropyRows pass = row_pass(a, p.logits);
    pass.target = part(rows.labels);
    pass.loss = part(v.loss);
    pass.lse = part(v.lse);
    pass.log_prob = part(v.log_prob);
    pass.entropy = part(v.entropy);
    pass.predicted = part(v.predicted);
    pass.only_label = a.only_label;
    if (gradients) {
      pass.dlogits = p.to;
      pass.scale = part(v.factor);
      pass.entropy_scale = part(v.entropy_factor);
    }
    if (v.labels.count == 0) return cross_entropy_rows(ctx, pass);
    CrossEntropyLabels labels = labels_of_part(v, rows, p);
    cross_entropy_label_scores(ctx, labels);
    cross_entropy_rows(ctx, pass);
    if (gradients) cross_entropy_label_gradient(ctx, labels);
  });
}

// Chunks of a call: those whose logits' gradients are kept come first.
struct Chunks {
  int64_t kept = 0, kept_limit = 1, limit = 1, most = 0, number = 0;

  Chunks(Context& ctx, const LinearCrossEntropy& a, const LinearHead& head, int64_t rows, int64_t kept_limit)
      : kept(a.kept.data ? std::min(a.kept.rows, rows) : 0),
        kept_limit(kept_limit),
        limit(linear_head_limit(ctx, head, rows, a.chunk_rows)),
        most(std::max(std::min(kept, kept_limit), std::min(rows - kept, limit))),
        number((kept + kept_limit - 1) / kept_limit + (rows - kept + limit - 1) / limit) {}

  int64_t count_at(int64_t begin, int64_t rows) const {
    return begin < kept ? std::min(kept_limit, kept - begin) : std::min(limit, rows - begin);
  }
};
// A forward has the chunks of one without gradients, kept rows or not: then its results have the same bits.
Chunks forward_chunks(Context& ctx, const LinearCrossEntropy& a, const LinearHead& head, int64_t rows) {
  return Chunks(ctx, a, head, rows, linear_head_limit(ctx, head, rows, a.chunk_rows));
}
// A backward needs no more memory for all kept rows than for some.
Chunks backward_chunks(Context& ctx, const LinearCrossEntropy& a, const LinearHead& head, int64_t rows) {
  return Chunks(ctx, a, head, rows,
                a.chunk_rows > 0 ? a.chunk_rows : std::max<int64_t>(std::min(a.kept.rows, rows), 1));
}

LinearHeadRows rows_of(Context& ctx, const LinearCrossEntropy& a, const LinearHead& head) {
  return linear_head_rows(ctx, head,
                          {.target = a.target, .ignore_index = a.ignore_index, .valid_rows = a.valid_rows});
}

}  // namespace

void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& call) {
  const LinearCrossEntropy a = with_labels(ctx, of_one_label(ctx, call));
  LinearHead head = checked(a);
  check_call(a, head);
  check_between(a);
  LinearHeadRows rows = rows_of(ctx, a, head);
  if (a.unit.data) head.dhidden = a.unit;
  Chunks chunks = forward_chunks(ctx, a, head, rows.count);
  linear_head_check_chunks(head, chunks.number);
  if (a.reduction != Reduction::none)
    cross_entropy_scale(ctx, {.target = a.target,
                              .class_weight = a.class_weight,
                              .ignore_index = a.ignore_index,
                              .mean = a.reduction == Reduction::mean,
                              .denominator = a.denominator,
                              .host_denominator = a.host_denominator,
                              .has_host_denominator = a.has_host_denominator,
                              .scale = a.scale});
  linear_head_clear(ctx, head, rows);
  Values values = make_values(ctx, a, rows, head.wants_gradients() && !a.unit.data);
  bool no_dlogits = a.wide_logits && a.hidden.dtype != DType::f32 && !head.wants_gradients();
  LinearHeadWorkspace workspace = linear_head_workspace(
      ctx, head, rows,
      {.chunk = chunks.most, .logits = chunks.kept < rows.count && !no_dlogits, .logits_rows = chunks.limit});
  for (int64_t begin = 0; begin < rows.count;) {
    LinearHeadChunk c = linear_head_chunk(head, rows, workspace, begin, chunks.count_at(begin, rows.count));
    bool keep = begin < chunks.kept;
    if (keep) c.logits = rows_from(a.kept, begin, c.count), c.padded = false;
    pass_rows(ctx, a, head, rows, values, c, head.wants_gradients() || keep);
    linear_head_gradients(ctx, head, c, {.first = begin == 0});
    begin += c.count;
  }
  write_results(ctx, a, rows, values);
  if (a.label_log_prob) cross_entropy_label_results(ctx, values.labels);
  if (a.reduction != Reduction::none)
    cross_entropy_total(ctx, {.loss = a.loss, .scale = a.scale, .total = a.total});
}

void linear_cross_entropy_rows_gradient(Context& ctx, const LinearCrossEntropy& call) {
  const LinearCrossEntropy a = with_labels(ctx, of_one_label(ctx, call));
  LinearHead head = checked(a);
  require_vector(kOp, "upstream", a.upstream, a.hidden.rows, DType::f32);
  check_between(a);
  LinearHeadRows rows = rows_of(ctx, a, head);
  if (a.unit.data) head.dhidden = {};  // the rest of the gradients
  Chunks chunks = backward_chunks(ctx, a, head, head.wants_gradients() ? rows.count : 0);
  linear_head_check_chunks(head, chunks.number);
  bool reads_weight = chunks.number > 0 && (head.dhidden.data || chunks.kept < rows.count);
  TIGON_CHECK(kOp, a.weight.data || !reads_weight,
              "weight must be given where logits are computed again, got its shape");
  if (a.unit.data && a.dhidden.data) {
    LinearHeadRows all = {.count = a.hidden.rows};
    Vector factor = factors(ctx, a, all, a.token_weight, a.upstream, {});
    linear_head_move(ctx, {.from = a.unit, .to = a.dhidden, .factor = factor});
  }
  linear_head_clear(ctx, head, rows);
  if (!head.wants_gradients()) return;
  LinearCrossEntropy silent = a;  // no result but gradients
  silent.loss = silent.log_prob = silent.lse = silent.entropy = silent.predicted = silent.z_term = {};
  Values values = make_values(ctx, silent, rows, true);
  if (chunks.kept > 0 && values.factor.data == a.upstream.data)  // 0 on ignored rows, whatever is upstream
    values.factor = factors(ctx, a, rows, {}, a.upstream, {});
  LinearHeadWorkspace workspace = linear_head_workspace(ctx, head, rows,
                                                        {.chunk = chunks.most,
                                                         .logits = chunks.kept < rows.count,
                                                         .logits_rows = chunks.limit,
                                                         .factored = chunks.kept > 0});
  for (int64_t begin = 0; begin < rows.count;) {
    LinearHeadChunk c = linear_head_chunk(head, rows, workspace, begin, chunks.count_at(begin, rows.count));
    LinearHeadPass pass = {.first = begin == 0};
    if (begin < chunks.kept) {
      c.logits = rows_from(a.kept, begin, c.count), c.padded = false;
      pass.factor = linear_head_part(values.factor, begin, c.count);
    } else {
      pass_rows(ctx, silent, head, rows, values, c, true);
    }
    linear_head_gradients(ctx, head, c, pass);
    begin += c.count;
  }
}

namespace {
void require_workspace(const LinearCrossEntropy& a, const Matrix& logits) {
  require_matrix(kOp, "workspace", logits, a.hidden.rows, a.weight.rows,
                 a.wide_logits ? DType::f32 : a.hidden.dtype);
}
}  // namespace

void linear_cross_entropy_chunk_logits(Context& ctx, const LinearCrossEntropy& a, Matrix logits) {
  LinearHead head = checked(a);
  if (a.hidden.rows == 0) return;
  require_workspace(a, logits);
  TIGON_CHECK(kOp, !a.lora_a.data, "lora must not be given here");
  LinearHeadRows all = {.count = a.hidden.rows, .labels = a.target};
  LinearHeadChunk c = linear_head_chunk(head, all, {}, 0, all.count);
  c.logits = logits;
  linear_head_logits(ctx, head, c);
  Values values = {
      .loss = a.loss, .lse = a.lse, .log_prob = a.log_prob, .entropy = a.entropy, .predicted = a.predicted};
  CrossEntropyRows pass = row_pass(a, logits);
  pass.loss = a.loss;
  pass.lse = a.lse;
  pass.log_prob = a.log_prob;
  pass.entropy = a.entropy;
  pass.predicted = a.predicted;
  cross_entropy_rows(ctx, pass);
  write_results(ctx, a, all, values);
}

void linear_cross_entropy_chunk_gradient(Context& ctx, const LinearCrossEntropy& a, Matrix logits,
                                         bool first) {
  LinearHead head = checked(a);
  require_vector(kOp, "upstream", a.upstream, a.hidden.rows, DType::f32);
  LinearHeadRows all = {.count = a.hidden.rows, .labels = a.target};
  if (all.count == 0) return first ? linear_head_clear(ctx, head, all) : void();
  require_workspace(a, logits);
  head.wide_logits = false;  // they are there
  bool apart = logits.dtype != a.hidden.dtype;
  LinearHeadWorkspace workspace =
      linear_head_workspace(ctx, head, all, {.chunk = all.count, .logits = apart});
  LinearHeadChunk c = linear_head_chunk(head, all, workspace, 0, all.count);
  if (!apart) c.logits = logits;
  CrossEntropyRows pass = row_pass(a, logits);
  pass.dlogits = c.logits;
  pass.scale = a.upstream;
  pass.entropy_scale = a.entropy_upstream;
  cross_entropy_rows(ctx, pass);
  linear_head_gradients(ctx, head, c, {.first = first});
}

}  // namespace tigon
