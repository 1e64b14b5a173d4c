// The plans of the norm family (tigon/base/cuda/norm_plan.h) for the shapes of norm_plans.txt, which lists
// them: a change of a table or of the selection shows there. TIGON_WRITE_PLANS=1 writes the file anew.
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "table.h"
#include "tigon/base/cuda/norm_plan.h"
#include "tigon/ops/gated_rms_norm/gated_rms_norm_scalars.h"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_scalars.h"

namespace tigon::test {
namespace oracle {
#include "tigon/base/norm_math.inc"
#include "tigon/ops/add_rms_norm/add_rms_norm_math.inc"
#include "tigon/ops/gated_rms_norm/gated_rms_norm_math.inc"
#include "tigon/ops/group_norm/group_norm_math.inc"
#include "tigon/ops/layer_norm/layer_norm_math.inc"
#include "tigon/ops/modulated_rms_norm/modulated_rms_norm_math.inc"
#include "tigon/ops/rms_norm/rms_norm_math.inc"
}  // namespace oracle

namespace {

using namespace tigon::cuda;

std::string to_string(const NormPlan& plan) {
  static constexpr const char* kKernels[] = {"registers", "lookahead", "shared_params", "cluster", "looped"};
  std::string text = kKernels[int(plan.kernel)];
  if (plan.config < 0) return text;
  const RowConfig& c = plan.rows;
  auto field = [&](const char* name, int64_t value, int64_t usual) {
    if (value != usual) text += std::string(" ") + name + "=" + std::to_string(value);
  };
  field("threads_per_row", c.threads_per_row, 0);
  field("vecs_per_thread", c.vecs_per_thread, 0);
  field("rows_per_block", c.rows_per_block, 1);
  field("min_blocks_per_sm", c.min_blocks_per_sm, 1);
  field("stages", c.stages, 0);
  field("lookahead", c.lookahead, 0);
  field("lane_split", c.lane_split, 1);
  field("threads", plan.threads, 0);
  field("shared", plan.shared, 0);
  return text;
}

// An H200.
constexpr DeviceLimits kDevice{.sms = 132, .shared_per_block = 232448, .clusters = true};

struct Traits {
  const char* op;
  bool forward;
  NormTraits traits;
};

template <class X, class W, class Y>
std::vector<Traits> all_traits() {
  using namespace oracle;
  return {
      {"rms_norm", true, forward_traits<RmsNormForward<double, X>, W, Y>()},
      {"rms_norm", false, backward_traits<RmsNormBackward<double, X>, W, Y>()},
      {"layer_norm", true, forward_traits<LayerNormForward<double, X>, W, X>()},
      {"layer_norm", false, backward_traits<LayerNormBackward<double, X>, W, X>()},
      {"add_rms_norm", true, forward_traits<AddRmsNormForward<double, X>, W, Y>()},
      {"add_rms_norm", false, backward_traits<AddRmsNormBackward<double, X>, W, Y>()},
      {"gated_rms_norm", true, forward_traits<GatedRmsNormForward<double, X, true>, W, X>()},
      {"gated_rms_norm", false, backward_traits<GatedRmsNormBackward<double, X, true>, W, X>()},
      {"group_norm", true, forward_traits<GroupNormRow<double, X>, W, X>()},
      {"modulated_rms_norm", true, forward_traits<ModulatedRmsNormForward<double, X>, W, X>()},
      {"modulated_rms_norm", false, backward_traits<ModulatedRmsNormBackward<double, X>, float, X>()},
      {"modulated_rms_norm_rows", false, backward_traits<ModulatedRmsNormRowsBackward<double, X>, X, X>()},
  };
}

// Contiguous rows in memory that begins `offset` elements after an aligned address.
NormProblem problem_of(const Traits& t, int64_t rows, int64_t cols, int64_t offset) {
  auto operand = [&](int bytes) {
    return NormOperand{reinterpret_cast<const void*>(uintptr_t(1 << 20) + uintptr_t(offset * bytes)), cols,
                       bytes};
  };
  const NormOperand operands[] = {operand(t.traits.x_bytes), operand(t.traits.y_bytes)},
                    params[] = {
                        {reinterpret_cast<const void*>(uintptr_t(1 << 20)), 0, t.traits.weight_bytes}};
  return norm_problem(rows, cols, 1, t.traits.x_bytes, operands, params);
}

NormPlan plan_of(const Traits& t, const NormProblem& problem, const DeviceLimits& device = kDevice) {
  return t.forward ? plan_forward(t.traits, problem, device) : plan_backward(t.traits, problem, device);
}

constexpr int64_t kCols[] = {1, 7, 128, 2048, 4096, 4097, 12289, 16384, 32768, 65536, 100003, 262144};

std::string all_plans() {
  std::ostringstream out;
  out << "# types of x and weight, direction, columns, where contiguous rows begin: plan: ops that take it\n";
  auto add = [&](const char* types, const std::vector<Traits>& list) {
    auto plans = [&](bool forward, int64_t cols, const char* where, int64_t offset) {
      std::map<std::string, std::string> ops;  // by plan
      for (const Traits& t : list)
        if (t.forward == forward)
          ops[to_string(plan_of(t, problem_of(t, 4096, cols, offset)))] += std::string(" ") + t.op;
      for (const auto& [plan, names] : ops)
        out << types << (forward ? " fwd " : " bwd ") << cols << " " << where << ": " << plan << ":" << names
            << "\n";
    };
    for (bool forward : {true, false})
      for (int64_t cols : kCols) {
        plans(forward, cols, "aligned", 0);
        // Rows of an odd length begin anywhere in any case.
        if (cols % 8 == 0) plans(forward, cols, "unaligned", 1);
      }
  };
  add("bf16 bf16", all_traits<bf16, bf16, bf16>());
  add("bf16 f32", all_traits<bf16, float, float>());
  add("f32 f32", all_traits<float, float, float>());
  add("f16 f16", all_traits<f16, f16, f16>());
  return out.str();
}

TEST_CASE("plans are those of the table") {
  const std::string path = std::string(TIGON_TEST_FILES) + "/norm_plans.txt", plans = all_plans();
  if (std::getenv("TIGON_WRITE_PLANS") != nullptr) std::ofstream(path) << plans;
  std::ifstream file(path);
  std::istringstream got(plans);
  std::string want, have;
  int lines = 0;
  for (; std::getline(file, want); ++lines) {
    REQUIRE(std::getline(got, have));
    CHECK(have == want);
  }
  CHECK(lines > 100);
  CHECK_FALSE(std::getline(got, have));
}

TEST_CASE("a plan holds its rows, in the shared memory that there is") {
  for (const Traits& t : all_traits<f16, f16, f16>())
    for (int64_t cols = 1; cols < 400000; cols = cols * 5 / 4 + 1)
      for (int64_t offset : {0, 1}) {
        const NormPlan plan = plan_of(t, problem_of(t, 64, cols, offset));
        const int64_t vecs = cols / t.traits.vec_size();
        INFO(t.op << " " << cols << ": " << to_string(plan));
        CHECK(plan.shared <= kDevice.shared_per_block);
        if (plan.kernel == NormKernel::registers || plan.kernel == NormKernel::lookahead) {
          const int64_t threads = plan.rows.threads_per_row ? plan.rows.threads_per_row : plan.threads;
          CHECK(threads * plan.rows.vecs_per_thread >= vecs);
          CHECK(plan.threads <= plan.rows.max_threads);
          CHECK(plan.threads % 32 == 0);
        }
        if (plan.kernel == NormKernel::cluster) CHECK(kMaxCluster * plan.rows.max_vecs() >= vecs);
      }
}

// A row's bits may depend on the kernel and its configuration, but for lane_split.
TEST_CASE("the plan of a row does not depend on the number of rows and SMs") {
  for (const Traits& t : all_traits<bf16, bf16, bf16>())
    for (int64_t cols : kCols)
      for (int64_t offset : {0, 1}) {
        const NormPlan few = plan_of(t, problem_of(t, 2, cols, offset)),
                       many = plan_of(t, problem_of(t, 100000, cols, offset), {1, 232448, true});
        INFO(t.op << " " << cols << ": " << to_string(few) << " | " << to_string(many));
        CHECK(few.kernel == many.kernel);
        CHECK(few.rows.vecs_per_thread * few.rows.lane_split <= 8);
        if (few.rows.lane_split == many.rows.lane_split)
          CHECK(few.config == many.config);
        else
          CHECK(few.rows.vecs_per_thread * few.rows.lane_split == many.rows.vecs_per_thread);
      }
}

TEST_CASE("rows that share parameters of their own take the threads and vectors of those that do not") {
  using Formula = oracle::ModulatedRmsNormForward<double, bf16>;
  for (const NormTraits& t : {forward_traits<Formula, bf16, bf16>(), forward_traits<Formula, float, bf16>()})
    for (int64_t cols = 8; cols < 60000; cols += cols < 1100 ? 8 : 512) {
      NormProblem problem{.rows = 64, .cols = cols};
      const NormPlan apart = plan_forward(t, problem, kDevice);
      problem.rows_per_param = kManyRowsPerParam - 1;
      CHECK(plan_forward(t, problem, kDevice).kernel == NormKernel::registers);
      problem.rows_per_param = kManyRowsPerParam;
      const NormPlan shared = plan_forward(t, problem, kDevice);
      INFO(cols << ": " << to_string(apart) << " | " << to_string(shared));
      CHECK(shared.kernel ==
            (cols > 256 && cols <= 12288 ? NormKernel::shared_params : NormKernel::registers));
      CHECK(shared.rows.vecs_per_thread == apart.rows.vecs_per_thread);
      CHECK(shared.rows.threads_per_row == apart.rows.threads_per_row);
      if (apart.rows.threads_per_row == 0) CHECK(shared.threads == apart.threads);
      CHECK(shared.shared <= kDevice.shared_per_block);
    }
}

TEST_CASE("vectorized rows") {
  const Traits t = all_traits<bf16, bf16, bf16>()[0];
  CHECK(problem_of(t, 4, 64, 0).vectorized);
  CHECK(problem_of(t, 4, 64, 8).vectorized);
  CHECK_FALSE(problem_of(t, 4, 64, 3).vectorized);
  CHECK_FALSE(problem_of(t, 4, 65, 0).vectorized);
  // One row elsewhere than the others, an absent one, a misaligned parameter.
  const uintptr_t base = 1 << 20;
  auto at = [&](int64_t element) {
    return NormOperand{reinterpret_cast<const void*>(base + uintptr_t(2 * element)), 64, 2};
  };
  const NormOperand rows[] = {at(0), {nullptr, 3, 2}, at(1)}, params[] = {at(1)};
  CHECK_FALSE(norm_problem(4, 64, 1, 2, rows, {}).vectorized);
  CHECK(norm_problem(4, 64, 1, 2, std::span(rows, 2), {}).vectorized);
  CHECK_FALSE(norm_problem(4, 64, 1, 2, std::span(rows, 2), params).vectorized);
}

TEST_CASE("devices without clusters loop over long rows") {
  for (const Traits& t : all_traits<bf16, bf16, bf16>())
    CHECK(plan_of(t, problem_of(t, 64, 100000, 0), {108, 166912, false}).kernel == NormKernel::looped);
}

}  // namespace
}  // namespace tigon::test
