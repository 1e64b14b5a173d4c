// bf16 and f16 against a reference in double arithmetic: every pattern, every tie, a sweep of all floats.
#include "table.h"

namespace tigon::test {
namespace {

struct Format {
  int mantissa, bias,
      max_exponent;  // value = 2^(e - bias) * 1.m; exponent field max_exponent means inf or NaN
};
constexpr Format kBf16{7, 127, 255}, kF16{10, 15, 31};

double decode(Format f, uint16_t bits) {
  int m = bits & ((1 << f.mantissa) - 1), e = (bits & 0x7fff) >> f.mantissa;
  double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (e == f.max_exponent) return m ? NAN : sign * INFINITY;
  if (e == 0) return sign * std::ldexp(m, 1 - f.bias - f.mantissa);
  return sign * std::ldexp(m + (1 << f.mantissa), e - f.bias - f.mantissa);
}

// Nearest representable value, ties to even, overflow to infinity; x is exact in double.
double nearest(Format f, double x) {
  if (std::isnan(x) || std::isinf(x) || x == 0) return x;
  int e = std::max(std::ilogb(x), 1 - f.bias);
  double quantum = std::ldexp(1.0, e - f.mantissa), rounded = std::nearbyint(x / quantum) * quantum;
  double limit = std::ldexp(1.0, f.max_exponent - f.bias);  // first power of two that is out of range
  return std::abs(rounded) >= limit ? std::copysign(INFINITY, x) : rounded;
}

template <class T>
bool rounds_right(Format f, float x) {
  double want = nearest(f, x);
  uint16_t got = from_float<T>(x).bits;
  if (std::isnan(want)) return std::isnan(decode(f, got)) && (got & (1 << (f.mantissa - 1)));  // quiet
  return decode(f, got) == want && std::signbit(decode(f, got)) == std::signbit(x);
}

template <class T>
void check_format(Format f) {
  int64_t wrong_value = 0, wrong_trip = 0, wrong_tie = 0, wrong_sweep = 0;
  for (uint32_t p = 0; p < 65536; ++p) {
    double want = decode(f, uint16_t(p));
    float got = to_float(T{uint16_t(p)});
    if (std::isnan(want)) {
      wrong_value += !std::isnan(got);
      wrong_trip += !rounds_right<T>(f, got);
      continue;
    }
    wrong_value += double(got) != want || std::signbit(got) != std::signbit(want);
    wrong_trip += from_float<T>(got).bits != p;
    double next = decode(f, uint16_t(p + 1));
    if (std::isnan(next) || std::isinf(next) || (p & 0x7fff) == 0x7fff) continue;
    float tie = float((want + next) / 2);
    for (float x : {tie, std::nextafter(tie, INFINITY), std::nextafter(tie, -INFINITY)})
      wrong_tie += !rounds_right<T>(f, x);
  }
  for (uint64_t p = 0; p < (uint64_t(1) << 32); p += 1021)
    wrong_sweep += !rounds_right<T>(f, std::bit_cast<float>(uint32_t(p)));
  CHECK(wrong_value == 0);
  CHECK(wrong_trip == 0);
  CHECK(wrong_tie == 0);
  CHECK(wrong_sweep == 0);
}

TEST_CASE("bf16") { check_format<bf16>(kBf16); }
TEST_CASE("f16") { check_format<f16>(kF16); }

TEST_CASE("the edge of the range") {
  CHECK(from_float<f16>(65504.0f).bits == 0x7bff);
  CHECK(from_float<f16>(65519.996f).bits == 0x7bff);
  CHECK(from_float<f16>(65520.0f).bits == 0x7c00);
  CHECK(from_float<f16>(-INFINITY).bits == 0xfc00);
  CHECK(from_float<f16>(0x1p-24f).bits == 1);
  CHECK(from_float<f16>(0x1p-25f).bits == 0);  // tie to even
  CHECK(from_float<f16>(-0.0f).bits == 0x8000);
  CHECK(from_float<bf16>(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(from_float<bf16>(std::numeric_limits<float>::denorm_min()).bits == 0);
  CHECK(std::isnan(
      to_float(from_float<bf16>(std::bit_cast<float>(0x7f800001u)))));  // payload only in the cut bits
}

TEST_CASE("promotion is PyTorch's") {
  CHECK(promote(DType::bf16, DType::bf16) == DType::bf16);
  CHECK(promote(DType::bf16, DType::f16) == DType::f32);
  CHECK(promote(DType::f16, DType::f32) == DType::f32);
}

}  // namespace
}  // namespace tigon::test
