#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>
#include <utility>

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/cross_entropy/cross_entropy_labels.h"
#include "tigon/ops/cross_entropy/cross_entropy_shards.h"
#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_cross_entropy";

void check_result(const char* name, const Vector& v, int64_t rows, DType dtype) {
  if (v) require_vector(kOp, name, v, rows, dtype);
}

void check(const LinearCrossEntropy& a) {
  int64_t rows = a.head.hidden.rows;
  linear_head_check(a.head);
  require_vector(kOp, "target", a.labels.target, rows, DType::i64);
  check_result("class_weight", a.class_weight, a.head.weight.rows, DType::f32);
  check_result("token_weight", a.token_weight, rows, DType::f32);
  check_result("upstream", a.upstream, rows, DType::f32);
  check_result("entropy_upstream", a.entropy_upstream, rows, DType::f32);
  linear_head_check(kOp, a.formula);
  const LinearCrossEntropyResults& r = a.results;
  check_result("loss", r.loss, rows, DType::f32);
  check_result("z_term", r.z_term, rows, DType::f32);
  check_result("log_prob", r.log_prob, rows, DType::f32);
  check_result("lse", r.lse, rows, DType::f32);
  check_result("entropy", r.entropy, rows, DType::f32);
  check_result("predicted", r.predicted, rows, DType::i64);
  const KeptLogits& k = a.kept;
  if (k.unit.data) require_matrix(kOp, "unit", k.unit, rows, a.head.hidden.cols, a.head.hidden.dtype);
  if (k.dlogits.data)
    require_matrix(kOp, "kept", k.dlogits, k.dlogits.rows, a.head.weight.rows, a.head.hidden.dtype);
  bool any = k.unit.data || k.dlogits.data;
  TIGON_CHECK(kOp, !any || (a.reduction.kind == Reduction::none && (k.are_logits || !a.entropy_upstream)),
              "unit and kept must be of per-row losses, without gradients of entropies");
  TIGON_CHECK(kOp, !k.are_logits || (!k.unit.data && !a.head.wide_logits),
              "kept logits must be rounded ones, without unit");
}

Vector factors(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows,
               const Vector& token_weight, const Vector& upstream) {
  Vector out = linear_head_vector(ctx, rows.count);
  linear_head_factors(ctx, {.target = a.labels.target,
                            .ignore_index = a.labels.ignore_index,
                            .index = rows.index,
                            .token_weight = token_weight,
                            .upstream = upstream,
                            .out = out});
  return out;
}

// The labels of the rows, one each: of several any that counts, and the sum of their upstream gradients.
LinearCrossEntropy labelled(Context& ctx, const LinearCrossEntropy& call) {
  LinearCrossEntropy a = call;
  a.head.op = kOp;
  const LinearCrossEntropyLabels& l = a.several;
  if (l.labels) {
    int64_t rows = a.head.hidden.rows, size = rows * l.count;
    TIGON_CHECK(kOp, l.count >= 1, "target must have at least one label a row, got ", l.count);
    require_vector(kOp, "target", l.labels, size, DType::i64);
    if (l.upstream) require_vector(kOp, "upstream", l.upstream, size, DType::f32);
    check_result("label_log_prob", l.log_prob, size, DType::f32);
    bool plain = a.reduction.kind == Reduction::none && !a.class_weight && !a.token_weight &&
                 !a.results.log_prob && !a.kept.unit.data && !a.kept.dlogits.data &&
                 a.label_smoothing == 0.0f && a.z_loss == 0.0f && a.labels.shift.shift == 0;
    TIGON_CHECK(kOp, plain, "several labels a row must have log-probabilities alone, and no shift");
    a.labels.target = linear_head_vector(ctx, rows, DType::i64);
    if (l.upstream) a.upstream = linear_head_vector(ctx, rows);
    cross_entropy_label_targets(ctx, {.labels = l.labels,
                                      .count = l.count,
                                      .ignore_index = a.labels.ignore_index,
                                      .classes = a.head.weight.rows,
                                      .upstream = l.upstream,
                                      .target = a.labels.target,
                                      .factor = a.upstream});
  }
  a.labels = linear_head_labels(ctx, kOp, a.labels);
  return a;
}

// What the row pass reads and writes for the rows worked on.
struct Values {
  Vector factor, entropy_factor;
  LinearCrossEntropyResults results;
  CrossEntropyLabels labels;  // count 0: one label a row
};

Values make_values(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, bool gradients) {
  Values v = {.results = a.results};
  LinearCrossEntropyResults& r = v.results;
  r.z_term = {};
  if (rows.listed)
    for (Vector* of : {&r.loss, &r.log_prob, &r.entropy, &r.predicted})
      if (*of || of == &r.loss) *of = linear_head_vector(ctx, rows.count, of->dtype);
  if (a.several.labels) {
    r.log_prob = linear_head_vector(ctx, rows.count);
    if (a.entropy_upstream && !r.entropy) r.entropy = linear_head_vector(ctx, rows.count);
    v.labels = {.labels = a.several.labels,
                .count = a.several.count,
                .ignore_index = a.labels.ignore_index,
                .classes = a.head.weight.rows,
                .upstream = a.several.upstream,
                .target = a.labels.target,
                .chosen = rows.labels,
                .scores = linear_head_vector(ctx, rows.count * a.several.count),
                .top = linear_head_vector(ctx, rows.count),
                .bias = a.head.bias,
                .logit_scale = a.formula.logit_scale,
                .softcap = a.formula.softcap,
                .temperature = a.formula.temperature,
                .log_prob = r.log_prob,
                .position = rows.position,
                .fault = rows.fault,
                .out = a.several.log_prob};
  }
  if (a.results.z_term || (rows.listed && a.results.lse))
    r.lse = rows.listed || !a.results.lse ? linear_head_vector(ctx, rows.count) : a.results.lse;
  if (!gradients) return v;
  v.factor = linear_head_factor(
      ctx, a.head, a.labels, rows,
      {.token_weight = a.token_weight, .upstream = a.upstream, .scale = a.reduction.scale});
  if (a.entropy_upstream)
    v.entropy_factor = rows.listed ? factors(ctx, a, rows, {}, a.entropy_upstream) : a.entropy_upstream;
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
  l.entropy = part(v.results.entropy), l.entropy_scale = part(v.entropy_factor);
  l.logits = p.logits, l.dlogits = p.to;
  return l;
}

// From the rows worked on to all rows, with zeros where the label is ignored.
void write_results(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, const Values& v) {
  const LinearCrossEntropyResults &from = v.results, &to = a.results;
  bool more =
      rows.listed || a.token_weight || to.z_term || to.log_prob || to.lse || to.entropy || to.predicted;
  if (!more) return;
  LinearHeadResults results = {.target = a.labels.target,
                               .ignore_index = a.labels.ignore_index,
                               .position = rows.position,
                               .fault = rows.fault};
  results.add({.from = from.loss, .to = to.loss, .factor = a.token_weight});
  results.add(
      {.from = from.lse, .to = to.z_term, .factor = a.token_weight, .gain = a.z_loss, .square = true});
  results.add({.from = from.lse, .to = to.lse});
  results.add({.from = from.log_prob, .to = to.log_prob});
  results.add({.from = from.entropy, .to = to.entropy});
  results.add({.from = from.predicted, .to = to.predicted});
  linear_head_results(ctx, results);
}

// The row pass of `count` rows from `begin` on, with the results that `r` asks for.
CrossEntropyRows row_pass(const LinearCrossEntropy& a, const Matrix& logits, const Vector& labels,
                          const LinearCrossEntropyResults& r, int64_t begin, int64_t count) {
  auto part = [&](const Vector& of) { return linear_head_part(of, begin, count); };
  return {.logits = logits,
          .target = part(labels),
          .bias = a.head.bias,
          .class_weight = a.class_weight,
          .loss = part(r.loss),
          .lse = part(r.lse),
          .log_prob = part(r.log_prob),
          .entropy = part(r.entropy),
          .predicted = part(r.predicted),
          .only_label = r.only_label,
          .ignore_index = a.labels.ignore_index,
          .logit_scale = a.formula.logit_scale,
          .softcap = a.formula.softcap,
          .temperature = a.formula.temperature,
          .label_smoothing = a.label_smoothing,
          .z_loss = a.z_loss};
}

// What the row pass makes of logits: the results in `v`, and dlogits where they are wanted.
void pass_part(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, const Values& v,
               const LinearHeadPart& p, bool gradients) {
  CrossEntropyRows pass = row_pass(a, p.logits, rows.labels, v.results, p.begin, p.count);
  if (gradients) {
    pass.dlogits = p.to;
    pass.scale = linear_head_part(v.factor, p.begin, p.count);
    pass.entropy_scale = linear_head_part(v.entropy_factor, p.begin, p.count);
  }
  if (v.labels.count == 0) return cross_entropy_rows(ctx, pass);
  CrossEntropyLabels labels = labels_of_part(v, rows, p);
  cross_entropy_label_scores(ctx, labels);
  cross_entropy_rows(ctx, pass);
  if (gradients) cross_entropy_label_gradient(ctx, labels);
}
// The same of a chunk, whose logits are made before.
void pass_rows(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, const Values& v,
               LinearHeadChunk& c, bool gradients) {
  linear_head_parts(ctx, a.head, c,
                    [&](const LinearHeadPart& p) { pass_part(ctx, a, rows, v, p, gradients); });
}

// Losses, log-probabilities and lse of a call that wants nothing else of the logits, without them; false where that cannot be.
bool pass_statistics(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, const Values& v) {
  const LinearCrossEntropyResults& r = v.results;
  bool all = a.head.wants_gradients() || a.kept.dlogits.data || a.several.labels || r.entropy ||
             r.predicted || a.label_smoothing > 0.0f;
  if (all || rows.count == 0) return false;
  Matrix parts = linear_head_matrix(ctx, 3, rows.count, rows.count, DType::f32);
  if (!linear_head_statistics(ctx, a.head, rows, a.formula, parts)) return false;
  cross_entropy_combine(ctx, {.parts = parts,
                              .target = rows.labels,
                              .class_weight = a.class_weight,
                              .classes = a.head.weight.rows,
                              .ignore_index = a.labels.ignore_index,
                              .z_loss = a.z_loss,
                              .loss = r.loss,
                              .log_prob = r.log_prob,
                              .lse = r.lse});
  return true;
}

// Chunks of a call: those whose logits' gradients are kept come first.
struct Chunks {
  int64_t kept = 0, kept_limit = 1, limit = 1, most = 0, number = 0;

  // A forward has the chunks of one without gradients, kept rows or not: then its results have the same bits. A backward
  // needs no more memory for all kept rows than for some.
  Chunks(Context& ctx, const LinearCrossEntropy& a, int64_t rows, bool forward)
      : kept(a.kept.dlogits.data ? std::min(a.kept.dlogits.rows, rows) : 0),
        limit(linear_head_limit(ctx, a.head, rows, a.labels.chunk_rows)) {
    kept_limit = forward || a.kept.are_logits ? limit
                 : a.labels.chunk_rows > 0    ? a.labels.chunk_rows
                                              : std::max<int64_t>(std::min(a.kept.dlogits.rows, rows), 1);
    most = std::max(std::min(kept, kept_limit), std::min(rows - kept, limit));
    number = (kept + kept_limit - 1) / kept_limit + (rows - kept + limit - 1) / limit;
    linear_head_check_chunks(a.head, number);
  }

  int64_t count_at(int64_t begin, int64_t rows) const {
    return begin < kept ? std::min(kept_limit, kept - begin) : std::min(limit, rows - begin);
  }
};

// All chunks of a forward: results, and gradients where they are wanted.
void pass_chunks(Context& ctx, const LinearCrossEntropy& a, const LinearHeadRows& rows, const Values& values,
                 const Chunks& chunks) {
  const LinearHead& head = a.head;
  bool no_dlogits = head.wide_logits && head.hidden.dtype != DType::f32 && !head.wants_gradients();
  LinearHeadWorkspace workspace = linear_head_workspace(
      ctx, head, rows,
      {.chunk = chunks.most, .logits = chunks.kept < rows.count && !no_dlogits, .logits_rows = chunks.limit});
  for (int64_t begin = 0; begin < rows.count;) {
    LinearHeadChunk c = linear_head_chunk(head, rows, workspace, begin, chunks.count_at(begin, rows.count));
    bool keep = begin < chunks.kept;
    if (keep) c.logits = rows_from(a.kept.dlogits, begin, c.count), c.padded = false;
    pass_rows(ctx, a, rows, values, c, head.wants_gradients() || (keep && !a.kept.are_logits));
    linear_head_gradients(ctx, head, c, {.first = begin == 0});
    begin += c.count;
  }
}

}  // namespace

void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& call) {
  LinearCrossEntropy a = labelled(ctx, call);
  check(a);
  require_vector(kOp, "loss", a.results.loss, a.head.hidden.rows, DType::f32);
  linear_head_check(kOp, a.reduction);
  TIGON_CHECK(kOp, a.labels.chunk_rows >= 0, "chunk_rows must be >= 1 (or None), got ", a.labels.chunk_rows);
  TIGON_CHECK(kOp, !a.head.wants_gradients() || a.reduction.kind != Reduction::none || a.upstream,
              "upstream must be given for the gradients of per-row losses");
  LinearHeadRows rows = linear_head_rows(ctx, a.head, a.labels);
  if (a.kept.unit.data) a.head.dhidden = a.kept.unit;
  const LinearHead& head = a.head;
  Chunks chunks(ctx, a, rows.count, true);
  linear_head_scale(ctx, a.reduction, a.labels, a.class_weight);
  linear_head_clear(ctx, head, rows);
  Values values = make_values(ctx, a, rows, head.wants_gradients() && !a.kept.unit.data);
  if (!pass_statistics(ctx, a, rows, values)) pass_chunks(ctx, a, rows, values, chunks);
  write_results(ctx, a, rows, values);
  if (a.several.log_prob) cross_entropy_label_results(ctx, values.labels);
  linear_head_total(ctx, a.reduction, a.results.loss);
}

void linear_cross_entropy_rows_gradient(Context& ctx, const LinearCrossEntropy& call) {
  LinearCrossEntropy a = labelled(ctx, call);
  check(a);
  LinearHead& head = a.head;
  require_vector(kOp, "upstream", a.upstream, head.hidden.rows, DType::f32);
  a.results = {};  // no result but gradients
  LinearHeadRows rows = linear_head_rows(ctx, head, a.labels);
  Matrix dhidden = head.dhidden;
  if (a.kept.unit.data) head.dhidden = {};  // the rest of the gradients
  Chunks chunks(ctx, a, head.wants_gradients() ? rows.count : 0, false);
  bool reads_weight = chunks.number > 0 && (head.dhidden.data || chunks.kept < rows.count);
  TIGON_CHECK(kOp, head.weight.data || !reads_weight,
              "weight must be given where logits are computed again, got its shape");
  if (a.kept.unit.data && dhidden.data) {
    LinearHeadRows all = {.count = head.hidden.rows};
    Vector factor = factors(ctx, a, all, a.token_weight, a.upstream);
    linear_head_move(ctx, {.from = a.kept.unit, .to = dhidden, .factor = factor});
  }
  linear_head_clear(ctx, head, rows);
  if (!head.wants_gradients()) return;
  Values values = make_values(ctx, a, rows, true);
  // Which rows are kept depends on their number: those computed again are scaled where kept ones are, after the products, and so
  // are those whose logits were kept.
  const bool late = (ctx.deterministic || a.kept.are_logits) && !a.entropy_upstream && !a.several.labels;
  const int64_t formed = a.kept.are_logits ? 0 : chunks.kept;  // rows whose dlogits are there
  if ((formed > 0 || late) &&
      values.factor.data == a.upstream.data)  // 0 on ignored rows, whatever is upstream
    values.factor = factors(ctx, a, rows, {}, a.upstream);
  const Vector factor = values.factor;
  if (late) values.factor = {};
  LinearHeadWorkspace workspace =
      linear_head_workspace(ctx, head, rows,
                            {.chunk = chunks.most,
                             .logits = (a.kept.overwrite ? chunks.kept : formed) < rows.count,
                             .logits_rows = chunks.limit,
                             .factored = formed > 0 || late});
  for (int64_t begin = 0; begin < rows.count;) {
    LinearHeadChunk c = linear_head_chunk(head, rows, workspace, begin, chunks.count_at(begin, rows.count));
    LinearHeadPass pass = {.first = begin == 0};
    const bool kept = begin < chunks.kept;
    const Matrix there = rows_from(a.kept.dlogits, begin, c.count);
    if (kept && (begin < formed || a.kept.overwrite)) c.logits = there, c.padded = false;
    if (!kept)
      pass_rows(ctx, a, rows, values, c, true);
    else if (a.kept.are_logits)
      pass_part(ctx, a, rows, values, {begin, c.count, there, c.logits}, true);
    if (begin < formed || late) pass.factor = linear_head_part(factor, begin, c.count);
    linear_head_gradients(ctx, head, c, pass);
    begin += c.count;
  }
}

namespace {
// The arguments of one chunk, with its logits in the caller's memory.
LinearCrossEntropy checked_chunk(const LinearCrossEntropy& call, const Matrix& logits) {
  LinearCrossEntropy a = call;
  a.head.op = kOp;
  check(a);
  if (a.head.hidden.rows > 0)
    require_matrix(kOp, "workspace", logits, a.head.hidden.rows, a.head.weight.rows,
                   a.head.wide_logits ? DType::f32 : a.head.hidden.dtype);
  return a;
}
}  // namespace

void linear_cross_entropy_chunk_logits(Context& ctx, const LinearCrossEntropy& call, Matrix logits) {
  LinearCrossEntropy a = checked_chunk(call, logits);
  if (a.head.hidden.rows == 0) return;
  TIGON_CHECK(kOp, !a.head.lora_a.data, "lora must not be given here");
  LinearHeadRows all = {.count = a.head.hidden.rows, .labels = a.labels.target};
  LinearHeadChunk c = linear_head_chunk(a.head, all, {}, 0, all.count);
  c.logits = logits;
  linear_head_logits(ctx, a.head, c);
  cross_entropy_rows(ctx, row_pass(a, logits, all.labels, a.results, 0, all.count));
  write_results(ctx, a, all, {.results = a.results});
}

void linear_cross_entropy_chunk_gradient(Context& ctx, const LinearCrossEntropy& call, Matrix logits,
                                         bool first) {
  LinearCrossEntropy a = checked_chunk(call, logits);
  LinearHead& head = a.head;
  require_vector(kOp, "upstream", a.upstream, head.hidden.rows, DType::f32);
  LinearHeadRows all = {.count = head.hidden.rows, .labels = a.labels.target};
  if (all.count == 0) return first ? linear_head_clear(ctx, head, all) : void();
  head.wide_logits = false;  // they are there
  bool apart = logits.dtype != head.hidden.dtype;
  LinearHeadWorkspace workspace =
      linear_head_workspace(ctx, head, all, {.chunk = all.count, .logits = apart});
  LinearHeadChunk c = linear_head_chunk(head, all, workspace, 0, all.count);
  if (!apart) c.logits = logits;
  CrossEntropyRows pass = row_pass(a, logits, all.labels, {}, 0, all.count);
  pass.dlogits = c.logits;
  pass.scale = a.upstream;
  pass.entropy_scale = a.entropy_upstream;
  cross_entropy_rows(ctx, pass);
  linear_head_gradients(ctx, head, c, {.first = first});
}

namespace {

// PyTorch's operators.

struct Operands : LinearHeadFields {
  LinearCrossEntropy call;
  int64_t vocab = 0, labels = -1;  // first dimension of weight; of target, as Fields::flat has it

  void operands(Fields& f) {
    LinearHead& h = call.head;
    f.rows("hidden", h.hidden), f.stacked("weight", h.weight, vocab, h.weight.dtype);
    f.flat("target", call.labels.target, Role::input, &labels);
    parameters(f, h, call.labels, call.formula);
  }
  LinearHeadPlan plan(const Fields& f) const {
    const LinearHead& h = call.head;
    return linear_head_memory({.cuda = f.on_cuda(),
                               .dtype = int64_t(h.hidden.dtype),
                               .weight_dtype = int64_t(h.hidden.dtype),
                               .rows = h.hidden.rows,
                               .worked = worked(h, call.labels),
                               .hidden = h.hidden.cols,
                               .vocab = h.weight.rows,
                               .lora_rank = (needs & (need_lora_a | need_lora_b)) != 0,
                               .train_hidden = (needs & need_hidden) != 0,
                               .train_weight = (needs & need_weight) != 0,
                               .train_bias = (needs & need_bias) != 0,
                               .main_grad = (needs & into_main_grad) != 0,
                               .chunk_rows = call.labels.chunk_rows,
                               .per_row = 1,
                               .keep_rows = keep_rows,
                               .unit = (needs & need_unit) != 0});
  }
  void kept(Fields& f, const LinearHeadPlan& p, Role role) {
    const LinearHead& h = call.head;
    f.result_if(p.kept > 0, "kept", call.kept.dlogits, p.kept, linear_head_logit_stride(h.weight.rows),
                h.hidden.dtype, role);
  }
  LinearCrossEntropy arguments() const {
    LinearCrossEntropy a = call;
    a.head.op = kOp;
    a.class_weight = class_weight, a.token_weight = token_weight;
    a.label_smoothing = label_smoothing, a.z_loss = z_loss;
    a.kept.dlogits.cols = a.head.weight.rows, a.kept.are_logits = needs & keep_logits;
    TIGON_CHECK(kOp, labels >= -1, "target must have one dimension, got ", -labels);
    if (labels < 0) return a;
    a.several.labels = a.labels.target, a.labels.target = {};
    a.several.count = labels > 0 ? a.several.labels.size / labels : 1;
    return a;
  }
};

struct Forward : Operands {
  enum Output : int64_t { z_term = 1, log_prob = 2, lse = 4, entropy = 8, predicted = 16, only_label = 32 };

  void fields(Fields& f) {
    LinearCrossEntropyResults& r = call.results;
    operands(f), reduction(f, call.reduction), f.option("outputs", outputs);
    losses(f, call.reduction, r.loss, call.head);
    // Of per-row losses the gradients are made in their backward; dhidden is that of an upstream gradient of 1.
    const bool one = call.reduction.kind != Reduction::none;
    const LinearHeadPlan p = one ? LinearHeadPlan{} : plan(f);
    LinearHeadFields formed = *this;
    if (!one) formed.needs = p.unit ? int64_t(need_hidden) : 0;
    formed.gradients(f, call.head, call.labels);
    numbers(f, predicted - 1, call.head);
    f.result_if(outputs & predicted, "predicted", r.predicted, call.head.hidden.rows, DType::i64);
    kept(f, p, Role::result);
  }
  static void run(Context& ctx, const Forward& given) {
    LinearCrossEntropy a = given.arguments();
    LinearHeadFields from = given;
    LinearCrossEntropyResults& r = a.results;
    r.loss = losses(ctx, a.reduction, r.loss, a.head);
    r.z_term = from.take(z_term), r.log_prob = from.take(log_prob);
    r.lse = from.take(lse), r.entropy = from.take(entropy);
    r.only_label = from.outputs & only_label;
    if (a.reduction.kind == Reduction::none) a.kept.unit = std::exchange(a.head.dhidden, {});
    linear_cross_entropy(ctx, a);
  }
};

// The gradients of per-row losses. weight is [V, 0] where its values are not needed. In place: dweight is added to main_grad, and with
// `finish` unit becomes dhidden in its own memory and kept logits their gradients; what is written so is not returned.
template <bool in_place>
struct RowsBackward : Operands {
  Vector upstream;
  Matrix main_grad;
  bool finish = false;

  void fields(Fields& f) {
    LinearHead& h = call.head;
    Matrix &unit = call.kept.unit, &dlogits = call.kept.dlogits;
    f.flat("upstream", upstream, Role::input), f.optional("entropy_upstream", call.entropy_upstream);
    in_place ? f.updated("unit", unit) : f.optional("unit", unit);
    in_place ? f.updated("kept", dlogits) : f.optional("kept", dlogits);
    if (in_place) f.updated("main_grad", main_grad);
    operands(f);
    if (in_place) f.option("finish", finish);
    if (h.weight.cols == 0)
      h.weight = {.dtype = h.hidden.dtype, .rows = vocab, .cols = h.hidden.cols, .stride = h.hidden.cols};
    const bool some = dlogits.data, all = some && dlogits.rows >= worked(h, call.labels);
    LinearHeadFields formed = *this;
    if (main_grad.data) formed.needs &= ~need_weight;
    if (finish && unit.data) formed.needs &= ~need_hidden;
    if (some && !all) formed.needs &= ~may_round;  // several chunks
    formed.gradients(
        f, h, (all && call.labels.chunk_rows == 0 && !(needs & keep_logits)) || whole(f, h, call.labels));
  }
  static void run(Context& ctx, const RowsBackward& given) {
    LinearCrossEntropy a = given.arguments();
    a.reduction.kind = Reduction::none;
    (a.several.labels ? a.several.upstream : a.upstream) = given.upstream;
    if (given.finish && a.kept.unit.data && given.needs & need_hidden) a.head.dhidden = a.kept.unit;
    a.kept.overwrite = given.finish && a.kept.are_logits;
    if (given.main_grad.data) a.head.dweight = given.main_grad, a.head.add_dweight = true;
    linear_cross_entropy_rows_gradient(ctx, a);
  }
};

// The log-probability of each label, and the entropy of each distribution; `chunk`: of one, whose logits stay with the caller.
template <bool chunk>
struct LogProb : Operands {
  Matrix logits;
  Vector log_prob;
  bool entropy = false;

  void fields(Fields& f) {
    if (chunk) f.padded_rows("logits", logits, true);
    operands(f), f.option("entropy", entropy);
    f.result_if(true, "log_prob", log_prob, call.labels.target);
    f.result_if(entropy, "entropy", call.results.entropy, call.head.hidden.rows);
    if (chunk) return;
    const LinearHeadPlan p = plan(f);
    f.result_if(p.unit, "unit", call.kept.unit, call.head.hidden, Role::statistics);
    kept(f, p, Role::statistics);
  }
  static void run(Context& ctx, const LogProb& given) {
    LinearCrossEntropy a = given.arguments();
    (a.several.labels ? a.several.log_prob : a.results.log_prob) = given.log_prob;
    if (chunk) return linear_cross_entropy_chunk_logits(ctx, a, given.logits);
    a.reduction.kind = Reduction::none;
    a.results.loss = linear_head_vector(ctx, a.head.hidden.rows);
    linear_cross_entropy(ctx, a);
  }
};

// The gradients of a chunk, from those logits.
struct ChunkGradient : Operands {
  Matrix logits;
  bool first = true;

  void fields(Fields& f) {
    LinearHead& h = call.head;
    f.padded_rows("logits", logits, true);
    f.updated("dhidden", h.dhidden), f.updated("dweight", h.dweight), f.updated("dbias", h.dbias);
    f.input("upstream", call.upstream), f.optional("entropy_upstream", call.entropy_upstream);
    operands(f), f.option("first", first);
  }
};

constexpr auto forward = Forward::run;
constexpr auto rows_backward = RowsBackward<false>::run;
constexpr auto rows_backward_in_place = RowsBackward<true>::run;
constexpr auto log_prob = LogProb<false>::run;
constexpr auto chunk_logits = LogProb<true>::run;
void chunk_gradient(Context& ctx, const ChunkGradient& given) {
  linear_cross_entropy_chunk_gradient(ctx, given.arguments(), given.logits, given.first);
}
TIGON_OPERATOR(forward, Forward, kOp, forward)
TIGON_OPERATOR(rows_backward, RowsBackward<false>, "linear_cross_entropy_rows_bwd", none)
TIGON_OPERATOR(rows_backward_in_place, RowsBackward<true>, "linear_cross_entropy_rows_bwd_", none)
TIGON_OPERATOR(log_prob, LogProb<false>, "linear_log_prob", forward)
TIGON_OPERATOR(chunk_logits, LogProb<true>, "linear_loss_logits", none)
TIGON_OPERATOR(chunk_gradient, ChunkGradient, "linear_loss_gradient", none)

}  // namespace

}  // namespace tigon
