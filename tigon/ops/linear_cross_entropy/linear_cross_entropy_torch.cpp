#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "linear_cross_entropy";

// Options in the order of the schemas.
struct Options {
  int64_t ignore_index;
  double label_smoothing, softcap, logit_scale, z_loss;
  int64_t chunk_rows;
};

// The part of the arguments that forward and the recomputing backward share. Tensors are replaced by copies where a view
// does not fit, so they must outlive the call.
LinearCrossEntropy arguments(Tensor& hidden, Tensor& weight, Tensor& target, OptionalTensor& bias,
                             OptionalTensor& class_weight, const Options& o) {
  check_same_device(kOp, "weight", weight, hidden);
  check_same_device(kOp, "target", target, hidden);
  if (bias) check_same_device(kOp, "bias", *bias, hidden);
  if (class_weight) check_same_device(kOp, "class_weight", *class_weight, hidden);
  return {.hidden = rows_of(kOp, "hidden", hidden),
          .weight = rows_of(kOp, "weight", weight),
          .target = vector_of(kOp, "target", target),
          .bias = vector_of(kOp, "bias", bias),
          .class_weight = vector_of(kOp, "class_weight", class_weight),
          .ignore_index = o.ignore_index,
          .label_smoothing = float(o.label_smoothing),
          .softcap = float(o.softcap),
          .logit_scale = float(o.logit_scale),
          .z_loss = float(o.z_loss),
          .chunk_rows = o.chunk_rows};
}

struct Gradients {
  Tensor dhidden, dweight, dbias;
};

Gradients make_gradients(LinearCrossEntropy& a, const Tensor& hidden, bool need_dhidden, bool need_dweight,
                         bool need_dbias) {
  int64_t v = a.weight.rows, h = a.weight.cols;
  Gradients g{.dhidden = need_dhidden ? make_like(hidden, a.hidden.dtype) : nothing(hidden, a.hidden.dtype),
              .dweight = need_dweight ? make(hidden, {v, h}, DType::f32) : nothing(hidden, DType::f32),
              .dbias = need_dbias ? make(hidden, {v}, DType::f32) : nothing(hidden, DType::f32)};
  if (a.hidden.rows == 0) {  // no chunk will write them
    torch::stable::zero_(g.dweight);
    torch::stable::zero_(g.dbias);
    return g;
  }
  if (need_dhidden) a.dhidden = rows_of(kOp, "dhidden", g.dhidden);
  if (need_dweight) a.dweight = rows_of(kOp, "dweight", g.dweight);
  if (need_dbias) a.dbias = vector_of(kOp, "dbias", g.dbias);
  return g;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(
    Tensor hidden, Tensor weight, Tensor target, OptionalTensor bias, OptionalTensor class_weight,
    OptionalTensor denominator, std::optional<double> host_denominator, int64_t ignore_index,
    double label_smoothing, double softcap, double logit_scale, double z_loss, int64_t reduction,
    int64_t chunk_rows, bool need_dhidden, bool need_dweight, bool need_dbias) {
  LinearCrossEntropy a = arguments(hidden, weight, target, bias, class_weight,
                                   {ignore_index, label_smoothing, softcap, logit_scale, z_loss, chunk_rows});
  if (denominator) {
    check_same_device(kOp, "denominator", *denominator, hidden);
    a.denominator = scalar_of(kOp, "denominator", *denominator);
  }
  a.has_host_denominator = host_denominator.has_value();
  a.host_denominator = host_denominator.value_or(0.0);
  a.reduction = Reduction(reduction);
  bool scalar = a.reduction != Reduction::none;
  Tensor rows = make(hidden, {a.hidden.rows}, DType::f32);
  Tensor total = scalar ? make(hidden, {}, DType::f32) : nothing(hidden, DType::f32);
  Tensor scale = scalar ? make(hidden, {}, DType::f32) : nothing(hidden, DType::f32);
  a.loss = vector_of(kOp, "loss", rows);
  if (scalar) {
    a.total = scalar_of(kOp, "total", total);
    a.scale = scalar_of(kOp, "scale", scale);
  }
  // Of per-row losses the gradients are made in rows_backward: they need the upstream ones.
  Gradients g =
      make_gradients(a, hidden, scalar && need_dhidden, scalar && need_dweight, scalar && need_dbias);
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {scalar ? total : rows, scale, g.dhidden, g.dweight, g.dbias};
}

// Gradients of per-row losses: the logits are computed again, with each row's upstream gradient folded in.
std::tuple<Tensor, Tensor, Tensor> rows_backward(Tensor upstream, Tensor hidden, Tensor weight, Tensor target,
                                                 OptionalTensor bias, OptionalTensor class_weight,
                                                 int64_t ignore_index, double label_smoothing, double softcap,
                                                 double logit_scale, double z_loss, int64_t chunk_rows,
                                                 bool need_dhidden, bool need_dweight, bool need_dbias) {
  LinearCrossEntropy a = arguments(hidden, weight, target, bias, class_weight,
                                   {ignore_index, label_smoothing, softcap, logit_scale, z_loss, chunk_rows});
  a.reduction = Reduction::none;
  a.upstream = vector_of(kOp, "upstream gradient", upstream);
  Tensor rows = make(hidden, {a.hidden.rows}, DType::f32);
  a.loss = vector_of(kOp, "loss", rows);
  Gradients g = make_gradients(a, hidden, need_dhidden, need_dweight, need_dbias);
  auto ctx = make_context(hidden);
  linear_cross_entropy(*ctx, a);
  return {g.dhidden, g.dweight, g.dbias};
}

// The kept gradients times the upstream one, in the parameters' dtypes. The kept ones are not touched: a second backward
// through the same loss gives the same answer.
std::tuple<Tensor, Tensor, Tensor> backward(Tensor dloss, Tensor scale, Tensor dhidden, Tensor dweight,
                                            Tensor dbias, ScalarType weight_dtype, ScalarType bias_dtype) {
  DType hidden_dtype = dtype_of(kOp, "dhidden", dhidden);
  auto ctx = make_context(dhidden);
  Vector factor = scalar_of(kOp, "upstream gradient", dloss);
  Vector late = linear_cross_entropy_scales_early(hidden_dtype) ? Vector{} : scalar_of(kOp, "scale", scale);
  auto finish = [&](Tensor& kept, DType dtype) {
    Tensor out = make_like(kept, dtype);
    linear_cross_entropy_finish(*ctx, {.in = rows_of(kOp, "gradient", kept),
                                       .dloss = factor,
                                       .scale = late,
                                       .out = rows_of(kOp, "gradient", out)});
    return out;
  };
  return {finish(dhidden, hidden_dtype), finish(dweight, dtype_of(kOp, "weight", weight_dtype)),
          finish(dbias, dtype_of(kOp, "bias", bias_dtype))};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  constexpr const char* kArguments =
      "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? "
      "denominator, "
      "float? host_denominator, int ignore_index, float label_smoothing, float softcap, float logit_scale, "
      "float z_loss, "
      "int reduction, int chunk_rows, bool need_dhidden, bool need_dweight, bool need_dbias) -> "
      "(Tensor loss, Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias)";
  m.def((std::string("linear_cross_entropy") + kArguments).c_str());
  m.def((std::string("linear_cross_entropy_fwd") + kArguments).c_str());
  m.def(
      "linear_cross_entropy_bwd(Tensor dloss, Tensor scale, Tensor dhidden, Tensor dweight, Tensor dbias, "
      "ScalarType weight_dtype, ScalarType bias_dtype) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_cross_entropy_rows_bwd(Tensor upstream, Tensor hidden, Tensor weight, Tensor target, Tensor? "
      "bias, "
      "Tensor? class_weight, int ignore_index, float label_smoothing, float softcap, float logit_scale, "
      "float z_loss, "
      "int chunk_rows, bool need_dhidden, bool need_dweight, bool need_dbias) -> (Tensor, Tensor, Tensor)");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&forward));
  m.impl("linear_cross_entropy_fwd", TORCH_BOX(&forward));
  m.impl("linear_cross_entropy_bwd", TORCH_BOX(&backward));
  m.impl("linear_cross_entropy_rows_bwd", TORCH_BOX(&rows_backward));
}

}  // namespace tigon::torch_shim
