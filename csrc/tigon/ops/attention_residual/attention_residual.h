// Attends over the outputs of earlier blocks instead of adding a residual (Kimi Team 2026, "Attention
// Residuals", arXiv:2603.15031): a learned query looks at normalized values, and their weighted sum is the
// next block's input.
// Formula     h_n = v_n * rstd_n,  rstd_n = (mean(v_n^2) + eps)^-1/2,
//             score_n = sum over columns of query * norm_weight * h_n
//             alpha = softmax over n of score,  y = sum over n of alpha_n * v_n
// Gradients   e_n = sum over columns of dy * v_n;  ds_n = alpha_n * (e_n - sum over m of alpha_m * e_m)
//             dv_n = alpha_n * dy + ds_n * rstd_n * (query * norm_weight - h_n * score_n / cols)
//             u = sum over rows and n of ds_n * h_n;  dquery = norm_weight * u;  dnorm_weight = query * u
// Shapes      values, dvalues [count * rows, cols], row r of value n at n * rows + r; y, dy [rows, cols]; any
//             row strides; query, norm_weight, dquery, dnorm_weight [cols]
// Dtypes      values f32 | bf16 | f16, y and dvalues in that dtype; query and norm_weight both of it or both
//             f32; gradients of the dtype of what they belong to; arithmetic f32
// Rounding    y and every gradient once, at the end; the normalized values are not rounded
// Saved       values, query, norm_weight: scores are computed again
// Aliasing    no result may overlap an input
// Determinism bitwise: fixed trees inside a row, fixed order over values and rows
// Traffic     forward 1 read of values + 1 write of y; backward 1 read of values and dy + 1 write of dvalues;
//             if the values of a row do not fit in shared memory, or rows are not aligned, values are read
//             twice
// Refused     cols < 1, count not in [1, 1024], eps < 0, sizes or dtypes that do not fit: tigon::Error before
//             anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

inline int64_t rows_of_one(const Matrix& values, int64_t count) {
  return count > 0 ? values.rows / count : 0;
}
inline void require_values(const Fields& f, const Matrix& values, int64_t count, const Vector& query,
                           const Vector& norm_weight) {
  f.require(count >= 1 && count <= 1024, "values must be 1 to 1024, got ", count);
  f.require(count >= 1 && values.rows % count == 0, "values must have a multiple of ", count, " rows, got ",
            values.rows);
  f.require(bool(query), "query must be [", values.cols, "], got none");
  f.require(bool(norm_weight), "norm_weight must be [", values.cols, "], got none");
}

struct AttentionResidualFwd {
  Matrix values;
  int64_t count = 1;
  Vector query, norm_weight;
  Matrix y;
  float eps = 1e-6f;

  void fields(Fields& f) {
    f.stacked_rows("values", values, count);
    require_values(f, values, count, query, norm_weight);
    f.coefficients("query", query, values.cols, values.dtype);
    f.coefficients("norm_weight", norm_weight, values.cols, values.dtype, &query);
    f.eps(eps);
    f.result("y", y, values, rows_of_one(values, count), values.cols);
  }
};

struct AttentionResidualBwd {
  Matrix dy;
  Matrix values;
  int64_t count = 1;
  Vector query, norm_weight;
  Matrix dvalues;               // empty if not wanted
  Vector dquery, dnorm_weight;  // empty if not wanted
  float eps = 1e-6f;

  void fields(Fields& f) {
    f.input("dy", dy, rows_of_one(values, count), values.cols, values.dtype);
    f.stacked_rows("values", values, count);
    require_values(f, values, count, query, norm_weight);
    f.coefficients("query", query, values.cols, values.dtype);
    f.coefficients("norm_weight", norm_weight, values.cols, values.dtype, &query);
    f.eps(eps);
    f.gradient("dvalues", dvalues, values);
    f.gradient("dquery", dquery, values.cols, query.dtype);
    f.gradient("dnorm_weight", dnorm_weight, values.cols, norm_weight.dtype);
  }
};

TIGON_API_OP(attention_residual, AttentionResidual)

}  // namespace tigon
