#include "tigon/ops/linear_cross_entropy/linear_cross_entropy_torch.h"

#include <vector>

#include "tigon/torch/linear_head.h"

namespace tigon::torch_shim {

constexpr const char* kOp = kLossHead;

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
  return {.hidden = rows_of(kOp, "hidden", t.hidden),
          .weight = rows_of(kOp, "weight", t.weight),
          .target = vector_of(kOp, "target", t.target),
          .bias = vector_of(kOp, "bias", t.bias),
          .class_weight = vector_of(kOp, "class_weight", t.class_weight),
          .token_weight = vector_of(kOp, "token_weight", t.token_weight),
          .ignore_index = f.ignore_index,
          .label_smoothing = float(f.label_smoothing),
          .softcap = float(f.softcap),
          .logit_scale = float(f.logit_scale),
          .temperature = float(f.temperature),
          .z_loss = float(f.z_loss),
          .chunk_rows = rows.chunk_rows,
          .valid_rows = rows.valid_rows,
          .lora_a = rows_of_optional("lora A", t.lora_a),
          .lora_b = rows_of_optional("lora B", t.lora_b),
          .lora_scale = float(f.lora_scale)};
}

namespace {

// Bits of `outputs`, as in python/tigon/ops/loss_head.
enum Output : int64_t { out_z_loss = 1, out_log_prob = 2, out_lse = 4, out_entropy = 8, out_predicted = 16 };

// Results of rows beside the loss: one f32 matrix, a row for each that is wanted, in the order of the bits.
struct RowResults {
  Tensor numbers, predicted;
};
RowResults make_row_results(LinearCrossEntropy& a, const Tensor& hidden, int64_t outputs) {
  int64_t n = a.hidden.rows, wanted = 0;
  for (int64_t bit = out_z_loss; bit < out_predicted; bit *= 2) wanted += (outputs & bit) != 0;
  bool classes = outputs & out_predicted;
  RowResults r{.numbers = wanted ? make(hidden, {wanted, n}, DType::f32) : nothing(hidden, DType::f32),
               .predicted = classes ? make(hidden, {n}, DType::i64) : nothing(hidden, DType::i64)};
  char* next = static_cast<char*>(data_of(kOp, "outputs", r.numbers));
  auto take = [&](Output bit) -> Vector {
    if (!(outputs & bit)) return {};
    Vector v{.data = next, .dtype = DType::f32, .size = n};
    next += n * int64_t(sizeof(float));
    return v;
  };
  a.z_term = take(out_z_loss);
  a.log_prob = take(out_log_prob);
  a.lse = take(out_lse);
  a.entropy = take(out_entropy);
  if (classes) a.predicted = vector_of(kOp, "predicted", r.predicted);
  return r;
}

using FiveGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// `given`: the matrix that the gradients of the logits are written to, or nothing.
template <class... Kept>
ForwardResult forward(Kept... given, Operands operands, OptionalTensor denominator,
                      std::optional<double> host_denominator, Formula formula, int64_t reduction, Rows rows,
                      int64_t outputs, int64_t needs) {
  OptionalTensor kept(std::move(given)...);
  const Tensor& hidden = operands.hidden;
  LinearCrossEntropy a = arguments(operands, formula, rows);
  if (denominator) {
    check_same_device(kOp, "denominator", *denominator, hidden);
    a.denominator = scalar_of(kOp, "denominator", *denominator);
  }
  a.has_host_denominator = host_denominator.has_value();
  a.host_denominator = host_denominator.value_or(0.0);
  a.reduction = Reduction(reduction);
  bool scalar = a.reduction != Reduction::none;
  Tensor losses = make(hidden, {a.hidden.rows}, DType::f32);
  Tensor total = scalar ? make(hidden, {}, DType::f32) : nothing(hidden, DType::f32);
  Tensor scale = scalar ? make(hidden, {}, DType::f32) : nothing(hidden, DType::f32);
  a.loss = vector_of(kOp, "loss", losses);
  if (scalar) {
    a.total = scalar_of(kOp, "total", total);
    a.scale = scalar_of(kOp, "scale", scale);
  }
  RowResults results = make_row_results(a, hidden, outputs);
  // Of per-row losses the gradients are made in rows_backward: they need the upstream ones.
  a.kept = rows_of_optional("kept", kept);
  HeadGradients g = make_gradients(kOp, a, hidden, scalar ? needs : 0, a.kept.data != nullptr);
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {scalar ? total : losses, scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b, results.numbers,
          results.predicted};
}

// Gradients of per-row losses from the kept gradients of their logits.
std::tuple<Tensor, Tensor, Tensor> kept_backward(Tensor upstream, Tensor kept, Tensor hidden, Tensor weight,
                                                 Tensor target, OptionalTensor token_weight,
                                                 int64_t ignore_index, int64_t valid_rows, int64_t needs) {
  Operands operands = {.hidden = hidden, .weight = weight, .target = target, .token_weight = token_weight};
  LinearCrossEntropy a = arguments(operands, {.ignore_index = ignore_index}, {.valid_rows = valid_rows});
  a.reduction = Reduction::none;
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  a.kept = rows_of(kOp, "kept", kept);
  HeadGradients g = make_gradients(kOp, a, hidden, needs, true);
  auto ctx = make_context(hidden);
  linear_cross_entropy_kept_gradient(*ctx, a);
  return {g.hidden, g.weight, g.bias};
}

// Gradients of per-row losses (and entropies): the logits are computed again, with each row's upstream gradients folded in.
// `given`: what weight's gradient is added to instead of being returned, or nothing.
template <class... MainGrad>
FiveGradients rows_backward(Tensor upstream, OptionalTensor entropy_upstream, MainGrad... given,
                            Operands operands, Formula formula, Rows rows, int64_t needs) {
  OptionalTensor main_grad(std::move(given)...);
  const Tensor& hidden = operands.hidden;
  LinearCrossEntropy a = arguments(operands, formula, rows);
  a.reduction = Reduction::none;
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  a.entropy_upstream = vector_of(kOp, "upstream gradient of the entropy", entropy_upstream);
  Tensor losses = make(hidden, {a.hidden.rows}, DType::f32);
  a.loss = vector_of(kOp, "loss", losses);
  HeadGradients g = make_gradients(kOp, a, hidden, main_grad ? needs & ~need_weight : needs);
  if (main_grad) {
    check_same_device(kOp, "main_grad", *main_grad, hidden);
    const void* memory = main_grad->data_ptr();
    a.dweight = rows_of(kOp, "main_grad", *main_grad);
    TIGON_CHECK(kOp, main_grad->data_ptr() == memory,
                "main_grad must have evenly spaced rows, got other strides");
    a.add_dweight = true;
  }
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {g.hidden, g.weight, g.bias, g.lora_a, g.lora_b};
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
      operands + "Tensor? denominator, float? host_denominator, " + formula + "int reduction, " + rows +
      "int outputs, int needs) -> (Tensor loss, Tensor scale,"
      " Tensor dhidden, Tensor dweight, Tensor dbias, Tensor dlora_a, Tensor dlora_b, Tensor rows,"
      " Tensor predicted)";
  define_forward(m, "linear_cross_entropy", "(" + forward_inputs);
  define(m, "linear_cross_entropy_keep(Tensor(a!)? kept, " + forward_inputs);
  define(m,
         "linear_cross_entropy_kept_bwd(Tensor upstream, Tensor kept, Tensor hidden, Tensor weight,"
         " Tensor target, Tensor? token_weight, int ignore_index, int valid_rows, int needs)"
         " -> (Tensor, Tensor, Tensor)");
  define(m,
         "linear_cross_entropy_bwd(Tensor dloss, Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias,"
         " Tensor dlora_a, Tensor dlora_b, ScalarType weight_dtype, ScalarType bias_dtype) -> " +
             five);
  define(m,
         "linear_cross_entropy_bwd_(Tensor dloss, Tensor scale, Tensor(a!) dhidden, Tensor(b!) dweight,"
         " Tensor(c!) dbias, Tensor(d!) dlora_a, Tensor(e!) dlora_b, ScalarType weight_dtype,"
         " ScalarType bias_dtype) -> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!), Tensor(e!))");
  const std::string backward_inputs = operands + formula + rows + "int needs) -> " + five;
  define(m, "linear_cross_entropy_rows_bwd(Tensor upstream, Tensor? entropy_upstream, " + backward_inputs);
  define(m,
         "linear_cross_entropy_add_bwd(Tensor upstream, Tensor? entropy_upstream, Tensor(a!)? main_grad, " +
             backward_inputs);
  define_forward(m, "linear_cross_entropy_columns", "(Tensor x, int columns) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_cross_entropy", boxed<&forward<>>);
  m.impl("linear_cross_entropy_keep", boxed<&forward<OptionalTensor>>);
  m.impl("linear_cross_entropy_kept_bwd", TORCH_BOX(&kept_backward));
  m.impl("linear_cross_entropy_bwd", TORCH_BOX(&finish_all<false>));
  m.impl("linear_cross_entropy_bwd_", TORCH_BOX(&finish_all<true>));
  m.impl("linear_cross_entropy_rows_bwd", boxed<&rows_backward<>>);
  m.impl("linear_cross_entropy_add_bwd", boxed<&rows_backward<OptionalTensor>>);
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
