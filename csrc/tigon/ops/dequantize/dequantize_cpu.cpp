// The CPU backend looks values up in a table of all codes.
#include <algorithm>
#include <array>
#include <bit>

#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/dequantize/dequantize.h"

namespace tigon::cpu {
namespace {

#include "tigon/base/e4m3.inc"
#include "tigon/ops/dequantize/dequantize_math.inc"

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

float value_of(CodeKind kind, uint32_t code) {
  switch (kind) {
    case CodeKind::e4m3: return float_of(e4m3_widen(code));
    case CodeKind::int8: return float(int8_t(uint8_t(code)));
    case CodeKind::int4: return float(int(code & 15u) - 8);
    case CodeKind::e2m1: return float_of(e2m1_widen(code));
  }
  return 0.0f;
}

float scale_at(const Matrix& m, int64_t r, int64_t c) {
  switch (m.dtype) {
    case DType::bf16: return to_float(m.row<bf16>(r)[c]);
    case DType::f16: return to_float(m.row<f16>(r)[c]);
    case DType::e4m3: return float_of(e4m3_widen(m.row<uint8_t>(r)[c]));
    case DType::u8: return float_of(e8m0_widen(m.row<uint8_t>(r)[c]));
    default: return m.row<float>(r)[c];
  }
}

template <class T>
void dequantize_row(const Dequantize& a, const std::array<float, 256>& values, int64_t r) {
  const auto* codes = a.codes.row<uint8_t>(r);
  T* to = a.weight.row<T>(r);
  const bool nibbles = is_nibble(a.kind);
  for (int64_t j = 0; j < a.scales.cols; ++j) {
    const int64_t first = j * a.block_cols, last = first + std::min(a.block_cols, a.columns - first);
    const float given = scale_at(a.scales, r / a.block_rows, j);
    const float scale = a.divisor ? given / *a.divisor.as<float>() : given;
    const float zero = a.zeros.data != nullptr ? a.zeros.row<float>(r / a.block_rows)[j] : 0.0f;
    for (int64_t c = first; c < last; ++c) {
      const uint32_t code = nibbles ? uint32_t(codes[c / 2]) >> (c % 2 * 4) & 15u : codes[c];
      to[c] = from_float<T>(dequantized(values[code], zero, scale));
    }
  }
}

}  // namespace

void dequantize(Context& ctx, const Dequantize& a) {
  std::array<float, 256> values;
  for (uint32_t code = 0; code < 256; ++code) values[code] = value_of(a.kind, code);
  dispatch_float("dequantize", "weight", a.weight.dtype, [&](auto type) {
    for_each_row(ctx, a.weight.rows,
                 [&](int64_t r) { dequantize_row<typename decltype(type)::type>(a, values, r); });
  });
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_DEFINE_ENTRY(dequantize, Dequantize, "dequantize", "dequantize", none)
}  // namespace tigon
