#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>

#include "tigon/base/require.h"
#include "tigon/ops/cross_entropy/cross_entropy.h"

namespace tigon {
namespace {

constexpr const char* kOp = "linear_cross_entropy";

void check(const LinearCrossEntropy& a) {
  int64_t rows = a.hidden.rows, h = a.hidden.cols, v = a.weight.rows;
  require_float(kOp, "hidden", a.hidden.dtype);
  TIGON_CHECK(kOp, h >= 1, "hidden must have at least one column, got ", h);
  TIGON_CHECK(kOp, v >= 1, "weight must have at least one row, got ", v);
  require_matrix(kOp, "weight", a.weight, v, h, a.hidden.dtype);
  require_vector(kOp, "target", a.target, rows, DType::i64);
  if (a.bias) {
    TIGON_CHECK(kOp, a.bias.size == v, "bias must be [", v, "], got [", a.bias.size, "]");
    TIGON_CHECK(kOp, a.bias.dtype == a.hidden.dtype || a.bias.dtype == DType::f32, "bias must be ",
                name_of(a.hidden.dtype), " or float32, got ", name_of(a.bias.dtype));
  }
  if (a.class_weight) require_vector(kOp, "class_weight", a.class_weight, v, DType::f32);
  if (a.upstream) require_vector(kOp, "upstream", a.upstream, rows, DType::f32);
  require_vector(kOp, "loss", a.loss, rows, DType::f32);
  if (a.reduction != Reduction::none) {
    require_vector(kOp, "total", a.total, 1, DType::f32);
    require_vector(kOp, "scale", a.scale, 1, DType::f32);
  }
  if (a.dhidden.data) require_matrix(kOp, "dhidden", a.dhidden, rows, h, a.hidden.dtype);
  if (a.dweight.data) require_matrix(kOp, "dweight", a.dweight, v, h, DType::f32);
  if (a.dbias) require_vector(kOp, "dbias", a.dbias, v, DType::f32);
  TIGON_CHECK(kOp, a.chunk_rows >= 0, "chunk_rows must be >= 1 (or None), got ", a.chunk_rows);
  bool scalar = a.reduction != Reduction::none;
  bool gradients = a.dhidden.data || a.dweight.data || a.dbias;
  TIGON_CHECK(kOp, !gradients || scalar || a.upstream, "upstream must be given for the gradients of per-row losses");
}

Matrix rows_from(const Matrix& m, int64_t first, int64_t count) {
  Matrix part = m;
  part.rows = count;
  if (m.data) part.data = static_cast<char*>(m.data) + first * m.stride * int64_t(size_of(m.dtype));
  return part;
}

Vector part_of(const Vector& v, int64_t first, int64_t count) {
  if (!v) return v;
  return {.data = static_cast<char*>(v.data) + first * int64_t(size_of(v.dtype)), .dtype = v.dtype, .size = count};
}

// One chunk of rows: logits, losses and dlogits over the logits, then the products that are wanted. `first` chunk: no sum yet.
void run_chunk(Context& ctx, const LinearCrossEntropy& a, int64_t begin, int64_t rows, Matrix logits, const Vector& ones) {
  DType dtype = a.hidden.dtype;
  int64_t h = a.hidden.cols, v = a.weight.rows;
  Matrix hidden = rows_from(a.hidden, begin, rows);
  logits.rows = rows;
  ctx.gemm({.m = rows, .n = v, .k = h, .a = hidden.data, .lda = hidden.stride, .b = a.weight.data, .ldb = a.weight.stride,
            .trans_b = true, .c = logits.data, .ldc = logits.stride, .ab_dtype = dtype, .c_dtype = dtype});
  bool gradients = a.dhidden.data || a.dweight.data || a.dbias;
  Vector scale = a.upstream ? part_of(a.upstream, begin, rows)
                 : linear_cross_entropy_scales_early(dtype) ? a.scale : Vector{};
  cross_entropy_rows(ctx, {.logits = logits,
                           .target = part_of(a.target, begin, rows),
                           .bias = a.bias,
                           .class_weight = a.class_weight,
                           .scale = gradients ? scale : Vector{},
                           .dlogits = gradients ? logits : Matrix{},
                           .loss = part_of(a.loss, begin, rows),
                           .ignore_index = a.ignore_index,
                           .logit_scale = a.logit_scale,
                           .softcap = a.softcap,
                           .label_smoothing = a.label_smoothing,
                           .z_loss = a.z_loss});
  float beta = begin == 0 ? 0.0f : 1.0f;  // the first chunk writes: nothing is zero-filled
  if (a.dhidden.data) {
    Matrix dhidden = rows_from(a.dhidden, begin, rows);
    ctx.gemm({.m = rows, .n = h, .k = v, .a = logits.data, .lda = logits.stride, .b = a.weight.data, .ldb = a.weight.stride,
              .c = dhidden.data, .ldc = dhidden.stride, .ab_dtype = dtype, .c_dtype = dtype});
  }
  if (a.dweight.data)
    ctx.gemm({.m = v, .n = h, .k = rows, .a = logits.data, .lda = logits.stride, .trans_a = true, .b = hidden.data,
              .ldb = hidden.stride, .c = a.dweight.data, .ldc = a.dweight.stride, .ab_dtype = dtype, .c_dtype = DType::f32,
              .beta = beta});
  if (a.dbias)
    ctx.gemm({.m = 1, .n = v, .k = rows, .a = ones.data, .lda = rows, .b = logits.data, .ldb = logits.stride,
              .c = a.dbias.data, .ldc = v, .ab_dtype = dtype, .c_dtype = DType::f32, .beta = beta});
}

Vector make_ones(Context& ctx, DType dtype, int64_t n) {
  Vector ones{.data = ctx.scratch(size_of(dtype) * size_t(n)), .dtype = dtype, .size = n};
  on_device(kOp, ctx, [&] { cpu::linear_cross_entropy_ones(ctx, ones); },
            TIGON_ON_CUDA(cuda::linear_cross_entropy_ones(ctx, ones)));
  return ones;
}

}  // namespace

int64_t linear_cross_entropy_chunk(Device device, int64_t rows) {
  int64_t most = device == Device::cuda ? 4096 : 1024;
  if (rows <= most + most / 4) return std::max<int64_t>(rows, 1);
  int64_t chunks = (rows + most - 1) / most;
  return ((rows + chunks - 1) / chunks + 127) / 128 * 128;
}

void linear_cross_entropy(Context& ctx, const LinearCrossEntropy& a) {
  check(a);
  int64_t rows = a.hidden.rows, v = a.weight.rows;
  int64_t chunk = std::min(a.chunk_rows > 0 ? a.chunk_rows : linear_cross_entropy_chunk(ctx.device(), rows), rows);
  if (a.reduction != Reduction::none)
    cross_entropy_scale(ctx, {.target = a.target,
                              .class_weight = a.class_weight,
                              .ignore_index = a.ignore_index,
                              .mean = a.reduction == Reduction::mean,
                              .denominator = a.denominator,
                              .host_denominator = a.host_denominator,
                              .has_host_denominator = a.has_host_denominator,
                              .scale = a.scale});
  int64_t ld = (v + 63) / 64 * 64;  // whole 128-byte lines, so that an odd vocabulary costs the products nothing
  Matrix logits{.data = ctx.scratch(size_of(a.hidden.dtype) * size_t(chunk * ld)), .dtype = a.hidden.dtype, .cols = v,
                .stride = ld};
  Vector ones = a.dbias ? make_ones(ctx, a.hidden.dtype, std::max<int64_t>(chunk, 1)) : Vector{};
  for (int64_t begin = 0; begin < rows; begin += chunk)
    run_chunk(ctx, a, begin, std::min(chunk, rows - begin), logits, ones);
  if (a.reduction != Reduction::none)
    cross_entropy_total(ctx, {.loss = a.loss, .scale = a.scale, .total = a.total});
}

void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a) {
  require_matrix(kOp, "gradient", a.out, a.in.rows, a.in.cols, a.out.dtype);
  require_vector(kOp, "upstream gradient", a.dloss, 1, DType::f32);
  if (a.scale) require_vector(kOp, "scale", a.scale, 1, DType::f32);
  if (a.in.rows == 0 || a.in.cols == 0) return;
  TIGON_CHECK(kOp, a.in.stride == a.in.cols && a.out.stride == a.out.cols, "gradients must be contiguous");
  on_device(kOp, ctx, [&] { cpu::linear_cross_entropy_finish(ctx, a); },
            TIGON_ON_CUDA(cuda::linear_cross_entropy_finish(ctx, a)));
}

}  // namespace tigon
