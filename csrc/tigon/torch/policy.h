// What the adaptors of policy and linear_policy share: the numbers of the formula and the divisors, as arguments of their schemas.
#pragma once

#include "tigon/ops/policy/policy.h"
#include "tigon/torch/shim.h"

namespace tigon::torch_shim {

enum class PolicyNormalise : int64_t { token = 0, sequence = 1, length = 2 };

struct PolicyOptions {
  PolicyFormula formula;
  PolicyNormalise normalise;

  static constexpr const char* kSchema =
      "int kind, int level, int normalise, float low, float high, float delta, float tau_positive,"
      " float tau_negative, float k_positive, float lambda_positive, float k_negative, float lambda_negative,"
      " int estimator, float kl, bool kl_corrected, float entropy_factor";
  static PolicyOptions take(Stack& s) {
    PolicyOptions n;
    PolicyFormula& p = n.formula;
    p.kind = PolicyKind(s.take<int64_t>()), p.level = PolicyLevel(s.take<int64_t>());
    n.normalise = PolicyNormalise(s.take<int64_t>()), p.by_answer = n.normalise == PolicyNormalise::sequence;
    for (double* number : {&p.low, &p.high, &p.delta, &p.tau_positive, &p.tau_negative, &p.k_positive,
                           &p.lambda_positive, &p.k_negative, &p.lambda_negative})
      *number = s.take<double>();
    p.estimator = PolicyKl(s.take<int64_t>()), p.kl = s.take<double>(), p.kl_corrected = s.take<bool>();
    p.entropy_factor = s.take<double>();
    return n;
  }
};

struct PolicyDivisors {
  OptionalTensor denominator, entropy_denominator;
  std::optional<double> host_denominator, host_entropy_denominator;
  static constexpr const char* kNames[] = {"denominator", "entropy_denominator", "host_denominator",
                                           "host_entropy_denominator"};

  PolicyTotals totals(const char* op, PolicyNormalise normalise, const Tensor& like, Vector scale,
                      Vector loss) const {
    auto divisor = [&](const char* name, const OptionalTensor& device, std::optional<double> number) {
      PolicyTotals::Divisor d = {.number = number.value_or(0.0), .has_number = number.has_value()};
      if (!device) return d;
      check_same_device(op, name, *device, like);
      d.device = scalar_of(op, name, *device);
      return d;
    };
    return {
        .denominator = divisor("denominator", denominator, host_denominator),
        .count_tokens = normalise == PolicyNormalise::token,
        .entropy_denominator = divisor("entropy_denominator", entropy_denominator, host_entropy_denominator),
        .scale = scale,
        .loss = loss};
  }
};

}  // namespace tigon::torch_shim
