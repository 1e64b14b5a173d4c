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

// A cell covers the floats that agree in the upper half of z, which is a float's bits, or twice them. At most
// one threshold lies in it. Its entry plus z has the code in byte 2: what is above the threshold carries into
// that byte.
template <int LowestExponent, bool Doubled>
struct CodeCells {
  static constexpr int kDoubled = Doubled, kMantissaBits = 7 + kDoubled;
  static constexpr uint32_t kFirst = uint32_t(127 + LowestExponent) << kMantissaBits;
  static constexpr int kCount = (-LowestExponent << kMantissaBits) + 4;  // the last four begin with 1
  static constexpr float kLowest = 1.0f / float(1 << -LowestExponent);
  static constexpr uint32_t kLowestZ = kFirst << 16;
  uint32_t of[kCount];

  // thresholds[j] is the largest z that still takes code j.
  constexpr void fill(const uint32_t* thresholds, int count) {
    int j = 0;
    for (int k = 0; k < kCount; ++k) {
      const uint32_t begin = (kFirst + uint32_t(k)) << 16, end = begin + 0xffffu;
      while (j < count && thresholds[j] < begin) ++j;
      const bool inside = j < count && thresholds[j] <= end;
      if (inside && j + 1 < count && thresholds[j + 1] <= end) throw "two thresholds in a cell";
      of[k] = (uint32_t(j) << 16) + 0xffffu - (inside ? thresholds[j] : end);
    }
  }
};

// The z of a value of exp_avg is twice the bits of its magnitude, and 1 more if it is negative: thresholds
// between two floats, and those that are a float and so a tie, hold for both signs.
using AvgCells = CodeCells<-22, true>;
using RootCells = CodeCells<-21, false>;

struct CodeMaps {
  struct Cells {
    AvgCells of_avg;     // the distance from code 127
    RootCells of_roots;  // from code 1 on
  };
  float avg[256];   // of exp_avg
  float root[256];  // of the root of exp_avg_sq
  Cells cells;
};

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
  // Computes the thresholds between the neighbours of a list that begins with 0, as z: each is half of a sum.
  const auto between = [&](const float* values, int count, int doubled) {
    for (int j = 0; j < count; ++j) {
      const double middle = ((j > 0 ? double(values[j - 1]) : 0.0) + double(values[j])) / 2.0;
      const float near = float(middle);
      const uint32_t z = 2 * std::bit_cast<uint32_t>(near) + (near < middle) - (near > middle);
      thresholds[j] = z >> (1 - doubled);
    }
  };
  float values[256] = {};
  int count = positive_values(true, values);
  for (int j = 0; j < count; ++j) maps.avg[128 + j] = values[j];
  for (int j = 0; j + 1 < count; ++j) maps.avg[126 - j] = -values[j];
  between(values, count, AvgCells::kDoubled);
  maps.cells.of_avg.fill(thresholds, count);
  count = positive_values(false, values);
  for (int j = 0; j < count; ++j) maps.root[1 + j] = values[j];
  between(values, count, RootCells::kDoubled);
  maps.cells.of_roots.fill(thresholds, count);
  return maps;
}

}  // namespace tigon::adamw_detail
