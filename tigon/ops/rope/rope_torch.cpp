#include <utility>

#include "tigon/ops/rope/rope.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {
namespace {

constexpr const char* kOp = "rope";

// Replaces `t` by a copy when its rows are not dense.
void make_rows_dense(Tensor& t) {
  int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) t = torch::stable::contiguous(t);
}

// unsqueeze_dim is the dimension of the heads: 1 for [B, H, T, D], 2 for [B, T, H, D].
RopeHeads heads_of(const char* name, Tensor& t, int64_t unsqueeze_dim) {
  TIGON_CHECK(kOp, t.dim() == 4, name, " must have 4 dimensions, got ", t.dim());
  make_rows_dense(t);
  int64_t h = unsqueeze_dim, s = 3 - h;
  return {.data = t.data_ptr(),
          .dtype = dtype_of(kOp, name, t),
          .batch = t.size(0),
          .heads = t.size(h),
          .tokens = t.size(s),
          .cols = t.size(3),
          .batch_stride = t.stride(0),
          .head_stride = t.stride(h),
          .token_stride = t.stride(s)};
}

RopeTable table_of(const char* name, Tensor& t) {
  int64_t dims = t.dim();
  TIGON_CHECK(kOp, dims == 2 || dims == 3, name, " must have 2 or 3 dimensions, got ", dims);
  make_rows_dense(t);
  return {.data = t.data_ptr(),
          .dtype = dtype_of(kOp, name, t),
          .batch = dims == 3 ? t.size(0) : 1,
          .tokens = t.size(dims - 2),
          .cols = t.size(dims - 1),
          .batch_stride = dims == 3 ? t.stride(0) : 0,
          .token_stride = t.stride(dims - 2)};
}

bool middle_swapped(const Tensor& x) { return x.stride(1) < x.stride(2); }

// Dense, sizes of x; `swapped`: dimension 1 lies inside dimension 2 in memory.
Tensor make_heads(const Tensor& x, DType dtype, bool swapped) {
  if (!swapped) return make_like(x, dtype);
  using torch::headeronly::ScalarType;
  auto type = dtype == DType::f32    ? ScalarType::Float
              : dtype == DType::bf16 ? ScalarType::BFloat16
                                     : ScalarType::Half;
  auto at_least_1 = [](int64_t n) { return n > 1 ? n : 1; };
  auto sizes = x.sizes();
  int64_t d = at_least_1(sizes[3]), inner = at_least_1(sizes[1]) * d, outer = at_least_1(sizes[2]) * inner;
  int64_t strides[4] = {outer, d, inner, 1};
  AtenTensorHandle handle = nullptr;
  int32_t device = x.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, sizes.data(), strides, int32_t(type), device,
                                                         x.get_device_index(), &handle));
  return Tensor(handle);
}

void check_unsqueeze_dim(int64_t d) {
  TIGON_CHECK(kOp, d == 1 || d == 2, "unsqueeze_dim must be 1 or 2, got ", d);
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor cos, Tensor sin, int64_t unsqueeze_dim) {
  check_unsqueeze_dim(unsqueeze_dim);
  check_same_device(kOp, "k", k, q);
  check_same_device(kOp, "cos", cos, q);
  check_same_device(kOp, "sin", sin, q);
  Rope a{
      .q = {}, .k = {}, .cos = table_of("cos", cos), .sin = table_of("sin", sin), .q_out = {}, .k_out = {}};
  bool q_swapped = q.dim() == 4 && middle_swapped(q), k_swapped = k.dim() == 4 && middle_swapped(k);
  a.q = heads_of("q", q, unsqueeze_dim);
  a.k = heads_of("k", k, unsqueeze_dim);
  Tensor q_out = make_heads(q, promote(a.q.dtype, a.cos.dtype), q_swapped);
  Tensor k_out = make_heads(k, promote(a.k.dtype, a.cos.dtype), k_swapped);
  a.q_out = heads_of("q", q_out, unsqueeze_dim);
  a.k_out = heads_of("k", k_out, unsqueeze_dim);
  auto ctx = make_context(q);
  rope_fwd(*ctx, a);
  return {q_out, k_out};
}

// dtype (of dq and dk) is a core DType; *_swapped: memory order wanted, that of q and k in the forward.
std::tuple<Tensor, Tensor> backward(OptionalTensor dq_out, OptionalTensor dk_out, Tensor cos, Tensor sin,
                                    int64_t unsqueeze_dim, int64_t dtype, bool q_swapped, bool k_swapped) {
  check_unsqueeze_dim(unsqueeze_dim);
  TIGON_CHECK(kOp, dtype >= 0 && dtype <= int64_t(DType::f16), "dtype must be 0, 1 or 2, got ", dtype);
  check_same_device(kOp, "sin", sin, cos);
  Rope a{
      .q = {}, .k = {}, .cos = table_of("cos", cos), .sin = table_of("sin", sin), .q_out = {}, .k_out = {}};
  auto prepare = [&](const char* name, OptionalTensor& dy, bool swapped, RopeHeads& in, RopeHeads& out) {
    if (!dy) return nothing(cos, DType(dtype));
    check_same_device(kOp, name, *dy, cos);
    in = heads_of(name, *dy, unsqueeze_dim);
    Tensor dx = make_heads(*dy, DType(dtype), swapped);
    out = heads_of(name, dx, unsqueeze_dim);
    return dx;
  };
  Tensor dq = prepare("dq", dq_out, q_swapped, a.q, a.q_out);
  Tensor dk = prepare("dk", dk_out, k_swapped, a.k, a.k_out);
  auto ctx = make_context(cos);
  rope_bwd(*ctx, a);
  return {dq, dk};
}

}  // namespace

// rope is rope_fwd under a second name: Python attaches autograd to it, and eager calls stay free of that
// layer.
TIGON_TORCH_SCHEMAS(m) {
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim) -> (Tensor, Tensor)");
  m.def("rope_fwd(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim) -> (Tensor, Tensor)");
  m.def(
      "rope_bwd(Tensor? dq_out, Tensor? dk_out, Tensor cos, Tensor sin, int unsqueeze_dim, int dtype, bool "
      "q_swapped, "
      "bool k_swapped) -> (Tensor dq, Tensor dk)");
}
TIGON_TORCH_KERNELS(m) {
  m.impl("rope", TORCH_BOX(&forward));
  m.impl("rope_fwd", TORCH_BOX(&forward));
  m.impl("rope_bwd", TORCH_BOX(&backward));
}

}  // namespace tigon::torch_shim
