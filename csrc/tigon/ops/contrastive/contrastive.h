// Computes statistics of a matrix of similarities that never exists as a whole, for contrastive losses.
// InfoNCE (van den Oord et al. 2018, arXiv:1807.03748, eq. 4) and its symmetric form (Radford et al. 2021,
// arXiv:2103.00020, figure 3) follow from them in O(n) steps.
// Formula     z = scale * q . d^T;  a pair (i, j) is left out if j is not among labels_i and
//             q_ids_i == d_ids_j, or t_ij > limit_i:
//             t = guide_q . guide_d^T (Solatorio 2024, "GISTEmbed", arXiv:2402.16829, eq. 3), without a guide
//             q . d^T
//             row_lse_i = log sum over j of exp z_ij,  col_lse_j = log sum over i of exp z_ij,
//             picked_ik = z at labels_ik
// Gradients   g_ij = scale (drow_i exp(z_ij - row_lse_i) + dcol_j exp(z_ij - col_lse_j)
//                           + sum over k of dpicked_ik [labels_ik == j]), 0 of a pair left out;
//             dq = g . d,  dd = g^T . q;  dlog_scale = sum over i, j of g_ij z_ij / scale
// Shapes      q, dq [n, H]; d, dd [m, H]; guide_q [n, G]; guide_d [m, G]; labels [n, K], none if outside
//             [0, m); picked [n * K]; q_ids, limit, row_lse, drow [n]; d_ids, col_lse, dcol [m]; scale [1];
//             rows at any stride
// Dtypes      q, d, dq, dd f32 | bf16 | f16, the guides one of their own; labels, ids i64; row_lse, col_lse
//             f64, so that a small loss is no difference of rounded numbers; the rest f32; GEMMs
//             accumulate in f32
// Rounding    q . d^T to q's dtype, a guide's t not at all; g once to q's dtype (for dlog_scale not), dq
//             once; dd once, summed over chunks in f32. A row or column of which all pairs are left out has
//             -inf; NaN propagates to its row and column
// Saved       all inputs, row_lse, col_lse
// Aliasing    none
// Determinism bitwise, run to run: chunks in order, sums in fixed trees over blocks that follow from shapes
// Traffic     forward one GEMM, backward three (those with a guide one more each). A chunk of
//             similarities, at most what loss_head_chunk_rows says, is written and read once in forward; in
//             backward written, read, written and read twice
// Refused     sizes or dtypes that do not fit, d without rows, ids of one side, one guide: tigon::Error
//             before anything is written
#pragma once

#include "tigon/base/fields.h"

namespace tigon {

// Holds what forward and backward take.
struct ContrastiveScores {
  Matrix q, d;
  Vector scale;             // must be above 0
  Matrix labels;            // empty if there are none
  Vector q_ids, d_ids;      // if empty, they leave no pair out
  Vector limit;             // if empty, it leaves no pair out
  Matrix guide_q, guide_d;  // if empty, t is q . d^T
  int64_t chunk_rows = 0;   // 0 stands for loss_head_chunk_rows

  void inputs(Fields& f) {
    f.rows("q", q);
    f.input("d", d, d.rows, q.cols, q.dtype);
    f.require(d.rows > 0, "d must have at least one row, got 0");
    f.coefficients("scale", scale, 1, DType::f32);
    f.optional("labels", labels, q.rows, labels.cols, DType::i64);
    f.parameter("q_ids", q_ids, q.rows, DType::i64);
    f.parameter("d_ids", d_ids, d.rows, DType::i64);
    for (const Vector* ids : {&q_ids, &d_ids})
      f.require(!*ids || ids->dtype == DType::i64, "ids must be int64, got ", name_of(ids->dtype));
    f.require(bool(q_ids) == bool(d_ids) || q.rows == 0, "q_ids and d_ids must be given together, got one");
    f.parameter("limit", limit, q.rows, DType::f32);
    f.optional("guide_q", guide_q, q.rows, guide_q.cols, guide_q.dtype);
    f.optional("guide_d", guide_d, d.rows, guide_q.cols, guide_q.dtype);
    f.require((guide_q.cols > 0) == (guide_d.cols > 0),
              "guide_q and guide_d must be given together, got one");
    f.require(!guide_q.cols || guide_q.dtype != DType::i64, "guides must be floats, got int64");
    f.option("chunk_rows", chunk_rows);
  }
};

struct ContrastiveFwd : ContrastiveScores {
  Vector row_lse, col_lse, picked;  // empty if not wanted

  void fields(Fields& f) {
    inputs(f);
    f.gradient("row_lse", row_lse, q.rows, DType::f64);
    f.gradient("col_lse", col_lse, d.rows, DType::f64);
    f.gradient("picked", picked, q.rows * labels.cols, DType::f32);
  }
};

struct ContrastiveBwd : ContrastiveScores {
  Vector row_lse, drow;  // drow is 0 if empty
  Vector col_lse, dcol;  // dcol is 0 if empty
  Vector dpicked;        // 0 if empty
  Matrix dq, dd;         // without data if not wanted
  Vector dlog_scale;     // f32 [1]; empty if not wanted

  void fields(Fields& f) {
    inputs(f);
    f.parameter("row_lse", row_lse, q.rows, DType::f64);
    f.parameter("drow", drow, q.rows, DType::f32);
    f.parameter("col_lse", col_lse, d.rows, DType::f64);
    f.parameter("dcol", dcol, d.rows, DType::f32);
    f.parameter("dpicked", dpicked, q.rows * labels.cols, DType::f32);
    f.gradient("dq", dq, q);
    f.gradient("dd", dd, d);
    f.gradient("dlog_scale", dlog_scale, 1, DType::f32);
  }
};

TIGON_API_OP(contrastive, Contrastive)

// Rows and columns are summed in blocks and panels.
constexpr int kContrastiveBlock = 128, kContrastivePanel = 256;  // rows and columns that share a partial sum
constexpr int64_t contrastive_blocks(int64_t rows) {
  return (rows + kContrastiveBlock - 1) / kContrastiveBlock;
}
constexpr int64_t contrastive_panels(int64_t cols) {
  return (cols + kContrastivePanel - 1) / kContrastivePanel;
}
// Holds a chunk's rows as the kernels read them: plain pointers, so that one form serves both backends.
struct ContrastiveChunk {
  // Holds q . d^T, then g. Rows begin at 16-byte boundaries and have memory for whole panels of 64 columns.
  void* scores;
  const float* guide;
  int64_t rows, cols, stride;  // stride is that of scores and guide
  const float* scale;
  const int64_t* labels;
  int64_t label_count, label_stride;
  const int64_t *q_ids, *d_ids;
  const float* limit;
  // The statistics go here: the maximum and the sum of exp(z - maximum) over each panel [panels, 2, rows] and
  // each block [blocks, 2, cols]. They are null if not wanted.
  float *row_parts, *col_parts, *picked;
  // The gradient reads these.
  const double *row_lse, *col_lse;
  const float *drow, *dcol, *dpicked;
  // Gets the sums of g_ij z_ij / scale, [blocks * panels]; null if not wanted.
  float* slope_parts;

  bool masked() const { return q_ids != nullptr || limit != nullptr; }
};
// Computes out = log(exp(out) + what the parts say); if `fresh` is set, without the old value of out.
struct ContrastiveMerge {
  const float* parts;  // [count, 2, size]
  int64_t count, size;
  double* out;
  bool fresh;
};
#define TIGON_CONTRASTIVE_BACKEND                                                    \
  void contrastive_statistics(Context& ctx, DType dtype, const ContrastiveChunk& a); \
  void contrastive_merge(Context& ctx, const ContrastiveMerge& a);                   \
  void contrastive_gradient(Context& ctx, DType dtype, const ContrastiveChunk& a);
namespace cpu {
TIGON_CONTRASTIVE_BACKEND
}
namespace cuda {
TIGON_CONTRASTIVE_BACKEND
}
#undef TIGON_CONTRASTIVE_BACKEND

}  // namespace tigon
