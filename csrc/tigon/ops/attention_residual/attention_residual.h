// Attention over the outputs of earlier blocks in the residual's place (Kimi Team 2026, "Attention Residuals", arXiv:2603.15031):
// a learned query looks at normalized values, and their weighted sum is the next block's input.
//
// Formula     h_n = v_n * rstd_n,  rstd_n = (mean(v_n^2) + eps)^-1/2,  score_n = sum over columns of query * norm_weight * h_n
//             alpha = softmax over n of score,  y = sum over n of alpha_n * v_n
// Gradients   e_n = sum over columns of dy * v_n;  ds_n = alpha_n * (e_n - sum over m of alpha_m * e_m)
//             dv_n = alpha_n * dy + ds_n * rstd_n * (query * norm_weight - h_n * score_n / cols)
//             u = sum over rows and n of ds_n * h_n;  dquery = norm_weight * u;  dnorm_weight = query * u
// Shapes      values, dvalues [count * rows, cols], row r of value n at n * rows + r; y, dy [rows, cols]; any row strides;
//             query, norm_weight, dquery, dnorm_weight [cols]
// Dtypes      values f32 | bf16 | f16, y and dvalues in that dtype; query and norm_weight both of it or both f32; gradients of the
//             dtype of what they belong to; arithmetic f32
// Rounding    y and every gradient once, at the end; the normalized values are not rounded
// Saved       values, query, norm_weight: scores are formed again
// Aliasing    no result may overlap an input
// Determinism bitwise: fixed trees inside a row, fixed order over values and rows
// Traffic     forward 1 read of values + 1 write of y; backward 1 read of values and dy + 1 write of dvalues; where the values of a
//             row do not fit in shared memory, or rows are not aligned, values are read twice
// Refused     cols < 1, count not in [1, 1024], eps < 0, sizes or dtypes that do not fit: tigon::Error before anything is written
#pragma once

#include "tigon/base/context.h"

namespace tigon {

struct AttentionResidualFwd {
  Matrix values;
  int64_t count = 1;
  Vector query, norm_weight;
  Matrix y;
  float eps = 1e-6f;
};

struct AttentionResidualBwd {
  Matrix dy;
  Matrix values;
  int64_t count = 1;
  Vector query, norm_weight;
  Matrix dvalues;               // empty: not wanted
  Vector dquery, dnorm_weight;  // empty: not wanted
  float eps = 1e-6f;
};

TIGON_API void attention_residual_fwd(Context& ctx, const AttentionResidualFwd& a);
TIGON_API void attention_residual_bwd(Context& ctx, const AttentionResidualBwd& a);

namespace cpu {
void attention_residual_fwd(Context& ctx, const AttentionResidualFwd& a);
void attention_residual_bwd(Context& ctx, const AttentionResidualBwd& a);
}  // namespace cpu
namespace cuda {
void attention_residual_fwd(Context& ctx, const AttentionResidualFwd& a);
void attention_residual_bwd(Context& ctx, const AttentionResidualBwd& a);
}  // namespace cuda

}  // namespace tigon
