// Computes the last linear layer of a language model and its gradients, one chunk of rows after another, for
// losses whose logits never exist as a whole. The ops linear_* share it; it has no loss of its own. Its
// functions are the steps of the loop over chunks in engine.h. A caller who has the logits of a chunk can
// also call a single step (operators.cpp).
// Formula     logits = hidden . weight^T (+ lora_scale (hidden . lora_a^T) . lora_b^T);  the row pass adds
//             the bias. With dlogits and, if given, a factor c for each row:
//             dhidden = diag(c) (dlogits . weight),  dweight = dlogits^T . (diag(c) hidden),
//             dbias = dlogits^T . c
//             lora: u = lora_scale (hidden . lora_a^T), t = lora_scale (dlogits . lora_b):
//             dhidden += diag(c) (t . lora_a),  dlora_a = t^T . (diag(c) hidden),
//             dlora_b = dlogits^T . (diag(c) u)
// Shapes      hidden, dhidden [rows, H]; weight, dweight [V, H], any row stride; bias, dbias [V]; lora_a,
//             dlora_a [r, H]; lora_b, dlora_b [V, r]; target, position [rows]; index, labels, factor [count]
// Dtypes      hidden, weight, lora_a, lora_b f32 | bf16 | f16, the same; bias f32 or hidden's; dhidden
//             hidden's; dweight f32, or hidden's if one chunk takes all rows; dbias, dlora_a, dlora_b f32;
//             GEMMs accumulate in f32
// Rounding    logits to hidden's dtype (with lora twice, u and t once), or with wide_logits not at all;
//             dhidden once, and again if c is given, as are c hidden and c; dweight once by its GEMM,
//             summed over chunks in f32. (In PyTorch on the CPU, bf16 GEMMs reach the f32 sum after one
//             rounding per chunk, since aten's GEMM returns bf16.)
// Saved       nothing
// Aliasing    none between operands and results
// Determinism bitwise, run to run: chunks in order, one GEMM at a time
// Traffic     per chunk: hidden and weight once or twice each, logits written once and read twice; of more
//             than one chunk dweight read and written in f32 per chunk after the first; listed rows: hidden
//             and dhidden once more each; loss_head_statistics: no logits, 8 bytes for a row and 256 of V
// Refused     sizes, dtypes or devices that do not fit, H < 1, V < 1, lora with one matrix or gradients
//             without lora; a dweight that is not f32 if chunks are summed; a group whose logits exceed 1
//             GiB; on the CPU labels outside [0, V) and a valid_rows that is not the count: tigon::Error
//             under the driver's name, before anything is written
#pragma once

#include <optional>
#include <vector>

#include "tigon/base/context.h"
#include "tigon/ops/loss_head/plan.h"

namespace tigon {

// Names the ways to make one loss of the losses of rows.
enum class Reduction : int { none = 0, mean = 1, sum = 2 };

// Names the operands of the linear layer, and the gradients that are wanted (empty: not wanted). A call with
// a loss is named LossHead (engine.h).
struct LinearHead {
  const char* op = "linear_head";  // is named in errors
  Matrix hidden, weight;
  Vector bias;            // is not added here: the row pass adds it in f32
  Matrix lora_a, lora_b;  // empty if absent
  float lora_scale = 1.0f;
  // If true, logits are f32 although operands have 16 bits: not even the result of the GEMM is rounded.
  bool wide_logits = false;
  Matrix dhidden;
  Matrix dweight;
  // If true, dweight is added to what its memory holds (a gradient that its owner keeps in f32).
  bool add_dweight = false;
  // If true, dweight is formed after all rows, for some classes at a time (engine.h), so that nothing of its
  // size is summed. The logits are then formed twice, except those of `kept_rows` rows.
  bool by_classes = false;
  int64_t kept_rows = 0;
  Vector dbias;
  Matrix dlora_a, dlora_b;

  bool wants_gradients() const {
    return dhidden.data || dweight.data || dbias || dlora_a.data || dlora_b.data;
  }
};
// Makes the refusals that concern the operands.
TIGON_API void loss_head_check(const LinearHead& a);

// Replaces each label by a later one: row r gets the label of row r + shift if both rows are in one sequence,
// and ignore_index otherwise. Rows are sequences of `length`, one after another. If several sequences are
// packed into one, their position_ids restart, and a label counts only if position_ids[r + shift] ==
// position_ids[r] + shift.
struct LossHeadShift {
  int64_t shift = 0;         // 0 leaves the labels as they are
  int64_t length = 0;        // 0 if all rows are one sequence
  Vector position_ids = {};  // i64 [rows]; empty if nothing is packed
};

// Says which rows count, and how many of them a chunk takes.
struct LossHeadLabels {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  int64_t valid_rows = -1;  // number of labels that are not ignore_index; -1 if not known
  int64_t chunk_rows = 0;   // 0 stands for loss_head_chunk_rows
  LossHeadShift shift;      // position t gets the label of t + shift
};
// Returns the labels of a driver's call: `given`, or with a shift new ones in the context's memory.
TIGON_API LossHeadLabels loss_head_labels(Context& ctx, const char* op, const LossHeadLabels& given);

// Says how logits become z = softcap * tanh(logit_scale * logit / softcap) / temperature, or without a
// softcap z = logit_scale * logit / temperature.
struct LogitFormula {
  float softcap = 0.0f;  // 0 if there is none
  float logit_scale = 1.0f;
  float temperature = 1.0f;
};
// Refuses numbers out of range.
void loss_head_check(const char* op, const LogitFormula& f);

// Says how the losses of rows become one: their sum times scale = 1 / denominator.
struct LossReduction {
  Reduction kind = Reduction::mean;
  Vector denominator;  // [1] on the device; empty if absent
  std::optional<double> host_denominator;
  Vector total, scale;  // out: f32 [1], for mean and sum
};
// Refuses results that do not fit the kind.
void loss_head_check(const char* op, const LossReduction& r);

// Lists the rows that a call works on, in order: all rows, or only those that count if the host knows their
// number. On the CPU it always does; on CUDA it does if valid_rows says it. The list is made on the device,
// and nothing waits for it. If the labels do not hold the promised number, `fault` is NaN and every label is
// replaced by a wrong one, so that nothing computed from the list can pass for a result. `index` is always
// inside [0, rows).
struct LossHeadRows {
  int64_t count = 0;    // rows worked on
  bool listed = false;  // if false, all rows; index, position and fault are empty
  Vector labels;        // i64 [count]
  Vector index;         // i64 [count], row of each place; 0 beyond the true count
  Vector position;      // i64 [rows], place of each row in the list; -1 if ignored
  Vector fault;         // f32 [1], 0 or NaN
};
// Checks the labels and makes the list of a call.
TIGON_API LossHeadRows loss_head_rows(Context& ctx, const LinearHead& a, const LossHeadLabels& labels);

// Returns the rows of a chunk of this call, at most `rows`: `chunk_rows` if it is not 0, else
// loss_head_chunk_rows. `lean` has the meaning of LossHeadSizes::lean.
TIGON_API int64_t loss_head_limit(Context& ctx, const LinearHead& a, int64_t rows, int64_t chunk_rows,
                                  bool lean = true);
// Refuses a dweight that cannot take the sum over so many chunks.
TIGON_API void loss_head_check_chunks(const LinearHead& a, int64_t chunks);

// Holds a chunk of whole groups. A chunk takes as many groups, in order, as have no more than `limit` rows
// together. A longer group raises the limit to its own length, as long as its logits take no more than 1 GiB.
// Every group is in one chunk, an empty one too.
struct LossHeadSpan {
  int64_t begin = 0, count = 0;   // rows of the list
  int64_t group = 0, groups = 0;  // groups [group, group + groups)
};
// Returns the most rows of a group.
TIGON_API int64_t loss_head_group_limit(const LinearHead& a, int64_t limit);
// Divides groups into chunks; group g has group_rows[g] rows.
TIGON_API std::vector<LossHeadSpan> loss_head_spans(const LinearHead& a,
                                                    const std::vector<int64_t>& group_rows, int64_t limit);

// Holds the memory of one chunk, which all chunks use. Logits in f32 exist only for a part of a chunk at a
// time (engine.h), so that they take no more than those of a small chunk. What the row pass leaves for the
// GEMMs is in `logits`.
struct LossHeadWorkspace {
  Matrix logits;           // [chunk, V], hidden's dtype
  Matrix wide;             // [part of a chunk, V] f32; empty if logits have hidden's dtype
  Matrix hidden, dhidden;  // gathered or scaled rows; the caller's are used if empty
  Matrix lora_u, lora_t;
  Vector ones, column;
};
// Says what memory a workspace needs.
struct LossHeadWorkspaceSizes {
  int64_t chunk = 0;        // most rows of a chunk
  bool logits = true;       // false if the driver gives each chunk memory for its logits
  int64_t logits_rows = 0;  // most rows of a chunk without such memory; 0 stands for chunk
  // Counts the rows of a part whose logits are f32 for every dtype of hidden; if it is 0, wide_logits
  // decides.
  int64_t f32_rows = 0;
  bool factored = false;  // true if loss_head_gradients will get factors
};
// Allocates the workspace of a call.
TIGON_API LossHeadWorkspace loss_head_workspace(Context& ctx, const LinearHead& a, const LossHeadRows& rows,
                                                const LossHeadWorkspaceSizes& memory);

// Holds views of rows [begin, begin + count) of the list. A driver may put memory of its own into `logits`.
// Before loss_head_logits it has hidden's dtype, or f32, and f32 values are then not rounded to 16 bits.
// Before loss_head_gradients it has hidden's dtype, such as the logits' gradients of an earlier call, and is
// not `padded`.
struct LossHeadChunk {
  int64_t begin = 0, count = 0;
  // Holds the logits (unless they are wide), then their gradients: [count, V] in hidden's dtype.
  Matrix logits;
  bool padded = false;     // CPU: true if zeros follow each of its rows (Gemm::padded_a)
  Matrix wide;             // [a part, V] f32
  Vector index;            // if empty, the rows are begin, begin + 1, ...
  Matrix hidden, dhidden;  // operands of the GEMMs: gathered if the rows are listed
  bool gathered = true;    // true if hidden holds the rows already
  Matrix scaled;           // memory for factor * hidden
  Matrix lora_u, lora_t;
  // True if lora_u holds u, which loss_head_logits makes; otherwise loss_head_gradients makes it.
  bool has_u = false;
  Vector ones, column;  // column is memory for the factor in hidden's dtype
};
// Returns the views of a chunk.
TIGON_API LossHeadChunk loss_head_chunk(const LinearHead& a, const LossHeadRows& rows,
                                        const LossHeadWorkspace& workspace, int64_t begin, int64_t count);
// Computes the logits of a chunk into chunk.logits, in the dtype of that memory.
TIGON_API void loss_head_logits(Context& ctx, const LinearHead& a, LossHeadChunk& chunk);

// Holds the logits of a part of a chunk, and the place of their gradients: the same memory unless the logits
// are wide. `to` is empty if the chunk has no logits.
struct LossHeadPart {
  int64_t begin = 0, count = 0;  // rows of the list
  Matrix logits, to;
};
// Says how the GEMMs of the gradients run, which only read dlogits. With `first` what is summed over chunks
// is written, not added to, so nothing is filled with zeros before. If rows are listed, the driver writes the
// other rows of dhidden (loss_head_clear).
struct LossHeadPass {
  bool first = true;
  Vector factor;  // f32 [count], for this chunk's rows; 1 if empty
};
// Computes what a chunk contributes to the gradients.
TIGON_API void loss_head_gradients(Context& ctx, const LinearHead& a, LossHeadChunk& chunk,
                                   const LossHeadPass& pass);
// Computes the statistics of the logits for losses without gradients, if the device has the GEMM for it
// (sm_90a, 16-bit rows of whole 16-byte vectors, no bias, lora or softcap). Otherwise it does nothing and
// returns false. For each row worked on `parts` gets max z, the log of the sum of e^(z - max z), and the
// label's log-probability: f32 [3, count], as cross_entropy_combine takes them. Logits are not written. The
// bits of a row depend on the row only. They may differ in the last place from those of a call with
// gradients, so deterministic contexts do not use it.
bool loss_head_statistics(Context& ctx, const LinearHead& a, const LossHeadRows& rows, const LogitFormula& f,
                          const Matrix& parts);
// Writes zeros after each row of logits in the head's own memory, for the GEMMs on the CPU
// (LossHeadChunk::padded).
void loss_head_pad(Context& ctx, const Matrix& logits);
// Writes zeros where no GEMM will write: to dhidden of listed rows, and to every gradient if no row is left.
TIGON_API void loss_head_clear(Context& ctx, const LinearHead& a, const LossHeadRows& rows);

// Returns a slice of a vector by row; a vector of size 1 stands for all rows and is returned as it is.
TIGON_API Vector loss_head_slice(const Vector& v, int64_t begin, int64_t count);
// Allocates a matrix or a vector in the context's memory.
TIGON_API Matrix loss_head_matrix(Context& ctx, int64_t rows, int64_t cols, int64_t stride, DType dtype);
TIGON_API Vector loss_head_vector(Context& ctx, int64_t n, DType dtype = DType::f32);

// Computes out = in * dloss * scale, rounded once. `scale` is given only if dlogits did not carry it. If it
// is empty, `out` may be `in`; then nothing is read or written if dloss is 1.
struct LossHeadFinish {
  Matrix in;
  Vector dloss;  // f32 [1], on the device
  Vector scale;  // f32 [1], on the device; 1 if empty
  Matrix out;
};
TIGON_API void loss_head_finish(Context& ctx, const LossHeadFinish& a);

// Shifts labels for loss_head_labels; by.length divides the rows.
struct LossHeadShifted {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  LossHeadShift by;
  Vector out;  // i64 [rows]
};

// Makes the list of rows that count for loss_head_rows, in one pass over the labels.
struct LossHeadCompact {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector index, labels, position, fault;  // out, as in LossHeadRows
};
TIGON_API void loss_head_compact(Context& ctx, const LossHeadCompact& a);

// Computes the factor of each row in the list: token_weight * upstream * scale, of which an empty one counts
// as 1. The factor is 0 if the label is ignored.
struct LossHeadFactors {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector index;                          // if empty, place i is row i
  Vector token_weight, upstream, scale;  // f32 [rows], [rows], [1]
  Vector out;                            // f32 [count]
};
TIGON_API void loss_head_factors(Context& ctx, const LossHeadFactors& a);

// Describes one result of all rows, made from that of the list. Rows that count get to = factor * gain *
// from, or factor * gain * from * from; other rows get 0 (i64: -1). If the list has a fault, all rows get NaN
// (i64: -1). It works in place if the list is all rows.
struct LossHeadResult {
  Vector from;    // f32 | i64 [count]; i64 is copied
  Vector to;      // [rows], from's dtype
  Vector factor;  // f32 [rows]; 1 if empty
  float gain = 1.0f;
  bool square = false;
};
// Writes up to eight such results in one pass.
struct LossHeadResults {
  Vector target;  // i64 [rows]
  int64_t ignore_index = -100;
  Vector position, fault;  // as in LossHeadRows; empty if the list is all rows
  LossHeadResult result[8];
  int count = 0;

  void add(const LossHeadResult& r) {
    if (r.to) result[count++] = r;
  }
};
TIGON_API void loss_head_results(Context& ctx, const LossHeadResults& a);

// Moves rows of a matrix by a list: it gathers to[i] = from[index[i]], or scatters to[index[i]] = from[i],
// times factor[i] if it is given. If `to` has more columns than `from`, they become 0, which only works
// without a factor (16-bit GEMMs on CUDA want rows of whole 16-byte vectors). Both have one dtype and do not
// overlap, except as said.
struct LossHeadMove {
  Matrix from, to;
  Vector index;   // if empty, row i is row i, and `from` may be `to`
  Vector factor;  // f32; 1 if empty
  bool scatter = false;

  int64_t rows() const { return index ? index.size : factor ? factor.size : to.rows; }
};
TIGON_API void loss_head_move(Context& ctx, const LossHeadMove& a);

#define TIGON_LOSS_HEAD_BACKEND                                   \
  void loss_head_finish(Context& ctx, const LossHeadFinish& a);   \
  void loss_head_ones(Context& ctx, Vector out);                  \
  void loss_head_zero(Context& ctx, const Matrix& out);           \
  void loss_head_shift(Context& ctx, const LossHeadShifted& a);   \
  void loss_head_compact(Context& ctx, const LossHeadCompact& a); \
  void loss_head_factors(Context& ctx, const LossHeadFactors& a); \
  void loss_head_results(Context& ctx, const LossHeadResults& a); \
  void loss_head_move(Context& ctx, const LossHeadMove& a);
namespace cpu {
TIGON_LOSS_HEAD_BACKEND
}
namespace cuda {
TIGON_LOSS_HEAD_BACKEND
bool loss_head_statistics(Context& ctx, const LinearHead& a, const LossHeadRows& rows, const LogitFormula& f,
                          const Matrix& parts);
}  // namespace cuda
#undef TIGON_LOSS_HEAD_BACKEND

}  // namespace tigon
