#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.h"

#include <algorithm>
#include <vector>

#include "tigon/torch/linear_head.h"

namespace tigon::torch_shim {

constexpr const char* kOp = kLossHead;

Vector flat(const char* op, const char* name, const Tensor& t) {
  return {.data = data_of(op, name, t), .dtype = dtype_of(op, name, t), .size = t.numel()};
}
Matrix rows_of_optional(const char* name, OptionalTensor& t) { return t ? rows_of(kOp, name, *t) : Matrix{}; }

LinearCrossEntropy arguments(Operands& t, const Formula& f, const Rows& rows) {
  check_same_device(kOp, "weight", t.weight, t.hidden);
  check_same_device(kOp, "target", t.target, t.hidden);
  auto check = [&](const char* name, const OptionalTensor& x) {
    if (x) check_same_device(kOp, name, *x, t.hidden);
  };
  check("bias", t.bias);
  check("class_weight", t.class_weight);
  check("token_weight", t.token_weight);
  check("lora A", t.lora_a);
  check("lora B", t.lora_b);
  bool several = t.target.dim() == 2;  // labels of a row
  if (several) t.target = to_contiguous(kOp, "target", t.target);
  Vector labels = several ? flat(kOp, "target", t.target) : Vector{};
  return {.hidden = rows_of(kOp, "hidden", t.hidden),
          .weight = rows_of(kOp, "weight", t.weight),
          .target = several ? Vector{} : vector_of(kOp, "target", t.target),
          .bias = vector_of(kOp, "bias", t.bias),
          .class_weight = vector_of(kOp, "class_weight", t.class_weight),
          .token_weight = vector_of(kOp, "token_weight", t.token_weight),
          .ignore_index = f.ignore_index,
          .label_smoothing = float(f.label_smoothing),
          .softcap = float(f.softcap),
          .logit_scale = float(f.logit_scale),
          .temperature = float(f.temperature),
          .z_loss = float(f.z_loss),
          .wide_logits = f.wide_logits,
          .chunk_rows = rows.chunk_rows,
          .valid_rows = rows.valid_rows,
          .lora_a = rows_of_optional("lora A", t.lora_a),
          .lora_b = rows_of_optional("lora B", t.lora_b),
          .lora_scale = float(f.lora_scale),
          .labels = labels,
          .label_count = several ? t.target.size(1) : 0};
}

namespace {

// Bits of `outputs`, as in python/tigon/ops/loss_head.
enum Output : int64_t {
  out_z_loss = 1,
  out_log_prob = 2,
  out_lse = 4,
  out_entropy = 8,
  out_predicted = 16,
  out_only_label = 32
};

// Results of rows beside the loss: one f32 matrix, a row for each that is wanted, in the order of the bits.
struct RowResults {
  Tensor numbers, predicted;
};
RowResults make_row_results(LinearCrossEntropy& a, const Tensor& hidden, int64_t outputs) {
  RowNumbers numbers(kOp, hidden, a.hidden.rows, outputs, out_predicted - 1);
  a.z_term = numbers.take(out_z_loss);
  a.log_prob = numbers.take(out_log_prob);
  a.lse = numbers.take(out_lse);
  a.entropy = numbers.take(out_entropy);
  bool classes = outputs & out_predicted;
  RowResults r{
      .numbers = numbers.numbers,
      .predicted = classes ? make(hidden, {a.hidden.rows}, DType::i64) : nothing(hidden, DType::i64)};
  if (classes) a.predicted = vector_of(kOp, "predicted", r.predicted);
  a.only_label = outputs & out_only_label;
  return r;
}

}  // namespace

Between make_between(LinearCrossEntropy& a, const Tensor& hidden, int64_t needs, int64_t keep_rows) {
  constexpr int64_t kAll = need_hidden | need_weight | need_bias | need_lora_a | need_lora_b;
  DType dtype = a.hidden.dtype;
  int64_t stride = linear_head_logit_stride(a.weight.rows),
          rows = a.valid_rows >= 0 ? a.valid_rows : a.hidden.rows;
  bool alone = (needs & kAll) == need_hidden;
  if (alone) {
    keep_rows = 0;
  } else if (keep_rows < 0) {
    int64_t whole = a.chunk_rows > 0 ? a.chunk_rows
                                     : linear_head_whole_rows({.device = device_of(kOp, hidden),
                                                               .dtype = dtype,
                                                               .hidden = a.hidden.cols,
                                                               .vocab = a.weight.rows,
                                                               .dweight = (needs & need_weight) != 0,
                                                               .add_dweight = (needs & into_main_grad) != 0});
    keep_rows = rows <= whole ? rows : 0;
  } else {
    int64_t chunk = a.chunk_rows > 0 ? a.chunk_rows
                                     : linear_head_chunk_rows({.device = device_of(kOp, hidden),
                                                               .dtype = dtype,
                                                               .rows = rows,
                                                               .hidden = a.hidden.cols,
                                                               .vocab = a.weight.rows});
    keep_rows = rows <= keep_rows ? rows : keep_rows / chunk * chunk;
  }
  bool unit = needs & need_unit && (keep_rows > 0 || alone), kept = keep_rows > 0;
  Between b = {.unit = unit ? make_like(hidden, dtype) : nothing(hidden, dtype),
               .kept = kept ? make(hidden, {keep_rows, stride}, dtype) : nothing(hidden, dtype)};
  if (unit) a.unit = rows_of(kOp, "unit", b.unit);
  if (kept) {
    a.kept = rows_of(kOp, "kept", b.kept);
    a.kept.cols = a.weight.rows;
  }
  return b;
}

namespace {

using FiveGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using ForwardResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

ForwardResult forward(Operands operands, LossReduction by, Formula formula, int64_t reduction, Rows rows,
                      int64_t outputs, int64_t needs, int64_t keep_rows) {
  const Tensor& hidden = operands.hidden;
  LinearCrossEntropy a = arguments(operands, formula, rows);
  LossTensors t = make_losses(kOp, a, hidden, by, reduction);
  RowResults results = make_row_results(a, hidden, outputs);
  // Of per-row losses the gradients are made in rows_backward: they need the upstream ones.
  HeadGradients g = make_gradients(kOp, a, hidden, t.scalar ? needs : 0);
  Between between = make_between(a, hidden, t.scalar ? 0 : needs, t.scalar ? 0 : keep_rows);
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {t.loss(),    t.scale,         t.scalar ? g.hidden : between.unit,
          g.weight,    g.bias,          g.lora_a,
          g.lora_b,    results.numbers, results.predicted,
          between.kept};
}

// What the gradients of per-row losses are made from. `weight` is [V, 0] where its values are not needed.
struct Upstream {
  Tensor losses;
  OptionalTensor entropies, main_grad, unit, kept;
};

// `finished`: unit becomes dhidden in its own memory, and no other is returned.
FiveGradients rows_gradient(Upstream from, Operands operands, Formula formula, Rows rows, int64_t needs,
                            bool finished) {
  const Tensor& hidden = operands.hidden;
  bool shape_only = operands.weight.numel() == 0;
  int64_t vocab = operands.weight.size(0);
  if (shape_only) operands.weight = nothing(hidden, dtype_of(kOp, "hidden", hidden));
  LinearCrossEntropy a = arguments(operands, formula, rows);
  if (shape_only)
    a.weight = {.dtype = a.hidden.dtype, .rows = vocab, .cols = a.hidden.cols, .stride = a.hidden.cols};
  a.reduction = Reduction::none;
  if (a.labels) from.losses = to_contiguous(kOp, "upstream gradient", from.losses);
  (a.labels ? a.label_upstream : a.upstream) = a.labels ? flat(kOp, "upstream gradient", from.losses)
                                                        : vector_of(kOp, "upstream gradient", from.losses);
  a.entropy_upstream = vector_of(kOp, "upstream gradient of the entropy", from.entropies);
  a.unit = rows_of_optional("unit", from.unit);
  a.kept = rows_of_optional("kept", from.kept);
  a.kept.cols = vocab;
  int64_t returned = needs;
  if (from.main_grad) returned &= ~need_weight;
  if (finished && from.unit) returned &= ~need_hidden;
  bool whole = a.kept.data && a.kept.rows >= (a.valid_rows >= 0 ? a.valid_rows : a.hidden.rows);
  if (a.kept.data && !whole) returned &= ~may_round;  // several chunks
  HeadGradients g = make_gradients(
      kOp, a, hidden, returned,
      (whole && a.chunk_rows == 0) || one_chunk(a, a.chunk_rows, a.valid_rows, device_of(kOp, hidden)));
  if (finished && from.unit && needs & need_hidden) a.dhidden = a.unit;
  if (from.main_grad) {
    check_same_device(kOp, "main_grad", *from.main_grad, hidden);
    const void* memory = from.main_grad->data_ptr();
    a.dweight = rows_of(kOp, "main_grad", *from.main_grad);
    TIGON_CHECK(kOp, from.main_grad->data_ptr() == memory,
                "main_grad must have evenly spaced rows, got other strides");
    a.add_dweight = true;
  }
  auto ctx = make_context(hidden);
  linear_cross_entropy_rows_gradient(*ctx, a);
  return {g.hidden, g.weight, g.bias, g.lora_a, g.lora_b};
}

FiveGradients rows_backward(Tensor upstream, OptionalTensor entropy_upstream, OptionalTensor unit,
                            OptionalTensor kept, Operands operands, Formula formula, Rows rows,
                            int64_t needs) {
  return rows_gradient({upstream, entropy_upstream, {}, unit, kept}, operands, formula, rows, needs, false);
}

FiveGradients rows_backward_in_place(Tensor upstream, OptionalTensor entropy_upstream,
                                     OptionalTensor main_grad, OptionalTensor unit, OptionalTensor kept,
                                     Operands operands, Formula formula, Rows rows, int64_t needs,
                                     bool finish) {
  return rows_gradient({upstream, entropy_upstream, main_grad, unit, kept}, operands, formula, rows, needs,
                       finish);
}

// The gradients of a scalar loss times the upstream one, in the parameters' dtypes. `in_place`: where a gradient has its
// parameter's dtype already, its memory is the result's; else it stays as it is.
template <bool in_place>
FiveGradients finish_all(Tensor dloss, Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias,
                         Tensor dlora_a, Tensor dlora_b, ScalarType weight_dtype, ScalarType bias_dtype) {
  DType hidden_dtype = dtype_of(kOp, "dhidden", dhidden);
  auto ctx = make_context(dhidden);
  Vector factor = scalar_of(kOp, "upstream gradient", dloss);
  Vector late = linear_head_scales_early(hidden_dtype) ? Vector{} : scalar_of(kOp, "scale", scale);
  auto finish = [&](Tensor& kept, DType dtype) {
    bool stays = in_place && (kept.numel() == 0 || (!late && dtype_of(kOp, "gradient", kept) == dtype));
    Tensor out = stays ? kept : make_like(kept, dtype);
    if (kept.numel() > 0)
      linear_head_finish(*ctx, {.in = rows_of(kOp, "gradient", kept),
                                .dloss = factor,
                                .scale = late,
                                .out = rows_of(kOp, "gradient", out)});
    return out;
  };
  return {finish(dhidden, hidden_dtype), finish(dweight, dtype_of(kOp, "weight", weight_dtype)),
          finish(dbias, dtype_of(kOp, "bias", bias_dtype)), finish(dlora_a, hidden_dtype),
          finish(dlora_b, hidden_dtype)};
}

// Rows of x with `columns` columns: zeros appended, or the rest cut off.
Tensor columns(Tensor x, int64_t columns) {
  Matrix from = rows_of(kOp, "x", x);
  TIGON_CHECK(kOp, columns >= 1, "columns must be >= 1, got ", columns);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  Tensor out = empty(x, sizes.data(), int64_t(sizes.size()), from.dtype);
  auto ctx = make_context(x);
  linear_head_columns(*ctx, {.from = from, .to = rows_of(kOp, "result", out)});
  return out;
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string operands = Operands::kSchema, formula = Formula::kSchema, rows = Rows::kSchema;
  const std::string five = "(Tensor, Tensor, Tensor, Tensor, Tensor)";
  const std::string forward_inputs =
      operands + LossReduction::kSchema + formula + "int reduction, " + rows +
      "int outputs, int needs, int keep_rows) -> (Tensor loss, Tensor scale,"
      " Tensor dhidden, Tensor dweight, Tensor dbias, Tensor dlora_a, Tensor dlora_b, Tensor rows,"
      " Tensor predicted, Tensor kept)";
  define_forward(m, "linear_cross_entropy", "(" + forward_inputs);
  define(m,
         "linear_cross_entropy_bwd(Tensor dloss, Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias,"
         " Tensor dlora_a, Tensor dlora_b, ScalarType weight_dtype, ScalarType bias_dtype) -> " +
             five);
  define(m,
         "linear_cross_entropy_bwd_(Tensor dloss, Tensor scale, Tensor(a!) dhidden, Tensor(b!) dweight,"
         " Tensor(c!) dbias, Tensor(d!) dlora_a, Tensor(e!) dlora_b, ScalarType weight_dtype,"
         " ScalarType bias_dtype) -> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!), Tensor(e!))");
  const std::string backward_inputs = "Tensor? kept, " + operands + formula + rows + "int needs";
  define(m, "linear_cross_entropy_rows_bwd(Tensor upstream, Tensor? entropy_upstream, Tensor? unit, " +
                backward_inputs + ") -> " + five);
  define(m,
         "linear_cross_entropy_rows_bwd_(Tensor upstream, Tensor? entropy_upstream, Tensor(a!)? main_grad,"
         " Tensor(b!)? unit, " +
             backward_inputs + ", bool finish) -> " + five);
  define_forward(m, "linear_cross_entropy_columns", "(Tensor x, int columns) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_cross_entropy", boxed<&forward>);
  m.impl("linear_cross_entropy_bwd", TORCH_BOX(&finish_all<false>));
  m.impl("linear_cross_entropy_bwd_", TORCH_BOX(&finish_all<true>));
  m.impl("linear_cross_entropy_rows_bwd", boxed<&rows_backward>);
  m.impl("linear_cross_entropy_rows_bwd_", boxed<&rows_backward_in_place>);
  implement_forward(m, "linear_cross_entropy_columns", TORCH_BOX(&columns));
}

}  // namespace tigon::torch_shim

// For Python, through ctypes: linear_head_chunk_rows, or with rows -1 linear_head_whole_rows.
extern "C" TIGON_API int64_t tigon_linear_cross_entropy_chunk(int cuda, int dtype_size, int64_t rows,
                                                              int64_t hidden, int64_t vocab, int dweight,
                                                              int add_dweight) {
  using namespace tigon;
  LinearHeadSizes sizes = {.device = cuda ? Device::cuda : Device::cpu,
                           .dtype = dtype_size == 4 ? DType::f32 : DType::bf16,
                           .rows = rows,
                           .hidden = hidden,
                           .vocab = vocab,
                           .dweight = dweight != 0,
                           .add_dweight = add_dweight != 0};
  return rows < 0 ? linear_head_whole_rows(sizes) : linear_head_chunk_rows(sizes);
}
