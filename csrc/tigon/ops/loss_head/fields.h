// Declares what PyTorch's operators of loss heads share: their first arguments, the gradients that a call
// forms, how the losses of rows become one, and other results of rows.
#pragma once

#include "tigon/base/op.h"
#include "tigon/ops/loss_head/loss_head.h"

namespace tigon {

// Names the fields that the operators of all loss heads have.
struct LossHeadFields {
  // Names the bits of `needs`, as in python/tigon/ops/loss_head/operands.py. With may_round weight's gradient
  // may come in hidden's dtype if the call does not sum it.
  enum Need : int64_t {
    need_hidden = 1,
    need_weight = 2,
    need_bias = 4,
    need_lora_a = 8,
    need_lora_b = 16,
    may_round = 32,
    // The forward of per-row losses may leave dhidden for an upstream gradient of 1.
    need_unit = 64,
    into_main_grad = 128,  // weight's gradient is added to what its owner keeps
    // The forward of per-row losses keeps logits, not their gradients.
    keep_logits = 256,
    // This bit sets LinearHead::by_classes; keep_rows of scalar losses is then its kept_rows.
    by_classes = 512
  };
  Vector class_weight, token_weight;
  float label_smoothing = 0.0f, z_loss = 0.0f;
  int64_t needs = 0, keep_rows = 0;  // keep_rows as in LossHeadSizes
  int64_t outputs = 0;               // has a bit for each result of rows
  Matrix rows;                       // has a row for each wanted result, in the order of the bits

  // Names the operands and options of a head.
  void operands(Fields& f, LinearHead& h, LossHeadLabels& labels, LogitFormula& z) {
    f.rows("hidden", h.hidden), f.input("weight", h.weight);
    f.input("target", labels.target), parameters(f, h, labels, z);
  }
  void parameters(Fields& f, LinearHead& h, LossHeadLabels& labels, LogitFormula& z) {
    f.optional("bias", h.bias);
    f.optional("class_weight", class_weight), f.optional("token_weight", token_weight);
    f.optional("lora_a", h.lora_a), f.optional("lora_b", h.lora_b);
    f.option("ignore_index", labels.ignore_index), f.option("label_smoothing", label_smoothing);
    f.option("softcap", z.softcap), f.option("logit_scale", z.logit_scale);
    f.option("temperature", z.temperature), f.option("z_loss", z_loss);
    f.option("lora_scale", h.lora_scale), f.option("wide_logits", h.wide_logits);
    f.option("chunk_rows", labels.chunk_rows), f.option("valid_rows", labels.valid_rows);
    f.option("needs", needs), f.option("keep_rows", keep_rows);
    h.by_classes = needs & by_classes, h.kept_rows = h.by_classes ? keep_rows : 0;
  }
  // Names what the losses of rows are divided by.
  static void reduction(Fields& f, LossReduction& r) {
    f.scalar("denominator", r.denominator, DType::f32, Role::optional);
    f.option("host_denominator", r.host_denominator), f.option("reduction", r.kind);
  }
  // Names the total, or the losses of rows, and the scale of a total.
  static void losses(Fields& f, LossReduction& r, Vector& loss, const LinearHead& h) {
    const bool by_row = r.kind == Reduction::none;
    f.rows_or_number("loss", by_row, loss, h.hidden.rows, r.total);
    f.number_if(!by_row, "scale", r.scale);
  }
  // Returns the number of rows worked on, as far as a caller knows it.
  static int64_t worked(const LinearHead& h, const LossHeadLabels& labels) {
    return labels.valid_rows >= 0 ? labels.valid_rows : h.hidden.rows;
  }
  // True if one chunk takes all rows of a call that forms dweight.
  static bool whole(const Fields& f, const LinearHead& h, const LossHeadLabels& labels) {
    return worked(h, labels) <= (labels.chunk_rows > 0
                                     ? labels.chunk_rows
                                     : loss_head_whole_rows({.cuda = f.on_cuda(),
                                                             .dtype = int64_t(h.hidden.dtype),
                                                             .hidden = h.hidden.cols,
                                                             .vocab = h.weight.rows,
                                                             .train_weight = 1}));
  }
  // Names the gradients that `needs` asks for, as results.
  void gradients(Fields& f, LinearHead& h, const LossHeadLabels& labels) const {
    gradients(f, h, whole(f, h, labels));
  }
  void gradients(Fields& f, LinearHead& h, bool whole) const {
    const int64_t v = h.weight.rows, cols = h.hidden.cols, r = h.lora_a.rows;
    const bool rounded = needs & need_weight && needs & may_round && (whole || needs & by_classes);
    f.result_if(needs & need_hidden, "dhidden", h.dhidden, h.hidden);
    f.result_if(needs & need_weight, "dweight", h.dweight, v, cols,
                loss_head_dweight(h.hidden.dtype, rounded));
    f.result_if(needs & need_bias, "dbias", h.dbias, v);
    f.result_if(needs & need_lora_a, "dlora_a", h.dlora_a, r, cols, DType::f32);
    f.result_if(needs & need_lora_b, "dlora_b", h.dlora_b, v, r, DType::f32);
  }
  // Names the results of rows that `outputs` asks for, among `bits`.
  void numbers(Fields& f, int64_t bits, const LinearHead& h) {
    int64_t wanted = 0;
    for (int64_t bit = 1; bit <= bits; bit *= 2) wanted += (outputs & bits & bit) != 0;
    f.result_if(wanted > 0, "rows", rows, wanted, h.hidden.rows, DType::f32);
  }
  // Returns the numbers of the next bit; empty if they are not wanted.
  Vector take(int64_t bit) {
    if (!(outputs & bit)) return {};
    const Vector v = {.data = rows.data, .size = rows.cols};
    rows = rows_from(rows, 1, rows.rows - 1);
    return v;
  }
  // Returns the losses of rows: memory of the context if a call returns only their total.
  static Vector losses(Context& ctx, const LossReduction& r, const Vector& loss, const LinearHead& h) {
    return r.kind == Reduction::none && loss ? loss : loss_head_vector(ctx, h.hidden.rows);
  }
};

}  // namespace tigon
