// A token drawn from every row of logits, by an exponential race (the Gumbel-max trick: Gumbel 1954; Maddison et al. 2014,
// arXiv:1411.0030, eq. 2), among the tokens that top-k (Fan et al. 2018, arXiv:1805.04833), top-p (Holtzman et al. 2020,
// arXiv:1904.09751) and min-p (Nguyen et al. 2025, arXiv:2407.01082) leave.
//
// Formula     z = logit_scale * (logits + bias), or softcap * tanh(z / softcap) of it; p = softmax(z / temperature).
//             top_k keeps the top_k largest z; of these top_p keeps the smallest set of largest z whose share of their sum of p is at
//             least top_p; of these min_p keeps p >= min_p * max(p). Equal z are kept or left together.
//             id = argmax over the kept of z / temperature - log(e), e = -log(1 - v): v in (0, 1) by Philox4x32-10 of
//             (column, row; seed). Temperature 0: id = argmax z. Equal scores: the lower column.
//             log_prob = log p(id) of all tokens, the kept and the others; for temperature 0 that of temperature 1
// Shapes      logits [rows, cols], any row stride; bias [cols]; temperatures, top_ks, top_ps, min_ps [rows] in the place of the
//             number for all rows; seed [1], or [rows]: then a row's draw depends on its seed and not on its place; ids, log_prob [rows]
// Dtypes      logits f32 | bf16 | f16; bias the same or f32; temperatures, top_ps, min_ps, log_prob f32; top_ks, seed, ids i64
// Rounding    arithmetic f32, sums f64
// Saved       nothing: a draw has no gradient
// Aliasing    none
// Determinism bitwise, and the same beside any other rows; the CPU's draws are CUDA's but where two scores are a rounding apart
// Traffic     rows * cols reads from memory, and again from cache: once more for the race, once for log_prob, and 2 to 18 times a
//             threshold of top_k and top_p
// Refused     sizes, dtypes, 2^32 columns or more: tigon::Error before anything is written. Values are not looked at: a temperature
//             that is not above 0 is 0; top_k below 1, top_p not below 1 and min_p not above 0 keep all. A row that holds NaN or
//             +inf, or nothing but -inf: id -1 and log_prob NaN
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

struct Sample {
  Matrix logits;
  Vector bias;          // empty: 0
  Vector temperatures;  // empty, as the next three may be: the number
  Vector top_ks;
  Vector top_ps;
  Vector min_ps;
  Vector seed;
  float logit_scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  float temperature = 1.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  int64_t first_row = 0;  // of a seed for all rows: the number of the first
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
