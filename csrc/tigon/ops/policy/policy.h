// Computes policy-gradient losses of token log-probabilities, for reinforcement learning from sampled
// answers: PPO's clipped objective (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with group advantages
// (GRPO: Shao et al. 2024, arXiv:2402.03300, eq. 3), and its relatives.
// Formula     per token that counts: d = log_prob - old (0 without old, whose ratio then is 1),
//             A = advantage,
//             rho = e^d (level token), e^(mean of d over the answer) (sequence: GSPO, Zheng et al. 2025,
//             arXiv:2507.18071, eq. 7), e^(sum of d) (sum: RLOO, Ahmadian et al. 2024, arXiv:2402.14740)
//             clip    -min(min(rho, delta) A, clamp(rho, 1 - low, 1 + high) A)
//             cispo   -min(rho, high) A log_prob, the factor a constant (MiniMax 2025, arXiv:2506.13585,
//                     eq. 4)
//             sapo    -4/tau s(tau (rho - 1)) A, tau = tau_positive if A > 0, else tau_negative, s = sigmoid
//                     (Gao et al. 2025, arXiv:2511.20347)
//             vespo   -phi A log_prob, phi = e^(lambda + k log w - lambda w) a constant,
//                     k and lambda by A >= 0, log w = sum over the answer of d and log importance,
//                     each term in [-20, 20] ([log 1e-8, 20]), the sum in [log 1e-8, 20]
//             times importance (not vespo, whose w has it); plus kl * k, with kl_corrected kl * rho * k, of
//             the estimators of Schulman 2020 ("Approximating KL divergence") with q = ref - log_prob:
//             k1 = -q, k2 = q^2 / 2, k3 = e^q - q - 1
//             weight = scale, with by_answer scale / n (n: tokens of the answer that count)
//             loss = sum of weight * that - entropy_factor * (entropy_scale, or weight without it) * entropy
// Gradient    dlog_prob = dloss / dlog_prob, dentropy = dloss / dentropy of each token, 0 if it does not
//             count; old, ref, advantage and importance are constants. If the branches of clip are equal, as
//             at ratio 1, half of each.
// Shapes      answers * tokens rows, row = answer * tokens + token;
//             a call handles the rows of answers [first, first + count) that have a place in log_prob.
//             target, old, ref, kl, clipped, loss [rows]; advantage, importance [rows] or [answers]; position
//             [rows]; log_prob, entropy, dlog_prob, dentropy [places]; scale, entropy_scale [1]
// Dtypes      target i64 | u8 (a mask, with ignore_index 0); position i64; the rest f32; sums over an answer
//             f64
// Rounding    f32 throughout
// Saved       dlog_prob, dentropy
// Aliasing    dlog_prob may be the memory of log_prob, and dentropy that of entropy, at level token
// Determinism bitwise: fixed trees over the tokens of an answer
// Traffic     every operand read once, at levels of an answer up to three times; one launch
// Refused     sizes or dtypes that do not fit, clip bounds or tau out of range, a level other than token for
//             parts of an answer: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

enum class PolicyKind : int8_t { clip, cispo, sapo, vespo };
enum class PolicyLevel : int8_t { token, sequence, sum };
enum class PolicyKl : int8_t { k1, k2, k3 };
enum class PolicyNormalise : int8_t { token, sequence, length };

// Holds the options of the formula.
struct PolicyFormula {
  PolicyKind kind = PolicyKind::clip;
  PolicyLevel level = PolicyLevel::token;
  bool by_answer = false;
  double low = 0.2, high = 0.2, delta = 0.0;  // delta is 0 for none
  double tau_positive = 1.0, tau_negative = 1.05;
  double k_positive = 2.0, lambda_positive = 3.0, k_negative = 3.0, lambda_negative = 2.0;
  PolicyKl estimator = PolicyKl::k3;
  double kl = 0.0;
  bool kl_corrected = false;
  double entropy_factor = 0.0;

  void fields(Fields& f) {
    f.option("low", low), f.option("high", high), f.option("delta", delta);
    f.option("tau_positive", tau_positive), f.option("tau_negative", tau_negative);
    f.option("k_positive", k_positive), f.option("lambda_positive", lambda_positive);
    f.option("k_negative", k_negative), f.option("lambda_negative", lambda_negative);
    f.option("estimator", estimator), f.option("kl", kl), f.option("kl_corrected", kl_corrected);
    f.option("entropy_factor", entropy_factor);
  }
  // True if gradients of a token depend on the other tokens of its answer.
  constexpr bool coupled() const { return level != PolicyLevel::token || kind == PolicyKind::vespo; }
};

// Holds the arguments of a call.
struct Policy {
  PolicyFormula formula;
  int64_t answers = 0, tokens = 0;
  int64_t first = 0, count = 0;
  // Holds the log-probabilities of the places from `base` on, f32. Rows without a place in it are not
  // touched.
  Vector log_prob;
  // Holds entropies like log_prob, f32. Without it there is no entropy term.
  Vector entropy;
  // Holds labels or a mask, i64 | u8 [rows]: a row with ignore_index does not count. If empty, every token
  // counts.
  Vector target;
  int64_t ignore_index = -100;
  // Holds the place of each row that counts, i64 [rows]. If empty, a row's place is its number.
  Vector position;
  int64_t base = 0;
  // Holds the number of all places (-1 if not given). The loss of a row beyond is NaN.
  int64_t list = -1;
  Vector advantage;             // f32 [rows] | [answers]
  Vector importance;            // f32 [rows] | [answers]; 1 if empty
  Vector old, ref;              // f32 [rows]; empty if absent
  Vector scale, entropy_scale;  // f32 [1]; scale is 1 if empty
  // Get the gradients, f32, like log_prob; empty if not wanted.
  Vector dlog_prob, dentropy;
  float slope_factor = 1.0f;  // factor of dlog_prob
  // If true, dlog_prob and dentropy include scale; otherwise they are as if it were 1.
  bool scaled = true;
  Vector loss;  // out: f32 [rows]
  // Gets the estimate without factor and correction, f32 [rows]; empty if not wanted.
  Vector kl;
  // Gets -1 and 1 if the ratio is clipped below and above, else 0, f32 [rows]; empty if not wanted.
  Vector clipped;
};

TIGON_API_ENTRY(policy, Policy)
// Makes its refusals, except those that concern log_prob, entropy and places.
TIGON_API void policy_check(const Policy& a);

// Computes what losses are divided by, and the total, around calls for all answers: `begin` makes scale,
// entropy_scale and the vector of losses, and `end` sums it.
struct PolicyTotals {
  struct Divisor {
    // Holds one number, f32 | f64 | i64 | i32 [1]; if it is empty, `number` is used.
    Vector device;
    std::optional<double> number;
    bool given() const { return device || number; }
  };
  // If not given, `normalise` selects the number of tokens that count, or of answers.
  Divisor denominator;
  PolicyNormalise normalise = PolicyNormalise::token;
  // If not given, entropies have the weights of the tokens.
  Divisor entropy_denominator;
  Vector scale;  // out: f32 [1]
  Vector loss;   // out: f32 [1]

  // Names the fields of PyTorch's operators; `formula` is a loss's.
  void fields(Fields& f, PolicyFormula& formula) {
    f.scalar("denominator", denominator.device, DType::f32, Role::optional);
    f.scalar("entropy_denominator", entropy_denominator.device, DType::f32, Role::optional);
    f.option("host_denominator", denominator.number);
    f.option("host_entropy_denominator", entropy_denominator.number);
    f.option("kind", formula.kind), f.option("level", formula.level), f.option("normalise", normalise);
    formula.by_answer = normalise == PolicyNormalise::sequence;
    formula.fields(f);
  }
};
TIGON_API void policy_begin(Context& ctx, Policy& a, const PolicyTotals& totals);
TIGON_API void policy_end(Context& ctx, const Policy& a, const PolicyTotals& totals);

}  // namespace tigon
