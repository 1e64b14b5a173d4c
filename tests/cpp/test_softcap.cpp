// The softcap by a polynomial, as the CUDA kernels evaluate it, against the formula in double: every bf16 and
// f16 number, many f32.
#include <cmath>

#include "table.h"
#include "tigon/base/softcap.h"

namespace tigon::test {
namespace {

// What the kernels' instructions compute, but for the last bits of ex2.approx and rcp.approx.
inline float fma(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float abs(float x) { return std::fabs(x); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
#include "tigon/base/softcap_polynomial.inc"

struct Cap {
  double scale, cap, temperature;
};
constexpr Cap kCaps[] = {{1, 30, 1}, {1, 50, 1}, {0.0625, 30, 0.7}, {2, 5, 1}, {1, 0.25, 3}, {1, 700, 1}};
constexpr double kLog2e = 1.4426950408889634;

SoftcapConstants constants(const Cap& c) {
  return softcap_constants(c.scale, c.cap, kLog2e * c.cap / c.temperature);
}

struct Largest {
  double z = 0, near = 0, close = 0, distance = 0, slope = 0;
  void look(const Cap& c, const SoftcapConstants& k, float x) {
    const double u = c.scale * double(x) / c.cap, top = kLog2e * c.cap / c.temperature, t = std::tanh(u);
    const double error = std::abs(double(softcap_z(x, k)) - top * t);
    z = std::max(z, error / top);
    if (std::abs(u) <= 1 && std::abs(u) > 1e-30) near = std::max(near, error / std::abs(top * t));
    const float m = float(0.75 * top);
    distance = std::max(distance, std::abs(double(softcap_z_minus(x, m, k)) - (top * t - double(m))) / top);
    const double steep = 1.0 / (std::cosh(u) * std::cosh(u)), got = double(softcap_times_slope(x, 3.0f, k));
    if (steep > 1e-10) slope = std::max(slope, std::abs(got / (3.0 * steep) - 1.0));
    // Where a vector's logits are known to be near the same bits come from fewer instructions.
    if (abs(x) > k.limit) return;
    CHECK(softcap_z<kNear>(x, k) == softcap_z(x, k));
    CHECK(softcap_z_minus<kNear>(x, m, k) == softcap_z_minus(x, m, k));
    CHECK(softcap_times_slope<kNear>(x, 3.0f, k) == softcap_times_slope(x, 3.0f, k));
    if (abs(x) > k.close_limit || std::abs(u) < 1e-30) return;
    close = std::max(close, std::abs(double(softcap_z<kClose>(x, k)) / (top * t) - 1.0));
    close = std::max(close, std::abs(double(softcap_times_slope<kClose>(x, 3.0f, k)) / (3.0 * steep) - 1.0));
  }
  void check() const {
    CHECK(z < 2e-7);
    CHECK(near < 3e-7);
    CHECK(close < 2.5e-7);
    CHECK(distance < 2.5e-7);
    CHECK(slope < 3e-6);  // the argument of the exponential is rounded
  }
};

TEST_CASE("every 16-bit logit") {
  for (const Cap& c : kCaps) {
    const SoftcapConstants k = constants(c);
    REQUIRE(softcap_is_in_range(k));
    INFO("scale " << c.scale << " cap " << c.cap << " temperature " << c.temperature);
    Largest l;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      for (float x : {to_float(bf16{uint16_t(bits)}), to_float(f16{uint16_t(bits)})})
        if (std::isfinite(x)) l.look(c, k, x);
    }
    l.check();
  }
}

TEST_CASE("many f32 logits") {
  for (const Cap& c : kCaps) {
    const SoftcapConstants k = constants(c);
    INFO("scale " << c.scale << " cap " << c.cap << " temperature " << c.temperature);
    Largest l;
    for (int64_t i = -400000; i <= 400000; ++i)
      l.look(c, k, float(double(i) * 1.000001e-5 * c.cap / c.scale));
    l.check();
  }
}

TEST_CASE("logits without a number") {
  const SoftcapConstants k = constants(kCaps[0]);
  CHECK(softcap_z(INFINITY, k) == k.top);
  CHECK(softcap_z(-INFINITY, k) == -k.top);
  CHECK(softcap_times_slope(INFINITY, 1.0f, k) == 0.0f);
  CHECK(softcap_times_slope(-INFINITY, 1.0f, k) == 0.0f);
  CHECK(std::isnan(softcap_z(NAN, k)));
  CHECK(std::isnan(softcap_z<kNear>(NAN, k)));
  CHECK(std::isnan(softcap_z_minus(NAN, 1.0f, k)));
}

TEST_CASE("caps that floats cannot hold") {
  for (double cap : {1e-12, 1e-6, 1e6, 1e30}) CHECK(!softcap_is_in_range(softcap_constants(1.0, cap, cap)));
  CHECK(!softcap_is_in_range(softcap_constants(1e-30, 30.0, 30.0)));
  for (double cap : {0.01, 1.0, 30.0, 500.0}) CHECK(softcap_is_in_range(softcap_constants(1.0, cap, cap)));
}

}  // namespace
}  // namespace tigon::test
