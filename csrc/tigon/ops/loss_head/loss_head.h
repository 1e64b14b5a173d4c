// The last linear layer of a language model, chunk of rows by chunk of rows, for losses whose logits never
// exist as a whole: what the ops linear_* share, and no loss. These are the steps of engine.h's loop over
// chunks; a caller who has the logits of a chunk takes a step by itself (operators.cpp).
// Formula     logits = hidden . weight^T (+ lora_scale (hidden . lora_a^T) . lora_b^T);  the row pass adds
//             the bias with dlogits and, where given, a factor c for each row:
//             dhidden = diag(c) (dlogits . weight),  dweight = dlogits^T . (diag(c) hidden),
//             dbias = dlogits^T . c
//             lora: u = lora_scale (hidden . lora_a^T), t = lora_scale (dlogits . lora_b):
//             dhidden += diag(c) (t . lora_a),  dlora_a = t^T . (diag(c) hidden),
//             dlora_b = dlogits^T . (diag(c) u)
// Shapes      hidden, dhidden [rows, H]; weight, dweight [V, H], any row stride; bias, dbias [V]; lora_a,
//             dlora_a [r, H]; lora_b, dlora_b [V, r]; target, position [rows]; index, labels, factor [count]
// Dtypes      hidden, weight, lora_a, lora_b f32 | bf16 | f16, the same; bias f32 or hidden's; dhidden
//             hidden's; dweight f32, or hidden's where one chunk takes all rows; dbias, dlora_a, dlora_b f32;
//             products accumulate in f32
// Rounding    logits to hidden's dtype (with lora twice, u and t once), or with wide_logits not at all;
//             dhidden once, and again where c is given, as are c hidden and c; dweight once by its product,
//             summed over chunks in f32 (In PyTorch on the CPU, bf16 products reach the f32 sum after one
//             rounding per chunk: aten's product is bf16.)
// Saved       nothing
// Aliasing    none between operands and results
// Determinism bitwise, run to run: chunks in order, one product at a time
// Traffic     per chunk: hidden and weight once or twice each, logits written once and read twice; of more
//             than one chunk dweight read and written in f32 per chunk after the first; listed rows: hidden
//             and dhidden once more each; loss_head_statistics: no logits, 8 bytes for a row and 256 of V
// Refused     sizes, dtypes or devices that do not fit, H < 1, V < 1, lora with one matrix or gradients
//             without lora; a dweight that is not f32 where chunks are summed; a group whose logits exceed 1
//             GiB; on the CPU labels outside [0, V) and a valid_rows that is not the count: tigon::Error
//             under the driver's name, before anything is written
#pragma once

#include <optional>
#include <vector>

#include "tigon/base/context.h"
#include "tigon/ops/loss_head/plan.h"

namespace tigon {

// How the losses of rows become one.
enum class Reduction : int { none = 0, mean = 1, sum = 2 };

// Names the operands of the linear layer, and the gradients that are wanted (empty: not). What a call does with
// it is named LossHead.
struct LinearHead {
  const char* op = "linear_head";  // named in errors
  Matrix hidden, weight;
  Vector bias;            // not added here: the row pass adds it in f32
  Matrix lora_a, lora_b;  // empty: none
  float lora_scale = 1.0f;
  bool wide_logits = false;  // logits in f32 from 16-bit operands: not even the product is rounded
  Matrix dhidden;
  Matrix dweight;
  bool add_dweight =
      false;  // dweight is added to its memory's contents (a gradient kept in f32 by its owner)
  // dweight is formed after all rows, of some classes at a time (engine.h): nothing of its size is summed.
  // The logits are formed twice, but for those of `kept_rows`.
  bool by_classes = false;
  int64_t kept_rows = 0;
  Vector dbias;
  Matrix dlora_a, dlora_b;

  bool wants_gradients() const {
    return dhidden.data || dweight.data || dbias || dlora_a.data || dlora_b.data;
  }
};
TIGON_API void loss_head_check(const LinearHead& a);

// Labels of positions in advance: the label of row r is that of row r + shift where both are in one sequence,
// else ignore_index. Rows are sequences of `length` behind one another; where several are packed into one row
// their position_ids restart, and a label counts where position_ids[r + shift] == position_ids[r] + shift.
struct LossHeadShift {
  int64_t shift = 0;         // 0: labels as they are
  int64_t length = 0;        // 0: all rows are one sequence
  Vector position_ids = {};  // i64 [rows]; empty: each sequence by itself
};

// Which rows count, and how many of them a chunk takes.
struct LossHeadLabels {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  int64_t valid_rows = -1;  // how many labels are not ignore_index; -1: not known
  int64_t chunk_rows = 0;   // 0: loss_head_chunk_rows
  LossHeadShift shift;      // position t against the label of t + k
};
// The labels of a driver's call: those given, or with a shift others in the context's memory.
TIGON_API LossHeadLabels loss_head_labels(Context& ctx, const char* op, const LossHeadLabels& given);

// z = softcap * tanh(logit_scale * logit / softcap) / temperature, or without a softcap logit_scale * logit /
// temperature.
struct LogitFormula {
  float softcap = 0.0f;  // 0: none
  float logit_scale = 1.0f;
  float temperature = 1.0f;
};
void loss_head_check(const char* op, const LogitFormula& f);

// How the losses of rows become one: their sum times scale = 1 / denominator.
struct LossReduction {
  Reduction kind = Reduction::mean;
  Vector denominator;  // [1] on the device; empty: none
  std::optional<double> host_denominator;
  Vector total, scale;  // out: f32 [1], mean and sum
};
void loss_head_check(const char* op, const LossReduction& r);

// The rows that a call works on, in order: all of them, or the list of those that count where the host knows
// their number (on the CPU always, on CUDA where valid_rows says it; the list is made on the device, nothing
// waits). Where the labels do not hold the promised number, `fault` is NaN and every label is made a wrong
// one, so that nothing computed from the list can pass for a result; `index` is inside [0, rows) always.
struct LossHeadRows {
  int64_t count = 0;    // rows worked on
  bool listed = false;  // false: all rows; index, position and fault are empty then
  Vector labels;        // i64 [count]
  Vector index;         // i64 [count], row of each; 0 beyond the true count
  Vector position;      // i64 [rows], place of each row in the list, -1: ignored
  Vector fault;         // f32 [1], 0 or NaN
};
TIGON_API LossHeadRows loss_head_rows(Context& ctx, const LinearHead& a, const LossHeadLabels& labels);

// Rows of a chunk of this call: `chunk_rows` where it is not 0, else loss_head_chunk_rows; at most `rows`.
// `lean` as in LossHeadSizes.
TIGON_API int64_t loss_head_limit(Context& ctx, const LinearHead& a, int64_t rows, int64_t chunk_rows,
                                  bool lean = true);
// Refuses a dweight that cannot take the sum over so many chunks.
TIGON_API void loss_head_check_chunks(const LinearHead& a, int64_t chunks);

// Chunks that hold groups whole, in order: as many groups as have no more than `limit` rows together. A
// longer group raises the limit to its own length, while its logits have no more than 1 GiB. Every group is
// in one chunk, an empty one too.
struct LossHeadSpan {
  int64_t begin = 0, count = 0;   // rows of the list
  int64_t group = 0, groups = 0;  // groups [group, group + groups)
};
TIGON_API int64_t loss_head_group_limit(const LinearHead& a, int64_t limit);  // most rows of a group
TIGON_API std::vector<LossHeadSpan> loss_head_plan(const LinearHead& a,
                                                   const std::vector<int64_t>& group_rows, int64_t limit);

// Memory of one chunk, used by all. Logits in f32 exist for a part of a chunk at a time (engine.h), which
// keeps them to the size of a small chunk's; what the row pass leaves for the products lies in `logits`.
struct LossHeadWorkspace {
  Matrix logits;           // [chunk, V], hidden's dtype
  Matrix wide;             // [part of a chunk, V] f32; empty: logits are in hidden's dtype
  Matrix hidden, dhidden;  // rows gathered or scaled; empty: the caller's own are used
  Matrix lora_u, lora_t;
  Vector ones, column;
};
struct LossHeadMemory {
  int64_t chunk = 0;        // most rows of a chunk
  bool logits = true;       // false: the driver sets each chunk's logits to memory of its own
  int64_t logits_rows = 0;  // most rows of a chunk without memory of its own; 0: chunk
  int64_t f32_rows = 0;     // of a part whose logits are f32 whatever hidden's dtype; 0: as wide_logits says
  bool factored = false;    // loss_head_gradients will be given factors
};
TIGON_API LossHeadWorkspace loss_head_workspace(Context& ctx, const LinearHead& a, const LossHeadRows& rows,
                                                const LossHeadMemory& memory);

// Views of rows [begin, begin + count) of the list. A driver may put memory of its own in `logits`: before
// loss_head_logits of hidden's dtype or f32, whose values are not rounded to 16 bits then; before
// loss_head_gradients of hidden's dtype, such as logits' gradients of an earlier call, and not `padded`.
struct LossHeadChunk {
  int64_t begin = 0, count = 0;
  Matrix logits;           // [count, V], hidden's dtype: logits (unless wide), then their gradients
  bool padded = false;     // on the CPU: zeros follow each of its rows (Gemm::padded_a)
  Matrix wide;             // [a part, V] f32
  Vector index;            // empty: rows begin, begin + 1, ...
  Matrix hidden, dhidden;  // operands of the products: gathered where the rows are listed
  bool gathered = true;    // hidden holds the rows already
  Matrix scaled;           // memory for factor * hidden
  Matrix lora_u, lora_t;
  bool has_u = false;   // lora_u holds u, which loss_head_logits makes; else loss_head_gradients makes it
  Vector ones, column;  // column: memory for the factor in hidden's dtype
};
TIGON_API LossHeadChunk loss_head_chunk(const LinearHead& a, const LossHeadRows& rows,
                                        const LossHeadWorkspace& workspace, int64_t begin, int64_t count);
// chunk.logits = the logits, in the dtype of that memory.
TIGON_API void loss_head_logits(Context& ctx, const LinearHead& a, LossHeadChunk& chunk);

// The logits of a part of a chunk, and where their gradients belong: the same memory unless logits are wide.
// `to` is empty where the chunk has no logits.
struct LossHeadPart {
  int64_t begin = 0, count = 0;  // rows of the list
  Matrix logits, to;
};
// The products of dlogits, which are only read. `first`: what is summed over chunks is written, not added to;
// nothing is zero-filled. With listed rows dhidden's other rows are the driver's (loss_head_clear).
struct LossHeadPass {
  bool first = true;
  Vector factor;  // f32 [count], of this chunk's rows; empty: 1
};
TIGON_API void loss_head_gradients(Context& ctx, const LinearHead& a, LossHeadChunk& chunk,
                                   const LossHeadPass& pass);
// Losses without gradients, where the device has the product for it (sm_90a, 16-bit rows of whole 16-byte
// vectors, no bias, lora or softcap): for the rows worked on max z, log of the sum of e^(z - max z) and the
// label's log-probability, f32 [3, count] as cross_entropy_combine takes them. Logits are not written, and
// the bits of a row depend on nothing but the row; they may differ in the last from those with gradients,
// so deterministic contexts do not take it. Returns false, with nothing done, elsewhere.
bool loss_head_statistics(Context& ctx, const LinearHead& a, const LossHeadRows& rows, const LogitFormula& f,
                          const Matrix& parts);
// Zeros where no product will write: dhidden of listed rows, and every gradient where no row is left.
TIGON_API void loss_head_clear(Context& ctx, const LinearHead& a, const LossHeadRows& rows);

// Part of a vector by row; [1] stands for all rows.
TIGON_API Vector loss_head_part(const Vector& v, int64_t begin, int64_t count);
// New ones in the context's memory.
TIGON_API Matrix loss_head_matrix(Context& ctx, int64_t rows, int64_t cols, int64_t stride, DType dtype);
TIGON_API Vector loss_head_vector(Context& ctx, int64_t n, DType dtype = DType::f32);

// out = in * dloss * scale (scale only where dlogits did not carry it: empty otherwise), rounded once. out
// may be in where scale is empty: then nothing is read or written for dloss 1.
struct LossHeadFinish {
  Matrix in;
  Vector dloss;  // f32 [1], on the device
  Vector scale;  // f32 [1], on the device; empty: 1
  Matrix out;
};
TIGON_API void loss_head_finish(Context& ctx, const LossHeadFinish& a);

// What loss_head_labels calls; by.length divides the rows.
struct LossHeadShifted {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  LossHeadShift by;
  Vector out;  // i64 [rows]
};

// The list of rows that count, from one pass over the labels: what loss_head_rows calls.
struct LossHeadCompact {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector index, labels, position, fault;  // out, as in LossHeadRows
};
TIGON_API void loss_head_compact(Context& ctx, const LossHeadCompact& a);

// Factor of each row in the list: token_weight * upstream * scale, what is empty counting as 1; 0 where the
// label is ignored.
struct LossHeadFactors {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector index;                          // empty: row i is row i
  Vector token_weight, upstream, scale;  // f32 [rows], [rows], [1]
  Vector out;                            // f32 [count]
};
TIGON_API void loss_head_factors(Context& ctx, const LossHeadFactors& a);

// Results of all rows from those of the list: to = factor * gain * from, or factor * gain * from * from, of
// rows that count; 0 of others (i64: -1), and NaN of all where the list has a fault (i64: -1). In place where
// the list is all rows.
struct LossHeadResult {
  Vector from;    // f32 | i64 [count]; i64 is copied
  Vector to;      // [rows], from's dtype
  Vector factor;  // f32 [rows]; empty: 1
  float gain = 1.0f;
  bool square = false;
};
struct LossHeadResults {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector position, fault;  // of the list; empty: the list is all rows
  LossHeadResult result[8];
  int count = 0;

  void add(const LossHeadResult& r) {
    if (r.to) result[count++] = r;
  }
};
TIGON_API void loss_head_results(Context& ctx, const LossHeadResults& a);

// Rows of a matrix by a list: gather to[i] = from[index[i]], scatter to[index[i]] = from[i]; times factor[i]
// where given. Columns that `to` has and `from` has not are 0 (products of 16-bit operands on CUDA want rows
// of whole 16-byte vectors); without a factor only. Same dtype, no overlap but as said.
struct LossHeadMove {
  Matrix from, to;
  Vector index;   // empty: row i is row i, from may be to then
  Vector factor;  // f32; empty: 1
  bool scatter = false;

  int64_t rows() const { return index ? index.size : factor ? factor.size : to.rows; }
};
TIGON_API void loss_head_move(Context& ctx, const LossHeadMove& a);

#define TIGON_LINEAR_HEAD_BACKEND                                 \
  void loss_head_finish(Context& ctx, const LossHeadFinish& a);   \
  void loss_head_ones(Context& ctx, Vector out);                  \
  void loss_head_zero(Context& ctx, const Matrix& out);           \
  void loss_head_shift(Context& ctx, const LossHeadShifted& a);   \
  void loss_head_compact(Context& ctx, const LossHeadCompact& a); \
  void loss_head_factors(Context& ctx, const LossHeadFactors& a); \
  void loss_head_results(Context& ctx, const LossHeadResults& a); \
  void loss_head_move(Context& ctx, const LossHeadMove& a);
namespace cpu {
TIGON_LINEAR_HEAD_BACKEND
}
namespace cuda {
TIGON_LINEAR_HEAD_BACKEND
bool loss_head_statistics(Context& ctx, const LinearHead& a, const LossHeadRows& rows, const LogitFormula& f,
                          const Matrix& parts);
}  // namespace cuda
#undef TIGON_LINEAR_HEAD_BACKEND

}  // namespace tigon
