// The sixteen-lane layer: every instruction set gives the same bits, and the functions are as exact as they
// claim.
#include "table.h"

namespace tigon::cpu {
namespace {
struct LaneTable {
  struct {
    const char* name;
    void (*map)(const float*, float*, int64_t);
  } maps[13];
  void (*narrow_bf16)(const float*, uint16_t*, int64_t);
  void (*narrow_f16)(const float*, uint16_t*, int64_t);
  void (*widen_bf16)(const uint16_t*, float*, int64_t);
  void (*widen_f16)(const uint16_t*, float*, int64_t);
  void (*sums)(const float*, float*, int64_t);
  void (*tail)(const float*, float*, float*, int64_t);
};
}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "test_lanes.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {
const LaneTable& lanes() { return TIGON_SELECT(lane_table); }
}  // namespace
}  // namespace tigon::cpu

namespace tigon::test {
namespace {

// Floats of every sign, exponent and NaN-ness, some 1.05 million of them.
std::vector<float> sweep() {
  std::vector<float> x;
  for (uint64_t p = 0; p < (uint64_t(1) << 32); p += 4093) x.push_back(std::bit_cast<float>(uint32_t(p)));
  for (float special :
       {0.0f, -0.0f, 1.0f, -1.0f, 0.25f, -0.25f, 88.72284f, 88.7229f, -103.97f, -104.0f, 1e38f})
    x.push_back(special);
  x.resize((x.size() + 15) / 16 * 16, INFINITY);
  return x;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// NaNs compare equal: their sign and payload are no part of a result.
std::vector<float> plain_nan(std::vector<float> v) {
  for (float& x : v)
    if (std::isnan(x)) x = NAN;
  return v;
}

TEST_CASE("every instruction set gives the same bits") {
  std::vector<float> x = sweep();
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = uint16_t(i);
  auto n = int64_t(x.size());
  std::vector<std::vector<float>> first;
  std::vector<std::vector<uint16_t>> first16;
  for_each_isa([&](NamedIsa isa) {
    const cpu::LaneTable& t = cpu::lanes();
    std::vector<std::vector<float>> got;
    for (const auto& m : t.maps) {
      got.emplace_back(x.size());
      m.map(x.data(), got.back().data(), n);
    }
    got.emplace_back(x.size() / 8);
    t.sums(x.data(), got.back().data(), n);
    for (auto widen : {t.widen_bf16, t.widen_f16}) {
      got.emplace_back(patterns.size());
      widen(patterns.data(), got.back().data(), 65536);
    }
    std::vector<std::vector<uint16_t>> got16(2, std::vector<uint16_t>(x.size()));
    t.narrow_bf16(x.data(), got16[0].data(), n);
    t.narrow_f16(x.data(), got16[1].data(), n);
    if (first.empty()) first = got, first16 = got16;
    for (size_t i = 0; i < got.size(); ++i) {
      INFO(isa.name << ", " << std::string(i < std::size(t.maps) ? t.maps[i].name : "sums or widening"));
      CHECK(same_bits(plain_nan(got[i]), plain_nan(first[i])));
    }
    for (size_t i = 0; i < 2; ++i) {
      INFO(isa.name << ", " << text(i ? DType::f16 : DType::bf16));
      CHECK(same_bits(got16[i], first16[i]));
    }
  });
}

TEST_CASE("16-bit lanes are the conversions of dtype.h") {
  std::vector<float> x = sweep();
  std::vector<uint16_t> b(x.size()), h(x.size());
  for_each_isa([&](NamedIsa isa) {
    INFO(isa.name);
    cpu::lanes().narrow_bf16(x.data(), b.data(), int64_t(x.size()));
    cpu::lanes().narrow_f16(x.data(), h.data(), int64_t(x.size()));
    int64_t wrong = 0;
    for (size_t i = 0; i < x.size(); ++i)
      wrong += b[i] != from_float<bf16>(x[i]).bits || h[i] != from_float<f16>(x[i]).bits;
    CHECK(wrong == 0);
  });
}

TEST_CASE("tails read and write exactly n elements") {
  for_each_isa([&](NamedIsa isa) {
    for (int64_t n = 0; n < 16; ++n) {
      INFO(isa.name << ", n = " << n);
      std::vector<float> x(size_t(n), 3.0f);  // an address sanitizer sees a read past the end
      float out[16], lanes[16];
      std::fill(out, out + 16, -1.0f);
      cpu::lanes().tail(x.data(), out, lanes, n);
      for (int64_t i = 0; i < 16; ++i) {
        CHECK(lanes[i] == (i < n ? 3.0f : 7.0f));
        CHECK(out[i] == (i < n ? 3.0f : -1.0f));
      }
    }
  });
}

struct Worst {
  double ulp = 0;
  float at = 0;
};

// Largest error in units in the last place of the result (subnormal results: of the smallest one).
Worst worst_ulp(void (*map)(const float*, float*, int64_t), double (*exact)(double), float from, float to) {
  std::vector<float> x;
  for (float v : sweep())
    if (v >= from && v <= to) x.push_back(v);
  for (int i = 0; i < 400000; ++i) x.push_back(from + (to - from) * (float(i) / 400000.0f));
  x.resize((x.size() + 15) / 16 * 16, from);
  std::vector<float> y(x.size());
  map(x.data(), y.data(), int64_t(x.size()));
  Worst worst;
  for (size_t i = 0; i < x.size(); ++i) {
    double want = exact(double(x[i]));
    if (std::abs(want) > double(std::numeric_limits<float>::max())) {
      if (!std::isinf(y[i]) && std::abs(y[i]) < std::numeric_limits<float>::max()) return {INFINITY, x[i]};
      continue;
    }
    int e = want == 0 ? -126 : std::max(std::ilogb(want), -126);
    double ulp = std::abs(double(y[i]) - want) / std::ldexp(1.0, e - 23);
    if (!(ulp <= worst.ulp)) worst = {ulp, x[i]};
  }
  return worst;
}

TEST_CASE("functions are as exact as lanes_math.inc says") {
  const cpu::LaneTable& t = cpu::lanes();
  auto check = [](std::string name, Worst worst, double limit) {
    INFO(name << ": " << worst.ulp << " ulp at " << worst.at);
    CHECK(worst.ulp <= limit);
  };
  check("exp", worst_ulp(t.maps[0].map, [](double x) { return std::exp(x); }, -110.0f, 89.5f), 1.0);
  check("exp2_neg", worst_ulp(t.maps[1].map, [](double x) { return std::exp2(x); }, -155.0f, 0.0f), 2.0);
  check("sigmoid",
        worst_ulp(t.maps[2].map, [](double x) { return 1 / (1 + std::exp(-x)); }, -85.0f, 200.0f), 2.5);
  check("log", worst_ulp(t.maps[11].map, [](double x) { return std::log(x); }, 1e-45f, 3.4e38f), 1.5);
  check("log near 1", worst_ulp(t.maps[11].map, [](double x) { return std::log(x); }, 0.3f, 3.0f), 1.5);
  check("tanh", worst_ulp(t.maps[3].map, [](double x) { return std::tanh(x); }, -100.0f, 100.0f), 2.5);
}

TEST_CASE("functions at the ends of the line") {
  float x[16] = {INFINITY, -INFINITY, NAN, 0.0f, -0.0f, 1e30f, -1e30f, 1e-40f}, y[16];
  auto of = [&](int f) {
    cpu::lanes().maps[f].map(x, y, 16);
    return y;
  };
  for_each_isa([&](NamedIsa isa) {
    INFO(isa.name);
    const float* e = of(0);
    CHECK((std::isinf(e[0]) && e[1] == 0 && std::isnan(e[2]) && e[3] == 1 && e[4] == 1 && std::isinf(e[5]) &&
           e[6] == 0));
    const float* e2 = of(1);
    CHECK((e2[0] == 1 && e2[1] == 0 && std::isnan(e2[2]) && e2[3] == 1 && e2[6] == 0));
    const float* s = of(2);
    CHECK((s[0] == 1 && s[1] == 0 && std::isnan(s[2]) && s[3] == 0.5f && s[5] == 1 && s[6] == 0));
    const float* h = of(3);
    CHECK((h[0] == 1 && h[1] == -1 && std::isnan(h[2]) && h[3] == 0 && h[4] == 0 && h[5] == 1 &&
           h[7] == 1e-40f));
    const float* l = of(11);
    CHECK((l[0] == INFINITY && std::isnan(l[1]) && std::isnan(l[2]) && l[3] == -INFINITY &&
           l[4] == -INFINITY && std::isnan(l[6])));
  });
}

}  // namespace
}  // namespace tigon::test
