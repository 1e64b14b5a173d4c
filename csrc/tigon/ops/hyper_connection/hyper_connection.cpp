#include "tigon/ops/hyper_connection/hyper_connection.h"

#include <algorithm>

#include "tigon/base/require.h"

namespace tigon {
namespace {

// This many elements of x are in fp32 at a time.
constexpr int64_t kChunk = int64_t(1) << 23;

int64_t chunk_rows(const Matrix& x) {
  return std::clamp<int64_t>(kChunk / x.cols, 1, std::max<int64_t>(x.rows, 1));
}

Matrix dense(float* data, int64_t rows, int64_t cols) {
  return {.data = data, .dtype = DType::f32, .rows = rows, .cols = cols, .stride = cols};
}

// Calls fn(first, rows, x of these rows in fp32) for every chunk of tokens.
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

void run(Context& ctx, const HyperConnectionFwd& a) {
  const char* op = "hyper_connection";
  const int64_t n = a.options.streams, tokens = a.x.rows, m = a.weight.rows;
  if (tokens == 0) return;
  bool done = false;
  on_device(op, ctx, [] {}, TIGON_ON_CUDA(done = cuda::weight_gemm(ctx, a)));
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
                           .c = a.matmul.row<float>(first),
                           .ldc = a.matmul.stride});
               });
  TIGON_RUN(op, ctx, coefficients, a);
  if (a.y.data != nullptr) mix_fwd(op, ctx, {.x = a.x, .mix = a.pre, .y = a.y, .streams = n, .outs = 1});
}

void run(Context& ctx, const HyperConnectionBwd& a) {
  const char* op = "hyper_connection_bwd";
  const int64_t n = a.options.streams, tokens = a.x.rows, m = a.weight.rows, cols = a.x.cols;
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
                                      .dmatmul = ctx.scratch_of<float>(tokens * m),
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
  on_device(op, ctx, [] {}, TIGON_ON_CUDA(done = cuda::weight_gemm_gradients(ctx, g)));
  if (done) return;
  if (a.dweight.data != nullptr)
    for_chunks(op, ctx, a.x, nullptr, 0.0f, [&](int64_t first, int64_t rows, const Matrix& wide) {
      ctx.gemm({.m = m,
                .n = cols,
                .k = rows,
                .a = g.dmatmul + first * m,
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
              .a = g.dmatmul + first * m,
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

}  // namespace

namespace cpu {
void hyper_connection_fwd(Context& ctx, const HyperConnectionFwd& a) { run(ctx, a); }
void hyper_connection_bwd(Context& ctx, const HyperConnectionBwd& a) { run(ctx, a); }
}  // namespace cpu
namespace cuda {
void hyper_connection_fwd(Context& ctx, const HyperConnectionFwd& a) { run(ctx, a); }
void hyper_connection_bwd(Context& ctx, const HyperConnectionBwd& a) { run(ctx, a); }
}  // namespace cuda

}  // namespace tigon
