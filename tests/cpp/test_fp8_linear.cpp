// Float8 in the core: what bytes and scales are, products of them, refusals.
#include "tigon/ops/fp8_linear/fp8_linear.h"

#include <cmath>
#include <vector>

#include "table.h"
#include "tigon/ops/fp8_linear/fp8_producers.h"

namespace tigon::test {
namespace {

double value_of(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 0x7f) == 0x7f) return NAN;
  const double a = exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * std::exp2(exponent - 10);
  return byte & 0x80 ? -a : a;
}

struct Bytes {
  int64_t rows, cols;
  std::vector<uint8_t> bytes;
  std::vector<float> scales;
  Bytes(int64_t r, int64_t c) : rows(r), cols(c), bytes(size_t(r * c), 0xff), scales(size_t(r), NAN) {}
  Matrix matrix() { return {bytes.data(), DType::e4m3, rows, cols, cols}; }
  Vector vector() { return {scales.data(), DType::f32, rows}; }
  double at(int64_t r, int64_t c) const { return value_of(bytes[size_t(r * cols + c)]) * scales[size_t(r)]; }
};

Bytes quantized(Context& ctx, Table& x, Vector factors = {}) {
  Bytes q(x.matrix().rows, x.matrix().cols);
  fp8_quantize(ctx, {.x = x.matrix(), .column_factors = factors, .q = q.matrix(), .scales = q.vector()});
  return q;
}
Bytes transposed(Context& ctx, Bytes& of, Vector factors = {}, Vector scales = {}) {
  Bytes t(of.cols, fp8_columns(of.rows));
  fp8_transpose(ctx, {.q = of.matrix(),
                      .row_factors = factors,
                      .row_scales = scales,
                      .qt = t.matrix(),
                      .column_scales = factors ? t.vector() : Vector{}});
  if (!factors) t.scales.assign(t.scales.size(), 1.0f);
  return t;
}

}  // namespace

TEST_CASE("float8: bytes and scales") {
  auto ctx = make_cpu_context(2);
  for (DType type : {DType::f32, DType::bf16, DType::f16}) {
    Table x(type, 19, 33, 2);
    x.normal(1, 3.0);
    for (int64_t c = 0; c < 33; ++c) x.set(4, c, 0.0);
    x.set(5, 7, INFINITY), x.set(5, 8, NAN);
    Bytes q = quantized(*ctx, x);
    CHECK(q.scales[4] == 0x1p-60f);
    for (int64_t r = 0; r < 19; ++r) {
      double largest = 0;
      for (int64_t c = 0; c < 33; ++c)
        if (std::isfinite(x(r, c))) largest = std::max(largest, std::abs(x(r, c)));
      const double scale = q.scales[size_t(r)];
      CHECK(std::exp2(std::round(std::log2(scale))) == scale);
      CHECK(largest <= 448 * scale);
      if (largest > 0) CHECK(largest > 224 * scale);
      for (int64_t c = 0; c < 33; ++c) {
        if (!std::isfinite(x(r, c)))
          CHECK(std::isnan(q.at(r, c)));
        else
          CHECK(std::abs(q.at(r, c) - x(r, c)) <= std::max(std::abs(x(r, c)) * 0x1p-4, scale * 0x1p-10));
      }
    }
    Bytes t = transposed(*ctx, q);
    for (int64_t c = 0; c < 33; ++c)
      for (int64_t r = 0; r < 32; ++r)
        CHECK(t.bytes[size_t(c * 32 + r)] == (r < 19 ? q.bytes[size_t(r * 33 + c)] : 0));
  }
}

TEST_CASE("float8: bytes of producers, and of a weight that is cast and transposed") {
  auto ctx = make_cpu_context(2);
  Table x(DType::bf16, 7, 48), up(DType::bf16, 7, 48), y(DType::bf16, 7, 48), dup(DType::bf16, 7, 48);
  x.normal(1, 3.0), up.normal(2);
  std::vector<float> factors(48, 4.0f);
  const Vector by_column = {factors.data(), DType::f32, 48};
  auto same = [](const Bytes& a, const Bytes& b) { return a.bytes == b.bytes && a.scales == b.scales; };
  auto of = [](Bytes& b, Vector by = {}) { return RowBytes{b.matrix(), b.vector(), by}; };
  Bytes q(7, 48), other(7, 48);
  RmsNormFp8 norm;
  norm.x = x.matrix(), norm.y = y.matrix(), norm.bytes = of(q);
  rms_norm_fp8(*ctx, norm);
  CHECK(same(q, quantized(*ctx, y)));
  GluFp8 glu;
  glu.gate = x.matrix(), glu.up = up.matrix(), glu.y = y.matrix(), glu.bytes = of(q);
  glu_fp8(*ctx, glu);
  CHECK(same(q, quantized(*ctx, y)));
  Table dy(DType::bf16, 7, 48), dgate(DType::bf16, 7, 48);
  dy.normal(3);
  GluBwdFp8 backward;
  backward.dy = dy.matrix(), backward.gate = x.matrix(), backward.up = up.matrix();
  backward.dgate = dgate.matrix(), backward.dup = dup.matrix();
  backward.gate_bytes = of(q, by_column), backward.up_bytes = of(other, by_column);
  glu_bwd_fp8(*ctx, backward);
  CHECK(same(q, quantized(*ctx, dgate, by_column)));
  CHECK(same(other, quantized(*ctx, dup, by_column)));
  Bytes of_x = quantized(*ctx, x), t(48, fp8_columns(7));
  fp8_quantize_transposed(*ctx, {.x = x.matrix(), .scales = of_x.vector(), .qt = t.matrix()});
  CHECK(t.bytes == transposed(*ctx, of_x).bytes);
}

TEST_CASE("float8: products and their gradients") {
  auto ctx = make_cpu_context(2);
  constexpr int64_t M = 21, K = 48, N = 32;
  Table x(DType::f32, M, K), w(DType::f32, N, K), dy(DType::f32, M, N), y(DType::f32, M, N, 1),
      dx(DType::f32, M, K, 1), dw(DType::f32, N, K, 1), bias(DType::f32, 1, N);
  x.normal(1), w.normal(2, 0.2), dy.normal(3, 1e-3), bias.normal(4);
  Bytes xq = quantized(*ctx, x), wq = quantized(*ctx, w), xt = transposed(*ctx, xq),
        wt = transposed(*ctx, wq);
  fp8_linear_fwd(*ctx, {.xq = xq.matrix(),
                        .xs = xq.vector(),
                        .wq = wq.matrix(),
                        .ws = wq.vector(),
                        .bias = bias.vector(),
                        .y = y.matrix()});
  const Fp8LinearBwd backward = {.dy = dy.matrix(),
                                 .xt = xt.matrix(),
                                 .xs = xq.vector(),
                                 .wt = wt.matrix(),
                                 .ws = wq.vector(),
                                 .dx = dx.matrix(),
                                 .dweight = dw.matrix()};
  fp8_linear_bwd(*ctx, backward);
  // The gradients read dy once more rounded: as far off as one cast.
  auto close = [](double got, double exact, double size) { return std::abs(got - exact) <= 0.06 * size; };
  for (int64_t r = 0; r < M; ++r)
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += xq.at(r, k) * wq.at(n, k);
      CHECK(std::abs(y(r, n) - sum - bias(0, n)) < 1e-5);
    }
  for (int64_t r = 0; r < M; ++r)
    for (int64_t k = 0; k < K; ++k) {
      double sum = 0, size = 0;
      for (int64_t n = 0; n < N; ++n) sum += dy(r, n) * wq.at(n, k), size += std::abs(dy(r, n) * wq.at(n, k));
      CHECK(close(dx(r, k), sum, size));
    }
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) {
      double sum = 0, size = 0;
      for (int64_t r = 0; r < M; ++r) sum += dy(r, n) * xq.at(r, k), size += std::abs(dy(r, n) * xq.at(r, k));
      CHECK(close(dw(n, k), sum, size));
    }
  Fp8LinearBwd plain = backward;
  plain.xt = {}, plain.xs = {}, plain.x = x.matrix();
  fp8_linear_bwd(*ctx, plain);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) {
      double sum = 0;
      for (int64_t r = 0; r < M; ++r) sum += dy(r, n) * x(r, k);
      CHECK(std::abs(dw(n, k) - sum) < 1e-7);
    }
}

TEST_CASE("float8: refusals") {
  auto ctx = make_cpu_context(1);
  Table x(DType::f32, 4, 24), y(DType::f32, 4, 16);
  x.normal(1);
  Bytes q = quantized(*ctx, x), w(16, 24);
  const Fp8LinearFwd call = {
      .xq = q.matrix(), .xs = q.vector(), .wq = w.matrix(), .ws = w.vector(), .y = y.matrix()};
  CHECK_THROWS_WITH_AS(fp8_linear_fwd(*ctx, call),
                       "[fp8_linear] weight must have columns by the multiple of 16, got 24", Error);
  CHECK_THROWS_WITH_AS(fp8_linear_bwd(*ctx, {.dy = y.matrix(), .need_dweight = false}),
                       "[fp8_linear_bwd] wt must be there with need_dx, got none", Error);
  Bytes wrong(3, 24);
  CHECK_THROWS_WITH_AS(fp8_quantize(*ctx, {.x = x.matrix(), .q = wrong.matrix(), .scales = wrong.vector()}),
                       "[fp8_quantize] q must be [4, 24], got [3, 24]", Error);
}

}  // namespace tigon::test
