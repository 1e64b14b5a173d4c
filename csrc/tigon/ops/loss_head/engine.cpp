#include "tigon/ops/loss_head/engine.h"

#include <algorithm>
#include <utility>

#include "tigon/base/require.h"

namespace tigon {
namespace {

void check(const LossHead& a) {
  const char* op = a.head.op;
  const int64_t rows = a.head.hidden.rows;
  require_optional(op, "token_weight", a.token_weight, rows);
  require_optional(op, "upstream", a.upstream, rows);
  require_optional(op, "loss", a.loss, rows);
  loss_head_check(op, a.reduction);
  TIGON_CHECK(op, a.labels.chunk_rows >= 0, "chunk_rows must be >= 1 (or None), got ", a.labels.chunk_rows);
  const bool takes_upstream = a.labelled && !a.groups && !a.unit && a.reduction.kind == Reduction::none;
  const bool plain = !a.head.lora_a.data && !a.head.wide_logits && !a.f32_logits && !a.head.add_dweight;
  TIGON_CHECK(op, !a.head.by_classes || plain,
              "by_classes must be without LoRA, float32 logits and a gradient to add to");
  TIGON_CHECK(op, a.upstream || !takes_upstream || !a.head.wants_gradients(),
              "upstream must be given for the gradients of per-row losses");
}

int64_t limit_of(Context& ctx, const LossHead& a, int64_t rows) {
  LinearHead all = a.head;
  if (a.classes > 0) all.weight.rows = a.classes;
  const int64_t limit =
      loss_head_limit(ctx, all, rows, a.labels.chunk_rows, a.labelled && !a.kept.dlogits.data);
  return std::max<int64_t>(limit / a.together, 1) * a.together;
}

// Divides the rows into spans of `limit` rows. Those of kept rows come first and hold no others.
void plan_rows(LossHeadRun& run) {
  const LossHead& a = run.a;
  const int64_t rows = run.rows.count / a.together * a.together;
  int64_t kept_limit = run.limit;
  if (a.kept.dlogits.data) run.kept = std::min(a.kept.dlogits.rows, rows);
  if (a.kept.holds == LossHeadKept::Holds::gradients)
    kept_limit = a.labels.chunk_rows > 0 ? a.labels.chunk_rows : std::max<int64_t>(run.kept, 1);
  for (int64_t begin = 0; begin < rows;) {
    const bool kept = begin < run.kept;
    const int64_t count = std::min(kept ? kept_limit : run.limit, (kept ? run.kept : rows) - begin);
    run.spans.push_back({.begin = begin, .count = count});
    begin += count;
  }
}

// Returns the number of rows of each group: only those that count if the host can read the labels.
std::vector<int64_t> group_rows(Context& ctx, const LossHead& a) {
  const LossHeadGroups& g = *a.groups;
  std::vector<int64_t> found(size_t(g.count()), (g.pairs ? 2 : 1) * g.tokens);
  if (ctx.device() != Device::cpu) return found;
  std::fill(found.begin(), found.end(), 0);
  const int64_t* labels = a.labels.target.as<int64_t>();
  for (int64_t r = 0; r < a.labels.target.size; ++r)
    found[size_t(r / g.tokens % g.count())] += labels[r] != a.labels.ignore_index;
  return found;
}

// Makes the list in which the rows of a pair are adjacent.
LossHeadRows pair_rows(Context& ctx, const LossHead& a, const LossHeadRows& rows) {
  const bool compact = ctx.device() == Device::cpu;
  const int64_t count = compact ? rows.count : a.labels.target.size;
  LossHeadRows r = {.count = count,
                    .listed = true,
                    .labels = loss_head_vector(ctx, count, DType::i64),
                    .index = loss_head_vector(ctx, count, DType::i64),
                    .position = loss_head_vector(ctx, a.labels.target.size, DType::i64)};
  const LossHeadPairs list = {.target = a.labels.target,
                              .ignore_index = a.labels.ignore_index,
                              .pairs = a.groups->count(),
                              .tokens = a.groups->tokens,
                              .compact = compact,
                              .index = r.index,
                              .labels = r.labels,
                              .position = r.position};
  TIGON_RUN(a.head.op, ctx, loss_head_pairs, list);
  return r;
}

// Divides the rows into chunks as without groups, and notes the groups that each chunk touches.
void plan_tokens(LossHeadRun& run) {
  const LossHeadGroups& g = *run.a.groups;
  plan_rows(run);
  for (LossHeadSpan& s : run.spans) {
    s.groups = g.count();
    if (run.rows.listed || g.pairs || run.rows.count <= run.limit) continue;
    s.group = s.begin / g.tokens;  // the rows are in order
    s.groups = (s.begin + s.count - 1) / g.tokens - s.group + 1;
  }
}

// Divides the groups into chunks. The bits of a GEMM depend on its rows, so the chunks are the same with and
// without gradients.
void plan_groups(LossHeadRun& run) {
  const LossHead& a = run.a;
  const LossHeadGroups& g = *a.groups;
  LossHeadLabels labels = a.labels;
  // If the list is made on the device, the host does not know how many of its rows a group has. It can be
  // used only if one chunk takes all.
  if (g.coupled && run.ctx.device() != Device::cpu && labels.valid_rows >= 0 &&
      limit_of(run.ctx, a, labels.valid_rows) < labels.valid_rows)
    labels.valid_rows = -1;
  run.rows = loss_head_rows(run.ctx, a.head, labels);
  run.limit = run.part = limit_of(run.ctx, a, run.rows.count);
  if (!g.coupled || run.rows.count <= run.limit) return plan_tokens(run);
  const std::vector<int64_t> sizes = group_rows(run.ctx, a);
  const int64_t most = labels.chunk_rows > 0 ? run.limit : loss_head_group_limit(a.head, run.limit);
  run.whole = *std::max_element(sizes.begin(), sizes.end()) <= most;
  if (!run.whole) return plan_tokens(run);
  if (g.pairs) run.rows = pair_rows(run.ctx, a, run.rows);
  run.spans = loss_head_spans(a.head, sizes, run.limit);
}

void plan(LossHeadRun& run, RowPass& pass) {
  const LossHead& a = run.a;
  if (a.groups) {
    plan_groups(run);
  } else {
    run.rows =
        a.labelled ? loss_head_rows(run.ctx, a.head, a.labels) : LossHeadRows{.count = a.head.hidden.rows};
    run.limit = limit_of(run.ctx, a, run.rows.count);
    run.part = pass.part(run.ctx, run.rows.count);
    if (!a.head.wants_gradients()) run.limit = std::min(run.limit, std::max<int64_t>(run.part, 1));
    run.part = std::min(run.part, run.limit);
    plan_rows(run);
  }
  loss_head_check_chunks(a.head, int64_t(run.spans.size()));
}

LossHeadWorkspace make_workspace(const LossHeadRun& run) {
  const LossHead& a = run.a;
  const bool kept_are_read = a.kept.holds == LossHeadKept::Holds::logits && !a.kept.overwrite;
  const bool apart = a.f32_logits || (a.head.wide_logits && a.head.hidden.dtype != DType::f32);
  LossHeadWorkspaceSizes m = {
      .logits = (kept_are_read ? 0 : run.kept) < run.rows.count && (!apart || a.head.wants_gradients()),
      .logits_rows = a.groups ? 0 : run.limit,
      .f32_rows = a.f32_logits ? run.part : 0,
      .factored = run.factored};
  for (const LossHeadSpan& s : run.spans) m.chunk = std::max(m.chunk, s.count);
  if (run.by_classes)
    m.logits_rows = std::max({run.limit, m.chunk, loss_head_class_rows(run.rows.count, a.head.weight.rows)});
  return loss_head_workspace(run.ctx, a.head, run.rows, m);
}

void make_scale(Context& ctx, const LossHead& a) {
  const LossReduction& r = a.reduction;
  if (r.kind == Reduction::none) return;
  cross_entropy_scale(ctx, {.target = a.mean_target ? a.mean_target : a.labels.target,
                            .class_weight = a.class_weight,
                            .ignore_index = a.labels.ignore_index,
                            .mean = r.kind == Reduction::mean && !r.host_denominator,
                            .denominator = r.denominator,
                            .host_denominator = r.host_denominator.value_or(1.0),
                            .scale = r.scale});
}

// Returns rows [first, first + count) of a chunk, whose logits may then be made by themselves.
LossHeadChunk slice(const LossHeadChunk& c, int64_t first, int64_t count) {
  LossHeadChunk part = c;
  part.begin += first, part.count = count;
  part.index = loss_head_slice(c.index, first, count);
  for (Matrix* m : {&part.logits, &part.hidden, &part.dhidden, &part.scaled, &part.lora_u, &part.lora_t})
    *m = rows_from(*m, first, count);
  return part;
}

// Runs over the chunks of a call, all in the memory of one.
class Chunks {
 public:
  Chunks(const LossHeadRun& run, RowPass& pass)
      : run_(run), a_(run.a), ctx_(run.ctx), pass_(pass), workspace_(make_workspace(run)) {}

  const Matrix& logits() const { return workspace_.logits; }

  void all() {
    if (a_.reference.hidden.data) reference();
    for (const LossHeadSpan& s : run_.spans) {
      if (s.count > 0) forth(s);
      if (!run_.twice()) gradients(s);
    }
    if (!run_.twice()) return;
    pass_.turn(run_);
    if (a_.head.wants_gradients()) back();
  }

 private:
  static LossHeadPart whole(const LossHeadChunk& c) { return {c.begin, c.count, c.logits, c.logits}; }

  // Runs over the chunks of the reference, whose logits use the same memory.
  void reference() {
    LossHeadWorkspace own = loss_head_workspace(ctx_, a_.reference, run_.rows,
                                                {.chunk = workspace_.logits.rows, .logits = false});
    own.logits = workspace_.logits;
    for (const LossHeadSpan& s : run_.spans) {
      if (s.count == 0) continue;
      LossHeadChunk c = loss_head_chunk(a_.reference, run_.rows, own, s.begin, s.count);
      loss_head_logits(ctx_, a_.reference, c);
      pass_.reference(run_, whole(c));
    }
  }

  void forth(const LossHeadSpan& s) {
    using Holds = LossHeadKept::Holds;
    chunk_ = loss_head_chunk(a_.head, run_.rows, workspace_, s.begin, s.count);
    if (s.begin >= run_.kept) return parts();
    const Matrix kept = rows_from(a_.kept.dlogits, s.begin, s.count);
    if (a_.kept.holds != Holds::logits || a_.kept.overwrite)
      chunk_.logits = kept, chunk_.padded = a_.kept.padded;
    if (a_.kept.holds == Holds::logits) pass_.rows(run_, {s.begin, s.count, kept, chunk_.logits});
    if (a_.kept.holds == Holds::nothing) parts();
  }

  // Makes the logits of a part at a time if they have memory of their own, otherwise those of the whole
  // chunk, and calls rows() for each part.
  void parts() {
    LossHeadChunk& c = chunk_;
    const bool apart = c.wide.data;
    const int64_t most = apart ? c.wide.rows : std::min(run_.part, c.count);
    if (!apart) loss_head_logits(ctx_, a_.head, c);
    for (int64_t first = 0; first < c.count; first += most) {
      LossHeadChunk part = slice(c, first, std::min(most, c.count - first));
      const Matrix to = part.logits;
      if (apart) part.logits = rows_from(c.wide, 0, part.count), loss_head_logits(ctx_, a_.head, part);
      pass_.rows(run_, {part.begin, part.count, part.logits, to});
    }
    c.gathered = true;
    // With f32_logits u is made again, by a GEMM of the whole chunk.
    if (apart) c.has_u = a_.head.lora_a.data && !a_.f32_logits;
  }

  void gradients(const LossHeadSpan& s) {
    const Vector factor = pass_.gradient(run_, s, s.count > 0 ? whole(chunk_) : LossHeadPart{});
    if (s.count == 0) return;
    loss_head_gradients(ctx_, a_.head, chunk_, {.first = first_, .factor = factor});
    first_ = false;
  }

  // Goes back from the last chunk, whose logits still exist, to the first.
  void back() {
    for (size_t i = run_.spans.size(); i-- > 0;) {
      const LossHeadSpan& s = run_.spans[i];
      if (i + 1 < run_.spans.size()) {
        chunk_ = loss_head_chunk(a_.head, run_.rows, workspace_, s.begin, s.count);
        loss_head_logits(ctx_, a_.head, chunk_);
      }
      gradients(s);
    }
  }

  const LossHeadRun& run_;
  const LossHead& a_;
  Context& ctx_;
  RowPass& pass_;
  LossHeadWorkspace workspace_;
  LossHeadChunk chunk_;
  bool first_ = true;  // no chunk has been summed yet
};

// Forms the gradient of weight from the logits of some classes of all rows at a time, in the memory of
// `room`.
void by_classes(const LossHeadRun& run, RowPass& pass, const Matrix& dweight, Matrix room) {
  Context& ctx = run.ctx;
  LinearHead head = run.a.head;
  const int64_t rows = run.rows.count, kept = run.kept, v = dweight.rows, h = dweight.cols;
  if (!room.data) {
    const int64_t most = std::max(run.limit, loss_head_class_rows(rows, v));
    room = loss_head_matrix(ctx, most, v, loss_head_logit_stride(v), head.hidden.dtype);
  }
  Matrix hidden = head.hidden;
  if (run.rows.listed) {
    hidden = loss_head_matrix(ctx, rows, h, h, head.hidden.dtype);
    loss_head_move(ctx, {.from = head.hidden, .to = hidden, .index = run.rows.index});
  }
  const int64_t most = room.rows * room.stride / rows / 64 * 64, slices = (v + most - 1) / most;
  const int64_t width = std::min(((v + slices - 1) / slices + 127) / 128 * 128, most);
  const Matrix weight = head.weight;
  head.lora_a = head.lora_b = head.dhidden = head.dlora_a = head.dlora_b = {}, head.dbias = {};
  for (int64_t first = 0; first < v; first += width) {
    const int64_t cols = std::min(width, v - first);
    head.weight = rows_from(weight, first, cols), head.dweight = rows_from(dweight, first, cols);
    LossHeadChunk all = {.count = rows,
                         .logits = {room.data, head.hidden.dtype, rows, cols, width},
                         .hidden = rows_from(hidden, 0, rows)};
    if (kept > 0) {
      Matrix from = rows_from(run.a.kept.dlogits, 0, kept);
      from.data = static_cast<char*>(from.data) + first * int64_t(size_of(from.dtype)), from.cols = cols;
      loss_head_move(ctx, {.from = from, .to = rows_from(all.logits, 0, kept)});
    }
    if (kept < rows) {
      LossHeadChunk others = slice(all, kept, rows - kept);
      loss_head_logits(ctx, head, others);
      pass.classes(run, {first, kept, others.count, others.logits});
    }
    loss_head_gradients(ctx, head, all, {});
  }
}

}  // namespace

void loss_head_class_gradient(const LossHeadRun& run, const LossHeadClasses& c, CrossEntropyRows pass,
                              const LossHeadWhole& whole) {
  auto part = [&](const Vector& of) { return loss_head_slice(of, c.begin, c.count); };
  pass.bias = loss_head_slice(pass.bias, c.first, c.logits.cols);
  pass.dlogits = c.logits;
  pass.first_class = c.first, pass.classes = run.a.head.weight.rows;
  pass.all_lse = part(whole.lse), pass.all_log_prob = part(whole.log_prob);
  if (pass.entropy_scale) pass.all_entropy = part(whole.entropy);
  pass.weight_sum = whole.weight_sum;
  cross_entropy_rows(run.ctx, pass);
}

Vector LossHeadRun::result(const Vector& to, const Vector& factor, bool zeroed) {
  if (!to) return {};
  const Vector from = rows.listed ? loss_head_vector(ctx, rows.count, to.dtype) : to;
  results.add({.from = from, .to = to, .factor = factor});
  writes = writes || factor || !zeroed;
  return from;
}

Vector LossHeadRun::factor() const {
  const Vector& upstream = a.upstream;
  const bool early = !upstream && loss_head_scales_early(a.head.hidden.dtype);
  const Vector scale = early ? a.reduction.scale : Vector{};
  if (!a.token_weight && !(rows.listed && upstream)) return upstream ? upstream : scale;
  const Vector out = loss_head_vector(ctx, rows.count);
  loss_head_factors(ctx, {.target = a.labels.target,
                          .ignore_index = a.labels.ignore_index,
                          .index = rows.index,
                          .token_weight = a.token_weight,
                          .upstream = upstream,
                          .scale = scale,
                          .out = out});
  return out;
}

void loss_head_run(Context& ctx, const LossHead& given, RowPass& pass) {
  check(given);
  LossHead a = given;
  LossHeadRun run = {.ctx = ctx, .a = a, .by_classes = a.head.by_classes && a.head.dweight.data};
  const Matrix dweight = run.by_classes ? std::exchange(a.head.dweight, {}) : Matrix{};
  const int64_t kept = std::min(a.head.kept_rows, a.head.hidden.rows), v = a.head.weight.rows;
  if (run.by_classes && kept > 0 && !a.groups) {
    a.kept.dlogits = loss_head_matrix(ctx, kept, v, loss_head_logit_stride(v), a.head.hidden.dtype);
    loss_head_pad(ctx, a.kept.dlogits), a.kept.padded = true;
  }
  plan(run, pass);
  pass.begin(run);
  make_scale(ctx, a);
  loss_head_clear(ctx, given.head, run.rows);
  run.results = {.target = a.labels.target,
                 .ignore_index = a.labels.ignore_index,
                 .position = run.rows.position,
                 .fault = run.rows.fault};
  pass.memory(run);
  Matrix logits;
  if (run.spans.empty()) {
    pass.turn(run);
  } else {
    Chunks chunks(run, pass);
    chunks.all();
    logits = chunks.logits();
  }
  if (run.by_classes && run.rows.count > 0) by_classes(run, pass, dweight, logits);
  if (run.rows.listed || run.writes) loss_head_results(ctx, run.results);
  pass.finish(run);
  const LossReduction& r = a.reduction;
  if (r.kind != Reduction::none)
    cross_entropy_total(ctx, {.loss = a.loss, .scale = r.scale, .total = r.total});
}

}  // namespace tigon
