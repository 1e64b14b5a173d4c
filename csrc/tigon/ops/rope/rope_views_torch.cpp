#include "tigon/ops/rope/rope_torch.h"

namespace tigon::torch_shim {
namespace {

void make_rows_dense(const char* op, const char* name, Tensor& t) {
  int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) t = to_contiguous(op, name, t);
}

// [T, ...], [B, T, ...], or with axes [A, T, ...], [A, B, T, ...]; `rest` trailing dimensions follow.
RopeTable table_of(const char* op, const char* name, Tensor& t, bool axes, int64_t rest) {
  int64_t dims = t.dim() - rest, least = axes ? 2 : 1;
  TIGON_CHECK(op, dims == least || dims == least + 1, name, " must have ", least + rest, " or ",
              least + rest + 1, " dimensions, got ", t.dim());
  bool batched = dims > least;
  return {.data = data_of(op, name, t),
          .dtype = dtype_of(op, name, t),
          .axes = axes ? t.size(0) : 1,
          .batch = batched ? t.size(dims - 2) : 1,
          .tokens = t.size(dims - 1),
          .cols = rest > 0 ? t.size(dims) : 1,
          .axis_stride = axes ? t.stride(0) : 0,
          .batch_stride = batched ? t.stride(dims - 2) : 0,
          .token_stride = t.stride(dims - 1)};
}

}  // namespace

RopeHeads heads_of(const char* op, const char* name, Tensor& t, int64_t head_dim) {
  int64_t dims = t.dim();
  TIGON_CHECK(op, dims == 3 || dims == 4, name, " must have 3 or 4 dimensions, got ", dims);
  TIGON_CHECK(op, head_dim == dims - 3 || head_dim == dims - 2, "head_dim must be ", dims - 3, " or ",
              dims - 2, ", got ", head_dim);
  make_rows_dense(op, name, t);
  int64_t token_dim = 2 * dims - 5 - head_dim;
  return {.data = data_of(op, name, t),
          .dtype = dtype_of(op, name, t),
          .batch = dims == 4 ? t.size(0) : 1,
          .heads = t.size(head_dim),
          .tokens = t.size(token_dim),
          .cols = t.size(dims - 1),
          .batch_stride = dims == 4 ? t.stride(0) : 0,
          .head_stride = t.stride(head_dim),
          .token_stride = t.stride(token_dim)};
}

bool heads_swapped(const Tensor& x) {
  int64_t dims = x.dim();
  return dims >= 3 && x.stride(dims - 3) < x.stride(dims - 2);
}

Tensor make_heads(const Tensor& x, DType dtype, bool swapped) {
  if (!swapped) return make_like(x, dtype);
  auto at_least_1 = [](int64_t n) { return n > 1 ? n : 1; };
  int64_t dims = x.dim(), d = at_least_1(x.size(dims - 1)), inner = at_least_1(x.size(dims - 3)) * d,
          outer = at_least_1(x.size(dims - 2)) * inner;
  int64_t strides[4] = {outer, d, inner, 1};
  return empty_strided(x, x.sizes().data(), strides + (4 - dims), dims, dtype);
}

Rope rope_of(const char* op, RopeTables& tables, const RopeOptions& options, const Tensor& like) {
  auto& [cos, sin, positions] = tables;
  check_same_device(op, "cos", cos, like);
  if (sin) check_same_device(op, "sin", *sin, like);
  if (positions) check_same_device(op, "positions", *positions, like);
  Rope a{};
  a.form = options.form();
  TIGON_CHECK(op, 0 <= options.pairs && options.pairs <= 2, "pairs must be 0, 1 or 2, got ", options.pairs);
  bool axes = a.form.sections.given();
  if (positions) a.positions = table_of(op, "positions", *positions, axes, 0);
  axes = axes && !positions;
  if (sin) {
    make_rows_dense(op, "cos", cos);
    make_rows_dense(op, "sin", *sin);
    a.cos = table_of(op, "cos", cos, axes, 1);
    a.sin = table_of(op, "sin", *sin, axes, 1);
    return a;
  }
  int64_t last = cos.dim() - 1;
  TIGON_CHECK(op, last >= 2 && cos.size(last) == 2 && options.shared,
              "sin must be given where cos is not complex");
  bool dense = (cos.stride(last) == 1 && cos.stride(last - 1) == 2) || cos.numel() == 0;
  if (!dense) cos = to_contiguous(op, "cos", cos);
  a.cos = table_of(op, "cos", cos, axes, 2);
  a.cos.col_stride = 2;
  a.sin = a.cos;
  a.sin.data = static_cast<const char*>(a.cos.data) + size_of(a.cos.dtype);
  return a;
}

}  // namespace tigon::torch_shim
