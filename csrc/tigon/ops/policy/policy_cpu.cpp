#include <algorithm>
#include <cmath>

#include "tigon/base/simd/lanes.h"
#include "tigon/ops/policy/policy.h"

namespace tigon::cpu {
namespace {

#include "tigon/ops/policy/policy_rows.inc"

struct PolicyTable {
  void (*run[4])(const PolicyRows& p, const PolicyAnswer& a, int64_t answer, int64_t begin, int64_t end,
                 float answer_slope, double* slope);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/policy/policy_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void policy(Context& ctx, const Policy& a) {
  constexpr int64_t kTokensPerTask = 4096;
  const PolicyRows p(a);
  const auto run = TIGON_SELECT(policy_table).run[int(p.formula.kind)];
  const bool by_token = p.formula.level == PolicyLevel::token;
  const int64_t span = p.formula.coupled() ? p.tokens : kTokensPerTask, parts = (p.tokens + span - 1) / span;
  parallel(ctx, a.count * parts, [&](int64_t task) {
    const int64_t answer = a.first + task / parts, begin = task % parts * span,
                  end = std::min(p.tokens, begin + span);
    PolicySums sums = {};
    if (p.formula.coupled() || p.formula.by_answer)
      for (int64_t t = 0; t < p.tokens; ++t) policy_add(p, answer, answer * p.tokens + t, sums);
    const PolicyAnswer common = policy_answer(p, sums);
    double slope = 0.0;
    if (!by_token) run(p, common, answer, begin, end, 0.0f, &slope);
    run(p, common, answer, begin, end, float(slope * policy_share(p, sums)), nullptr);
  });
}

}  // namespace tigon::cpu
