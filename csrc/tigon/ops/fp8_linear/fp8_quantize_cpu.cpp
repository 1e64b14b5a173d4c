// The CPU backend of the casts writes the same bytes as the CUDA kernels.
#include <algorithm>
#include <bit>

#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/fp8_linear/fp8_quantize.h"

namespace tigon::cpu {
namespace {

#include "tigon/base/e4m3.inc"
#include "tigon/ops/fp8_linear/fp8_linear_math.inc"

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
float factor_at(const Vector& v, int64_t i) { return v ? v.as<float>()[i] : 1.0f; }
uint8_t byte_of(float value, uint32_t scale) {
  return uint8_t(e4m3_round(bits_of(fp8_scaled(value, float_of(e4m3_inverse(scale))))));
}

template <class T>
void quantize_row(const Fp8Quantize& a, int64_t r) {
  const T* x = a.x.row<T>(r);
  auto value = [&](int64_t c) { return fp8_value(to_float(x[c]), factor_at(a.column_factors, c)); };
  uint32_t largest = 0;
  for (int64_t c = 0; c < a.x.cols; ++c) largest = std::max(largest, e4m3_magnitude(bits_of(value(c))));
  const uint32_t scale = e4m3_scale(largest);
  for (int64_t c = 0; c < a.x.cols; ++c) a.q.row<uint8_t>(r)[c] = byte_of(value(c), scale);
  a.scales.as<float>()[r] = float_of(scale);
}

}  // namespace

void fp8_quantize(Context& ctx, const Fp8Quantize& a) {
  dispatch_float("fp8_quantize", "x", a.x.dtype, [&](auto type) {
    for_each_row(ctx, a.x.rows, [&](int64_t r) { quantize_row<typename decltype(type)::type>(a, r); });
  });
}

void fp8_quantize_transposed(Context& ctx, const Fp8QuantizeTransposed& a) {
  dispatch_float("fp8_quantize_transposed", "x", a.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_row(ctx, a.qt.rows, [&](int64_t c) {
      auto* to = a.qt.row<uint8_t>(c);
      std::fill(to + a.x.rows, to + a.qt.cols, uint8_t(0));
      for (int64_t r = 0; r < a.x.rows; ++r)
        to[r] = byte_of(to_float(a.x.row<T>(r)[c]), bits_of(a.scales.as<float>()[r]));
    });
  });
}

void fp8_transpose(Context& ctx, const Fp8Transpose& a) {
  for_each_row(ctx, a.qt.rows, [&](int64_t c) {
    auto* to = a.qt.row<uint8_t>(c);
    std::fill(to + a.q.rows, to + a.qt.cols, uint8_t(0));
    if (!a.row_factors) {
      for (int64_t r = 0; r < a.q.rows; ++r) to[r] = a.q.row<uint8_t>(r)[c];
      return;
    }
    auto value = [&](int64_t r) {
      return fp8_value(float_of(e4m3_widen(a.q.row<uint8_t>(r)[c])),
                       a.row_factors.as<float>()[r] * a.row_scales.as<float>()[r]);
    };
    uint32_t largest = 0;
    for (int64_t r = 0; r < a.q.rows; ++r) largest = std::max(largest, e4m3_magnitude(bits_of(value(r))));
    const uint32_t scale = e4m3_scale(largest);
    for (int64_t r = 0; r < a.q.rows; ++r) to[r] = byte_of(value(r), scale);
    a.column_scales.as<float>()[c] = float_of(scale) / factor_at(a.column_divisors, c);
  });
}

}  // namespace tigon::cpu
