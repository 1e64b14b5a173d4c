#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::cross_entropy_torch {
namespace {

constexpr const char* kOp = "cross_entropy";
enum Reduction : int64_t { none = 0, mean = 1, sum = 2 };

// Tensors are replaced by copies where a view does not fit, so they must outlive the call.
struct Labels {
  Tensor target;
  OptionalTensor weight;
  static constexpr const char* kNames[] = {"target", "weight"};
};
struct Reduced {
  OptionalTensor denominator;
  std::optional<double> host_denominator;
  int64_t reduction;
  static constexpr const char* kNames[] = {"denominator", "host_denominator", "reduction"};
};
struct Options {
  int64_t ignore_index;
  float label_smoothing, softcap, z_loss;
  static constexpr const char* kNames[] = {"ignore_index", "label_smoothing", "softcap", "z_loss"};
};

CrossEntropyRows arguments(Tensor& logits, Labels& labels, const Options& o) {
  check_devices(kOp, labels, logits);
  CrossEntropyRows a = {.logits = rows_of(kOp, "logits", logits),
                        .target = vector_of(kOp, "target", labels.target),
                        .class_weight = vector_of(kOp, "weight", labels.weight),
                        .ignore_index = o.ignore_index,
                        .softcap = o.softcap,
                        .label_smoothing = o.label_smoothing,
                        .z_loss = o.z_loss};
  TIGON_CHECK(kOp, a.logits.cols >= 1, "logits must have at least one column, got ", a.logits.cols);
  return a;
}

// Rows, then their sum where one number is asked for.
Tensor run(CrossEntropyRows a, const Tensor& logits, const Reduced& by) {
  Tensor rows = make(logits, {a.logits.rows}, DType::f32);
  a.loss = vector_of(kOp, "loss", rows);
  auto ctx = make_context(logits);
  if (by.reduction == Reduction::none) {
    cross_entropy_rows(*ctx, a);
    return rows;
  }
  CrossEntropyScale scaling = {.target = a.target,
                               .class_weight = a.class_weight,
                               .ignore_index = a.ignore_index,
                               .mean = by.reduction == Reduction::mean,
                               .host_denominator = by.host_denominator.value_or(0.0),
                               .has_host_denominator = by.host_denominator.has_value()};
  if (by.denominator) {
    check_same_device(kOp, "denominator", *by.denominator, logits);
    scaling.denominator = scalar_of(kOp, "denominator", *by.denominator);
  }
  if (by.denominator || by.host_denominator || by.reduction == Reduction::mean) {
    scaling.scale = {.data = ctx->scratch_of<float>(1), .dtype = DType::f32, .size = 1};
    cross_entropy_scale(*ctx, scaling);
    a.scale = scaling.scale;
  }
  cross_entropy_rows(*ctx, a);
  Tensor total = make(logits, {}, DType::f32);
  cross_entropy_total(*ctx, {.loss = a.loss, .scale = a.scale, .total = scalar_of(kOp, "loss", total)});
  return total;
}

std::tuple<Tensor, Tensor> forward(Tensor logits, Labels labels, Reduced by, Options options,
                                   bool need_dlogits) {
  CrossEntropyRows a = arguments(logits, labels, options);
  Tensor dlogits = need_dlogits ? make_like(logits, a.logits.dtype) : nothing(logits, a.logits.dtype);
  if (need_dlogits) a.dlogits = rows_of(kOp, "dlogits", dlogits);
  return {run(a, logits, by), dlogits};
}

// The gradient takes the place of the logits.
Tensor forward_inplace(Tensor logits, Labels labels, Reduced by, Options options) {
  const void* memory = logits.data_ptr();
  CrossEntropyRows a = arguments(logits, labels, options);
  TIGON_CHECK(kOp, logits.data_ptr() == memory,
              "logits must have a dense last dimension and evenly spaced rows with ",
              "inplace=True, got other strides");
  a.dlogits = a.logits;
  return run(a, logits, by);
}

// The gradient of unreduced losses, from the logits.
Tensor backward(Tensor dloss, Tensor logits, Labels labels, Options options) {
  CrossEntropyRows a = arguments(logits, labels, options);
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
  const std::string inputs = schema<Labels, Reduced, Options>();
  define_forward(m, "cross_entropy",
                 "(Tensor logits, " + inputs + ", bool need_dlogits) -> (Tensor loss, Tensor dlogits)");
  define(m, "cross_entropy_inplace(Tensor(a!) logits, " + inputs + ") -> Tensor");
  define(m, "cross_entropy_bwd(Tensor dloss, Tensor logits, " + schema<Labels, Options>() + ") -> Tensor");
  define(m, "cross_entropy_rescale(Tensor(a!) grad, Tensor factor) -> ()");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "cross_entropy", boxed<&forward>);
  m.impl("cross_entropy_inplace", boxed<&forward_inplace>);
  m.impl("cross_entropy_bwd", boxed<&backward>);
  m.impl("cross_entropy_rescale", TORCH_BOX(&rescale));
}

}  // namespace tigon::torch_shim::cross_entropy_torch
