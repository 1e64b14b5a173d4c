#include "tigon/ops/hyper_connection/hyper_connection.h"

#include <algorithm>

#include "tigon/base/op.h"

namespace tigon {
namespace {

// Elements of x that are in fp32 at a time.
constexpr int64_t kChunk = int64_t(1) << 23;

int64_t chunk_rows(const Matrix& x) {
  return std::clamp<int64_t>(kChunk / x.cols, 1, std::max<int64_t>(x.rows, 1));
}

Matrix dense(float* data, int64_t rows, int64_t cols) {
  return {.data = data, .dtype = DType::f32, .rows = rows, .cols = cols, .stride = cols};
}

void require_streams(const char* op, const char* name, int64_t streams) {
  TIGON_CHECK(op, streams >= 1 && streams <= kMaxStreams, name, " must be in [1, ", kMaxStreams, "], got ",
              streams);
}

// x: [tokens, streams * columns]; the columns of a stream.
int64_t require_x(const char* op, const Matrix& x, int64_t streams) {
  require_streams(op, "streams", streams);
  require_float(op, "x", x.dtype);
  TIGON_CHECK(op, x.cols >= streams && x.cols % streams == 0, "x must have columns in ", streams,
              " streams, got ", x.cols);
  return x.cols / streams;
}

void require_given(const char* op, const char* name, const Matrix& m, int64_t rows, int64_t cols,
                   DType dtype) {
  if (m.data != nullptr) require_matrix(op, name, m, rows, cols, dtype);
}

// The checks that both directions make; how many parts the weight has: pre, post, res.
int parts_of(const char* op, const Matrix& x, const Matrix& weight, const Vector& base, const Vector& scale,
             const Matrix& product, const Vector& rstd, const HyperConnection& options) {
  require_x(op, x, options.streams);
  const int64_t n = options.streams, m = weight.rows;
  TIGON_CHECK(op, m == n || m == 2 * n || m == 2 * n + n * n, "weight must have ", n, ", ", 2 * n, " or ",
              2 * n + n * n, " rows, got ", m);
  require_matrix(op, "weight", weight, m, x.cols, DType::f32);
  const int parts = m == n ? 1 : m == 2 * n ? 2 : 3;
  require_vector(op, "base", base, m, DType::f32);
  require_vector(op, "scale", scale, parts, DType::f32);
  require_matrix(op, "product", product, x.rows, m, DType::f32);
  require_vector(op, "rstd", rstd, x.rows, DType::f32);
  TIGON_CHECK(op, options.norm_eps >= 0.0f, "norm_eps must be >= 0, got ", options.norm_eps);
  TIGON_CHECK(op, options.sinkhorn_eps >= 0.0f, "sinkhorn_eps must be >= 0, got ", options.sinkhorn_eps);
  TIGON_CHECK(op, options.iterations >= 1, "iterations must be >= 1, got ", options.iterations);
  return parts;
}

// fn(first, rows, x of these rows in fp32) for every chunk of tokens.
template <class Fn>
void for_chunks(const char* op, Context& ctx, const Matrix& x, float* rstd, float eps, const Fn& fn) {
  const int64_t chunk = chunk_rows(x);
  const bool copies = x.dtype != DType::f32;
  float* wide = copies ? ctx.scratch_of<float>(chunk * x.cols) : nullptr;
  for (int64_t first = 0; first < x.rows; first += chunk) {
    const int64_t rows = std::min(chunk, x.rows - first);
    const Matrix part = rows_from(x, first, rows);
    if (copies || rstd != nullptr) {
      const HyperConnectionWiden a = {part, wide, rstd ? rstd + first : nullptr, eps};
      TIGON_RUN(op, ctx, widen, a);
    }
    fn(first, rows, copies ? dense(wide, rows, x.cols) : part);
  }
}

void mix_fwd(const char* op, Context& ctx, const HyperConnectionMixFwd& a) {
  TIGON_RUN(op, ctx, hyper_connection_mix_fwd, a);
}
void mix_bwd(const char* op, Context& ctx, const HyperConnectionMixBwd& a) {
  TIGON_RUN(op, ctx, hyper_connection_mix_bwd, a);
}

}  // namespace

void hyper_connection_fwd(Context& ctx, const HyperConnectionFwd& a) {
  const char* op = "hyper_connection";
  const int parts = parts_of(op, a.x, a.weight, a.base, a.scale, a.product, a.rstd, a.options);
  const int64_t n = a.options.streams, tokens = a.x.rows, m = a.weight.rows;
  require_given(op, "y", a.y, tokens, a.x.cols / n, a.x.dtype);
  require_matrix(op, "pre", a.pre, tokens, n, DType::f32);
  if (parts > 1) require_matrix(op, "post", a.post, tokens, n, DType::f32);
  if (parts > 2) require_matrix(op, "res", a.res, tokens, n * n, DType::f32);
  if (tokens == 0) return;
  bool done = false;
  on_device(op, ctx, [] {}, TIGON_ON_CUDA(done = cuda::products(ctx, a)));
  if (!done)
    for_chunks(op, ctx, a.x, a.rstd.as<float>(), a.options.norm_eps,
               [&](int64_t first, int64_t rows, const Matrix& wide) {
                 ctx.gemm({.m = rows,
                           .n = m,
                           .k = a.x.cols,
                           .a = wide.data,
                           .lda = wide.stride,
                           .b = a.weight.data,
                           .ldb = a.weight.stride,
                           .trans_b = true,
                           .c = a.product.row<float>(first),
                           .ldc = a.product.stride});
               });
  TIGON_RUN(op, ctx, coefficients, a);
  if (a.y.data != nullptr) mix_fwd(op, ctx, {.x = a.x, .mix = a.pre, .y = a.y, .streams = n, .outs = 1});
}

void hyper_connection_bwd(Context& ctx, const HyperConnectionBwd& a) {
  const char* op = "hyper_connection_bwd";
  const int parts = parts_of(op, a.x, a.weight, a.base, a.scale, a.product, a.rstd, a.options);
  const int64_t n = a.options.streams, tokens = a.x.rows, m = a.weight.rows, cols = a.x.cols;
  require_given(op, "dy", a.dy, tokens, cols / n, a.x.dtype);
  require_given(op, "dpre", a.dpre, tokens, n, DType::f32);
  if (parts > 1) require_given(op, "dpost", a.dpost, tokens, n, DType::f32);
  if (parts > 2) require_given(op, "dres", a.dres, tokens, n * n, DType::f32);
  require_result(op, "dx", a.dx, a.x);
  require_result(op, "dweight", a.dweight, a.weight);
  require_optional(op, "dbase", a.dbase, m);
  require_optional(op, "dscale", a.dscale, parts);

  float* dots = nullptr;
  if (a.dy.data != nullptr && tokens > 0) {
    dots = ctx.scratch_of<float>(tokens * n);
    mix_bwd(op, ctx,
            {.dy = a.dy,
             .x = a.x,
             .mix = dense(dots, tokens, n),
             .dmix = dense(dots, tokens, n),
             .streams = n,
             .outs = 1});
  }
  const HyperConnectionGradients g = {.call = &a,
                                      .dots = dots,
                                      .dproduct = ctx.scratch_of<float>(tokens * m),
                                      .pre = ctx.scratch_of<float>(tokens * n),
                                      .x_scale = ctx.scratch_of<float>(tokens)};
  TIGON_RUN(op, ctx, coefficient_gradients, g);
  if (tokens == 0) {
    if (a.dweight.data != nullptr)
      on_device(
          op, ctx, [&] { cpu::set_zero(ctx, a.dweight); }, TIGON_ON_CUDA(cuda::set_zero(ctx, a.dweight)));
    return;
  }
  bool done = false;
  on_device(op, ctx, [] {}, TIGON_ON_CUDA(done = cuda::product_gradients(ctx, g)));
  if (done) return;
  if (a.dweight.data != nullptr)
    for_chunks(op, ctx, a.x, nullptr, 0.0f, [&](int64_t first, int64_t rows, const Matrix& wide) {
      ctx.gemm({.m = m,
                .n = cols,
                .k = rows,
                .a = g.dproduct + first * m,
                .lda = m,
                .trans_a = true,
                .b = wide.data,
                .ldb = wide.stride,
                .c = a.dweight.data,
                .ldc = a.dweight.stride,
                .beta = first > 0 ? 1.0f : 0.0f});
    });
  if (a.dx.data == nullptr) return;
  const int64_t chunk = chunk_rows(a.x);
  float* addend = ctx.scratch_of<float>(chunk * cols);
  for (int64_t first = 0; first < tokens; first += chunk) {
    const int64_t rows = std::min(chunk, tokens - first);
    ctx.gemm({.m = rows,
              .n = cols,
              .k = m,
              .a = g.dproduct + first * m,
              .lda = m,
              .b = a.weight.data,
              .ldb = a.weight.stride,
              .c = addend,
              .ldc = cols});
    mix_bwd(op, ctx,
            {.dy = rows_from(a.dy, first, rows),
             .x = rows_from(a.x, first, rows),
             .mix = dense(g.pre + first * n, rows, n),
             .dx = rows_from(a.dx, first, rows),
             .streams = n,
             .outs = a.dy.data != nullptr ? 1 : 0,
             .x_scale = {.data = g.x_scale + first, .dtype = DType::f32, .size = rows},
             .addend = dense(addend, rows, cols)});
  }
}

TIGON_OP(hyper_connection_mix, HyperConnectionMix)

}  // namespace tigon
