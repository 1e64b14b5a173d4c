// Experts in the core: a layer against double, routing against its definition, what is not here, bitwise promises, refusals.
#include "tigon/ops/experts/experts_layer.h"

#include "table.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/experts/experts_math.inc"
}  // namespace oracle

namespace {

Vector ints(std::vector<int32_t>& v) {
  return {.data = v.data(), .dtype = DType::i32, .size = int64_t(v.size())};
}

struct Point {
  double weighted, dgate, dup, dw;
};
template <GluKind K>
Point point_of(double dact, double w, double gate, double up, const GluOptions& o) {
  Point p;
  oracle::experts_point<K>(dact, w, gate, up, o, p.weighted, p.dgate, p.dup, p.dw);
  return p;
}
Point exact_point(double dact, double w, double gate, double up, const GluOptions& o) {
  switch (o.kind) {
    case GluKind::swiglu: return point_of<GluKind::swiglu>(dact, w, gate, up, o);
    case GluKind::geglu: return point_of<GluKind::geglu>(dact, w, gate, up, o);
    case GluKind::geglu_tanh: return point_of<GluKind::geglu_tanh>(dact, w, gate, up, o);
    case GluKind::reglu: return point_of<GluKind::reglu>(dact, w, gate, up, o);
    case GluKind::relu_squared: return point_of<GluKind::relu_squared>(dact, w, gate, up, o);
    default: return point_of<GluKind::swiglu_oai>(dact, w, gate, up, o);
  }
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

  // Column of row e's matrix, whichever way it lies.
  double first(int64_t e, int64_t out, int64_t in) const {
    return transposed ? gate_up(e * kHidden + in, out) : gate_up(e * wide + out, in);
  }
  double second(int64_t e, int64_t out, int64_t in) const {
    return transposed ? down(e * kInner + in, out) : down(e * kHidden + out, in);
  }
  int64_t gate_column(int64_t i) const { return gate.columns == GateColumns::interleaved ? 2 * i : i; }
  int64_t up_column(int64_t i) const {
    return gate.columns == GateColumns::interleaved ? 2 * i + 1 : kInner + i;
  }
};

struct Exact {
  std::vector<double> y, dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias;

  explicit Exact(const Layer& l)
      : y(size_t(l.x.rows() * l.x.cols())),
        dx(y.size()),
        dweights(size_t(Layer::kSlots)),
        dgate_up(size_t(Layer::kExperts * l.wide * Layer::kHidden)),
        ddown(size_t(Layer::kExperts * Layer::kHidden * Layer::kInner)),
        dgate_up_bias(size_t(Layer::kExperts * l.wide)),
        ddown_bias(size_t(Layer::kExperts * Layer::kHidden)) {
    constexpr int64_t H = Layer::kHidden, I = Layer::kInner, E = Layer::kExperts, K = Layer::kChoices;
    for (int64_t s = 0; s < Layer::kSlots; ++s) {
      int64_t t = s / K, e = int64_t(l.ids(t, s % K));
      if (e >= E) continue;
      double w = l.weights(0, s);
      std::vector<double> z(size_t(l.wide), 0.0), dz(size_t(l.wide), 0.0);
      for (int64_t c = 0; c < l.wide; ++c) {
        z[size_t(c)] = l.gate_up_bias(e, c);
        for (int64_t h = 0; h < H; ++h) z[size_t(c)] += l.first(e, c, h) * l.x(t, h);
      }
      std::vector<double> out(size_t(H), 0.0);
      for (int64_t h = 0; h < H; ++h) out[size_t(h)] = l.down_bias(e, h);
      for (int64_t i = 0; i < I; ++i) {
        bool single = l.gate.columns == GateColumns::single;
        size_t gc = size_t(l.gate_column(i)), uc = single ? 0 : size_t(l.up_column(i));
        double dact = 0.0;
        for (int64_t h = 0; h < H; ++h) dact += l.dy(t, h) * l.second(e, h, i);
        Point p = exact_point(dact, w, z[gc], single ? 1.0 : z[uc], l.gate.unit);
        double act = exact_point(0.0, 1.0, z[gc], single ? 1.0 : z[uc], l.gate.unit).weighted;
        dweights[size_t(s)] += p.dw;
        dz[gc] = p.dgate;
        if (!single) dz[uc] = p.dup;
        for (int64_t h = 0; h < H; ++h) {
          out[size_t(h)] += l.second(e, h, i) * act;
          ddown[size_t(l.transposed ? (e * I + i) * H + h : (e * H + h) * I + i)] += l.dy(t, h) * p.weighted;
        }
      }
      for (int64_t h = 0; h < H; ++h) {
        y[size_t(t * H + h)] += w * out[size_t(h)];
        dweights[size_t(s)] += l.dy(t, h) * l.down_bias(e, h);
        ddown_bias[size_t(e * H + h)] += w * l.dy(t, h);
        for (int64_t c = 0; c < l.wide; ++c) {
          dx[size_t(t * H + h)] += dz[size_t(c)] * l.first(e, c, h);
          dgate_up[size_t(l.transposed ? (e * H + h) * l.wide + c : (e * l.wide + c) * H + h)] +=
              dz[size_t(c)] * l.x(t, h);
        }
      }
      for (int64_t c = 0; c < l.wide; ++c) dgate_up_bias[size_t(e * l.wide + c)] += dz[size_t(c)];
    }
  }
};

// Within so many units of the largest value; a result that is exactly zero must be.
void check_near(const char* name, const Table& got, const std::vector<double>& exact, DType t, double units) {
  double most = 0.0;
  for (double v : exact) most = std::max(most, std::abs(v));
  check_close(
      name, got, [&](int64_t r, int64_t c) { return exact[size_t(r * got.cols() + c)]; },
      [&](int64_t r, int64_t c) {
        return exact[size_t(r * got.cols() + c)] == 0.0 ? 0.0 : units * unit(t) * most;
      });
}

const ExpertsGate kGates[] = {{.unit = {.kind = GluKind::swiglu}, .columns = GateColumns::halves},
                              {.unit = {.kind = GluKind::swiglu}, .columns = GateColumns::interleaved},
                              {.unit = {.kind = GluKind::geglu}, .columns = GateColumns::halves},
                              {.unit = {.kind = GluKind::geglu_tanh}, .columns = GateColumns::single},
                              {.unit = {.kind = GluKind::reglu}, .columns = GateColumns::interleaved},
                              {.unit = {.kind = GluKind::swiglu_oai, .alpha = 1.2f, .limit = 1.5f},
                               .columns = GateColumns::interleaved},
                              {.unit = {.kind = GluKind::relu_squared}, .columns = GateColumns::single}};

TEST_CASE("a layer against double") {
  auto ctx = make_cpu_context(2);
  for (const ExpertsGate& gate : kGates)
    for (DType t : kFloats)
      for (bool transposed : {false, true}) {
        INFO(int(gate.unit.kind) << " " << int(gate.columns) << " " << text(t) << " " << transposed);
        Layer l(gate, t, transposed);
        experts_fwd(*ctx, l.forward());
        experts_bwd(*ctx, l.backward());
        Exact exact(l);
        // Sums of up to 42 terms, and the rounding of rows and of two products before each result.
        check_near("y", l.y, exact.y, t, 16);
        check_near("dx", l.dx, exact.dx, t, 16);
        check_near("dweights", l.dweights, exact.dweights, t, 16);
        check_near("dgate_up", l.dgate_up, exact.dgate_up, t, 16);
        check_near("ddown", l.ddown, exact.ddown, t, 16);
        check_near("dgate_up_bias", l.dgate_up_bias, exact.dgate_up_bias, t, 16);
        check_near("ddown_bias", l.ddown_bias, exact.ddown_bias, t, 16);
        for (int64_t r = l.offsets.back(); r < Layer::kSlots; ++r)
          CHECK_MESSAGE(std::isnan(l.rows(r, 0)), "row ", r, " is not here and was written");
      }
}

TEST_CASE("the formulas' gradients are their slopes") {
  for (const ExpertsGate& gate : kGates)
    for (double g : {-3.0, -0.4, 0.6, 1.4})
      for (double u : {-1.0, 0.5}) {
        INFO(int(gate.unit.kind) << " at " << g << ", " << u);
        double x = g, v = u, w = 0.7;
        Point p = exact_point(1.3, w, x, v, gate.unit);
        auto loss = [&] { return 1.3 * exact_point(0.0, w, x, v, gate.unit).weighted; };
        CHECK(p.dgate == doctest::Approx(slope(&x, loss)).epsilon(1e-6));
        CHECK(p.dup == doctest::Approx(slope(&v, loss)).epsilon(1e-6));
        CHECK(p.dw == doctest::Approx(slope(&w, loss)).epsilon(1e-6));
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
