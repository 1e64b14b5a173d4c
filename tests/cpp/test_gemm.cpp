// The built-in GEMM against double, for every layout and dtype.
#include "table.h"
#include "tigon/base/gemm_pieces.h"

namespace tigon::test {
namespace {

struct Shape {
  int64_t m, n, k;
};

// How the GEMM is run: as one, or in the pieces that CUDA runs (then rows begin at 16-byte boundaries).
enum class Run { whole, pieces };

void check_gemm(Context& ctx, Shape s, DType ab, DType c_type, bool trans_a, bool trans_b, float alpha,
                float beta, Run run = Run::whole) {
  auto gap = [&](int64_t cols, int64_t otherwise) {
    return run == Run::pieces ? (cols + 7) / 8 * 8 - cols : otherwise;
  };
  auto table = [&](DType t, int64_t rows, int64_t cols, int64_t otherwise) {
    return Table(t, rows, cols, gap(cols, otherwise));
  };
  auto a = table(ab, trans_a ? s.k : s.m, trans_a ? s.m : s.k, 3).normal(1);
  auto b = table(ab, trans_b ? s.n : s.k, trans_b ? s.k : s.n, 1).normal(2);
  Table c = table(c_type, s.m, s.n, 2);
  if (beta != 0) c.normal(3);  // with beta 0 the result starts as NaN and must not be read
  Table before = c;
  Gemm whole = {.m = s.m,
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
                .beta = beta};
  GemmPieces pieces = {.piece = {whole}, .count = 1};
  if (run == Run::pieces) pieces = gemm_pieces(whole, 0);
  for (int i = 0; i < pieces.count; ++i) ctx.gemm(pieces.piece[size_t(i)]);
  auto sum = [&](int64_t i, int64_t j, bool magnitude, int64_t first = 0) {
    double total = 0;
    for (int64_t k = first; k < s.k; ++k) {
      double term = (trans_a ? a(k, i) : a(i, k)) * (trans_b ? b(j, k) : b(k, j));
      total += magnitude ? std::abs(term) : term;
    }
    return total;
  };
  auto expected = [&](int64_t i, int64_t j) {
    return alpha * sum(i, j, false) + (beta != 0 ? before(i, j) : 0.0);
  };
  // k rounded products and additions in fp32, then one rounding to the result's type; in pieces the inner
  // elements past the last whole vector are rounded (with what was there) before.
  auto bound = [&](int64_t i, int64_t j) {
    double early = pieces.count > 1 ? std::abs(alpha) * std::abs(sum(i, j, false, s.k / 8 * 8)) +
                                          (beta != 0 ? std::abs(before(i, j)) : 0.0)
                                    : 0.0;
    return double(s.k + 2) * 0x1p-24 * sum(i, j, true) +
           unit(c_type) * (std::abs(expected(i, j)) + early * 1.01) + tiny(c_type) + 0x1p-22;
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
              check_gemm(*ctx, s, ab, c, trans_a, trans_b, 1.0f, beta);
  check_gemm(*ctx, {4, 6, 8}, DType::f32, DType::f32, false, true, 0.5f, 1.0f);
}

TEST_CASE("in pieces of whole vectors") {
  auto ctx = make_cpu_context(1);
  for (DType ab : {DType::bf16, DType::f16})
    for (DType c : {DType::f32, ab})
      for (bool trans_a : {false, true})
        for (bool trans_b : {false, true})
          for (float beta : {0.0f, 1.0f})
            for (Shape s : {Shape{9, 17, 31}, {16, 33, 24}, {7, 8, 9}, {23, 5, 16}, {1, 1, 1}})
              check_gemm(*ctx, s, ab, c, trans_a, trans_b, 0.5f, beta, Run::pieces);
}

TEST_CASE("which dimensions are cut") {
  auto buffer = std::vector<float>(64);
  auto count = [&](Gemm g, int64_t least = 0) {
    g.a = g.b = buffer.data(), g.c = buffer.data();
    return gemm_pieces(g, least).count;
  };
  Gemm even = {.m = 9,
               .n = 16,
               .k = 8,
               .lda = 8,
               .ldb = 16,
               .ldc = 16,
               .ab_dtype = DType::bf16,
               .c_dtype = DType::bf16};
  CHECK(count(even) == 1);  // nothing has m contiguous
  Gemm odd = even;
  odd.m = 9, odd.n = 17, odd.k = 9, odd.lda = 16, odd.ldb = 24, odd.ldc = 24;
  CHECK(count(odd) == 4);
  CHECK(count(odd, int64_t(1) << 30) == 1);  // little work
  odd.trans_a = true;
  CHECK(count(odd) == 4);  // m and n: neither matrix has k contiguous
  odd.trans_b = true, odd.ldb = 16;
  CHECK(count(odd) == 8);
  odd.ldc = 17;  // rows off the boundaries
  CHECK(count(odd) == 1);
  odd.ldc = 24, odd.ab_dtype = odd.c_dtype = DType::f32;
  CHECK(count(odd) == 1);
}

TEST_CASE("empty GEMMs") {
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
