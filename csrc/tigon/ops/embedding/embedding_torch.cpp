#include <array>

#include "tigon/ops/embedding/embedding.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim::embedding_torch {
namespace {

constexpr const char* kOp = "embedding";

// Of any shape, as one vector; replaced by a dense copy where it is not.
Vector ids_of(Tensor& ids) {
  if (!ids.is_contiguous()) ids = to_contiguous(kOp, "ids", ids);
  return {.data = data_of(kOp, "ids", ids), .dtype = dtype_of(kOp, "ids", ids), .size = ids.numel()};
}

Tensor forward(Tensor ids, Tensor weight, int64_t /* of the gradient */, double scale) {
  check_same_device(kOp, "ids", ids, weight);
  TIGON_CHECK(kOp, weight.dim() == 2, "weight must have two dimensions, got ", weight.dim());
  TIGON_CHECK(kOp, ids.dim() < 8, "ids must have fewer than 8 dimensions, got ", ids.dim());
  Matrix table = rows_of(kOp, "weight", weight);
  Vector tokens = ids_of(ids);
  std::array<int64_t, 8> sizes;
  for (int64_t d = 0; d < ids.dim(); ++d) sizes[size_t(d)] = ids.size(d);
  sizes[size_t(ids.dim())] = table.cols;
  Tensor y = empty(weight, sizes.data(), ids.dim() + 1, table.dtype);
  auto ctx = make_context(weight);
  Matrix rows = {.data = data_of(kOp, "y", y),
                 .dtype = table.dtype,
                 .rows = tokens.size,
                 .cols = table.cols,
                 .stride = table.cols};
  embedding_fwd(*ctx, {.ids = tokens, .weight = table, .y = rows, .scale = float(scale)});
  return y;
}

Tensor backward(Tensor dy, Tensor ids, int64_t vocabulary, int64_t padding_idx, double scale) {
  check_same_device(kOp, "ids", ids, dy);
  Matrix rows = rows_of(kOp, "dy", dy);
  Tensor dweight = make(dy, {vocabulary, rows.cols}, rows.dtype);
  auto ctx = make_context(dy);
  embedding_bwd(*ctx, {.ids = ids_of(ids),
                       .dy = rows,
                       .dweight = rows_of(kOp, "dweight", dweight),
                       .padding_idx = padding_idx,
                       .scale = float(scale)});
  return dweight;
}

}  // namespace

// padding_idx -1: none.
TIGON_TORCH_SCHEMAS(m) {
  define_forward(m, "embedding", "(Tensor ids, Tensor weight, int padding_idx, float scale) -> Tensor");
  define(m, "embedding_bwd(Tensor dy, Tensor ids, int vocabulary, int padding_idx, float scale) -> Tensor");
}
TIGON_TORCH_KERNELS(m) {
  implement_forward(m, "embedding", TORCH_BOX(&forward));
  m.impl("embedding_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim::embedding_torch
