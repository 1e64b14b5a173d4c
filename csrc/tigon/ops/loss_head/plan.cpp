#include "tigon/ops/loss_head/plan.h"

#include <algorithm>

namespace tigon {
namespace {

// Rows of a chunk where there are several.
int64_t most_rows(const LinearHeadSizes& s) {
  constexpr int64_t kLeast = 1024, kSmallLogits = int64_t(512) << 20;
  if (!s.cuda) return kLeast;
  int64_t most =
      std::max(kLeast, kSmallLogits / (std::max<int64_t>(s.vocab, 1) * int64_t(size_of(DType(s.dtype)))));
  return s.train_weight ? std::max(most, s.hidden) : most;
}

int64_t ceil_to(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// Bytes of a call, by what they are of.
struct Bytes {
  const LinearHeadSizes& s;
  DType dtype = DType(s.dtype), weight_dtype = DType(s.weight_dtype);
  bool f16 = dtype == DType::f16;
  int64_t size = int64_t(size_of(dtype)), weight_size = int64_t(size_of(weight_dtype));
  int64_t logits = linear_head_logit_stride(s.vocab);

  // Without weight's gradient the forward of losses of rows.
  int64_t chunk(bool dweight) const {
    LinearHeadSizes sizes = s;
    sizes.train_weight = dweight && s.train_weight;
    return s.chunk_rows > 0 ? s.chunk_rows : linear_head_chunk_rows(sizes);
  }
  int64_t worked_at_once(bool dweight) const {
    return std::min(chunk(dweight), std::max<int64_t>(s.worked, 1));
  }
  // A row's logits and what their product takes: PyTorch's on the CPU a copy, in f32 for f16.
  int64_t logits_row() const {
    int64_t copy = s.cuda || dtype == DType::bf16 ? 0 : f16 ? 8 : 4;
    return (size + copy) * logits;
  }
  // Copies of a row, its low-rank products.
  int64_t copies_row(int64_t copies) const {
    return size * (copies * s.hidden + 2 * ceil_to(s.lora_rank, 8));
  }
  // Index, labels, place, loss and factors of every row; what the products take; the logits of a wide part.
  int64_t fixed() const {
    int64_t product = s.cuda ? int64_t(32) << 20 : (f16 ? 8 : size) * s.vocab * s.hidden;
    int64_t wide = ceil_to(linear_head_wide_rows(s.cuda, s.vocab), 128);
    return 64 * s.rows + product + (s.wide ? std::min(s.rows, wide) * 4 * logits : 0);
  }
  // The weight in hidden's dtype.
  int64_t weight() const { return weight_dtype == dtype ? 0 : s.vocab * s.hidden * size; }
  // True if weight's gradient has the dtype of its product, of so many rows.
  bool rounds(int64_t rows) const { return rows >= s.worked && weight_dtype == dtype && !f16; }
};

// The gradients as they are formed, in their parameters' dtypes, and the copies that the last step makes.
struct Gradients {
  int64_t dhidden, others, results, copied;

  Gradients(const Bytes& b, bool rounded) {
    const LinearHeadSizes& s = b.s;
    int64_t head = s.main_grad ? 0 : s.vocab * s.hidden * s.train_weight, bias = s.vocab * s.train_bias;
    int64_t lora = s.lora_rank * (s.hidden + s.vocab), parameters = b.weight_size * (head + bias);
    dhidden = s.rows * s.hidden * b.size * s.train_hidden;
    others = (rounded ? b.size : 4) * head + 4 * (bias + lora);
    results = dhidden + parameters + lora * b.size + 4 * s.rows;
    copied = b.f16 * dhidden + (b.f16 || (b.weight_dtype != DType::f32 && !rounded)) * parameters;
  }
};

bool trains_others(const LinearHeadSizes& s) { return s.train_weight || s.train_bias || s.lora_rank > 0; }

void plan_kept(const Bytes& b, LinearHeadPlan& p) {
  const LinearHeadSizes& s = b.s;
  bool others = trains_others(s);
  if (others && (s.keep_rows < 0 ? s.worked <= p.whole_rows : s.worked <= s.keep_rows))
    p.kept = s.worked;
  else if (others && s.keep_rows > 0)
    p.kept = s.keep_rows / b.chunk(false) * b.chunk(false);
  p.unit = s.unit && s.train_hidden && (p.kept > 0 || !others);
}

// A scalar loss: the gradients exist when the loss does, or with main_grad in a backward like it.
void plan_scalar(const Bytes& b, LinearHeadPlan& p) {
  const LinearHeadSizes& s = b.s;
  bool listed = s.worked < s.rows;
  p.workspace = p.chunk_rows * (b.logits_row() + b.copies_row(2 * listed)) + b.fixed() + b.weight();
  Gradients g(b, b.rounds(p.chunk_rows));
  p.results = g.results;
  p.gradients = s.main_grad ? 0 : g.dhidden + g.others;
  p.peak = g.dhidden + g.others + std::max(p.workspace, g.copied);
}

// Losses of rows: what is kept, and the larger of forward and backward.
void plan_rows(const Bytes& b, LinearHeadPlan& p) {
  const LinearHeadSizes& s = b.s;
  bool listed = s.worked < s.rows, whole = s.worked == p.kept;
  int64_t forward = b.worked_at_once(false), backward = whole ? 0 : b.worked_at_once(true);
  int64_t fixed = b.fixed() + b.weight(), kept = s.chunk_rows > 0 ? std::min(p.kept, s.chunk_rows) : p.kept;
  int64_t first =
      forward * (b.logits_row() - whole * b.size * b.logits + b.copies_row(listed * (1 + p.unit))) + fixed;
  int64_t copies = (listed || p.kept > 0) + (listed && s.train_hidden && !p.unit);
  int64_t second = backward * b.logits_row() + std::max(kept, backward) * b.copies_row(copies) + fixed;
  if (p.unit && !trains_others(s)) second = 0;
  Gradients g(b, b.rounds(std::max(p.kept, backward)));
  p.chunk_rows = backward ? backward : p.kept ? p.kept : forward;
  p.workspace = std::max(first, second);
  p.gradients = p.kept * b.logits * b.size + p.unit * g.dhidden;
  p.results = g.results;
  p.peak = std::max(first, g.others + !p.unit * g.dhidden + std::max(second, g.copied)) + p.gradients;
}

// The reference: three tensors of the logits' size at a time, whatever the options.
LinearHeadPlan plan_f64(const LinearHeadSizes& s) {
  int64_t logits = 8 * s.rows * s.vocab, trained = s.vocab * (s.hidden * s.train_weight + s.train_bias);
  int64_t results =
      8 * (trained + s.rows * (s.hidden * s.train_hidden + 1) + s.lora_rank * (s.hidden + s.vocab));
  return {.chunk_rows = s.rows,
          .workspace = 3 * logits,
          .results = results,
          .peak = std::max(3 * logits, logits + results)};
}

}  // namespace

int64_t linear_head_whole_rows(const LinearHeadSizes& s) {
  bool sums_cost = s.cuda && s.train_weight && !s.main_grad && DType(s.dtype) != DType::f32;
  int64_t most = most_rows(s);
  return std::max(most + most / 4, sums_cost ? s.hidden * 23 / 10 : 0);
}

int64_t linear_head_chunk_rows(const LinearHeadSizes& s) {
  if (s.worked <= linear_head_whole_rows(s)) return std::max<int64_t>(s.worked, 1);
  int64_t most = most_rows(s), chunks = (s.worked + most - 1) / most;
  return ((s.worked + chunks - 1) / chunks + 127) / 128 * 128;
}

int64_t linear_head_wide_rows(bool cuda, int64_t vocab) {
  return most_rows({.cuda = cuda, .dtype = int64_t(DType::f32), .vocab = vocab});
}

LinearHeadPlan linear_head_memory(const LinearHeadSizes& sizes) {
  if (DType(sizes.dtype) == DType::f64) return plan_f64(sizes);
  LinearHeadSizes s = sizes;
  const Bytes b{s};
  LinearHeadPlan p = {.chunk_rows = b.worked_at_once(true),
                      .whole_rows = s.chunk_rows > 0 ? s.chunk_rows : linear_head_whole_rows(s),
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

}  // namespace tigon

// For Python, through ctypes.
extern "C" TIGON_API void tigon_linear_head_memory(const tigon::LinearHeadSizes* sizes,
                                                   tigon::LinearHeadPlan* plan) {
  *plan = tigon::linear_head_memory(*sizes);
}
