#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::cross_entropy_torch {
namespace {

constexpr const char* kOp = "cross_entropy";
enum Reduction : int64_t { none = 0, mean = 1, sum = 2 };

// Options in the order of the schemas.
struct Options {
  int64_t ignore_index;
  double label_smoothing, softcap, z_loss;
};

// Tensors are replaced by copies where a view does not fit, so they must outlive the call.
CrossEntropyRows arguments(Tensor& logits, Tensor& target, OptionalTensor& weight, const Options& o) {
  check_same_device(kOp, "target", target, logits);
  if (weight) check_same_device(kOp, "weight", *weight, logits);
  CrossEntropyRows a = {.logits = rows_of(kOp, "logits", logits),
                        .target = vector_of(kOp, "target", target),
                        .class_weight = vector_of(kOp, "weight", weight),
                        .ignore_index = o.ignore_index,
                        .softcap = float(o.softcap),
                        .label_smoothing = float(o.label_smoothing),
                        .z_loss = float(o.z_loss)};
  TIGON_CHECK(kOp, a.logits.cols >= 1, "logits must have at least one column, got ", a.logits.cols);
  return a;
}

// Rows, then their sum where one number is asked for.
Tensor run(CrossEntropyRows a, const Tensor& logits, OptionalTensor& denominator,
           std::optional<double> host_denominator, int64_t reduction) {
  Tensor rows = make(logits, {a.logits.rows}, DType::f32);
  a.loss = vector_of(kOp, "loss", rows);
  auto ctx = make_context(logits);
  if (reduction == Reduction::none) {
    cross_entropy_rows(*ctx, a);
    return rows;
  }
  CrossEntropyScale scaling = {.target = a.target,
                               .class_weight = a.class_weight,
                               .ignore_index = a.ignore_index,
                               .mean = reduction == Reduction::mean,
                               .host_denominator = host_denominator.value_or(0.0),
                               .has_host_denominator = host_denominator.has_value()};
  if (denominator) {
    check_same_device(kOp, "denominator", *denominator, logits);
    scaling.denominator = scalar_of(kOp, "denominator", *denominator);
  }
  if (denominator || host_denominator || reduction == Reduction::mean) {
    scaling.scale = {.data = ctx->scratch_of<float>(1), .dtype = DType::f32, .size = 1};
    cross_entropy_scale(*ctx, scaling);
    a.scale = scaling.scale;
  }
  cross_entropy_rows(*ctx, a);
  Tensor total = make(logits, {}, DType::f32);
  cross_entropy_total(*ctx, {.loss = a.loss, .scale = a.scale, .total = scalar_of(kOp, "loss", total)});
  return total;
}

std::tuple<Tensor, Tensor> forward(Tensor logits, Tensor target, OptionalTensor weight,
                                   OptionalTensor denominator, std::optional<double> host_denominator,
                                   int64_t reduction, int64_t ignore_index, double label_smoothing,
                                   double softcap, double z_loss, bool need_dlogits) {
  CrossEntropyRows a = arguments(logits, target, weight, {ignore_index, label_smoothing, softcap, z_loss});
  Tensor dlogits = need_dlogits ? make_like(logits, a.logits.dtype) : nothing(logits, a.logits.dtype);
  if (need_dlogits) a.dlogits = rows_of(kOp, "dlogits", dlogits);
  return {run(a, logits, denominator, host_denominator, reduction), dlogits};
}

// The gradient takes the place of the logits.
Tensor forward_inplace(Tensor logits, Tensor target, OptionalTensor weight, OptionalTensor denominator,
                       std::optional<double> host_denominator, int64_t reduction, int64_t ignore_index,
                       double label_smoothing, double softcap, double z_loss) {
  const void* memory = logits.data_ptr();
  CrossEntropyRows a = arguments(logits, target, weight, {ignore_index, label_smoothing, softcap, z_loss});
  TIGON_CHECK(kOp, logits.data_ptr() == memory,
              "logits must have a dense last dimension and evenly spaced rows with ",
              "inplace=True, got other strides");
  a.dlogits = a.logits;
  return run(a, logits, denominator, host_denominator, reduction);
}

// The gradient of unreduced losses, from the logits.
Tensor backward(Tensor dloss, Tensor logits, Tensor target, OptionalTensor weight, int64_t ignore_index,
                double label_smoothing, double softcap, double z_loss) {
  CrossEntropyRows a = arguments(logits, target, weight, {ignore_index, label_smoothing, softcap, z_loss});
  check_same_device(kOp, "dloss", dloss, logits);
  Tensor dlogits = make_like(logits, a.logits.dtype);
  a.dlogits = rows_of(kOp, "dlogits", dlogits);
  a.scale = vector_of(kOp, "dloss", dloss);
  auto ctx = make_context(logits);
  cross_entropy_rows(*ctx, a);
  return dlogits;
}

void rescale(Tensor grad, Tensor factor) {
  check_same_device(kOp, "upstream gradient", factor, grad);
  const void* memory = grad.data_ptr();
  Matrix rows = rows_of(kOp, "gradient", grad);
  TIGON_CHECK(kOp, grad.data_ptr() == memory, "gradient must have evenly spaced rows, got other strides");
  auto ctx = make_context(grad);
  cross_entropy_rescale(*ctx, {.grad = rows, .factor = scalar_of(kOp, "upstream gradient", factor)});
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  define_forward(
      m, "cross_entropy",
      "(Tensor logits, Tensor target, Tensor? weight, Tensor? denominator, float? host_denominator,"
      " int reduction, int ignore_index, float label_smoothing, float softcap, float z_loss,"
      " bool need_dlogits) -> (Tensor loss, Tensor dlogits)");
  define(m,
         "cross_entropy_inplace(Tensor(a!) logits, Tensor target, Tensor? weight, Tensor? denominator,"
         " float? host_denominator, int reduction, int ignore_index, float label_smoothing, float softcap,"
         " float z_loss) -> Tensor");
  define(m,
         "cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, int ignore_index,"
         " float label_smoothing, float softcap, float z_loss) -> Tensor");
  define(m, "cross_entropy_rescale(Tensor(a!) grad, Tensor factor) -> ()");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "cross_entropy", TORCH_BOX(&forward));
  m.impl("cross_entropy_inplace", TORCH_BOX(&forward_inplace));
  m.impl("cross_entropy_bwd", TORCH_BOX(&backward));
  m.impl("cross_entropy_rescale", TORCH_BOX(&rescale));
}

}  // namespace tigon::torch_shim::cross_entropy_torch
