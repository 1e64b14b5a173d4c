// The built-in matrix product against double, for every layout and dtype.
#include "tests/cpp/table.h"

namespace tigon::test {
namespace {

struct Shape {
  int64_t m, n, k;
};

void check_product(Context& ctx, Shape s, DType ab, DType c_type, bool trans_a, bool trans_b, float alpha,
                   float beta) {
  auto a = Table(ab, trans_a ? s.k : s.m, trans_a ? s.m : s.k, 3).normal(1);
  auto b = Table(ab, trans_b ? s.n : s.k, trans_b ? s.k : s.n, 1).normal(2);
  Table c(c_type, s.m, s.n, 2);
  if (beta != 0) c.normal(3);  // with beta 0 the result starts as NaN and must not be read
  Table before = c;
  ctx.gemm({.m = s.m,
            .n = s.n,
            .k = s.k,
            .a = a.matrix().data,
            .lda = a.matrix().stride,
            .trans_a = trans_a,
            .b = b.matrix().data,
            .ldb = b.matrix().stride,
            .trans_b = trans_b,
            .c = c.matrix().data,
            .ldc = c.matrix().stride,
            .ab_dtype = ab,
            .c_dtype = c_type,
            .alpha = alpha,
            .beta = beta});
  auto sum = [&](int64_t i, int64_t j, bool magnitude) {
    double total = 0;
    for (int64_t k = 0; k < s.k; ++k) {
      double term = (trans_a ? a(k, i) : a(i, k)) * (trans_b ? b(j, k) : b(k, j));
      total += magnitude ? std::abs(term) : term;
    }
    return total;
  };
  auto expected = [&](int64_t i, int64_t j) {
    return alpha * sum(i, j, false) + (beta != 0 ? before(i, j) : 0.0);
  };
  // k rounded products and additions in fp32, then one rounding to the result's type.
  auto bound = [&](int64_t i, int64_t j) {
    return double(s.k + 2) * 0x1p-24 * sum(i, j, true) + unit(c_type) * std::abs(expected(i, j)) +
           tiny(c_type) + 0x1p-22;
  };
  INFO(s.m << " x " << s.n << " x " << s.k << " " << text(ab) << " -> " << text(c_type) << " ta " << trans_a
           << " tb " << trans_b << " alpha " << alpha << " beta " << beta);
  check_close("c", c, expected, bound);
}

TEST_CASE("every transpose, dtype and beta") {
  auto ctx = make_cpu_context(2);
  for (DType ab : kFloats)
    for (DType c : {DType::f32, ab})
      for (bool trans_a : {false, true})
        for (bool trans_b : {false, true})
          for (float beta : {0.0f, 1.0f})
            for (Shape s :
                 {Shape{1, 1, 1}, {3, 5, 7}, {66, 259, 33}, {5, 3, 300}})  // past one tile in every direction
              check_product(*ctx, s, ab, c, trans_a, trans_b, 1.0f, beta);
  check_product(*ctx, {4, 6, 8}, DType::f32, DType::f32, false, true, 0.5f, 1.0f);
}

TEST_CASE("empty products") {
  auto ctx = make_cpu_context(1);
  Table c(DType::f32, 2, 3);
  Table untouched = c;
  ctx->gemm({.m = 0, .n = 3, .k = 4, .c = c.matrix().data, .ldc = 3});
  CHECK(c == untouched);
  ctx->gemm({.m = 2, .n = 3, .k = 0, .c = c.matrix().data, .ldc = 3});
  check_close("c", c, [](int64_t, int64_t) { return 0.0; }, [](int64_t, int64_t) { return 0.0; });
}

TEST_CASE("the same bits for any number of threads") {
  check_same_everywhere([](Context& ctx) {
    auto a = Table(DType::bf16, 130, 70).normal(1), b = Table(DType::bf16, 70, 300).normal(2);
    Table c(DType::f32, 130, 300);
    ctx.gemm({.m = 130,
              .n = 300,
              .k = 70,
              .a = a.matrix().data,
              .lda = 70,
              .b = b.matrix().data,
              .ldb = 300,
              .c = c.matrix().data,
              .ldc = 300,
              .ab_dtype = DType::bf16,
              .c_dtype = DType::f32});
    return std::vector<Table>{c};
  });
}

TEST_CASE("a dtype without kernels is refused") {
  auto ctx = make_cpu_context(1);
  CHECK_THROWS_WITH_AS(ctx->gemm({.m = 1, .n = 1, .k = 1, .ab_dtype = DType::i64}),
                       "[gemm] operands must be float32, bfloat16 or float16, got int64", Error);
}

}  // namespace
}  // namespace tigon::test
