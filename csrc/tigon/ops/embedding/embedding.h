// Embedding: rows of a table by token id, and the table's gradient (Bengio et al. 2003, "A neural probabilistic language model").
//
// Formula     y_i = scale * weight[ids_i]
// Gradients   dweight_v = scale * sum of dy_i over all i with ids_i = v, 0 for v = padding_idx
// Shapes      ids [tokens]; weight, dweight [V, H], dweight dense; y, dy [tokens, H]; any row stride
// Dtypes      ids i64 | i32; weight f32 | bf16 | f16, y, dy, dweight the same; sums f32
// Rounding    once, on store; with scale = 1 y is weight bit for bit
// Saved       ids
// Aliasing    none
// Determinism bitwise: a token's rows are added in the order of their positions, in parts that follow from shapes and ids alone
// Traffic     forward 1 read + 1 write of [tokens, H]; backward 1 read of [tokens, H] + 1 write of [V, H] (the rows that no id
//             names are cleared in the same launch)
// Refused     sizes or dtypes that do not fit, 2^31 tokens or ids: tigon::Error before anything is written. An id outside [0, V):
//             tigon::Error on the CPU; on CUDA its row of y is NaN and dweight has nothing of it
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

struct EmbeddingFwd {
  Vector ids;
  Matrix weight;
  Matrix y;
  float scale = 1.0f;
};

struct EmbeddingBwd {
  Vector ids;
  Matrix dy;
  Matrix dweight;
  int64_t padding_idx = -1;  // none
  float scale = 1.0f;
};

TIGON_API_OP(embedding, Embedding)

}  // namespace tigon
