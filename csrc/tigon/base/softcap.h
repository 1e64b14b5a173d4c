// Holds the constants of the polynomial softcap (softcap_math.inc) for one cap.
#pragma once

#include <cmath>

namespace tigon {

// The softcap is z = top * tanh(u) with u = scale * x / cap.
struct SoftcapConstants {
  static constexpr int kTerms = 7, kCloseTerms = 5;
  // z = x * (factor[0] + factor[1] x^2 + ...) if |x| <= limit, which means |u| <= 1. close_factor is used in
  // the same way if |x| <= close_limit, which means |u| <= 1/2.
  float factor[kTerms], close_factor[kCloseTerms];
  float limit, close_limit;
  // 2^(double_log2e * |x|) = e^(2 |u|).
  float double_log2e;
  float top;
  // This is 1 / top^2.
  float inv_top_squared;
};

// tanh(u) / u = 1 + sum_i kSoftcapTerms[i] u^(2 i) for |u| <= 1, with a relative error of 5.6e-8: minimax,
// exact at 0.
constexpr double kSoftcapTerms[SoftcapConstants::kTerms] = {1.0,
                                                            -0.33332986787405917,
                                                            0.13326408940340483,
                                                            -0.053498709886384015,
                                                            0.020359763344214027,
                                                            -0.0062593427406951924,
                                                            0.0010582657698593185};

// The shorter polynomial serves |u| <= 1/2, with a relative error of 1.5e-8.
constexpr double kSoftcapCloseTerms[SoftcapConstants::kCloseTerms] = {
    1.0, -0.33333143896570247, 0.13325878969273948, -0.053045495164719394, 0.017241493351836444};

inline SoftcapConstants softcap_constants(double scale, double cap, double top) {
  constexpr double kLog2e = 1.4426950408889634;
  const double r = scale / cap;
  SoftcapConstants c = {};
  double power = top * r;
  for (int i = 0; i < SoftcapConstants::kTerms; ++i, power *= r * r) {
    c.factor[i] = float(kSoftcapTerms[i] * power);
    if (i < SoftcapConstants::kCloseTerms) c.close_factor[i] = float(kSoftcapCloseTerms[i] * power);
  }
  c.limit = float(1.0 / r), c.close_limit = float(0.5 / r);
  c.double_log2e = float(2.0 * kLog2e * r);
  c.top = float(top);
  c.inv_top_squared = float(1.0 / (top * top));
  return c;
}

// True if floats can hold the constants: cap / scale from about 0.002 to 1000.
inline bool softcap_is_in_range(const SoftcapConstants& c) {
  // Below kLeast the last factor has the error of a subnormal number.
  constexpr double kLeast = 1e-40, kMost = 1e35;
  for (float f : {c.factor[0], c.factor[SoftcapConstants::kTerms - 1], c.limit, c.double_log2e, c.top,
                  c.inv_top_squared})
    if (!(std::abs(double(f)) >= kLeast && std::abs(double(f)) <= kMost)) return false;
  return true;
}

}  // namespace tigon
