// Computes preference losses of token log-probabilities: of pairs of a chosen and a rejected answer (DPO:
// Rafailov et al. 2023, arXiv:2305.18290, eq. 7, and its relatives), and of single answers that are desirable
// or not (KTO: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7).
// Formula     per answer: l = sum of log_prob over the tokens that count, n = their number; score = l - ref,
//             with `average`
//             divided by max(n, 1); c, r: scores of a pair; x = beta (c - r) - gamma; eps = label_smoothing;
//             s = sigmoid
//             logistic     -(1 - eps) log s(x) - eps log s(-x)   (DPO; with eps cDPO: Mitchell 2023;
//                          without ref CPO: Xu et al. 2024, arXiv:2401.08417; with average and gamma SimPO:
//                          Meng et al. 2024, arXiv:2405.14734, eq. 6)
//             hinge        max(0, 1 - x)  (SLiC: Zhao et al. 2023, arXiv:2305.10425; RSO)
//             ipo          (c - r - 1 / (2 beta))^2              (Azar et al. 2023, arXiv:2310.12036, eq. 17)
//             robust       (-(1 - eps) log s(x) + eps log s(-x)) / (1 - 2 eps)   (Ray Chowdhury et al. 2024,
//                          arXiv:2403.00409)
//             exo_pair     q log(q / (1 - eps)) + (1 - q) log((1 - q) / eps), q = s(x)   (Ji et al. 2024,
//                          arXiv:2402.00856, eq. 16)
//             nca_pair     -log s(beta c) - 1/2 log s(-beta c) - 1/2 log s(-beta r)   (Chen et al. 2024,
//                          arXiv:2402.05369)
//             bco_pair     -log s(beta c) - log s(-beta r)       (Jung et al. 2024, arXiv:2404.04656)
//             sppo_hard    (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2   (Wu et al. 2024, arXiv:2405.00675,
//                          eq. 4.7)
//             apo_zero     1 - s(beta c) + s(beta r)  (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7)
//             apo_down     s(beta c) + 1 - s(x)                  (there, eq. 8)
//             discopop     -log s(x) (1 - m) + e^-x m, m = s(x / tau)   (Lu et al. 2024, arXiv:2406.08414,
//                          eq. 5)
//             orpo         -beta log s(o), o = log odds(e^c) - log odds(e^r)   (Hong et al. 2024,
//                          arXiv:2403.07691, eq. 6-7; log(1 - e^x) is constant past -1.2e-38, so that an
//                          answer that is certain or empty gives finite numbers and slopes)
//             kto          w (1 - s(sign beta (score - kl))), sign and w of desirable and undesirable
//                          answers;
//                          with kl = 0 the unpaired form of apo_zero
//             loss = scale * that + nll * nll_scale * -(sum of log_prob over the chosen answer's nll tokens)
// Gradient    dlog_prob = dloss / dlog_prob of each token, 0 if it does not count; ref and kl are constants
// Shapes      answers * tokens rows in all, row = answer * tokens + token; answers: pairs chosen, then pairs
//             rejected (kto: pairs answers); a call handles the groups [first, first + count), a pair or a
//             single answer each. target [rows], nll_target [pairs * tokens], position [rows], ref, sums,
//             rewards [answers], desirable, loss, nll, margin [pairs], log_prob, dlog_prob [places], scale,
//             nll_scale, kl [1]
// Dtypes      target, nll_target i64 | u8 (a mask, with ignore_index 0); position i64; desirable u8; the rest
//             f32; arithmetic in f64
// Rounding    every result once
// Saved       dlog_prob
// Empty       an answer without tokens has l = 0 and score -ref (averaged too)
// Aliasing    dlog_prob may be the memory of log_prob
// Determinism bitwise: fixed trees over the tokens of an answer
// Traffic     log_prob and target read once or twice, dlog_prob written once: one launch
// Refused     sizes or dtypes that do not fit, beta <= 0, tau <= 0, label_smoothing outside the range of its
//             kind: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

enum class PreferenceKind : int8_t {
  logistic,
  hinge,
  ipo,
  robust,
  exo_pair,
  nca_pair,
  bco_pair,
  sppo_hard,
  apo_zero,
  apo_down,
  discopop,
  orpo,
  kto,
};
inline constexpr int kPreferenceKinds = 13;

// Holds the options of the formula.
struct PreferenceFormula {
  PreferenceKind kind = PreferenceKind::logistic;
  bool average = false;
  double beta = 0.1;
  double label_smoothing = 0.0;
  double gamma = 0.0;
  double tau = 0.05;
  double nll = 0.0;                                         // factor of the nll term; 0 for none
  double desirable_weight = 1.0, undesirable_weight = 1.0;  // kto

  void fields(Fields& f) {
    f.option("kind", kind), f.option("average", average), f.option("beta", beta);
    f.option("label_smoothing", label_smoothing), f.option("gamma", gamma), f.option("tau", tau);
    f.option("nll", nll), f.option("desirable_weight", desirable_weight);
    f.option("undesirable_weight", undesirable_weight);
  }
};

// Holds the arguments of a call.
struct Preference {
  PreferenceFormula formula;
  int64_t pairs = 0, tokens = 0;
  int64_t first = 0, count = 0;
  // Holds the log-probabilities of the places from `base` on, f32.
  Vector log_prob;
  // Holds labels or a mask, i64 | u8 [rows]: a row with ignore_index does not count. If empty, every token
  // counts.
  Vector target;
  // Holds labels or a mask for the tokens of the chosen answers that the nll term has, i64 | u8 [pairs *
  // tokens]. If empty, it has those of target.
  Vector nll_target;
  int64_t ignore_index = -100;
  // Holds the place of each row that counts, i64 [rows]. If empty, a row's place is its number.
  Vector position;
  int64_t base = 0;
  // Holds sums of the reference's log-probabilities, f32 [answers]; 0 if empty.
  Vector ref;
  // Holds the log-probabilities of the reference's tokens instead of ref, f32, like log_prob; empty if
  // absent.
  Vector ref_log_prob;
  Vector desirable;  // u8 [pairs], kto
  Vector kl;         // f32 [1], kto; 0 if empty
  // Holds the factor of every pair's loss and gradient, f32 [1]; 1 if empty.
  Vector scale;
  // Holds the factor of the nll term, f32 [1]; 1 if empty.
  Vector nll_scale;
  // Gets the gradient, f32, like log_prob; empty if not wanted.
  Vector dlog_prob;
  double slope_factor = 1.0;  // factor of dlog_prob
  // If true, dlog_prob includes scale; otherwise it is as if scale were 1 (nll_scale divided by it).
  bool scaled = true;
  Vector loss;  // out: f32 [pairs]
  // Gets the nll term without its factor, f32 [pairs]; empty if not wanted (the factor must then be 0).
  Vector nll;
  // Gets l, or with average l / max(n, 1), f32 [answers]; empty if not wanted.
  Vector sums;
  // Gets beta * score, f32 [answers]; empty if not wanted.
  Vector rewards;
  // Gets the reward of chosen - the reward of rejected, f32 [pairs]; empty if not wanted.
  Vector margin;
};

TIGON_API_ENTRY(preference, Preference)
// Makes its refusals, except those that concern log_prob and places.
TIGON_API void preference_check(const Preference& a);

// Computes what losses are divided by, and the totals, around calls for all groups: `begin` makes scale,
// nll_scale and the vectors of losses (nll for pairs), and `end` sums them.
struct PreferenceTotals {
  // Holds one number on the device, f32 | f64 | i64 | i32 [1]; if it is empty, host_denominator is used.
  Vector denominator;
  std::optional<double> host_denominator;  // if not given, the number of pairs
  Vector scale;                            // out: f32 [1]
  Vector loss, nll;                        // out: f32 [1]; kto has no nll

  // Names the fields of PyTorch's operators, with what they read of the loss.
  void fields(Fields& f, Preference& a) {
    f.optional("target", a.target), f.optional("nll_target", a.nll_target), f.optional("ref", a.ref);
    f.optional("desirable", a.desirable);
    f.scalar("kl", a.kl, DType::f32, Role::optional);
    f.scalar("denominator", denominator, DType::f32, Role::optional);
    f.option("host_denominator", host_denominator);
    a.formula.fields(f);
  }
};
TIGON_API void preference_begin(Context& ctx, Preference& a, const PreferenceTotals& totals);
TIGON_API void preference_end(Context& ctx, const Preference& a, const PreferenceTotals& totals);

}  // namespace tigon
