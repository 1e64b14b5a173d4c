// LoRA in the core: gradients of two maps of one x are slopes, refusals.
#include "tigon/ops/lora_linear/lora_linear.h"

#include "table.h"

namespace tigon::test {
namespace {

// Two maps of one x, the first with two adapters. Memory starts as NaN: what is read before it is written
// shows.
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

TEST_CASE("lora_linear: gradients of two maps and three adapters are slopes") {
  for (double p : {0.0, 0.4}) {
    Maps m(DType::f32, DType::f32, p);
    m.run();
    const Table dx = m.dx, da = m.da;
    const std::vector<Table> db = m.db;
    auto loss = [&] {
      m.run();
      return dot(m.ys[0], m.dys[0]) + dot(m.ys[1], m.dys[1]);
    };
    check_slopes("dx", m.x, dx, loss);
    for (size_t i = 0; i < 3; ++i) {
      Table rows(DType::f32, m.a[i].rows(), Maps::kIn);
      rows.fill([&](int64_t r, int64_t c) { return da(8 * int64_t(i) + r, c); });
      check_slopes("da", m.a[i], rows, loss);
      check_slopes("db", m.b[i], db[i], loss);
    }
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
