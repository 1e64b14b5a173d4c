#include "tigon/ops/linear_divergence/linear_divergence.h"

#include "tigon/torch/linear_head.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::linear_divergence_torch {
namespace {

constexpr const char* kOp = "linear_divergence";

// Bits of `outputs`, as in python/tigon/ops/loss_head/divergence_operators.py.
enum Output : int64_t { out_soft = 1, out_hard = 2, out_entropy = 4 };

// Tensors are replaced by copies where a view does not fit, so they must outlive the call of the core.
struct Operands {
  Tensor hidden, weight, target, teacher;
  OptionalTensor teacher_weight, teacher_bias, bias, token_weight, lora_a, lora_b;

  static constexpr const char* kSchema =
      "Tensor hidden, Tensor weight, Tensor target, Tensor teacher, Tensor? teacher_weight,"
      " Tensor? teacher_bias, Tensor? bias, Tensor? token_weight, Tensor? lora_a, Tensor? lora_b, ";
  static Operands take(Stack& s) {
    return {s.take<Tensor>(),         s.take<Tensor>(),         s.take<Tensor>(),
            s.take<Tensor>(),         s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<OptionalTensor>(), s.take<OptionalTensor>(), s.take<OptionalTensor>(),
            s.take<OptionalTensor>()};
  }
};

struct Formula {
  int64_t kind;
  double beta, soft_weight, hard_weight, temperature, softcap, logit_scale, teacher_softcap,
      teacher_logit_scale, lora_scale;
  int64_t ignore_index, chunk_rows, valid_rows;

  static constexpr const char* kSchema =
      "int kind, float beta, float soft_weight, float hard_weight, float temperature, float softcap,"
      " float logit_scale, float teacher_softcap, float teacher_logit_scale, float lora_scale,"
      " int ignore_index, int chunk_rows, int valid_rows, ";
  static Formula take(Stack& s) {
    return {s.take<int64_t>(), s.take<double>(),  s.take<double>(), s.take<double>(), s.take<double>(),
            s.take<double>(),  s.take<double>(),  s.take<double>(), s.take<double>(), s.take<double>(),
            s.take<int64_t>(), s.take<int64_t>(), s.take<int64_t>()};
  }
};

LinearDivergence arguments(Operands& t, const Formula& f) {
  check_same_device(kOp, "weight", t.weight, t.hidden);
  check_same_device(kOp, "target", t.target, t.hidden);
  check_same_device(kOp, "teacher", t.teacher, t.hidden);
  auto check = [&](const char* name, const OptionalTensor& x) {
    if (x) check_same_device(kOp, name, *x, t.hidden);
  };
  check("teacher_weight", t.teacher_weight);
  check("teacher_bias", t.teacher_bias);
  check("bias", t.bias);
  check("token_weight", t.token_weight);
  check("lora A", t.lora_a);
  check("lora B", t.lora_b);
  auto rows_if = [](const char* name, OptionalTensor& x) { return x ? rows_of(kOp, name, *x) : Matrix{}; };
  DivergenceKind kind = DivergenceKind(f.kind);
  DivergenceBeta beta = divergence_beta(kind, f.beta);
  Matrix teacher = rows_of(kOp, "teacher", t.teacher);
  return {.hidden = rows_of(kOp, "hidden", t.hidden),
          .weight = rows_of(kOp, "weight", t.weight),
          .target = vector_of(kOp, "target", t.target),
          .bias = vector_of(kOp, "bias", t.bias),
          .lora_a = rows_if("lora A", t.lora_a),
          .lora_b = rows_if("lora B", t.lora_b),
          .lora_scale = float(f.lora_scale),
          .teacher_hidden = t.teacher_weight ? teacher : Matrix{},
          .teacher_weight = rows_if("teacher_weight", t.teacher_weight),
          .teacher_bias = vector_of(kOp, "teacher_bias", t.teacher_bias),
          .teacher_logits = t.teacher_weight ? Matrix{} : teacher,
          .token_weight = vector_of(kOp, "token_weight", t.token_weight),
          .kind = kind,
          .beta = beta.beta,
          .factor = float(beta.factor),
          .soft_weight = float(f.soft_weight),
          .hard_weight = float(f.hard_weight),
          .temperature = float(f.temperature),
          .softcap = float(f.softcap),
          .logit_scale = float(f.logit_scale),
          .teacher_softcap = float(f.teacher_softcap),
          .teacher_logit_scale = float(f.teacher_logit_scale),
          .ignore_index = f.ignore_index,
          .chunk_rows = f.chunk_rows,
          .valid_rows = f.valid_rows};
}

// Results of rows beside the loss: a row of one matrix for each that is wanted, in the order of the bits.
Tensor make_row_results(LinearDivergence& a, const Tensor& hidden, int64_t outputs) {
  RowNumbers numbers(kOp, hidden, a.hidden.rows, outputs, out_soft | out_hard | out_entropy);
  a.soft = numbers.take(out_soft);
  a.hard = numbers.take(out_hard);
  a.entropy = numbers.take(out_entropy);
  return numbers.numbers;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Operands operands, Formula formula, LossReduction by, int64_t reduction, int64_t outputs, int64_t needs) {
  const Tensor& hidden = operands.hidden;
  LinearDivergence a = arguments(operands, formula);
  LossTensors t = make_losses(kOp, a, hidden, by, reduction);
  Tensor results = make_row_results(a, hidden, outputs);
  HeadGradients g = make_gradients(kOp, a, hidden, t.scalar ? needs : 0);
  auto ctx = make_context(hidden);
  linear_divergence(*ctx, a);
  return {t.loss(), t.scale, g.hidden, g.weight, g.bias, g.lora_a, g.lora_b, results};
}

// Gradients of per-row losses: the logits are computed again, with each row's upstream gradient folded in.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rows_backward(Tensor upstream, Operands operands,
                                                                 Formula formula, int64_t needs) {
  const Tensor& hidden = operands.hidden;
  LinearDivergence a = arguments(operands, formula);
  a.reduction = Reduction::none;
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  Tensor losses = make(hidden, {a.hidden.rows}, DType::f32);
  a.loss = vector_of(kOp, "loss", losses);
  HeadGradients g = make_gradients(kOp, a, hidden, needs);
  auto ctx = make_context(hidden);
  linear_divergence(*ctx, a);
  return {g.hidden, g.weight, g.bias, g.lora_a, g.lora_b};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string inputs = std::string(Operands::kSchema) + Formula::kSchema;
  define_forward(m, "linear_divergence",
                 "(" + inputs + LossReduction::kSchema +
                     "int reduction, int outputs, int needs) ->"
                     " (Tensor loss, Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias,"
                     " Tensor dlora_a, Tensor dlora_b, Tensor rows)");
  define(m, "linear_divergence_rows_bwd(Tensor upstream, " + inputs +
                "int needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "linear_divergence", boxed<&forward>);
  m.impl("linear_divergence_rows_bwd", boxed<&rows_backward>);
}

}  // namespace tigon::torch_shim::linear_divergence_torch

// For Python, through ctypes.
extern "C" TIGON_API int64_t tigon_linear_divergence_logit_rows(int64_t vocab, int sides) {
  return tigon::linear_divergence_logit_rows(vocab, sides);
}
