// Holds the 8-bit codes of moments: their values, and tables that find the nearest one by a single look-up.
// The values are the dynamic map of Dettmers et al. 2021, arXiv:2110.02861, bit for bit as create_dynamic_map
// of bitsandbytes computes it. Decade d of seven has 2^d values, or 2^(d+1) without a sign: the means of
// neighbours on a linear grid over [0.1, 1], times 10^(d - 6). 0 and 1 are added, and all are sorted. So with
// a sign, zero is code 127 and there is no -1; without a sign, zero is code 0.
#pragma once

#include <bit>
#include <cstdint>

namespace tigon::adamw_detail {

inline constexpr int kCodedBlock = 256;  // elements that share an absmax

// A cell covers the floats of one exponent that agree in their upper mantissa bits. It is so small that at
// most one threshold lies in it. Its entry has the lower 24 bits of the threshold, and below them the code at
// the beginning of the cell. What is above the threshold has the next code.
template <int LowestExponent, int MantissaBits>
struct CodeCells {
  static constexpr int kShift = 23 - MantissaBits;
  static constexpr uint32_t kFirst = uint32_t(127 + LowestExponent) << MantissaBits;
  static constexpr int kCount = (-LowestExponent << MantissaBits) + 4;  // the last four begin with 1
  static constexpr float kLowest = 1.0f / float(1 << -LowestExponent);
  uint32_t of[kCount];

  // thresholds[j] is the largest float that still takes code j. Codes are stored with `add` added.
  constexpr void fill(const uint32_t* thresholds, int count, uint32_t add) {
    int j = 0;
    for (int k = 0; k < kCount; ++k) {
      const uint32_t cell = kFirst + uint32_t(k), begin = cell << kShift;
      while (j < count && thresholds[j] < begin) ++j;
      const bool inside = j < count && thresholds[j] >> kShift == cell;
      if (inside && j + 1 < count && thresholds[j + 1] >> kShift == cell) throw "two thresholds in a cell";
      of[k] = (inside ? thresholds[j] << 8 : 0xffffff00u) | (uint32_t(j) + add);
    }
  }
};

using AvgCells = CodeCells<-22, 6>;
using RootCells = CodeCells<-21, 7>;

struct alignas(16) CodeMaps {
  float avg[256];      // of exp_avg
  float root[256];     // of the root of exp_avg_sq
  AvgCells of_avg[2];  // [sign]: codes of values >= 0, and 255 minus those of values <= 0
  RootCells of_roots;  // from code 1 on
};
static_assert(sizeof(CodeMaps) % 16 == 0);

// Computes a * b + c as the linspace of PyTorch does: a double holds the product exactly.
constexpr float mapped_fma(float a, float b, float c) { return float(double(a) * double(b) + double(c)); }

// Writes the values above 0 in order, up to 1, and returns their number.
constexpr int positive_values(bool is_signed, float (&to)[256]) {
  constexpr float kScale[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
  int count = 0;
  for (int d = 0; d < 7; ++d) {
    const int n = 1 << (is_signed ? d : d + 1);
    const float step = (1.0f - 0.1f) / float(n);
    const auto at = [&](int k) {
      return k < (n + 1) / 2 ? mapped_fma(step, float(k), 0.1f) : mapped_fma(-step, float(n - k), 1.0f);
    };
    for (int k = 0; k < n; ++k) to[count++] = (at(k) + at(k + 1)) / 2.0f * kScale[d];
  }
  to[count++] = 1.0f;
  return count;
}

constexpr CodeMaps code_maps() {
  CodeMaps maps{};
  uint32_t thresholds[256] = {};
  // Computes the thresholds between the neighbours of a list that begins with 0. Each is half of a sum,
  // rounded so that a tie takes the lower code.
  const auto between = [&](const float* values, int count, bool negative) {
    for (int j = 0; j < count; ++j) {
      const double middle = ((j > 0 ? double(values[j - 1]) : 0.0) + double(values[j])) / 2.0;
      const float near = float(middle);
      uint32_t bits = std::bit_cast<uint32_t>(near);
      if (negative ? double(near) >= middle : double(near) > middle) bits -= 1;
      thresholds[j] = bits;
    }
  };
  float values[256] = {};
  int count = positive_values(true, values);
  for (int j = 0; j < count; ++j) maps.avg[128 + j] = values[j];
  for (int j = 0; j + 1 < count; ++j) maps.avg[126 - j] = -values[j];
  between(values, count, false);
  maps.of_avg[0].fill(thresholds, count, 127);
  between(values, count, true);
  maps.of_avg[1].fill(thresholds, count - 1, 128);
  count = positive_values(false, values);
  for (int j = 0; j < count; ++j) maps.root[1 + j] = values[j];
  between(values, count, false);
  maps.of_roots.fill(thresholds, count, 0);
  return maps;
}

}  // namespace tigon::adamw_detail
