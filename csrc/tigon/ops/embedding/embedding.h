// Looks up rows of a table by token id, and computes the table's gradient (Bengio et al. 2003, "A neural
// probabilistic language model").
// Formula     y_i = scale * weight[ids_i]
// Gradients   dweight_v = scale * sum of dy_i over all i with ids_i = v, 0 for v = padding_idx
// Shapes      ids [tokens]; weight, dweight [V, H], dweight dense; y, dy [tokens, H]; any row stride
// Dtypes      ids i64 | i32; weight f32 | bf16 | f16, y, dy, dweight the same; sums f32
// Rounding    once, on store, with `add` of the sum; with scale = 1 y is weight bit for bit
// Saved       ids
// Aliasing    none
// Determinism bitwise: a token's rows are added in the order of their positions, in parts that follow from
//             shapes and ids only
// Traffic     forward 1 read + 1 write of [tokens, H]; backward 1 read of [tokens, H] + 1 write of [V, H]
//             (the rows that no id names are cleared in the same launch)
// Refused     sizes or dtypes that do not fit, 2^31 tokens or ids: tigon::Error before anything is written.
//             An id outside [0, V): tigon::Error on the CPU; on CUDA its row of y is NaN and dweight gets
//             nothing from it
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

inline void require_embedding(const Fields& f, const Vector& ids, const char* table, int64_t rows) {
  constexpr int64_t kMost = (int64_t(1) << 31) - 1;
  f.require(ids.dtype == DType::i64 || ids.dtype == DType::i32, "ids must be int64 or int32, got ",
            name_of(ids.dtype));
  f.require(ids.size < kMost, "ids must have fewer than 2^31 elements, got ", ids.size);
  f.require(rows < kMost, table, " must have fewer than 2^31 rows, got ", rows);
}

struct EmbeddingFwd {
  Vector ids;
  Matrix weight;
  Matrix y;
  // Only the gradient uses it.
  int64_t padding_idx = -1;
  float scale = 1.0f;

  void fields(Fields& f) {
    f.input("ids", ids, ids.size, ids.dtype);
    f.rows("weight", weight, 0);
    require_embedding(f, ids, "weight", weight.rows);
    f.option("padding_idx", padding_idx);
    f.option("scale", scale);
    f.result("y", y, ids.size, weight.cols, weight.dtype);
  }
};

struct EmbeddingBwd {
  Vector ids;
  Matrix dy;
  Matrix dweight;
  int64_t padding_idx = -1;  // -1 for none
  float scale = 1.0f;
  // The rows that ids name are added to dweight's, whose others stay; without scale.
  bool add = false;

  void fields(Fields& f) {
    f.rows("dy", dy, 0);
    f.input("ids", ids, ids.size, ids.dtype);
    f.option("vocabulary", dweight.rows);
    require_embedding(f, ids, "dweight", dweight.rows);
    f.require(dy.rows == ids.size, "dy must be [", ids.size, ", ", dy.cols, "], got [", dy.rows, ", ",
              dy.cols, "]");
    f.option("padding_idx", padding_idx);
    f.option("scale", scale);
    f.require(dweight.rows <= 1 || dweight.stride == dweight.cols, "dweight must be dense (stride ",
              dweight.cols, "), got stride ", dweight.stride);
    f.result("dweight", dweight, dweight.rows, dy.cols, dy.dtype);
  }
};

TIGON_API_OP(embedding, Embedding)

}  // namespace tigon
