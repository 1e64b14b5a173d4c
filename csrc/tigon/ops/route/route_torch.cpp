#include "tigon/ops/route/route.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::route_torch {
namespace {

constexpr const char* kOp = "route";

// The options of the schema, in its order.
struct Options : RouteOptions {
  static Options take(Stack& s) {
    Options o;
    o.score = s.take<bool>() ? RouteScore::sigmoid : RouteScore::softmax;
    o.normalize = s.take<bool>();
    o.num_groups = s.take<int64_t>();
    o.top_groups = s.take<int64_t>();
    o.group_score = s.take<bool>() ? RouteGroupScore::sum_of_two : RouteGroupScore::max;
    o.scale = float(s.take<double>());
    return o;
  }
};

Matrix logits_of(Tensor& logits) {
  TIGON_CHECK(kOp, logits.dim() == 2, "logits must have two dimensions, got ", logits.dim());
  return rows_of(kOp, "logits", logits);
}
Matrix ids_of(Tensor& ids) {
  return {.data = data_of(kOp, "ids", ids),
          .dtype = dtype_of(kOp, "ids", ids),
          .rows = ids.size(0),
          .cols = ids.size(1),
          .stride = ids.size(1)};
}
Vector optional_vector(const char* name, OptionalTensor& t, const Tensor& like) {
  if (t) check_same_device(kOp, name, *t, like);
  return vector_of(kOp, name, t);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(Tensor logits, OptionalTensor bias,
                                                           OptionalTensor token_weights, int64_t top_k,
                                                           Options options, bool f32_weights, bool i64_ids,
                                                           bool losses) {
  const Matrix rows = logits_of(logits);
  TIGON_CHECK(kOp, top_k >= 1 && top_k <= rows.cols, "top_k must be in [1, ", rows.cols, "], got ", top_k);
  Tensor weights = make(logits, {rows.rows, top_k}, f32_weights ? DType::f32 : rows.dtype);
  Tensor ids = make(logits, {rows.rows, top_k}, i64_ids ? DType::i64 : DType::i32);
  auto wanted = [&](std::initializer_list<int64_t> sizes) {
    return losses ? make(logits, sizes, DType::f32) : nothing(logits, DType::f32);
  };
  Tensor aux = wanted({}), z = wanted({}), balance = wanted({rows.cols + 1});
  auto ctx = make_context(logits);
  route_fwd(*ctx, {.logits = rows,
                   .bias = optional_vector("correction_bias", bias, logits),
                   .token_weights = optional_vector("token_weights", token_weights, logits),
                   .weights = rows_of(kOp, "weights", weights),
                   .ids = ids_of(ids),
                   .aux = losses ? scalar_of(kOp, "aux", aux) : Vector{},
                   .z = losses ? scalar_of(kOp, "z", z) : Vector{},
                   .balance = losses ? vector_of(kOp, "balance", balance) : Vector{},
                   .options = options});
  return {weights, ids, aux, z, balance};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> infer(Tensor logits, OptionalTensor bias,
                                                 OptionalTensor token_weights, int64_t top_k, Options options,
                                                 bool f32_weights, bool i64_ids, bool losses) {
  auto all = forward(logits, bias, token_weights, top_k, options, f32_weights, i64_ids, losses);
  return {std::get<0>(all), std::get<1>(all), std::get<2>(all), std::get<3>(all)};
}

std::tuple<Tensor> backward(OptionalTensor dweights, OptionalTensor daux, OptionalTensor dz, Tensor logits,
                            Tensor ids, OptionalTensor token_weights, Tensor balance, Options options) {
  const Matrix rows = logits_of(logits);
  Tensor dlogits = make_like(logits, rows.dtype);
  auto ctx = make_context(logits);
  route_bwd(*ctx, {.logits = rows,
                   .ids = ids_of(ids),
                   .dweights = dweights ? rows_of(kOp, "dweights", *dweights) : Matrix{},
                   .daux = daux ? scalar_of(kOp, "daux", *daux) : Vector{},
                   .dz = dz ? scalar_of(kOp, "dz", *dz) : Vector{},
                   .token_weights = optional_vector("token_weights", token_weights, logits),
                   .balance = vector_of(kOp, "balance", balance),
                   .dlogits = rows_of(kOp, "dlogits", dlogits),
                   .options = options});
  return {dlogits};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string options =
      "bool sigmoid, bool normalize, int num_groups, int top_groups, bool sum_of_two, float scale";
  const std::string inputs = "(Tensor logits, Tensor? correction_bias, Tensor? token_weights, int top_k, " +
                             options + ", bool f32_weights, bool i64_ids, bool losses) -> ";
  define_forward(m, "route", inputs + "(Tensor weights, Tensor ids, Tensor aux, Tensor z, Tensor balance)");
  define(m, "route_infer" + inputs + "(Tensor weights, Tensor ids, Tensor aux, Tensor z)");
  define(m,
         "route_bwd(Tensor? dweights, Tensor? daux, Tensor? dz, Tensor logits, Tensor ids, Tensor? "
         "token_weights, Tensor balance, " +
             options + ") -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "route", &boxed<&forward>);
  m.impl("route_infer", &boxed<&infer>);
  m.impl("route_bwd", &boxed<&backward>);
}

}  // namespace tigon::torch_shim::route_torch
