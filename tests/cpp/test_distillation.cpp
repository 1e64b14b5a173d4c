// The row pass of distillation heads against the definitions in double, labels and exclusions, refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/divergence/distillation.h"

namespace tigon::test {
namespace {

const DivergenceKind kKinds[] = {DivergenceKind::forward_kl, DivergenceKind::reverse_kl, DivergenceKind::jsd,
                                 DivergenceKind::tvd};
constexpr double kBeta = double(0.3f), kSoft = double(0.7f), kHard = double(0.4f);

// z of a side, and dz/dlogit.
struct Z {
  std::vector<double> z, slope;
};
Z z_of(const Table& x, int64_t r, const DistillationSide& side) {
  Z out;
  for (int64_t c = 0; c < x.cols(); ++c) {
    double cap = double(side.softcap), scale = double(side.logit_scale), t = double(side.temperature);
    double u = scale * (x(r, c) + (side.bias ? double(side.bias.as<float>()[c]) : 0.0));
    double bent = cap > 0.0 ? std::tanh(u / cap) : 0.0;
    out.z.push_back((cap > 0.0 ? cap * bent : u) / t);
    out.slope.push_back(scale / t * (1.0 - bent * bent));
  }
  return out;
}
std::vector<double> log_softmax(const std::vector<double>& z, double factor = 1.0) {
  double top = *std::max_element(z.begin(), z.end()), sum = 0.0;
  for (double v : z) sum += std::exp((v - top) * factor);
  std::vector<double> l;
  for (double v : z) l.push_back((v - top) * factor - std::log(sum));
  return l;
}
double divergence_of(DivergenceKind kind, double lq, double lp) {
  double q = std::exp(lq), p = std::exp(lp), m = kBeta * p + (1 - kBeta) * q;
  switch (kind) {
    case DivergenceKind::forward_kl: return p * (lp - lq);
    case DivergenceKind::reverse_kl: return q * (lq - lp);
    case DivergenceKind::jsd: return kBeta * p * (lp - std::log(m)) + (1 - kBeta) * q * (lq - std::log(m));
    default: return std::abs(q - p) / 2;
  }
}
// d divergence / d log q.
double slope_of(DivergenceKind kind, double lq, double lp) {
  double q = std::exp(lq), p = std::exp(lp), m = kBeta * p + (1 - kBeta) * q;
  switch (kind) {
    case DivergenceKind::forward_kl: return -p;
    case DivergenceKind::reverse_kl: return q * (lq - lp + 1);
    case DivergenceKind::jsd: return (1 - kBeta) * q * (lq - std::log(m));
    default: return q * (q > p ? 0.5 : q < p ? -0.5 : 0.0);
  }
}

struct Run {
  DistillationRows a;
  Table student, teacher, bias, teacher_bias, dstudent, labels, scale, loss, soft, hard, entropy;

  Run(DivergenceKind kind, DType teacher_type, DType gradient, int64_t rows, int64_t cols)
      : student(DType::f32, rows, cols, 3),
        teacher(teacher_type, rows, cols, 1),
        bias(Table::column(DType::f32, cols)),
        teacher_bias(Table::column(DType::f32, cols)),
        dstudent(gradient, rows, cols, 2),
        labels(Table::column(DType::i64, rows)),
        scale(Table::column(DType::f32, rows)),
        loss(Table::column(DType::f32, rows)),
        soft(Table::column(DType::f32, rows)),
        hard(Table::column(DType::f32, rows)),
        entropy(Table::column(DType::f32, rows)) {
    student.normal(1, 2.0), teacher.normal(2, 2.0), bias.normal(3), teacher_bias.normal(4);
    labels.fill([&](int64_t, int64_t r) { return r % 4 == 3 ? -100 : (r * 37) % cols; });
    scale.fill([](int64_t, int64_t r) { return 0.5 + 0.25 * double(r); });
    a.kind = kind, a.beta = float(kBeta), a.soft_weight = float(kSoft), a.hard_weight = float(kHard);
    a.student_side = {.logit_scale = 0.8f, .softcap = 5.0f, .temperature = 1.5f};
    a.teacher_side = {.logit_scale = 1.2f, .temperature = 2.5f};
  }
  DistillationRows rows() {
    DistillationRows call = a;
    call.student = student.matrix(), call.teacher = teacher.matrix(), call.dstudent = dstudent.matrix();
    call.student_side.bias = bias.vector(), call.teacher_side.bias = teacher_bias.vector();
    call.labels = labels.vector(), call.scale = scale.vector(), call.loss = loss.vector();
    call.soft = soft.vector(), call.hard = hard.vector(), call.entropy = entropy.vector();
    return call;
  }
  std::vector<Table> results() const { return {loss, soft, hard, entropy, dstudent}; }
};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (DivergenceKind kind : kKinds)
    for (DType t : kFloats)
      for (DType g : kFloats)
        for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {4, 77}, {2, 9001}}) {
          INFO("kind " << int(kind) << " " << rows << " x " << cols << " " << text(t) << " " << text(g));
          Run run(kind, t, g, rows, cols);
          DistillationRows a = run.rows();
          distillation_rows(*ctx, a);
          std::vector<double> soft, hard, entropy, gradients;
          for (int64_t r = 0; r < rows; ++r) {
            double counts = r % 4 == 3 ? 0.0 : 1.0;
            Z s = z_of(run.student, r, a.student_side), t_z = z_of(run.teacher, r, a.teacher_side);
            auto lq = log_softmax(s.z), lp = log_softmax(t_z.z), lh = log_softmax(s.z, 1.5);
            double total = 0.0, sum = 0.0, heat = 0.0;
            size_t label = size_t((r * 37) % cols);
            for (size_t c = 0; c < lq.size(); ++c)
              total += divergence_of(kind, lq[c], lp[c]), sum += slope_of(kind, lq[c], lp[c]),
                  heat -= std::exp(lq[c]) * lq[c];
            soft.push_back(counts * total), hard.push_back(-counts * lh[label]);
            entropy.push_back(counts * heat);
            for (size_t c = 0; c < lq.size(); ++c) {
              double of_soft = slope_of(kind, lq[c], lp[c]) - std::exp(lq[c]) * sum;
              double of_hard = c == label ? std::expm1(lh[c]) : std::exp(lh[c]);
              gradients.push_back(counts * (0.5 + 0.25 * double(r)) * s.slope[c] *
                                  (kSoft * of_soft + kHard * 1.5 * of_hard));
            }
          }
          auto of = [](const std::vector<double>& v) {
            return [&v](int64_t, int64_t r) { return v[size_t(r)]; };
          };
          auto within = [](double e) { return [e](int64_t, int64_t) { return e; }; };
          check_close("soft", run.soft, of(soft), within(4e-6));
          check_close("hard", run.hard, of(hard), within(4e-6));
          check_close("entropy", run.entropy, of(entropy), within(4e-6));
          check_close(
              "loss", run.loss,
              [&](int64_t, int64_t r) { return kSoft * soft[size_t(r)] + kHard * hard[size_t(r)]; },
              within(6e-6));
          auto gradient = [&](int64_t r, int64_t c) { return gradients[size_t(r * cols + c)]; };
          check_close("dstudent", run.dstudent, gradient, [&](int64_t r, int64_t c) {
            return std::abs(gradient(r, c)) * (1.001 * unit(g) + 1e-5) + 8e-7 + tiny(g);
          });
        }
}

TEST_CASE("equal rows have no divergence") {
  auto ctx = make_cpu_context(1);
  for (DivergenceKind kind : kKinds) {
    Run run(kind, DType::f32, DType::f32, 3, 501);
    DistillationRows a = run.rows();
    a.teacher = a.student, a.teacher_side = a.student_side, a.hard_weight = 0.0f, a.hard = {};
    distillation_rows(*ctx, a);
    for (int64_t r = 0; r < 3; ++r) {
      CHECK(run.soft(r) == 0.0);
      for (int64_t c = 0; c < 501; ++c) CHECK(std::abs(run.dstudent(r, c)) < 1e-9);
    }
  }
}

TEST_CASE("a class at -inf on one side, and a label that leads") {
  auto ctx = make_cpu_context(1);
  Run run(DivergenceKind::jsd, DType::f32, DType::f32, 2, 40);
  run.a.student_side.softcap = 0.0f;
  run.teacher.set(0, 3, -INFINITY), run.student.set(0, 5, -INFINITY);
  run.student.set(1, 37, 200.0);
  distillation_rows(*ctx, run.rows());
  for (const Table& t : run.results())
    for (int64_t r = 0; r < t.rows(); ++r)
      for (int64_t c = 0; c < t.cols(); ++c) CHECK(std::isfinite(t(r, c)));
  CHECK(run.hard(1) >= 0.0);
  CHECK(run.hard(1) < 1e-30);
  run.student.set(0, 1, NAN);
  distillation_rows(*ctx, run.rows());
  CHECK(std::isnan(run.loss(0)));
  CHECK(std::isnan(run.dstudent(0, 7)));
}

TEST_CASE("the same bits everywhere") {
  for (DivergenceKind kind : kKinds)
    for (DType t : kFloats) {
      INFO("kind " << int(kind) << " " << text(t));
      check_same_everywhere([&](Context& ctx) {
        Run run(kind, t, t, 9, 5000);
        distillation_rows(ctx, run.rows());
        return run.results();
      });
    }
}

TEST_CASE("refusals write nothing") {
  Run run(DivergenceKind::jsd, DType::bf16, DType::bf16, 4, 8);
  Run untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* message) {
    DistillationRows a = run.rows();
    change(a);
    CHECK_THROWS_WITH_AS(distillation_rows(*ctx, a), message, Error);
  };
  using A = DistillationRows;
  refused([](A& a) { a.student.dtype = DType::bf16; },
          "[distillation] student must be float32, got bfloat16");
  refused([](A& a) { a.teacher.cols = 7; }, "[distillation] teacher must be [4, 8], got [4, 7]");
  refused([](A& a) { a.labels = {}; }, "[distillation] labels must be given for a hard loss, got none");
  refused([](A& a) { a.beta = 0.0f; }, "[distillation] beta must be in (0, 1), got 0");
  refused([](A& a) { a.teacher_side.temperature = 0.0f; },
          "[distillation] teacher's temperature must be > 0, got 0");
  refused([](A& a) { a.student_side.softcap = -1.0f; },
          "[distillation] student's softcap must be > 0 or none, got -1");
  run.labels.set(0, 2, 8.0);
  refused([](A&) {}, "[distillation] labels must be in [0, 8) or -100 (ignored), got 8 in row 2");
  for (size_t i = 0; i < run.results().size(); ++i) CHECK(run.results()[i] == untouched.results()[i]);
}

}  // namespace
}  // namespace tigon::test
