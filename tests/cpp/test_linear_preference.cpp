// Losses of preferences and policies on the streaming head, in the core: chunks of any size against the
// whole, refusals before anything is written.
#include "table.h"
#include "tigon/ops/linear_preference/linear_policy.h"
#include "tigon/ops/linear_preference/linear_preference.h"

namespace tigon::test {
namespace {

constexpr int64_t kAnswers = 6, kTokens = 5, kRows = kAnswers * kTokens, kHidden = 7, kVocab = 11;

// Operands and results of both functions.
struct Run {
  Table hidden, weight, target, ref_hidden, ref_weight, dhidden, dweight, scalars, of_answers, of_rows,
      advantage;
  std::vector<Table> kept;

  Run()
      : hidden(DType::f32, kRows, kHidden),
        weight(DType::f32, kVocab, kHidden),
        target(Table::column(DType::i64, kRows)),
        ref_hidden(DType::f32, kRows, 4),
        ref_weight(DType::f32, kVocab, 4),
        dhidden(DType::f32, kRows, kHidden),
        dweight(DType::f32, kVocab, kHidden),
        scalars(DType::f32, 1, 3),
        of_answers(DType::f32, 3, kAnswers),
        of_rows(DType::f32, 3, kRows),
        advantage(Table::column(DType::f32, kAnswers)) {
    hidden.normal(1), weight.normal(2, 0.5), ref_hidden.normal(3), ref_weight.normal(4, 0.5),
        advantage.normal(5);
    target.fill([](int64_t, int64_t r) { return r % 4 == 1 || r / kTokens == 4 ? -100 : (r * 7) % kVocab; });
  }
  static Vector part(Table& t, int64_t row, int64_t size) {
    return {.data = t.matrix().row<float>(row), .dtype = DType::f32, .size = size};
  }
  Vector scalar(int64_t i) {
    return {.data = static_cast<float*>(scalars.matrix().data) + i, .dtype = DType::f32, .size = 1};
  }
  LinearHead head() {
    return {.op = "test",
            .hidden = hidden.matrix(),
            .weight = weight.matrix(),
            .dhidden = dhidden.matrix(),
            .dweight = dweight.matrix()};
  }
  LinearPreference preference(PreferenceKind kind, int64_t chunk) {
    bool lone = kind == PreferenceKind::kto;
    LinearPreference a = {.head = head(), .labels = {.target = target.vector(), .chunk_rows = chunk}};
    a.ref = {.op = "test", .hidden = ref_hidden.matrix(), .weight = ref_weight.matrix()};
    a.loss.formula.kind = kind;
    a.loss.formula.nll = lone ? 0.0 : 0.3;
    a.loss.pairs = lone ? kAnswers : kAnswers / 2, a.loss.tokens = kTokens;
    a.loss.target = target.vector();
    a.loss.sums = part(of_answers, 0, kAnswers), a.loss.rewards = part(of_answers, 1, kAnswers);
    static uint8_t desirable[kAnswers] = {1, 0, 0, 1, 1, 0};
    if (lone) a.loss.desirable = {.data = desirable, .dtype = DType::u8, .size = kAnswers};
    a.totals = {.scale = scalar(0), .loss = scalar(1), .nll = scalar(2)};
    return a;
  }
  LinearPolicy policy(PolicyLevel level, int64_t chunk) {
    LinearPolicy a = {.head = head(), .labels = {.target = target.vector(), .chunk_rows = chunk}};
    a.loss.formula = {.kind = PolicyKind::sapo, .level = level, .by_answer = true, .entropy_factor = 0.2};
    a.loss.answers = kAnswers, a.loss.tokens = kTokens;
    a.loss.advantage = advantage.vector();
    kept.push_back(Table::column(DType::f32, kRows).fill([](int64_t, int64_t) { return -2.0; }));
    a.loss.old = kept.back().vector();
    a.loss.clipped = part(of_rows, 0, kRows);
    a.log_prob = part(of_rows, 1, kRows), a.entropy = part(of_rows, 2, kRows);
    a.totals = {.normalise = PolicyNormalise::sequence, .scale = scalar(0), .loss = scalar(1)};
    return a;
  }
  double loss() const { return scalars(0, 1); }
};

template <class Call>
void check_chunks(const Call& call) {
  auto ctx = make_cpu_context(1);
  Run whole;
  call(*ctx, whole, 0);
  for (int64_t chunk : {1, 3, 5, 9, 10, 13, 29, 1000}) {
    INFO("chunk of " << chunk);
    Run run;
    call(*ctx, run, chunk);
    auto near = [&](const Table& want) { return [&want](int64_t r, int64_t c) { return want(r, c); }; };
    auto room = [](int64_t, int64_t) { return 1e-5; };
    check_close("dhidden", run.dhidden, near(whole.dhidden), room);
    check_close("dweight", run.dweight, near(whole.dweight), room);
    CHECK(run.loss() == doctest::Approx(whole.loss()).epsilon(1e-5));
  }
}

template <class Fn>
void each_call(const Fn& fn) {
  for (PreferenceKind kind : {PreferenceKind::logistic, PreferenceKind::apo_zero, PreferenceKind::kto}) {
    INFO("kind " << int(kind));
    fn([kind](Context& ctx, Run& run, int64_t chunk) {
      linear_preference(ctx, run.preference(kind, chunk));
    });
  }
  for (PolicyLevel level : {PolicyLevel::token, PolicyLevel::sequence}) {
    INFO("level " << int(level));
    fn([level](Context& ctx, Run& run, int64_t chunk) { linear_policy(ctx, run.policy(level, chunk)); });
  }
}

TEST_CASE("chunks change nothing but the order of additions") {
  each_call([](const auto& call) { check_chunks(call); });
}

TEST_CASE("refusals come before anything is written") {
  auto ctx = make_cpu_context(1);
  auto refused = [&](const char* message, auto&& change) {
    Run run;
    Table before = run.dhidden;
    LinearPreference a = run.preference(PreferenceKind::logistic, 0);
    change(a);
    CHECK_THROWS_WITH_AS(linear_preference(*ctx, a), doctest::Contains(message), Error);
    CHECK(run.dhidden == before);
  };
  refused("hidden must have 4 answers of 5 tokens, got 30 rows",
          [](LinearPreference& a) { a.loss.pairs = 2; });
  refused("beta must be > 0", [](LinearPreference& a) { a.loss.formula.beta = -1.0; });
  refused("ref must have 30 rows, got 29", [](LinearPreference& a) { a.ref.hidden.rows = 29; });
  refused("ref must have 11 classes, got 10", [](LinearPreference& a) { a.ref.weight.rows = 10; });
  refused("temperature must be > 0", [](LinearPreference& a) { a.formula.temperature = 0.0f; });
  refused("chunk_rows must be >= 1", [](LinearPreference& a) { a.labels.chunk_rows = -1; });
  refused("valid_rows must be", [](LinearPreference& a) { a.labels.valid_rows = 3; });
}

}  // namespace
}  // namespace tigon::test
