#include "tigon/ops/loss_head/plan.h"

#include <algorithm>

namespace tigon {
namespace {

// Returns the rows of a chunk if there are several chunks.
int64_t most_rows(const LossHeadSizes& s) {
  constexpr int64_t kLeast = 1024, kSmallLogits = int64_t(512) << 20;
  if (!s.cuda) return kLeast;
  int64_t row = std::max<int64_t>(s.vocab, 1) * int64_t(size_of(DType(s.dtype)));
  int64_t most = std::max(kLeast, (s.lean && !s.train_weight ? kSmallLogits / 2 : kSmallLogits) / row);
  return s.train_weight ? std::max(most, s.hidden) : most;
}

int64_t ceil_to(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// Computes the bytes of a call, by purpose.
struct Bytes {
  const LossHeadSizes& s;
  DType dtype = DType(s.dtype), weight_dtype = DType(s.weight_dtype);
  bool f16 = dtype == DType::f16;
  int64_t size = int64_t(size_of(dtype)), weight_size = int64_t(size_of(weight_dtype));
  int64_t logits = loss_head_logit_stride(s.vocab);

  // Returns the rows of a chunk. Without `dweight` they are those of the forward of losses of rows; with
  // `lean` nothing is kept.
  int64_t chunk(bool dweight, bool lean) const {
    LossHeadSizes sizes = s;
    sizes.train_weight = dweight && s.train_weight, sizes.lean = lean && s.lean;
    return s.chunk_rows > 0 ? s.chunk_rows : loss_head_chunk_rows(sizes);
  }
  int64_t worked_at_once(bool dweight, bool lean) const {
    return std::min(chunk(dweight, lean), std::max<int64_t>(s.worked, 1));
  }
  // Counts a row's logits and what their GEMM takes: on the CPU PyTorch's takes a copy, in f32 for f16.
  int64_t logits_row() const {
    int64_t copy = s.cuda || dtype == DType::bf16 ? 0 : f16 ? 8 : 4;
    return (size + copy) * logits;
  }
  // Counts the copies of a row, and u and t of lora.
  int64_t copies_row(int64_t copies) const {
    return size * (copies * s.hidden + 2 * ceil_to(s.lora_rank, 8));
  }
  // Counts index, labels, place, loss and factors of every row, the memory of the GEMMs, and the logits of a
  // wide part.
  int64_t fixed() const {
    const bool direct =
        dtype == DType::bf16 && (!s.train_weight || s.by_classes);  // no GEMM adds to its result
    int64_t gemms = s.cuda ? int64_t(32) << 20 : direct ? 0 : (f16 ? 8 : size) * s.vocab * s.hidden;
    int64_t wide = ceil_to(loss_head_wide_rows(s.cuda, s.vocab), 128);
    return 64 * s.rows + gemms + (s.wide ? std::min(s.rows, wide) * 4 * logits : 0);
  }
  // Counts what a gradient by classes takes: the logits' gradients of kept rows, all rows gathered, and
  // statistics.
  int64_t classes() const {
    if (!s.by_classes) return 0;
    return s.kept_rows * size * logits + (s.worked < s.rows) * s.worked * s.hidden * size + 8 * s.rows;
  }
  // Counts the weight's copy in hidden's dtype.
  int64_t weight() const { return weight_dtype == dtype ? 0 : s.vocab * s.hidden * size; }
  // True if weight's gradient has the dtype of its GEMM over so many rows.
  bool rounds(int64_t rows) const { return rows >= s.worked && weight_dtype == dtype && !f16 && !s.sums; }
};

// Counts the gradients as they are formed, in their parameters' dtypes, and the copies that the last step
// makes.
struct Gradients {
  int64_t dhidden, others, results, copied;

  Gradients(const Bytes& b, bool rounded) {
    const LossHeadSizes& s = b.s;
    rounded = rounded || s.by_classes;
    int64_t head = s.main_grad ? 0 : s.vocab * s.hidden * s.train_weight, bias = s.vocab * s.train_bias;
    int64_t lora = s.lora_rank * (s.hidden + s.vocab), parameters = b.weight_size * (head + bias);
    dhidden = s.rows * s.hidden * b.size * s.train_hidden;
    others = (rounded ? b.size : 4) * head + 4 * (bias + lora);
    results = dhidden + parameters + lora * b.size + 4 * s.rows;
    copied = b.f16 * dhidden + (b.f16 || (b.weight_dtype != DType::f32 && !rounded)) * parameters;
  }
};

bool trains_others(const LossHeadSizes& s) { return s.train_weight || s.train_bias || s.lora_rank > 0; }

void plan_kept(const Bytes& b, LossHeadPlan& p) {
  const LossHeadSizes& s = b.s;
  bool others = trains_others(s);
  if (others && (s.keep_rows < 0 ? s.worked <= p.whole_rows : s.worked <= s.keep_rows))
    p.kept = s.worked;
  else if (others && s.keep_rows > 0)
    p.kept = s.keep_rows / b.chunk(false, false) * b.chunk(false, false);
  p.unit = s.unit && s.train_hidden && (p.kept > 0 || !others);
}

// Plans a scalar loss: the gradients exist when the loss does, or with main_grad in a backward like it.
void plan_scalar(const Bytes& b, LossHeadPlan& p) {
  const LossHeadSizes& s = b.s;
  bool listed = s.worked < s.rows;
  p.workspace =
      p.chunk_rows * (b.logits_row() + b.copies_row(2 * listed)) + b.fixed() + b.weight() + b.classes();
  Gradients g(b, b.rounds(p.chunk_rows));
  p.results = g.results;
  p.gradients = s.main_grad ? 0 : g.dhidden + g.others;
  p.peak = g.dhidden + g.others + std::max(p.workspace, g.copied);
}

// Plans losses of rows: what is kept, and the larger of forward and backward.
void plan_rows(const Bytes& b, LossHeadPlan& p) {
  const LossHeadSizes& s = b.s;
  bool listed = s.worked < s.rows, whole = s.worked == p.kept;
  int64_t forward = b.worked_at_once(false, p.kept == 0);
  int64_t backward = whole ? 0 : b.worked_at_once(true, p.kept == 0);
  int64_t fixed = b.fixed() + b.weight(), kept = s.chunk_rows > 0 ? std::min(p.kept, s.chunk_rows) : p.kept;
  int64_t first =
      forward * (b.logits_row() - whole * b.size * b.logits + b.copies_row(listed * (1 + p.unit))) + fixed;
  int64_t copies = (listed || p.kept > 0) + (listed && s.train_hidden && !p.unit);
  int64_t second = backward * b.logits_row() + std::max(kept, backward) * b.copies_row(copies) + fixed;
  if (p.unit && !trains_others(s)) second = 0;
  second += b.classes();
  Gradients g(b, b.rounds(std::max(p.kept, backward)));
  p.chunk_rows = backward ? backward : p.kept ? p.kept : forward;
  p.workspace = std::max(first, second);
  p.gradients = p.kept * b.logits * b.size + p.unit * g.dhidden;
  p.results = g.results;
  p.peak = std::max(first, g.others + !p.unit * g.dhidden + std::max(second, g.copied)) + p.gradients;
}

// Plans the reference in f64: three tensors of the logits' size at a time, with any options.
LossHeadPlan plan_f64(const LossHeadSizes& s) {
  int64_t logits = 8 * s.rows * s.vocab, trained = s.vocab * (s.hidden * s.train_weight + s.train_bias);
  int64_t results =
      8 * (trained + s.rows * (s.hidden * s.train_hidden + 1) + s.lora_rank * (s.hidden + s.vocab));
  return {.chunk_rows = s.rows,
          .workspace = 3 * logits,
          .results = results,
          .peak = std::max(3 * logits, logits + results)};
}

}  // namespace

int64_t loss_head_whole_rows(const LossHeadSizes& s) {
  bool sums_cost = s.cuda && s.train_weight && !s.main_grad && DType(s.dtype) != DType::f32;
  int64_t most = most_rows(s);
  return std::max(most + most / 4, sums_cost ? s.hidden * 23 / 10 : 0);
}

int64_t loss_head_chunk_rows(const LossHeadSizes& s) {
  if (s.worked <= loss_head_whole_rows(s)) return std::max<int64_t>(s.worked, 1);
  int64_t most = most_rows(s), chunks = (s.worked + most - 1) / most;
  return ((s.worked + chunks - 1) / chunks + 127) / 128 * 128;
}

int64_t loss_head_wide_rows(bool cuda, int64_t vocab) {
  return most_rows({.cuda = cuda, .dtype = int64_t(DType::f32), .vocab = vocab, .lean = 0});
}

int64_t loss_head_class_rows(int64_t rows, int64_t vocab) {
  return (64 * rows - 1) / loss_head_logit_stride(vocab) + 1;
}

LossHeadPlan loss_head_plan(const LossHeadSizes& sizes) {
  if (DType(sizes.dtype) == DType::f64) return plan_f64(sizes);
  LossHeadSizes s = sizes;
  const Bytes b{s};
  LossHeadSizes all = s;
  all.lean = 0;
  LossHeadPlan p = {.chunk_rows = b.worked_at_once(true, true),
                    .whole_rows = s.chunk_rows > 0 ? s.chunk_rows : loss_head_whole_rows(all),
                    .row = b.logits_row() + b.copies_row(s.copies) + s.row,
                    .fixed = b.fixed() + s.fixed};
  if (s.cap >= 0) {
    p.fits = std::max<int64_t>(s.cap - p.fixed, 0) / p.row;
    if (p.fits >= 256) p.fits = p.fits / 128 * 128;
    p.chunk_rows = std::min(p.chunk_rows, std::max<int64_t>(p.fits, 1));
    if (s.per_row) s.chunk_rows = p.whole_rows = p.chunk_rows;
  }
  plan_kept(b, p);
  s.per_row ? plan_rows(b, p) : plan_scalar(b, p);
  return p;
}

LossHeadPlan loss_head_plan_within(const LossHeadSizes& sizes,
                                   const std::function<LossHeadPlan(const LossHeadSizes&)>& plan,
                                   bool keeps) {
  LossHeadPlan p = plan(sizes);
  if (sizes.peak < 0 || p.peak <= sizes.peak || DType(sizes.dtype) == DType::f64) return p;
  LossHeadSizes s = sizes;
  const bool narrow = DType(s.dtype) == DType::bf16 && s.weight_dtype == s.dtype;
  s.by_classes = s.classes && s.train_weight && narrow && !s.main_grad && !s.wide && s.lora_rank == 0;
  if (s.per_row) s.keep_rows = 0;
  const int64_t worked = std::max<int64_t>(s.worked, 1), step = s.cuda ? 128 : 1;
  int64_t most = std::min(p.chunk_rows, worked), low = 1;
  if (s.by_classes) {
    LossHeadSizes frozen = sizes;
    frozen.train_weight = 0;
    low = loss_head_class_rows(worked, s.vocab);
    most = std::max(std::min(most, loss_head_chunk_rows(frozen)), low);
  }
  auto at = [&](int64_t rows) {
    s.chunk_rows = rows;
    LossHeadPlan found = plan(s);
    found.chunk_rows = std::min(rows, found.chunk_rows), found.capped = 1;
    found.by_classes = s.by_classes, found.kept_rows = s.kept_rows;
    return found;
  };
  const int64_t least = low;
  p = at(least);
  p.least = p.peak > s.peak ? p.peak : 0;
  if (p.least > 0) return p;
  for (int64_t high = most + 1; high - low > 1;) {  // searches for the most rows that fit
    const int64_t middle = low + (high - low) / 2;
    (at(middle).peak <= s.peak ? low : high) = middle;
  }
  p = at(std::max(low >= 2 * step ? low / step * step : low, least));
  if (!s.by_classes || s.per_row || !keeps) return p;
  const int64_t row = loss_head_logit_stride(s.vocab) * int64_t(size_of(DType(s.dtype)));
  s.kept_rows = std::min((s.peak - p.peak) / row / step * step, worked);
  return at(p.chunk_rows);
}

}  // namespace tigon

// Is called by Python, through ctypes.
extern "C" TIGON_API void tigon_loss_head_plan(const tigon::LossHeadSizes* sizes, tigon::LossHeadPlan* plan) {
  *plan = tigon::loss_head_plan_within(*sizes, tigon::loss_head_plan, true);
}
