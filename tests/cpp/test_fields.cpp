// What every op with a list of fields (base/fields.h) is tested for in the core, on tables made from that
// list: the same bits everywhere and in place, refusals that write nothing.
#include <map>

#include "table.h"
#include "tigon/base/op.h"
#include "tigon/ops/add_rms_norm/add_rms_norm.h"
#include "tigon/ops/attention_residual/attention_residual.h"
#include "tigon/ops/dyt/dyt.h"
#include "tigon/ops/gated_rms_norm/gated_rms_norm.h"
#include "tigon/ops/group_norm/group_norm.h"
#include "tigon/ops/hyper_connection/hyper_connection.h"
#include "tigon/ops/layer_norm/layer_norm.h"
#include "tigon/ops/mish/mish.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm.h"
#include "tigon/ops/poly_norm/poly_norm.h"
#include "tigon/ops/relu_squared/relu_squared.h"
#include "tigon/ops/rms_norm/rms_norm.h"
#include "tigon/ops/route/route.h"
#include "tigon/ops/silu/silu.h"
#include "tigon/ops/softmax/softmax.h"
#include "tigon/ops/sparsemax/sparsemax.h"

namespace tigon::test {
namespace {

using Tables = std::map<std::string, Table>;

// Sees every field of a list, statistics one by one.
class Visitor : public Fields {
 public:
  explicit Visitor(std::function<void(const Field&)> visit) : visit_(std::move(visit)) {}
  void statistics(const char*, std::initializer_list<Statistic> list, int64_t size, Role role) override {
    for (const Statistic& s : list) visit_({s.name, role, s.vector, {.cols = size}});
  }
  void result_over(const char* name, Matrix& m, const char*, const Matrix& x, Role role,
                   const char*) override {
    visit_({name, role, m, {.rows = x.rows, .cols = x.cols, .dtype = x.dtype}});
  }
  void list(const char*, std::span<const Vector>&, const Listed&) override {}

 protected:
  void field(const Field& f) override { visit_(f); }

 private:
  std::function<void(const Field&)> visit_;
};
template <class Args>
void for_each_field(Args& args, const std::function<void(const Field&)>& visit) {
  Visitor visitor(visit);
  args.fields(visitor);
}

bool is_written(const Field& f) {
  return f.role == Role::result || f.role == Role::gradient || f.role == Role::statistics;
}
void bind(const Field& f, Table& t) {
  if (f.matrix != nullptr)
    *f.matrix = t.matrix();
  else
    *f.vector = t.vector();
}

struct Sizes {
  DType dtype = DType::f32;
  int64_t rows = 3, cols = 6;
};

// Makes the tables that a list names and `tables` has not; the members are views of them then.
template <class Args>
void bind_all(Args& args, const Sizes& sizes, double scale, Tables& tables) {
  auto given = [&](const Field& f) {
    auto found = tables.find(f.name);
    if (found != tables.end()) bind(f, found->second);
    return found != tables.end();
  };
  auto make = [&](const Field& f, DType dtype, int64_t rows, int64_t cols) {
    Table& t = tables.emplace(f.name, Table(dtype, rows, cols, f.matrix != nullptr ? 3 : 0)).first->second;
    const bool of_columns = f.vector != nullptr && f.name[0] != 'd';
    if (!is_written(f)) t.normal(unsigned(tables.size()), of_columns ? 0.4 : scale, of_columns ? 1.0 : 0.0);
    bind(f, t);
  };
  for_each_field(args, [&](const Field& f) {
    if (!given(f) && f.role == Role::rows) make(f, sizes.dtype, sizes.rows, sizes.cols);
  });
  for_each_field(args, [&](const Field& f) {
    if (given(f)) return;
    const Expected& e = f.expected;
    make(f, e.like != nullptr && *e.like ? e.like->dtype : e.dtype, f.matrix != nullptr ? e.rows : 1, e.cols);
  });
}

template <class Fwd, class Bwd>
struct Op {
  const char* name;
  void (*forward_entry)(Context&, const Fwd&);
  void (*backward_entry)(Context&, const Bwd&);
  void (*tune_forward)(Fwd&);  // options, and sizes that no field has
  void (*tune_backward)(Bwd&);
  double scale = 1.0;   // of the numbers in matrices
  int64_t stacked = 1;  // matrices in one
  std::vector<std::pair<const char*, const char*>>
      over;           // a result and the input that it may be written over
  bool deep = false;  // rows of more than one block too
};

template <class Fwd, class Bwd>
struct Run {
  Op<Fwd, Bwd> op;
  Fwd forward{};
  Bwd backward{};
  Tables tables;

  Run(const Op<Fwd, Bwd>& op, Sizes sizes) : op(op) {
    sizes.rows *= op.stacked;
    op.tune_forward(forward), op.tune_backward(backward);
    bind_all(forward, sizes, op.scale, tables), bind_all(backward, sizes, op.scale, tables);
  }
  Run(const Run&) = delete;
  void run_forward(Context& ctx) { op.forward_entry(ctx, forward); }
  void both(Context& ctx) { run_forward(ctx), op.backward_entry(ctx, backward); }
  std::vector<std::string> names(bool (*wanted)(const Field&)) {
    std::vector<std::string> all;
    auto add = [&](const Field& f) {
      if (wanted(f)) all.push_back(f.name);
    };
    for_each_field(forward, add), for_each_field(backward, add);
    return all;
  }
};

template <class Fwd, class Bwd>
void check_bits(const Op<Fwd, Bwd>& op) {
  for (DType dtype : kFloats)
    for (int64_t cols : op.deep ? std::vector<int64_t>{6, 186, 5004} : std::vector<int64_t>{6, 186}) {
      INFO(text(dtype) << ", " << cols << " columns");
      check_same_everywhere([&](Context& ctx) {
        Run run(op, {dtype, cols > 1000 ? 9 : cols > 100 ? 60 : 1110, cols});
        run.both(ctx);
        std::vector<Table> written;
        for (const std::string& name : run.names(is_written)) written.push_back(run.tables.at(name));
        for (const Table& t : written) CHECK(t.guards_intact());
        return written;
      });
    }
}

template <class Fwd, class Bwd>
void check_in_place(const Op<Fwd, Bwd>& op) {
  auto ctx = make_cpu_context(2);
  for (auto [result, input] : op.over)
    for (DType dtype : kFloats) {
      INFO(result << " over " << input << ", " << text(dtype));
      Run run(op, {dtype, 21, 78});
      run.both(*ctx);
      const Table apart = run.tables.at(result);
      Table& over = run.tables.at(input);
      bool backward = false;
      auto rebind = [&](const Field& f, bool in_backward) {
        if (f.name == std::string(result) && is_written(f)) bind(f, over), backward = in_backward;
      };
      for_each_field(run.forward, [&](const Field& f) { rebind(f, false); });
      for_each_field(run.backward, [&](const Field& f) { rebind(f, true); });
      if (backward)
        op.backward_entry(*ctx, run.backward);
      else
        run.run_forward(*ctx);
      int64_t off = 0;
      for (int64_t i = 0; i < over.rows() * over.cols(); ++i) off += over(i) != apart(i);
      CHECK(off == 0);
    }
}

// One member at a time that does not fit: the message names it, what it must be and what it is.
template <class Args>
void check_refusals(const std::string& op, Args args, void (*entry)(Context&, const Args&),
                    const Tables& tables) {
  auto ctx = make_cpu_context(1);
  const Tables before = tables;
  const Args fitting = args;
  auto refuses = [&](const std::string& message) {
    CHECK_THROWS_WITH_AS(entry(*ctx, args), doctest::Contains(message.c_str()), Error);
    args = fitting;
  };
  std::vector<Field> fields;  // of the members of args
  for_each_field(args, [&](const Field& f) { fields.push_back(f); });
  for (const Field& f : fields) {
    const std::string name = f.name, start = "[" + op + "] ";
    INFO(name);
    if (f.matrix != nullptr) {
      Matrix& m = *f.matrix;
      const std::string rows = std::to_string(m.rows), cols = std::to_string(m.cols);
      m.dtype = DType::f64;
      refuses(" must be ");
      if (f.role == Role::rows) continue;
      --m.cols;
      refuses(start + name + " must be [" + rows + ", " + cols + "], got [" + rows + ", " +
              std::to_string(m.cols) + "]");
    } else {
      Vector& v = *f.vector;
      v.dtype = DType::i64;
      refuses(" must be ");
      const std::string size = std::to_string(v.size++);
      refuses(start + name + " must be [" + size + "], got [" + std::to_string(v.size) + "]");
    }
  }
  CHECK(tables == before);
}

template <class Fwd, class Bwd>
void check_op(const Op<Fwd, Bwd>& op) {
  INFO(std::string(op.name));
  check_bits(op), check_in_place(op);
  Run run(op, {});
  check_refusals(op.name, run.forward, op.forward_entry, run.tables);
  check_refusals(op.name + std::string("_bwd"), run.backward, op.backward_entry, run.tables);
}

void untuned(auto&) {}
void with_eps(auto& a) {
  if constexpr (requires { a.eps; }) a.eps = 1e-3f;
}
void one_offset(auto& a) {
  with_eps(a);
  a.offset = 1.0f, a.rounding = Rounding::none;
}
template <int groups>
void modulated(auto& a) {
  with_eps(a);
  a.scale.rows = groups;
}
void grouped(auto& a) {
  with_eps(a);
  a.channels = 6, a.groups = 3;
}
void gated(auto& a) {
  with_eps(a);
  a.options.group = 3;
}
void stacked(auto& a) {
  with_eps(a);
  a.count = 3;
}
template <int parts>
void connected(auto& a) {
  a.options = {.streams = 2, .pre_eps = 1e-3f, .post_eps = 1e-3f, .iterations = 5};
  a.weight.rows = parts == 1 ? 2 : parts == 2 ? 4 : 8;
}
template <bool transposed>
void mixed(auto& a) {
  a.streams = 3, a.outs = 2, a.transposed = transposed;
}

const RouteOptions kRoutes[] = {
    {},
    {.normalize = false, .scale = 3.0f},
    {.normalize = false, .num_groups = 3, .top_groups = 2},
    {.score = RouteScore::sigmoid,
     .num_groups = 3,
     .top_groups = 2,
     .group_score = RouteGroupScore::sum_of_two},
    {.score = RouteScore::sigmoid, .normalize = false, .scale = 0.5f},
};
template <int form>
void routed(auto& a) {
  a.options = kRoutes[form];
  a.ids.cols = 3, a.ids.dtype = DType::i64;
}

#define TIGON_FIELDS_OP(op, Args, tune, ...)                                                  \
  Op<Args##Fwd, Args##Bwd> {                                                                  \
    .name = #op, .forward_entry = op##_fwd, .backward_entry = op##_bwd, .tune_forward = tune, \
    .tune_backward = tune __VA_OPT__(, ) __VA_ARGS__                                          \
  }
#define TIGON_CASE(...) check_op(TIGON_FIELDS_OP(__VA_ARGS__))

TEST_CASE("norms") {
  TIGON_CASE(rms_norm, RmsNorm, with_eps, .deep = true);
  TIGON_CASE(rms_norm, RmsNorm, one_offset);
  TIGON_CASE(add_rms_norm, AddRmsNorm, with_eps);
  TIGON_CASE(gated_rms_norm, GatedRmsNorm, gated);
  TIGON_CASE(modulated_rms_norm, ModulatedRmsNorm, modulated<1>, .over = {{"dx", "dy"}});
  TIGON_CASE(modulated_rms_norm, ModulatedRmsNorm, modulated<3>, .over = {{"dx", "dy"}});
  TIGON_CASE(layer_norm, LayerNorm, with_eps, .deep = true);
  TIGON_CASE(group_norm, GroupNorm, grouped);
  TIGON_CASE(poly_norm, PolyNorm, with_eps, .over = {{"dx", "dy"}}, .deep = true);
  TIGON_CASE(dyt, Dyt, untuned);
}
TEST_CASE("activations and distributions") {
  TIGON_CASE(silu, Activation, untuned, .over = {{"y", "x"}, {"dx", "dy"}}, .deep = true);
  TIGON_CASE(relu_squared, Activation, untuned, .over = {{"y", "x"}, {"dx", "dy"}}, .deep = true);
  TIGON_CASE(mish, Activation, untuned, .over = {{"y", "x"}, {"dx", "dy"}}, .deep = true);
  TIGON_CASE(softmax, Distribution, untuned, .over = {{"y", "x"}, {"dx", "dy"}}, .deep = true);
  TIGON_CASE(sparsemax, Distribution, untuned, .scale = 0.1, .over = {{"y", "x"}, {"dx", "dy"}},
             .deep = true);
}
TEST_CASE("residual streams") {
  TIGON_CASE(attention_residual, AttentionResidual, stacked, .scale = 0.5, .stacked = 3);
  TIGON_CASE(hyper_connection, HyperConnection, connected<1>, .scale = 0.5);
  TIGON_CASE(hyper_connection, HyperConnection, connected<2>, .scale = 0.5);
  TIGON_CASE(hyper_connection, HyperConnection, connected<3>, .scale = 0.5);
  TIGON_CASE(hyper_connection_mix, HyperConnectionMix, mixed<false>);
  TIGON_CASE(hyper_connection_mix, HyperConnectionMix, mixed<true>);
}

template <int form>
void check_route() {
  INFO("form " << form);
  const auto op = TIGON_FIELDS_OP(route, Route, routed<form>, .scale = 2.0, .over = {{"dlogits", "logits"}});
  check_bits(op), check_in_place(op);
}
TEST_CASE("route") {
  check_route<0>(), check_route<1>(), check_route<2>(), check_route<3>(), check_route<4>();
}

TEST_CASE("what one op refuses") {
  auto ctx = make_cpu_context(1);
  auto refuses = [&]<class Fwd, class Bwd>(const Op<Fwd, Bwd>& op, void (*change)(Fwd&),
                                           const char* message) {
    Run run(op, {.rows = 6, .cols = 12});
    change(run.forward);
    CHECK_THROWS_WITH_AS(run.run_forward(*ctx), message, Error);
  };
#define TIGON_REFUSED(op, Args, tune, change, message) \
  refuses(TIGON_FIELDS_OP(op, Args, tune), +[](Args##Fwd& a) { change; }, "[" #op "] " message)
  TIGON_REFUSED(rms_norm, RmsNorm, with_eps, a.eps = -1.0f, "eps must be >= 0, got -1");
  TIGON_REFUSED(rms_norm, RmsNorm, with_eps, a.x.cols = 0, "x must have at least one column, got 0");
  TIGON_REFUSED(rms_norm, RmsNorm, with_eps, a.y.rows = 3, "y must be [6, 12], got [3, 12]");
  TIGON_REFUSED(poly_norm, PolyNorm, with_eps, a.bias = {}, "bias must be [1], got [0]");
  TIGON_REFUSED(modulated_rms_norm, ModulatedRmsNorm, modulated<3>, a.scale.rows = 4,
                "scale must have a number of rows that divides 6, got 4");
  TIGON_REFUSED(modulated_rms_norm, ModulatedRmsNorm, modulated<3>, a.scale.rows = 0,
                "scale must have a number of rows that divides 6, got 0");
  TIGON_REFUSED(attention_residual, AttentionResidual, stacked, a.count = 0,
                "values must be 1 to 1024, got 0");
  TIGON_REFUSED(attention_residual, AttentionResidual, stacked, a.count = 4,
                "values must have a multiple of 4 rows, got 6");
  TIGON_REFUSED(attention_residual, AttentionResidual, stacked, a.query = {}, "query must be [12], got none");
  TIGON_REFUSED(hyper_connection, HyperConnection, connected<3>, a.options.streams = 9,
                "streams must be in [1, 8], got 9");
  TIGON_REFUSED(hyper_connection, HyperConnection, connected<3>, a.options.streams = 5,
                "x must have columns in 5 streams, got 12");
  TIGON_REFUSED(hyper_connection, HyperConnection, connected<3>, a.weight.rows = 7,
                "weight must have 2, 4 or 8 rows, got 7");
  TIGON_REFUSED(hyper_connection, HyperConnection, connected<3>, a.options.iterations = 0,
                "iterations must be >= 1, got 0");
  TIGON_REFUSED(hyper_connection_mix, HyperConnectionMix, mixed<false>, a.post = {},
                "f and post must be given together");
  TIGON_REFUSED(hyper_connection_mix, HyperConnectionMix, mixed<false>, a.mix = {},
                "outs must be 3 without a mix, got 2");
  Run run(TIGON_FIELDS_OP(rms_norm, RmsNorm, with_eps), {});
  run.backward.weight = {};
  CHECK_THROWS_WITH_AS(rms_norm_bwd(*ctx, run.backward),
                       "[rms_norm_bwd] dweight must be absent when weight is, got [6]", Error);
}

}  // namespace
}  // namespace tigon::test
