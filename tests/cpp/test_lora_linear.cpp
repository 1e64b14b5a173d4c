// LoRA in the core: two maps of one x against double, dropout's mask, zeros, refusals.
#include "tigon/ops/lora_linear/lora_linear.h"

#include "table.h"

namespace tigon::test {
namespace {

namespace mask {
#include "tigon/ops/lora_linear/lora_linear_math.inc"
}  // namespace mask

// Two maps of one x, the first with two adapters. Memory starts as NaN: what is read before it is written shows.
struct Maps {
  static constexpr int64_t kRows = 9, kIn = 21, kOut[2] = {13, 6}, kRanks[3] = {3, 8, 5}, kOf[3] = {0, 0, 1};
  double dropout;
  int64_t seed = 77;
  Table x, dx, t, da, bias;
  std::vector<Table> weights, ys, dys, a, b, db;

  Maps(DType type, DType adapters, double p)
      : dropout(p),
        x(type, kRows, kIn, 2),
        dx(type, kRows, kIn, 1),
        t(type, kRows, 8 + 8 + 8),
        da(type == adapters ? type : DType::f32, 24, kIn),
        bias(type, 1, kOut[0]) {
    x.normal(1), bias.normal(2);
    for (unsigned g = 0; g < 2; ++g) {
      weights.emplace_back(type, kOut[g], kIn, 3), weights.back().normal(10 + g, 0.3);
      ys.emplace_back(type, kRows, kOut[g], 1);
      dys.emplace_back(type, kRows, kOut[g], 2), dys.back().normal(20 + g);
    }
    for (unsigned i = 0; i < 3; ++i) {
      a.emplace_back(adapters, kRanks[i], kIn, 1), a.back().normal(30 + i, 0.3);
      b.emplace_back(adapters, kOut[kOf[i]], kRanks[i], 1), b.back().normal(40 + i, 0.3);
      db.emplace_back(da.dtype(), kOut[kOf[i]], kRanks[i], 1);
    }
  }
  static double scale(int i) { return 0.5 + i; }
  double p_of(int i) const { return i == 1 ? dropout : 0.0; }
  double factor(int i, int64_t r, int64_t k) const {
    if (p_of(i) == 0.0) return 1.0;
    mask::Dropper dropper = mask::make_dropper(p_of(i), uint32_t(i));
    dropper.seed = uint64_t(seed);
    return double(dropper.factors(r, k / 4).of[k % 4]);
  }
  double low(int i, int64_t r, int64_t j) const {
    double sum = 0.0;
    for (int64_t k = 0; k < kIn; ++k) sum += factor(i, r, k) * x(r, k) * a[size_t(i)](j, k);
    return sum;
  }
  double dlow(int i, int64_t r, int64_t j) const {
    double sum = 0.0;
    for (int64_t n = 0; n < kOut[kOf[i]]; ++n) sum += dys[size_t(kOf[i])](r, n) * b[size_t(i)](n, j);
    return scale(i) * sum;
  }
  double y(int64_t g, int64_t r, int64_t n) const {
    double sum = g == 0 ? bias(0, n) : 0.0;
    for (int64_t k = 0; k < kIn; ++k) sum += x(r, k) * weights[size_t(g)](n, k);
    for (int i = 0; i < 3; ++i)
      for (int64_t j = 0; kOf[i] == g && j < kRanks[i]; ++j)
        sum += scale(i) * low(i, r, j) * b[size_t(i)](n, j);
    return sum;
  }

  std::vector<LoraBase> bases(std::vector<Table>& of) {
    return {{.weight = weights[0].matrix(), .bias = bias.vector(), .y = of[0].matrix()},
            {.weight = weights[1].matrix(), .y = of[1].matrix()}};
  }
  std::vector<LoraAdapter> adapters() {
    std::vector<LoraAdapter> list;
    for (int i = 0; i < 3; ++i)
      list.push_back({.base = kOf[i],
                      .a = a[size_t(i)].matrix(),
                      .b = b[size_t(i)].matrix(),
                      .scale = float(scale(i)),
                      .dropout = p_of(i),
                      .db = db[size_t(i)].matrix()});
    return list;
  }
  Vector seeds() { return {.data = &seed, .dtype = DType::i64, .size = 1}; }
  void run() {
    auto ctx = make_cpu_context();
    auto list = adapters();
    auto forward = bases(ys), backward = bases(dys);
    lora_linear_fwd(*ctx,
                    {.x = x.matrix(), .bases = forward, .adapters = list, .seed = seeds(), .t = t.matrix()});
    lora_linear_bwd(*ctx, {.x = x.matrix(),
                           .bases = backward,
                           .adapters = list,
                           .seed = seeds(),
                           .t = t.matrix(),
                           .dx = dx.matrix(),
                           .da = da.matrix()});
  }
};

TEST_CASE("lora_linear: two maps, three adapters") {
  for (DType type : kFloats)
    for (DType of : {type, DType::f32})
      for (double p : {0.0, 0.4}) {
        Maps m(type, of, p);
        m.run();
        const std::string name = text(type) + ", adapters " + text(of) + (p > 0.0 ? ", dropout" : "");
        auto bound = [&](int64_t, int64_t) { return 60.0 * unit(type); };
        for (int64_t g = 0; g < 2; ++g)
          check_close(
              name + ": y", m.ys[size_t(g)], [&](int64_t r, int64_t n) { return m.y(g, r, n); }, bound);
        check_close(
            name + ": dx", m.dx,
            [&](int64_t r, int64_t k) {
              double sum = 0.0;
              for (int64_t g = 0; g < 2; ++g)
                for (int64_t n = 0; n < Maps::kOut[g]; ++n)
                  sum += m.dys[size_t(g)](r, n) * m.weights[size_t(g)](n, k);
              for (int i = 0; i < 3; ++i)
                for (int64_t j = 0; j < Maps::kRanks[i]; ++j)
                  sum += m.factor(i, r, k) * m.dlow(i, r, j) * m.a[size_t(i)](j, k);
              return sum;
            },
            bound);
        check_close(
            name + ": da", m.da,
            [&](int64_t row, int64_t k) {
              const int i = int(row / 8);
              double sum = 0.0;
              for (int64_t r = 0; row % 8 < Maps::kRanks[i] && r < Maps::kRows; ++r)
                sum += m.dlow(i, r, row % 8) * m.factor(i, r, k) * m.x(r, k);
              return sum;
            },
            bound);
        for (int i = 0; i < 3; ++i)
          check_close(
              name + ": db", m.db[size_t(i)],
              [&](int64_t n, int64_t j) {
                double sum = 0.0;
                for (int64_t r = 0; r < Maps::kRows; ++r)
                  sum += m.dys[size_t(Maps::kOf[i])](r, n) * m.low(i, r, j);
                return Maps::scale(i) * sum;
              },
              bound);
      }
}

TEST_CASE("lora_linear: refused before anything is written") {
  Maps m(DType::f32, DType::f32, 0.4);
  const Table before = m.ys[0];
  auto ctx = make_cpu_context();
  auto list = m.adapters();
  auto bases = m.bases(m.ys);
  LoraLinearFwd call{.x = m.x.matrix(), .bases = bases, .adapters = list, .t = m.t.matrix()};
  CHECK_THROWS_WITH_AS(lora_linear_fwd(*ctx, call), "[lora_linear] seed must be [1], got [0]", Error);
  call.seed = m.seeds();
  list[2].base = 2;
  CHECK_THROWS_WITH_AS(lora_linear_fwd(*ctx, call),
                       "[lora_linear] an adapter's linear must be in [0, 2), got 2", Error);
  list[2].base = 1, list[0].dropout = 1.0;
  CHECK_THROWS_WITH_AS(lora_linear_fwd(*ctx, call), "[lora_linear] dropout must be in [0, 1), got 1", Error);
  CHECK(m.ys[0] == before);
}

}  // namespace
}  // namespace tigon::test
