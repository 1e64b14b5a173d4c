#include <vector>

#include "tigon/ops/hyper_connection/hyper_connection.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::hyper_connection_torch {
namespace {

constexpr const char* kOp = "hyper_connection";

// The options of the schema, in its order.
struct Options : HyperConnection {
  static Options take(Stack& s) {
    Options o;
    o.streams = s.take<int64_t>();
    o.norm_eps = float(s.take<double>());
    o.pre_eps = float(s.take<double>());
    o.post_scale = float(s.take<double>());
    o.post_eps = float(s.take<double>());
    o.iterations = s.take<int64_t>();
    o.sinkhorn_eps = float(s.take<double>());
    return o;
  }
};

// Contiguous, x's sizes but for the last.
Tensor make_rows(const Tensor& x, int64_t cols, DType dtype) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) sizes.push_back(x.size(d));
  sizes.push_back(cols);
  return empty(x, sizes.data(), int64_t(sizes.size()), dtype);
}

Matrix optional_rows(const char* op, const char* name, OptionalTensor& t, const Tensor& like) {
  if (!t) return {};
  check_same_device(op, name, *t, like);
  return rows_of(op, name, *t);
}
Matrix wanted(const char* op, const char* name, Tensor& t, bool want) {
  return want ? rows_of(op, name, t) : Matrix{};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(Tensor x, Tensor weight, Tensor base,
                                                                   Tensor scale, Options options,
                                                                   bool collapse) {
  check_same_device(kOp, "weight", weight, x);
  check_same_device(kOp, "base", base, x);
  check_same_device(kOp, "scale", scale, x);
  const int64_t n = options.streams;
  TIGON_CHECK(kOp, n >= 1 && n <= kMaxStreams, "streams must be in [1, ", kMaxStreams, "], got ", n);
  const Matrix rows = rows_of(kOp, "x", x), w = rows_of(kOp, "weight", weight);
  const bool has_post = w.rows > n, has_res = w.rows > 2 * n;
  Tensor y = collapse ? make_rows(x, rows.cols / n, rows.dtype) : nothing(x, rows.dtype);
  Tensor pre = make_rows(x, n, DType::f32);
  Tensor post = has_post ? make_rows(x, n, DType::f32) : nothing(x, DType::f32);
  Tensor res = has_res ? make_rows(x, n * n, DType::f32) : nothing(x, DType::f32);
  Tensor product = make(x, {rows.rows, w.rows}, DType::f32), rstd = make(x, {rows.rows}, DType::f32);
  auto ctx = make_context(x);
  hyper_connection_fwd(*ctx, {.x = rows,
                              .weight = w,
                              .base = vector_of(kOp, "base", base),
                              .scale = vector_of(kOp, "scale", scale),
                              .y = wanted(kOp, "y", y, collapse),
                              .pre = rows_of(kOp, "pre", pre),
                              .post = wanted(kOp, "post", post, has_post),
                              .res = wanted(kOp, "res", res, has_res),
                              .product = rows_of(kOp, "product", product),
                              .rstd = vector_of(kOp, "rstd", rstd),
                              .options = options});
  return {y, pre, post, res, product, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> infer(Tensor x, Tensor weight, Tensor base, Tensor scale,
                                                 Options options, bool collapse) {
  auto all = forward(x, weight, base, scale, options, collapse);
  return {std::get<0>(all), std::get<1>(all), std::get<2>(all), std::get<3>(all)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(OptionalTensor dy, OptionalTensor dpre,
                                                    OptionalTensor dpost, OptionalTensor dres, Tensor x,
                                                    Tensor weight, Tensor base, Tensor scale, Tensor product,
                                                    Tensor rstd, Options options, bool need_dx,
                                                    bool need_dweight, bool need_dbase, bool need_dscale) {
  const Matrix rows = rows_of(kOp, "x", x), w = rows_of(kOp, "weight", weight);
  Tensor dx = need_dx ? make_like(x, rows.dtype) : nothing(x, rows.dtype);
  Tensor dweight = need_dweight ? make_like(weight, DType::f32) : nothing(x, DType::f32);
  Tensor dbase = need_dbase ? make_like(base, DType::f32) : nothing(x, DType::f32);
  Tensor dscale = need_dscale ? make_like(scale, DType::f32) : nothing(x, DType::f32);
  auto ctx = make_context(x);
  hyper_connection_bwd(*ctx, {.dy = optional_rows(kOp, "dy", dy, x),
                              .dpre = optional_rows(kOp, "dpre", dpre, x),
                              .dpost = optional_rows(kOp, "dpost", dpost, x),
                              .dres = optional_rows(kOp, "dres", dres, x),
                              .x = rows,
                              .weight = w,
                              .base = vector_of(kOp, "base", base),
                              .scale = vector_of(kOp, "scale", scale),
                              .product = rows_of(kOp, "product", product),
                              .rstd = vector_of(kOp, "rstd", rstd),
                              .dx = wanted(kOp, "dx", dx, need_dx),
                              .dweight = wanted(kOp, "dweight", dweight, need_dweight),
                              .dbase = need_dbase ? vector_of(kOp, "dbase", dbase) : Vector{},
                              .dscale = need_dscale ? vector_of(kOp, "dscale", dscale) : Vector{},
                              .options = options});
  return {dx, dweight, dbase, dscale};
}

}  // namespace

TIGON_TORCH_SCHEMAS(m) {
  const std::string options =
      "int streams, float norm_eps, float pre_eps, float post_scale, float post_eps, int iterations, float "
      "sinkhorn_eps";
  const std::string inputs =
      "(Tensor x, Tensor weight, Tensor base, Tensor scale, " + options + ", bool collapse)";
  const std::string results = "Tensor y, Tensor pre, Tensor post, Tensor res";
  define_forward(m, kOp, inputs + " -> (" + results + ", Tensor product, Tensor rstd)");
  define(m, "hyper_connection_infer" + inputs + " -> (" + results + ")");
  define(
      m,
      "hyper_connection_bwd(Tensor? dy, Tensor? dpre, Tensor? dpost, Tensor? dres, Tensor x, Tensor weight, "
      "Tensor base, Tensor scale, Tensor product, Tensor rstd, " +
          options +
          ", bool need_dx, bool need_dweight, bool need_dbase, bool need_dscale) -> (Tensor dx, Tensor "
          "dweight, "
          "Tensor dbase, Tensor dscale)");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, kOp, &boxed<&forward>);
  m.impl("hyper_connection_infer", &boxed<&infer>);
  m.impl("hyper_connection_bwd", &boxed<&backward>);
}

}  // namespace tigon::torch_shim::hyper_connection_torch
