// Computes InfoNCE of cosines at a fixed temperature, the common case of a contrastive loss, in as few GEMMs
// as possible, on sm_90a only. z is bounded, so exponentials need no maxima: the first GEMM's epilogue writes
// e^z, and the gradients' GEMMs read it.
// Formula     z_ij = scale * cos(q_i, d_j), document i is query i's;  loss = reduction_scale * sum over i of
//             w_i l_i, l_i = log(sum over j of exp(z_ij - z_ii)), symmetric: the mean of that and log(sum
//             over j of exp(z_ji - z_ii))
// Gradients   dq, dd of loss * dloss. The forward leaves G d^ and G^T q^, where with r_i, c_i the sums of row
//             and column i: d^ unit rows, q^ those times scale / log 2, so that q^ . d^T is z in powers of
//             two; G_ij = e^z_ij w_i / r_i of one side, but for the factor w_i / r_i of rows of G d^;
//             G_ij = e^z_ij (w_i / r_i + w_j / c_j) / 2 of both; G_ii less w_i.
//             The backward: through x / |x|
// Shapes      q, dq [n, H]; d, dd [m, H], m >= n > 0, H a multiple of 8; weight, factor [n]; loss, dloss [1]
// Dtypes      q, d bf16; GEMMs into f32; G d^ bf16, G^T q^ too unless `wide`; weight and the rest f32
// Rounding    q^ and d^ once, e^z and G once, q^ times its factor once, G d^ and G^T q^ once; sums of f32
// Saved       q, d, G d^, G^T q^, factor
// Aliasing    none
// Determinism bitwise, run to run: sums in fixed trees over tiles that follow from shapes
// Traffic     one side: 3 GEMMs, G written once and read twice; both: 4, the first writes 1/64 of a
//             matrix, but for the last chunk, for which a pass over e^z stands in place of the second
//             GEMM. Rows are read and written once before the GEMMs, and once after
// Refused     another device or dtype, scale above kContrastiveMostScale, sizes that do not fit, several
//             chunks that are not `wide`: tigon::Error before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

// Bounds scale, so that e^scale times the number of rows, and its inverse, are normal numbers of bf16.
constexpr float kContrastiveMostScale = 60.0f;

// Holds what forward and backward take.
struct ContrastiveCosine {
  Matrix q, d;
  float scale = 1.0f, reduction_scale = 1.0f;
  bool symmetric = false;

  void inputs(Fields& f) {
    f.rows("q", q);
    f.input("d", d, d.rows, q.cols, q.dtype);
    f.option("scale", scale);
    f.option("reduction_scale", reduction_scale);
    f.option("symmetric", symmetric);
    f.require(q.dtype == DType::bf16, "q must be bfloat16, got ", name_of(q.dtype));
    f.require(d.rows >= q.rows, "d must have at least q's ", q.rows, " rows, got ", d.rows);
    f.require(scale > 0.0f && scale <= kContrastiveMostScale, "scale must be in (0, ", kContrastiveMostScale,
              "], got ", scale);
    f.require(q.cols % 8 == 0, "q must have a multiple of 8 columns, got ", q.cols);
  }
};

struct ContrastiveCosineFwd : ContrastiveCosine {
  Vector weight;           // 1 if empty
  int64_t chunk_rows = 0;  // if 0, as many as 1 GiB of G has
  bool wide = true;        // gq is f32, so that several chunks can be summed
  Vector loss, factor;
  Matrix gd;  // G d^; without data if not wanted
  Vector gq;  // G^T q^ [m * H]; empty if not wanted

  void fields(Fields& f) {
    inputs(f);
    f.parameter("weight", weight, q.rows, DType::f32);
    f.option("chunk_rows", chunk_rows);
    f.option("wide", wide);
    f.gradient("loss", loss, 1, DType::f32);
    f.gradient("factor", factor, q.rows, DType::f32);
    f.gradient("gd", gd, q);
    f.gradient("gq", gq, d.rows * d.cols, wide ? DType::f32 : q.dtype);
  }
};

struct ContrastiveCosineBwd : ContrastiveCosine {
  Vector factor, dloss, gq;
  Matrix gd;
  Matrix dq, dd;  // without data if not wanted

  void fields(Fields& f) {
    inputs(f);
    f.parameter("factor", factor, q.rows, DType::f32);
    f.coefficients("dloss", dloss, 1, DType::f32);
    f.optional("gd", gd, q);
    f.parameter("gq", gq, d.rows * d.cols, q.dtype);
    f.gradient("dq", dq, q);
    f.gradient("dd", dd, d);
  }
};

TIGON_API_OP(contrastive_cosine, ContrastiveCosine)

}  // namespace tigon
