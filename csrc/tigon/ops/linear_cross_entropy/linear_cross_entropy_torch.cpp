#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.h"

#include <vector>

namespace tigon::torch_shim {

constexpr const char* kOp = kLossHead;

LinearCrossEntropy arguments(Operands& t, const Formula& f, const Memory& m) {
  LinearCrossEntropy a = {.head = head_of(kOp, t, f), .formula = f.logits()};
  if (t.target.dim() == 2) {
    a.several = {.labels = flat(kOp, "target", t.target), .count = t.target.size(1)};
    a.labels = {.ignore_index = f.ignore_index, .valid_rows = m.valid_rows, .chunk_rows = m.chunk_rows};
  } else {
    a.labels = labels_of(kOp, t, f, m);
  }
  a.class_weight = vector_of(kOp, "class_weight", t.class_weight);
  a.token_weight = vector_of(kOp, "token_weight", t.token_weight);
  a.label_smoothing = float(f.label_smoothing), a.z_loss = float(f.z_loss);
  return a;
}

KeptTensors make_kept(LinearCrossEntropy& a, const Tensor& hidden, const Memory& m) {
  const LinearHead& head = a.head;
  DType dtype = head.hidden.dtype;
  LinearHeadPlan plan = linear_head_memory({.cuda = device_of(kOp, hidden) == Device::cuda,
                                            .dtype = int64_t(dtype),
                                            .weight_dtype = int64_t(dtype),
                                            .rows = head.hidden.rows,
                                            .worked = m.worked(head.hidden.rows),
                                            .hidden = head.hidden.cols,
                                            .vocab = head.weight.rows,
                                            .lora_rank = (m.needs & (need_lora_a | need_lora_b)) != 0,
                                            .train_hidden = (m.needs & need_hidden) != 0,
                                            .train_weight = (m.needs & need_weight) != 0,
                                            .train_bias = (m.needs & need_bias) != 0,
                                            .main_grad = (m.needs & into_main_grad) != 0,
                                            .chunk_rows = m.chunk_rows,
                                            .per_row = 1,
                                            .keep_rows = m.keep_rows,
                                            .unit = (m.needs & need_unit) != 0});
  KeptTensors k = {
      .unit = plan.unit ? make_like(hidden, dtype) : nothing(hidden, dtype),
      .dlogits = plan.kept > 0 ? make(hidden, {plan.kept, linear_head_logit_stride(head.weight.rows)}, dtype)
                               : nothing(hidden, dtype)};
  if (plan.unit) a.kept.unit = rows_of(kOp, "unit", k.unit);
  if (plan.kept > 0) a.kept.dlogits = rows_of(kOp, "kept", k.dlogits), a.kept.dlogits.cols = head.weight.rows;
  a.kept.are_logits = m.needs & keep_logits;
  return k;
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
RowResults make_row_results(LinearCrossEntropyResults& to, const Tensor& hidden, int64_t rows,
                            int64_t outputs) {
  RowNumbers numbers(kOp, hidden, rows, outputs, out_predicted - 1);
  to.z_term = numbers.take(out_z_loss);
  to.log_prob = numbers.take(out_log_prob);
  to.lse = numbers.take(out_lse);
  to.entropy = numbers.take(out_entropy);
  bool classes = outputs & out_predicted;
  RowResults r{.numbers = numbers.numbers,
               .predicted = classes ? make(hidden, {rows}, DType::i64) : nothing(hidden, DType::i64)};
  if (classes) to.predicted = vector_of(kOp, "predicted", r.predicted);
  to.only_label = outputs & out_only_label;
  return r;
}

using ForwardResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

ForwardResult forward(Operands operands, Formula formula, Memory memory, Reduced by, int64_t outputs) {
  const Tensor& hidden = operands.hidden;
  LinearCrossEntropy a = arguments(operands, formula, memory);
  int64_t rows = a.head.hidden.rows;
  LossTensors t(kOp, hidden, rows, by);
  a.reduction = t.reduction, a.results.loss = vector_of(kOp, "loss", t.losses);
  RowResults results = make_row_results(a.results, hidden, rows, outputs);
  // Of per-row losses the gradients are made in rows_backward: they need the upstream ones.
  Memory none = {.chunk_rows = memory.chunk_rows, .valid_rows = memory.valid_rows};
  HeadGradients g = make_gradients(a.head, hidden, t.scalar ? memory : none);
  KeptTensors kept = make_kept(a, hidden, t.scalar ? none : memory);
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {t.loss(),    t.scale,         t.scalar ? g.hidden : kept.unit,
          g.weight,    g.bias,          g.lora_a,
          g.lora_b,    results.numbers, results.predicted,
          kept.dlogits};
}

// What the gradients of per-row losses are made from. `weight` is [V, 0] where its values are not needed.
struct Upstream {
  Tensor losses;
  OptionalTensor entropies, unit, kept;
  static constexpr const char* kNames[] = {"upstream", "entropy_upstream", "unit", "kept"};
};

// `finished`: unit becomes dhidden in its own memory, and no other is returned; kept logits become their gradients.
FiveGradients rows_gradient(Upstream from, OptionalTensor main_grad, Operands operands, Formula formula,
                            Memory memory, bool finished) {
  const Tensor& hidden = operands.hidden;
  bool shape_only = operands.weight.numel() == 0;
  int64_t vocab = operands.weight.size(0);
  if (shape_only) operands.weight = nothing(hidden, dtype_of(kOp, "hidden", hidden));
  LinearCrossEntropy a = arguments(operands, formula, memory);
  LinearHead& head = a.head;
  if (shape_only)
    head.weight = {
        .dtype = head.hidden.dtype, .rows = vocab, .cols = head.hidden.cols, .stride = head.hidden.cols};
  a.reduction.kind = Reduction::none;
  if (a.several.labels)
    a.several.upstream = flat(kOp, "upstream gradient", from.losses);
  else
    a.upstream = vector_of(kOp, "upstream gradient", from.losses);
  a.entropy_upstream = vector_of(kOp, "upstream gradient of the entropy", from.entropies);
  a.kept = {.unit = rows_of(kOp, "unit", from.unit), .dlogits = rows_of(kOp, "kept", from.kept)};
  a.kept.dlogits.cols = vocab;
  a.kept.are_logits = memory.needs & keep_logits, a.kept.overwrite = finished && a.kept.are_logits;
  int64_t returned = memory.needs;
  if (main_grad) returned &= ~need_weight;
  if (finished && from.unit) returned &= ~need_hidden;
  bool some = a.kept.dlogits.data, whole = some && a.kept.dlogits.rows >= memory.worked(head.hidden.rows);
  if (some && !whole) returned &= ~may_round;  // several chunks
  whole = (whole && memory.chunk_rows == 0 && !a.kept.are_logits) ||
          one_chunk(head, memory, device_of(kOp, hidden));
  HeadGradients g = make_gradients(head, hidden, returned, whole);
  if (finished && from.unit && memory.needs & need_hidden) head.dhidden = a.kept.unit;
  if (main_grad) {
    check_same_device(kOp, "main_grad", *main_grad, hidden);
    const void* memory_of = main_grad->data_ptr();
    head.dweight = rows_of(kOp, "main_grad", *main_grad);
    TIGON_CHECK(kOp, main_grad->data_ptr() == memory_of,
                "main_grad must have evenly spaced rows, got other strides");
    head.add_dweight = true;
  }
  auto ctx = make_context(hidden);
  linear_cross_entropy_rows_gradient(*ctx, a);
  return {g.hidden, g.weight, g.bias, g.lora_a, g.lora_b};
}

FiveGradients rows_backward(Upstream from, Operands operands, Formula formula, Memory memory) {
  return rows_gradient(from, {}, operands, formula, memory, false);
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
  const std::string five = std::string("(") + kFiveGradients + ")";
  define_forward(m, "linear_cross_entropy",
                 "(" + head_schema<Reduced>() + ", int outputs) -> (Tensor loss, Tensor scale, " +
                     kFiveGradients + ", Tensor rows, Tensor predicted, Tensor kept)");
  const std::string dtypes = "ScalarType weight_dtype, ScalarType bias_dtype) -> ";
  define(m, std::string("linear_cross_entropy_bwd(Tensor dloss, Tensor scale, ") + kFiveGradients + ", " +
                dtypes + five);
  define(m,
         "linear_cross_entropy_bwd_(Tensor dloss, Tensor scale, Tensor(a!) dhidden, Tensor(b!) dweight,"
         " Tensor(c!) dbias, Tensor(d!) dlora_a, Tensor(e!) dlora_b, " +
             dtypes + "(Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!), Tensor(e!))");
  const std::string name = "linear_cross_entropy_rows_bwd";
  define(m, name + "(" + schema<Upstream, Operands, Formula, Memory>() + ") -> " + five);
  define(m, name +
                "_(Tensor upstream, Tensor? entropy_upstream, Tensor(b!)? unit, Tensor(c!)? kept,"
                " Tensor(a!)? main_grad, " +
                head_schema() + ", bool finish) -> " + five);
  define_forward(m, "linear_cross_entropy_columns", "(Tensor x, int columns) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_cross_entropy", boxed<&forward>);
  m.impl("linear_cross_entropy_bwd", TORCH_BOX(&finish_all<false>));
  m.impl("linear_cross_entropy_bwd_", TORCH_BOX(&finish_all<true>));
  m.impl("linear_cross_entropy_rows_bwd", boxed<&rows_backward>);
  m.impl("linear_cross_entropy_rows_bwd_", boxed<&rows_gradient>);
  implement_forward(m, "linear_cross_entropy_columns", TORCH_BOX(&columns));
}

}  // namespace tigon::torch_shim

// For Python, through ctypes.
extern "C" TIGON_API void tigon_linear_head_memory(const tigon::LinearHeadSizes* sizes,
                                                   tigon::LinearHeadPlan* plan) {
  *plan = tigon::linear_head_memory(*sizes);
}
