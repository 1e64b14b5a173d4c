// Experts in the core: gradients are slopes, routing against its definition, results that are absent, bitwise
// promises, refusals.
#include "experts_layer.h"
#include "table.h"

namespace tigon::test {
namespace {

Vector ints(std::vector<int32_t>& v) {
  return {.data = v.data(), .dtype = DType::i32, .size = int64_t(v.size())};
}

// A layer and one step of it. Memory starts as NaN: what is read before it is written shows.
struct Layer {
  static constexpr int64_t kTokens = 11, kChoices = 3, kExperts = 5, kHidden = 19, kInner = 21,
                           kSlots = kTokens * kChoices;
  ExpertsGate gate;
  bool transposed;
  int64_t wide;
  Table x, dy, ids, weights, gate_up, down, gate_up_bias, down_bias;
  Table y, rows, dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias;
  std::vector<int32_t> order, place, offsets;

  Layer(const ExpertsGate& how, DType t, bool matrices_transposed)
      : gate(how),
        transposed(matrices_transposed),
        wide(how.columns == GateColumns::single ? kInner : 2 * kInner),
        x(t, kTokens, kHidden, 2),
        dy(t, kTokens, kHidden, 1),
        ids(DType::i64, kTokens, kChoices),
        weights(DType::f32, 1, kSlots),
        gate_up(t, kExperts * (transposed ? kHidden : wide), transposed ? wide : kHidden),
        down(t, kExperts * (transposed ? kInner : kHidden), transposed ? kHidden : kInner),
        gate_up_bias(t, kExperts, wide),
        down_bias(t, kExperts, kHidden),
        y(t, kTokens, kHidden, 3),
        rows(t, kSlots, wide),
        dx(t, kTokens, kHidden),
        dweights(DType::f32, 1, kSlots),
        dgate_up(t, gate_up.rows(), gate_up.cols()),
        ddown(t, down.rows(), down.cols()),
        dgate_up_bias(t, kExperts, wide),
        ddown_bias(t, kExperts, kHidden),
        order(kSlots, -7),
        place(kSlots, -7),
        offsets(kExperts + 1, -7) {
    x.normal(1), dy.normal(2), weights.normal(3, 0.5), gate_up.normal(4, 0.25), down.normal(5, 0.25);
    gate_up_bias.normal(6, 0.5), down_bias.normal(7, 0.5);
    // One expert (3) nobody chooses; one id in five is not here; some tokens choose one twice.
    std::mt19937 bits(8);
    ids.fill([&](int64_t, int64_t) {
      int id = int(bits() % 6);
      return id == 3 ? 2 : id == 5 ? 5 + int(bits() % 3) : id;
    });
  }
  ExpertsWeights experts() {
    return {.gate_up = gate_up.matrix(),
            .down = down.matrix(),
            .gate_up_bias = gate_up_bias.matrix(),
            .down_bias = down_bias.matrix(),
            .transposed = transposed,
            .gate = gate};
  }
  ExpertsFwd forward() {
    return {.x = x.matrix(),
            .ids = ids.matrix(),
            .weights = weights.vector(),
            .experts = experts(),
            .y = y.matrix(),
            .gate_up_rows = rows.matrix(),
            .order = ints(order),
            .place = ints(place),
            .offsets = ints(offsets)};
  }
  ExpertsBwd backward() {
    return {.dy = dy.matrix(),
            .x = x.matrix(),
            .weights = weights.vector(),
            .experts = experts(),
            .gate_up_rows = rows.matrix(),
            .order = ints(order),
            .place = ints(place),
            .offsets = ints(offsets),
            .dx = dx.matrix(),
            .dweights = dweights.vector(),
            .dgate_up = dgate_up.matrix(),
            .ddown = ddown.matrix(),
            .dgate_up_bias = dgate_up_bias.matrix(),
            .ddown_bias = ddown_bias.matrix()};
  }
};

const ExpertsGate kGates[] = {{.unit = {.kind = GluKind::swiglu}, .columns = GateColumns::halves},
                              {.unit = {.kind = GluKind::swiglu}, .columns = GateColumns::interleaved},
                              {.unit = {.kind = GluKind::geglu}, .columns = GateColumns::halves},
                              {.unit = {.kind = GluKind::geglu_tanh}, .columns = GateColumns::single},
                              {.unit = {.kind = GluKind::reglu}, .columns = GateColumns::interleaved},
                              {.unit = {.kind = GluKind::swiglu_oai, .alpha = 1.2f, .limit = 1.5f},
                               .columns = GateColumns::interleaved},
                              {.unit = {.kind = GluKind::relu_squared}, .columns = GateColumns::single}};

TEST_CASE("gradients are slopes") {
  auto ctx = make_cpu_context(2);
  for (const ExpertsGate& gate : kGates) {
    INFO(int(gate.unit.kind) << " " << int(gate.columns));
    Layer l(gate, DType::f32, false);
    auto loss = [&] {
      experts_fwd(*ctx, l.forward());
      return dot(l.y, l.dy);
    };
    loss();
    experts_bwd(*ctx, l.backward());
    check_slopes("dweights", l.weights, l.dweights, loss);
    check_slopes("dgate_up_bias", l.gate_up_bias, l.dgate_up_bias, loss, 2e-3);
    check_slopes("ddown_bias", l.down_bias, l.ddown_bias, loss);
  }
}

TEST_CASE("routing is a stable sort") {
  auto ctx = make_cpu_context(1);
  Layer l(kGates[0], DType::f32, false);
  experts_fwd(*ctx, l.forward());
  std::vector<int32_t> expected;
  for (int e = 0; e <= Layer::kExperts; ++e) {
    CHECK(l.offsets[size_t(e)] == int(expected.size()));
    for (int64_t s = 0; s < Layer::kSlots; ++s) {
      int64_t id = int64_t(l.ids(s / Layer::kChoices, s % Layer::kChoices));
      if (std::min(id, Layer::kExperts) == e) expected.push_back(int32_t(s));
    }
  }
  CHECK(l.order == expected);
  for (int64_t p = 0; p < Layer::kSlots; ++p)
    CHECK(l.place[size_t(l.order[size_t(p)])] == (p < l.offsets.back() ? p : -1));
}

TEST_CASE("the same bits everywhere") {
  for (const ExpertsGate& gate : kGates)
    for (DType t : kFloats) {
      INFO(int(gate.unit.kind) << " " << text(t));
      check_same_everywhere([&](Context& ctx) {
        Layer l(gate, t, true);
        experts_fwd(ctx, l.forward());
        experts_bwd(ctx, l.backward());
        return std::vector<Table>{l.y,     l.dx,   l.dweights,      l.dgate_up,
                                  l.ddown, l.rows, l.dgate_up_bias, l.ddown_bias};
      });
    }
}

TEST_CASE("only what is asked for") {
  auto ctx = make_cpu_context(1);
  Layer all(kGates[0], DType::bf16, false), some(kGates[0], DType::bf16, false);
  experts_fwd(*ctx, all.forward());
  experts_fwd(*ctx, some.forward());
  experts_bwd(*ctx, all.backward());
  ExpertsBwd b = some.backward();
  b.dx = b.dgate_up = b.dgate_up_bias = b.ddown_bias = {};
  b.dweights = {};
  experts_bwd(*ctx, b);
  CHECK(some.ddown == all.ddown);
  CHECK(std::isnan(some.dx(0, 0)));
  CHECK(std::isnan(some.dweights(0, 0)));
}

TEST_CASE("refusals write nothing") {
  auto ctx = make_cpu_context(1);
  Layer l(kGates[0], DType::f32, false), untouched = l;
  auto refused = [&](const char* message, const std::function<void(ExpertsFwd&)>& spoil) {
    ExpertsFwd a = l.forward();
    spoil(a);
    CHECK_THROWS_WITH_AS(experts_fwd(*ctx, a), doctest::Contains(message), Error);
    CHECK(l.y == untouched.y);
    CHECK(l.rows == untouched.rows);
  };
  refused("gate_up must be", [](ExpertsFwd& a) { a.experts.transposed = true; });
  refused("y must be", [](ExpertsFwd& a) { a.y.rows -= 1; });
  refused("ids must have 11 rows", [](ExpertsFwd& a) { a.ids.rows -= 1; });
  refused("offsets must have one element more", [](ExpertsFwd& a) { a.offsets.size = 1; });
  l.ids.set(3, 1, -1);
  refused("ids must be >= 0, got -1", [](ExpertsFwd&) {});
}

}  // namespace
}  // namespace tigon::test
