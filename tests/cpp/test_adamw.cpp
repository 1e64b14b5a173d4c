// AdamW in the core: its formula is the paper's, random bits against known answers, parts of a list,
// refusals.
#include "tigon/ops/adamw/adamw.h"

#include "table.h"
#include "tigon/ops/adamw/adamw_codes.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/adamw/adamw_bits.inc"
#include "tigon/ops/adamw/adamw_math.inc"

uint32_t code_bits(float x) { return std::bit_cast<uint32_t>(x); }
float code_value(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t clamped(float y, float lowest) { return code_bits(std::abs(y) > lowest ? std::abs(y) : lowest); }
using namespace adamw_detail;
#include "tigon/ops/adamw/adamw_codes.inc"
}  // namespace oracle

namespace {

// The streams of one parameter.
struct State {
  Table param, grad, avg, sq, most, low, master, step;
  bool amsgrad = false;
  AdamwRounding rounding;

  State(DType p, DType g, DType m, DType v, int64_t n, AdamwRounding r, unsigned seed)
      : param(Table::column(p, n)),
        grad(Table::column(g, n)),
        avg(Table::column(m, n)),
        sq(Table::column(v, n)),
        most(Table::column(v, n)),
        low(Table::column(DType::bf16, n)),
        master(Table::column(DType::f32, n)),
        step(Table::column(DType::f32, 1)),
        rounding(r) {
    param.normal(seed), grad.normal(seed + 1, 0.1);
    auto zero = [](int64_t, int64_t) { return 0.0; };
    avg.fill(zero), sq.fill(zero), most.fill(zero), low.fill(zero), step.fill(zero);
    master.fill([&](int64_t, int64_t c) { return param(c); });
  }
  AdamwTensor tensor() {
    AdamwTensor t{.param = param.vector(),
                  .grad = grad.vector(),
                  .exp_avg = avg.vector(),
                  .exp_avg_sq = sq.vector(),
                  .step = step.vector()};
    if (amsgrad) t.max_exp_avg_sq = most.vector();
    if (rounding == AdamwRounding::split && param.dtype() == DType::bf16)
      t.low = low.vector(), t.low.dtype = DType::i16;
    if (rounding == AdamwRounding::master && param.dtype() != DType::f32) t.master = master.vector();
    return t;
  }
  std::vector<Table> results() const { return {param, avg, sq, most, low, master, step}; }
};

void run(Context& ctx, std::vector<AdamwTensor> tensors, const AdamwGroup& group,
         AdamwRounding rounding = AdamwRounding::nearest, AdamwRounding moments = AdamwRounding::nearest) {
  adamw(ctx, {.tensors = tensors,
              .groups = {&group, 1},
              .rounding = rounding,
              .moment_rounding = moments,
              .seed = 7});
}

TEST_CASE("the shared formula in double is the paper's") {
  struct {
    double weight1, weight2, eps, decay, l2, scale, rate;
  } c{0.1, 1e-3, 1e-8, -1e-3, 0.0, 1 / std::sqrt(1 - 0.999), -1e-2 / (1 - 0.9)};
  double p = 0.7, m = 0, v = 0, g = 0.3;
  oracle::adamw_update(g, c, p, m, v, static_cast<double*>(nullptr));
  CHECK(std::abs(m - 0.1 * g) < 1e-12);
  CHECK(std::abs(v - 1e-3 * g * g) < 1e-12);
  CHECK(std::abs(p - (0.7 - 1e-2 * 0.1 * 0.7 - 1e-2 * g / (g + 1e-8))) < 1e-12);
}

// Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds).
TEST_CASE("Philox4x32-10") {
  auto words = [](oracle::Random r) { return std::vector<uint32_t>(r.word, r.word + 4); };
  CHECK(words(oracle::philox(0u, 0u, 0u, 0u, 0)) ==
        std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(words(oracle::philox(~0u, ~0u, ~0u, ~0u, ~uint64_t(0))) ==
        std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(words(oracle::philox(0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0x299f31d0a4093822u)) ==
        std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("halves of a master join again, and the upper one is the nearest") {
  for (uint64_t k = 0; k < (uint64_t(1) << 32); k += 4099) {
    uint32_t x = uint32_t(k);
    for (uint32_t u : {x, (x & 0xffff0000u) | 0x8000u, x | 0xffffu}) {
      uint32_t whole = oracle::splittable(u);
      uint32_t upper = oracle::upper_half(whole), low = whole & 0xffffu;
      REQUIRE(oracle::joined(upper & 0xffffu, low) == whole);
      float value = std::bit_cast<float>(u), near = to_float(bf16{uint16_t(upper)});
      float even = to_float(from_float<bf16>(value));
      if (std::isnan(value))
        REQUIRE(std::isnan(near));
      else if ((u & 0xffffu) != 0x8000u)
        REQUIRE(near == even);
      else
        REQUIRE(std::abs(near) >= std::abs(value));
    }
  }
}

TEST_CASE("stochastic rounding: one of two neighbours, with the right share of the 65536 draws") {
  for (float x : {1.00390625f, -1.003f, 3e-39f, 1.5e-3f, -7.77e4f, 6e-8f, 2.9e-8f, 1e-5f, 65519.0f, 0.0f}) {
    uint32_t u = std::bit_cast<uint32_t>(x);
    double sum16 = 0, sumb = 0;
    for (uint32_t r = 0; r < 65536; ++r) {
      sumb += to_float(bf16{uint16_t(oracle::stochastic_bf16(u, r))});
      sum16 += std::abs(x) < 65504 ? to_float(f16{uint16_t(oracle::stochastic_f16(u, r))}) : 0.0;
    }
    CHECK(sumb / 65536 == doctest::Approx(double(x)).epsilon(1e-7));
    if (std::abs(x) < 65504 && std::abs(x) > 1e-9)
      CHECK(std::abs(sum16 / 65536 - x) <= std::max(0x1p-14 * 0x1p-10 * std::abs(x), 0x1p-24 * 0x1p-16));
  }
  for (float x : {INFINITY, -INFINITY}) {
    CHECK(to_float(bf16{uint16_t(oracle::stochastic_bf16(std::bit_cast<uint32_t>(x), 0xffffu))}) == x);
    CHECK(to_float(f16{uint16_t(oracle::stochastic_f16(std::bit_cast<uint32_t>(x), 0xffffu))}) == x);
  }
  for (uint32_t nan : {0x7fffffffu, 0xffc00000u, 0x7fc00001u})
    CHECK(std::isnan(to_float(bf16{uint16_t(oracle::stochastic_bf16(nan, 0xffffu))})));
}

// Of three uniform numbers that say nothing of each other, the share below bounds a, b and c is a b c.
TEST_CASE("the random bits of an element and its moments are even in pairs and as three") {
  const int n = 65536;
  for (int odd : {0, 1})
    for (uint32_t neighbour : {0u, 12345u, 0xffffu})
      for (int a : {3 << 12, 51111, n})
        for (int b : {2222, 60001, n})
          for (int c : {1 << 13, 37777, n}) {
            int below = 0;
            for (uint32_t x = 0; x < n; ++x) {
              const oracle::Random r{{odd ? x << 16 | neighbour : neighbour << 16 | x, 0u, 0u, 0u}};
              auto is_below = [&](uint32_t factor, int bound) {
                return int(oracle::random_of(r, odd, factor)) < bound;
              };
              below += is_below(oracle::kParamFactor, a) && is_below(oracle::kAvgFactor, b) &&
                       is_below(oracle::kSqFactor, c);
            }
            CHECK(std::abs(double(below) / n - double(a) / n * b / n * c / n) < 5e-4);
          }
}

TEST_CASE("a code is the nearest value, the lower of two, in every neighbourhood") {
  static constexpr adamw_detail::CodeMaps maps = adamw_detail::code_maps();
  const auto nearest = [](const float* values, double y) {
    int code = 0;
    while (code < 255 && y > (double(values[code]) + values[code + 1]) / 2) ++code;
    return uint32_t(code);
  };
  const auto check = [&](float y) {
    REQUIRE(oracle::avg_code(maps.cells, y) == nearest(maps.avg, y));
    if (y > 0) REQUIRE(oracle::root_code(maps.cells, y, y) == std::max(nearest(maps.root, y), 1u));
  };
  for (const float* values : {maps.avg, maps.root})
    for (int code = 0; code < 255; ++code) {
      REQUIRE(values[code] < values[code + 1]);
      for (double at : {double(values[code]), (double(values[code]) + values[code + 1]) / 2}) {
        const float y = float(at);
        for (float x : {y, std::nextafter(y, -2.0f), std::nextafter(y, 2.0f)}) check(x), check(-x);
      }
    }
  for (uint32_t bits = 0; bits <= 0x3f800000u; bits += 4099)
    check(std::bit_cast<float>(bits)), check(-std::bit_cast<float>(bits));
  // Four codes of exp_avg in a word, from distances and signs.
  for (uint32_t a = 0; a <= 128; ++a)
    for (uint32_t negative = 0; negative < 16; ++negative) {
      uint32_t distances = 0, signs = 0, expected = 0;
      for (uint32_t k = 0; k < 4; ++k) {
        const uint32_t distance = (a + 43 * k) % 129;
        const bool below = (negative >> k & 1) != 0;
        distances |= distance << 8 * k, signs |= below ? 0xffu << 8 * k : 0u;
        expected |= (below ? 127 - std::min(distance, 127u) : 127 + distance) << 8 * k;
      }
      CHECK(oracle::avg_codes(distances, signs) == expected);
    }
  CHECK(oracle::avg_code(maps.cells, NAN) == 127u);
  CHECK(oracle::avg_code(maps.cells, -NAN) == 127u);
  CHECK(oracle::root_code(maps.cells, 0.0f, 0.0f) == 0u);
  CHECK(oracle::root_code(maps.cells, 1e-30f, 0.0f) == 1u);
}

TEST_CASE("any order and any split of a list gives the same bits") {
  auto ctx = make_cpu_context(3);
  const AdamwRounding nearest = AdamwRounding::nearest, stochastic = AdamwRounding::stochastic;
  for (auto [r, moments] : {std::pair{nearest, nearest},
                            {stochastic, nearest},
                            {nearest, stochastic},
                            {stochastic, stochastic},
                            {AdamwRounding::split, stochastic}}) {
    const int64_t n = 40003, cut = 17001;
    State whole(DType::bf16, DType::bf16, DType::bf16, DType::bf16, n, r, 9), parts = whole;
    run(*ctx, {whole.tensor()}, AdamwGroup{}, r, moments);
    AdamwTensor first = parts.tensor(), second = first;
    for (Vector AdamwTensor::* v : {&AdamwTensor::param, &AdamwTensor::grad, &AdamwTensor::exp_avg,
                                    &AdamwTensor::exp_avg_sq, &AdamwTensor::low}) {
      if (!(first.*v)) continue;
      (second.*v).data = static_cast<char*>((first.*v).data) + cut * int64_t(size_of((first.*v).dtype));
      (second.*v).size = n - cut, (first.*v).size = cut;
    }
    second.first = cut;
    first.step = second.step = {};
    run(*ctx, {second, first}, AdamwGroup{}, r, moments);
    CHECK(whole.param == parts.param);
    CHECK(whole.avg == parts.avg);
    CHECK(whole.sq == parts.sq);
    CHECK(whole.low == parts.low);
  }
}

TEST_CASE("refusals, before anything is written") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto&& spoil, const char* words) {
    State s(DType::bf16, DType::bf16, DType::bf16, DType::bf16, 9, AdamwRounding::split, 1);
    std::vector<Table> before = s.results();
    AdamwGroup group{};
    std::vector<AdamwTensor> list{s.tensor(), s.tensor()};
    Adamw call{.tensors = list, .groups = {&group, 1}, .rounding = AdamwRounding::split};
    spoil(list[1], group, call);
    std::string message;
    try {
      adamw(*ctx, call);
    } catch (const Error& e) {
      message = e.what();
    }
    CHECK_MESSAGE(message.find(words) != std::string::npos, message, " lacks: ", words);
    std::vector<Table> after = s.results();
    for (size_t i = 0; i < before.size(); ++i) CHECK(before[i] == after[i]);
  };
  refused([](auto& t, auto&, auto&) { t.grad.size = 8; }, "grad must be [9], got [8]");
  refused([](auto& t, auto&, auto&) { t.grad.dtype = DType::f16; }, "grad must be bfloat16 or float32");
  refused([](auto& t, auto&, auto&) { t.exp_avg.dtype = DType::f16; }, "exp_avg must be float32, bfloat16");
  refused([](auto& t, auto&, auto&) { t.exp_avg.dtype = DType::u8; }, "exp_avg, its absmax, must be");
  refused([](auto& t, auto&, auto&) { t.avg_absmax = t.step; },
          "exp_avg must be uint8 where it has an absmax");
  refused([](auto& t, auto&, auto&) { t.exp_avg.dtype = DType::u8, t.avg_absmax = t.step; },
          "must both be uint8 or neither");
  refused([](auto& t, auto&, auto&) { t.low = {}; }, "low must be [9], got [0]");
  refused([](auto& t, auto&, auto&) { t.master = t.param; }, "master must be absent");
  refused([](auto& t, auto&, auto&) { t.group = 1; }, "group must be in [0, 1), got 1");
  refused([](auto&, auto& g, auto&) { g.beta1 = 1.0; }, "betas[0] must be in [0, 1), got 1");
  refused([](auto&, auto& g, auto&) { g.lr = -1.0; }, "lr must be >= 0, got -1");
  refused([](auto&, auto& g, auto&) { g.eps = NAN; }, "eps must be >= 0, got nan");
  refused([](auto& t, auto&, auto&) { t.step = {}, t.steps = -1; }, "steps must be in");
  refused([](auto&, auto&, auto& c) { c.moment_rounding = AdamwRounding::master; },
          "moment_rounding must be 0 or 1, nearest or stochastic, got 3");
  refused([](auto&, auto&, auto& c) { c.clip = {.data = &c, .dtype = DType::f64, .size = 1}; },
          "clip must be");
}

}  // namespace
}  // namespace tigon::test
