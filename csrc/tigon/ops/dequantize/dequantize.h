// Makes a weight of its codes of 8 or 4 bits and a grid of scales (e4m3, e8m0 and e2m1 as in the OCP
// Microscaling Formats, 2023).
// Formula     weight[r, c] = (value(code[r, c]) - zeros[i, j]) (scales[i, j] / divisor),
//             i = r / block_rows, j = c / block_cols
//             value: e4m3 of a byte, int8 of a byte, a nibble - 8 (int4), or e2m1 of a nibble. The low nibble
//             of a byte is the first
// Shapes      weight [N, K]; codes [N, K], of nibbles [N, ceil(K / 2)]; scales, zeros [ceil(N / block_rows),
//             ceil(K / block_cols)]; divisor one element. Rows at any stride
// Dtypes      codes float8 e4m3, else u8; scales f32 | bf16 | f16 | float8 e4m3, or u8, which is e8m0; zeros
//             and divisor f32; weight f32 | bf16 | f16; arithmetic f32
// Rounding    in f32 the quotient and the product, then once to the weight's dtype
// Saved       nothing
// Aliasing    none
// Determinism bitwise, on all devices: every element by itself
// Traffic     codes and scales read once, the weight written once
// Refused     sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

enum class CodeKind : int8_t { e4m3, int8, int4, e2m1 };

constexpr bool is_nibble(CodeKind kind) { return kind == CodeKind::int4 || kind == CodeKind::e2m1; }

constexpr int64_t count_blocks(int64_t n, int64_t block) { return n / block + (n % block != 0); }

struct Dequantize {
  Matrix codes;
  Matrix scales;
  Matrix zeros;    // 0 if absent
  Vector divisor;  // 1 if absent
  CodeKind kind = CodeKind::e4m3;
  int64_t columns = 0, block_rows = 1, block_cols = 1;
  Matrix weight;

  void fields(Fields& f) {
    f.input("codes", codes);
    f.input("scales", scales);
    f.optional("zeros", zeros, scales.rows, scales.cols, DType::f32);
    f.scalar("divisor", divisor, DType::f32, Role::optional);
    f.option("kind", kind);
    f.option("columns", columns);
    f.option("block_rows", block_rows);
    f.option("block_cols", block_cols);
    f.option("dtype", weight.dtype);
    f.require(kind >= CodeKind::e4m3 && kind <= CodeKind::e2m1, "kind must be from 0 to 3, got ", int(kind));
    const DType of_codes = kind == CodeKind::e4m3 ? DType::e4m3 : DType::u8;
    f.require(codes.dtype == of_codes, "codes must be ", name_of(of_codes), ", got ", name_of(codes.dtype));
    f.require(is_kernel_float(scales.dtype) || scales.dtype == DType::e4m3 || scales.dtype == DType::u8,
              "scales must be float32, bfloat16, float16, float8_e4m3fn or uint8, got ",
              name_of(scales.dtype));
    f.require(is_kernel_float(weight.dtype), "dtype must be float32, bfloat16 or float16, got ",
              name_of(weight.dtype));
    f.require(columns >= 0, "columns must be >= 0, got ", columns);
    f.require(block_rows > 0 && block_cols > 0, "block must be positive, got [", block_rows, ", ", block_cols,
              "]");
    const int64_t width = is_nibble(kind) ? (columns + 1) / 2 : columns;
    f.require(codes.cols == width, "codes must have ", width, " columns, got ", codes.cols);
    if (block_rows > 0 && block_cols > 0) {
      const int64_t rows = count_blocks(codes.rows, block_rows), cols = count_blocks(columns, block_cols);
      f.require(scales.rows == rows && scales.cols == cols, "scales must be [", rows, ", ", cols, "], got [",
                scales.rows, ", ", scales.cols, "]");
    }
    f.result("weight", weight, codes.rows, columns, weight.dtype);
  }
};

TIGON_API_ENTRY(dequantize, Dequantize)

}  // namespace tigon
