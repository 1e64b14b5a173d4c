// Casts tensors to float8 with a scale for each row (Micikevicius et al. 2022, arXiv:2209.05433; PyTorch
// calls such scales `rowwise`).
// Formula     fp8_quantize: q[r, c] = e4m3(v / scales[r]), v = x[r, c] column_factors[c],
//             scales[r] = s(max over c of |v|)
//             fp8_transpose: qt[c, r] = q[r, c]; with row_factors e4m3(v / column_scales[c]), v = q[r, c]
//             (row_factors[r] row_scales[r]), column_scales[c] = s(max over r of |v|), stored as
//             column_scales / column_divisors: the same digits, unless v is some 2^15 times smaller than its
//             column's largest
//             s(m): the least power of two with m <= 448 s, at least 2^-60; taken over finite v only
// Shapes      x, q [M, K], rows at any stride; scales, row_factors, row_scales [M]; qt [K, fp8_columns(M)],
//             whose last columns are zeros; column_scales, column_factors, column_divisors [K]
// Dtypes      x f32 | bf16 | f16; factors and divisors, powers of two, and scales f32; q, qt float8 e4m3;
//             arithmetic f32, where products with powers of two round only what is below 2^-126
// Rounding    once, to nearest even. No element is clamped: |v| / scale <= 448. Infinity and NaN become NaN.
//             A row of zeros: 2^-60, zeros
// Saved       nothing
// Aliasing    none
// Determinism bitwise, on all devices: maxima do not depend on an order; a row's bytes and scale follow from
//             the row only
// Traffic     fp8_quantize: x read, a byte an element written; fp8_quantize_transposed too. fp8_transpose: a
//             byte read and one written; with factors and more than 8192 rows, before sm_90 1024, one
//             more read
// Refused     sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

// Returns the columns of a transposed matrix with `rows` rows: GEMM takes multiples of 16.
constexpr int64_t fp8_columns(int64_t rows) { return rows <= 16 ? 16 : (rows + 15) / 16 * 16; }

struct Fp8Quantize {
  Matrix x;
  Vector column_factors;  // 1 if empty
  Matrix q;
  Vector scales;

  void fields(Fields& f) {
    f.rows("x", x);
    f.optional("column_factors", column_factors, x.cols, DType::f32);
    f.result("q", q, x.rows, x.cols, DType::e4m3);
    f.result("scales", scales, x.rows, DType::f32);
  }
};

struct Fp8Transpose {
  Matrix q;
  Vector row_factors;  // if empty, the bytes are copied as they are
  Vector row_scales;   // more factors, given with row_factors
  // Divides column_scales; given with row_factors, 1 if empty.
  Vector column_divisors;
  Matrix qt;
  Vector column_scales;  // given with row_factors

  void fields(Fields& f) {
    f.input("q", q, q.rows, q.cols, DType::e4m3);
    f.optional("row_factors", row_factors, q.rows, DType::f32);
    f.optional("row_scales", row_scales, q.rows, DType::f32);
    f.optional("column_divisors", column_divisors, q.cols, DType::f32);
    f.require(bool(row_factors) == bool(row_scales), "row_scales must be there where row_factors are");
    f.require(row_factors || !column_divisors, "column_divisors must be absent where row_factors are");
    f.result("qt", qt, q.cols, fp8_columns(q.rows), DType::e4m3);
    f.result_if(bool(row_factors), "column_scales", column_scales, q.cols);
  }
};

// The transposed bytes of rows whose scales are known from fp8_quantize.
struct Fp8QuantizeTransposed {
  Matrix x;
  Vector scales;
  Matrix qt;

  void fields(Fields& f) {
    f.rows("x", x);
    f.input("scales", scales, x.rows, DType::f32);
    f.result("qt", qt, x.cols, fp8_columns(x.rows), DType::e4m3);
  }
};

TIGON_API_ENTRY(fp8_quantize, Fp8Quantize)
TIGON_API_ENTRY(fp8_quantize_transposed, Fp8QuantizeTransposed)
TIGON_API_ENTRY(fp8_transpose, Fp8Transpose)

}  // namespace tigon
