// Draws a token from every row of logits by an exponential race, which is the Gumbel-max trick (Maddison et
// al. 2014, arXiv:1411.0030, eq. 2), among the tokens that top-k (Fan et al. 2018, arXiv:1805.04833), top-p
// (Holtzman et al. 2020, arXiv:1904.09751) and min-p (Nguyen et al. 2025, arXiv:2407.01082) leave.
// Formula     z = logit_scale * (logits + bias), with a softcap softcap * tanh(z / softcap); p = softmax(z /
//             temperature). top_k keeps the top_k largest z. Of these, top_p keeps the smallest set of
//             largest z whose share of their sum of p is at least top_p. Of these, min_p keeps p >= min_p *
//             max(p). Equal z are kept or left out together. id = argmax over the kept tokens of z /
//             temperature - log(e), where e = -log(1 - v) and v in (0, 1) comes from Philox4x32-10 of
//             (column, row; seed). At temperature 0, id = argmax z. The lower column wins if scores are
//             equal. log_prob = log p(id) over all tokens, kept or not; at temperature 0 that of temperature
//             1
// Shapes      logits [rows, cols], any row stride; bias [cols]; temperatures, top_ks, top_ps, min_ps [rows],
//             each instead of one number for all rows; seed [1] or [rows]. With [rows] the draw of a row
//             depends on its seed and not on its place. ids, log_prob [rows]
// Dtypes      logits f32 | bf16 | f16; bias the same or f32; temperatures, top_ps, min_ps, log_prob f32;
//             top_ks, seed, ids i64
// Rounding    arithmetic f32, sums f64
// Saved       nothing: a draw has no gradient
// Aliasing    none
// Determinism bitwise, also among other rows. The CPU draws what CUDA draws unless two scores are a rounding
//             apart
// Traffic     rows * cols reads from memory, then again from cache: once for the race, once for log_prob,
//             and for each threshold of top_k and top_p until 4096 entries can still be it, at most 18
//             times (some 6 times for usual logits)
// Refused     sizes, dtypes, 2^32 columns or more: tigon::Error before anything is written. Values are not
//             checked: a temperature that is not above 0 counts as 0; top_k below 1, top_p not below 1 and
//             min_p not above 0 keep all tokens. A row that holds NaN or +inf, or only -inf, gets id -1 and
//             log_prob NaN
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

struct Sample {
  Matrix logits;
  Vector bias;  // empty: 0
  // This and the next three may be empty: the number below is that of all rows.
  Vector temperatures;
  Vector top_ks;
  Vector top_ps;
  Vector min_ps;
  Vector seed;
  float logit_scale = 1.0f;
  // 0 means none.
  float softcap = 0.0f;
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  // With one seed for all rows, the first row has this number.
  int64_t first_row = 0;
  bool need_log_prob = true;
  Vector ids;
  Vector log_prob;

  void fields(Fields& f) {
    f.rows("logits", logits);
    f.parameter("bias", bias, logits);
    f.optional("temperatures", temperatures, logits.rows, DType::f32);
    f.optional("top_ks", top_ks, logits.rows, DType::i64);
    f.optional("top_ps", top_ps, logits.rows, DType::f32);
    f.optional("min_ps", min_ps, logits.rows, DType::f32);
    f.input("seed", seed, seed.size, DType::i64);
    f.option("logit_scale", logit_scale);
    f.option("softcap", softcap);
    f.option("temperature", temperature);
    f.option("top_k", top_k);
    f.option("top_p", top_p);
    f.option("min_p", min_p);
    f.option("first_row", first_row);
    f.option("need_log_prob", need_log_prob);
    f.require(logits.cols < int64_t(1) << 32, "logits must have fewer than 2^32 columns, got ", logits.cols);
    f.require(seed.size == 1 || seed.size == logits.rows, "seed must be [1] or [", logits.rows, "], got [",
              seed.size, "]");
    f.result("ids", ids, logits.rows, DType::i64);
    f.result_if(need_log_prob, "log_prob", log_prob, logits.rows);
  }
};

TIGON_API_ENTRY(sample, Sample)

}  // namespace tigon
