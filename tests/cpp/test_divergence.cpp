// The divergences in the core against the same formulas in double, the formulas against finite differences and the definition,
// refusals, bitwise promises.
#include "table.h"
#include "tigon/ops/divergence/divergence.h"

namespace tigon::test {
namespace oracle {
#include "tigon/ops/divergence/divergence_math.inc"
}  // namespace oracle

namespace {

// Of a class: its probability, its share of the loss, dloss / d(log q).
struct Terms {
  double q, term, g;
};
template <DivergenceKind K>
Terms terms(double tq, double tp, float beta) {
  double q = std::exp2(tq), p = std::exp2(tp), term, g, d = tq - tp;
  if (K == DivergenceKind::jsd && std::isinf(tq - tp)) d = tq < tp ? -1e30 : 1e30;
  if (K == DivergenceKind::jsd && q == 0.0 && p == 0.0) d = 0.0;
  oracle::divergence_terms<K>(q, p, d, std::exp2(-std::abs(d)), beta, term, g);
  double own = g - q * double(oracle::divergence_own_share<K>());
  return {q, oracle::divergence_loss<K>(term, g, beta), double(oracle::divergence_unit<K>(beta)) * own};
}
Terms terms(DivergenceKind kind, double lq, double lp, float beta) {
  double tq = lq * M_LOG2E, tp = lp * M_LOG2E;
  switch (kind) {
    case DivergenceKind::forward_kl: return terms<DivergenceKind::forward_kl>(tq, tp, beta);
    case DivergenceKind::reverse_kl: return terms<DivergenceKind::reverse_kl>(tq, tp, beta);
    case DivergenceKind::jsd: return terms<DivergenceKind::jsd>(tq, tp, beta);
    default: return terms<DivergenceKind::tvd>(tq, tp, beta);
  }
}
const DivergenceKind kKinds[] = {DivergenceKind::forward_kl, DivergenceKind::reverse_kl, DivergenceKind::jsd,
                                 DivergenceKind::tvd};

std::vector<double> log_softmax(const Table& x, int64_t r, double temperature) {
  double sum = 0.0;
  std::vector<double> l(size_t(x.cols()));
  for (int64_t c = 0; c < x.cols(); ++c) sum += std::exp(x(r, c) / temperature);
  for (int64_t c = 0; c < x.cols(); ++c) l[size_t(c)] = x(r, c) / temperature - std::log(sum);
  return l;
}

struct Run {
  DivergenceRows a;
  Table student, teacher, dstudent, labels, loss;

  Run(DivergenceKind kind, DType t, int64_t rows, int64_t cols)
      : student(t, rows, cols, 3),
        teacher(t, rows, cols, 1),
        dstudent(t, rows, cols, 2),
        labels(Table::column(DType::i64, rows)),
        loss(Table::column(DType::f32, rows)) {
    student.normal(1, 2.0), teacher.normal(2, 2.0);
    labels.fill([](int64_t, int64_t r) { return r % 4 == 3 ? -100 : r; });
    a.kind = kind, a.beta = 0.3f, a.temperature = 1.5f, a.factor = 0.25f;
  }
  DivergenceRows rows() {
    DivergenceRows call = a;
    call.student = student.matrix(), call.teacher = teacher.matrix(), call.dstudent = dstudent.matrix();
    call.labels = labels.vector(), call.loss = loss.vector();
    return call;
  }
};

TEST_CASE("against double") {
  auto ctx = make_cpu_context(2);
  for (DivergenceKind kind : kKinds)
    for (DType t : kFloats)
      for (auto [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {6, 77}, {2, 9001}}) {
        INFO("kind " << int(kind) << " " << rows << " x " << cols << " " << text(t));
        Run run(kind, t, rows, cols);
        divergence_rows(*ctx, run.rows());
        double gain = 0.25 / 1.5;
        std::vector<double> losses, gradients;
        for (int64_t r = 0; r < rows; ++r) {
          auto lq = log_softmax(run.student, r, 1.5), lp = log_softmax(run.teacher, r, 1.5);
          double total = 0.0, sum_g = 0.0;
          for (size_t c = 0; c < size_t(cols); ++c) {
            Terms k = terms(kind, lq[c], lp[c], 0.3f);
            total += k.term, sum_g += k.g;
          }
          bool counts = r % 4 != 3;
          losses.push_back(counts ? 0.25 * total : 0.0);
          for (size_t c = 0; c < size_t(cols); ++c) {
            Terms k = terms(kind, lq[c], lp[c], 0.3f);
            gradients.push_back(counts ? gain * (k.g - k.q * sum_g) : 0.0);
          }
        }
        // Logarithms lie within 20: half an ulp of those is 1e-6 of a probability. The sign of q - p may differ at a tie.
        check_close(
            "loss", run.loss, [&](int64_t, int64_t r) { return losses[size_t(r)]; },
            [&](int64_t, int64_t) { return 4e-6; });
        auto gradient = [&](int64_t r, int64_t c) { return gradients[size_t(r * cols + c)]; };
        check_close("dstudent", run.dstudent, gradient, [&](int64_t r, int64_t c) {
          return std::abs(gradient(r, c)) * (1.001 * unit(t) + 1e-5) + 2e-7 + tiny(t);
        });
      }
}

TEST_CASE("g is the slope in log q, and the terms are the definition's") {
  for (DivergenceKind kind : kKinds)
    for (double at : {-9.0, -2.0, -0.5})
      for (double lp : {-7.0, -1.0, -0.3}) {
        INFO("kind " << int(kind) << " at " << at << ", " << lp);
        double lq = at;
        Terms k = terms(kind, lq, lp, 0.3f);
        double beta = double(0.3f), q = std::exp(lq), p = std::exp(lp), m = beta * p + (1 - beta) * q;
        double defined[] = {p * (lp - lq), q * (lq - lp),
                            beta * p * (lp - std::log(m)) + (1 - beta) * q * (lq - std::log(m)),
                            std::abs(q - p) / 2};
        CHECK(k.q == doctest::Approx(q).epsilon(1e-6));
        CHECK(k.term == doctest::Approx(defined[int(kind)]).epsilon(1e-6));
        CHECK(k.g ==
              doctest::Approx(slope(&lq, [&] { return terms(kind, lq, lp, 0.3f).term; })).epsilon(1e-6));
      }
}

TEST_CASE("classes at -inf add nothing that is not there") {
  for (DivergenceKind kind : kKinds) {
    INFO("kind " << int(kind));
    Terms both = terms(kind, -INFINITY, -INFINITY, 0.3f);
    CHECK((both.q == 0.0 && both.term == 0.0 && both.g == 0.0));
    Terms teacher = terms(kind, -1.0, -INFINITY, 0.3f), student = terms(kind, -INFINITY, -1.0, 0.3f);
    CHECK(std::isinf(teacher.term) == (kind == DivergenceKind::reverse_kl));
    CHECK(std::isinf(student.term) == (kind == DivergenceKind::forward_kl));
    CHECK(student.q == 0.0);
    CHECK(std::isnan(terms(kind, NAN, -1.0, 0.3f).term));
    CHECK(std::isnan(terms(kind, -1.0, NAN, 0.3f).term));
  }
}

TEST_CASE("the same bits everywhere, in place too") {
  for (DivergenceKind kind : kKinds)
    for (DType t : kFloats) {
      INFO("kind " << int(kind) << " " << text(t));
      check_same_everywhere([&](Context& ctx) {
        Run run(kind, t, 9, 5000);
        divergence_rows(ctx, run.rows());
        return std::vector<Table>{run.loss, run.dstudent};
      });
      auto ctx = make_cpu_context(2);
      Run apart(kind, t, 5, 77), over(kind, t, 5, 77);
      divergence_rows(*ctx, apart.rows());
      DivergenceRows a = over.rows();
      a.dstudent = a.student;
      divergence_rows(*ctx, a);
      CHECK(over.loss == apart.loss);
      check_close(
          "dstudent over student", over.student, [&](int64_t r, int64_t c) { return apart.dstudent(r, c); },
          [](int64_t, int64_t) { return 0.0; });
    }
}

TEST_CASE("refusals write nothing") {
  Run run(DivergenceKind::jsd, DType::f32, 4, 8);
  Run untouched = run;
  auto ctx = make_cpu_context(1);
  auto refused = [&](auto change, const char* message) {
    DivergenceRows a = run.rows();
    change(a);
    CHECK_THROWS_WITH_AS(divergence_rows(*ctx, a), message, Error);
  };
  refused([](DivergenceRows& a) { a.teacher.cols = 7; }, "[divergence] teacher must be [4, 8], got [4, 7]");
  refused([](DivergenceRows& a) { a.loss.size = 3; }, "[divergence] loss must be [4], got [3]");
  refused([](DivergenceRows& a) { a.beta = 1.0f; }, "[divergence] beta must be in (0, 1), got 1");
  refused([](DivergenceRows& a) { a.temperature = 0.0f; }, "[divergence] temperature must be > 0, got 0");
  refused([](DivergenceRows& a) { a.log_probs = true; },
          "[divergence] temperature must be 1 with log-probabilities, got 1.5");
  refused([](DivergenceRows& a) { a.labels.dtype = DType::f32; },
          "[divergence] labels must be int64, got float32");
  CHECK(run.loss == untouched.loss);
  CHECK(run.dstudent == untouched.dstudent);
}

}  // namespace
}  // namespace tigon::test
