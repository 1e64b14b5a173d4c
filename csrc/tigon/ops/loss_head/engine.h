// Declares the loop over chunks that all losses of a linear head share. loss_head_run divides the rows, holds
// the memory, makes the logits, forms the gradients and writes the results. A loss is a RowPass: it reads the
// logits of some rows at a time, and writes the losses of these rows and the gradients of their logits.
// The words of this file:
//   A row counts if its label is not ignore_index.
//   A chunk is a set of rows whose logits lie in memory together; all chunks share this memory.
//   A part is a piece of a chunk: the rows that a RowPass reads at once.
//   Kept rows have memory of their own for their logits or the gradients of these, which outlives the chunk.
//   A group is a set of rows that one loss needs together, such as the tokens of an answer.
// The table below says how the losses differ. It has a line for each loss and answers four questions. Which
// rows does a chunk hold? In which form do the logits exist, and how many at once? Which other logits does
// the loss compare them with? What do the GEMMs of the gradients take: only dlogits as the loss wrote them,
// or also a factor for each row (RowPass::gradient)?
//   loss          rows of a chunk             logits                     other logits         GEMMs take
//   labels        rows that count; kept       hidden's dtype, or f32     none                 dlogits
//                 rows come first             for a part at a time
//   backward of   kept rows come first, in    read if they were kept;    none                 dlogits; for
//   per-row       one chunk if dlogits were   none if dlogits were                            kept dlogits
//   losses        kept; then as labels        kept; else made again                           also a factor
//   divergence    as labels; without          f32, a part at a time      the teacher's, a     dlogits
//                 gradients at most a part                               part at a time
//   drafter       as divergence; all draft    a chunk at a time          the teacher's, a     dlogits
//                 rows of a teacher's row                                part at a time
//                 share a chunk
//   token losses  whole groups if each fits   a chunk at a time; made    a reference's, for   dlogits and a
//                 a chunk, else any rows      twice if a group fits no   all chunks before    factor from
//                                             chunk                      the first            the formula
//   contrastive   any rows, all of them       a chunk at a time          a guide's, a chunk   dlogits
//                                                                        at a time
// The engine handles rows, chunks, kept rows, groups and the reference: the members of LossHead say what a
// loss wants of them. A loss makes the logits of a second head by itself in rows(), for the rows that it is
// given. This suffices for divergences and drafters, whose parts are no longer than the memory of the
// teacher's logits.
// Order   checks, list of rows, plan, begin(), scale, clear, memory(), workspace, reference; for each chunk
//         logits, rows(), gradient(), GEMMs; turn(); results, finish(), total. All refusals come before the
//         first write, in begin() at the latest.
// If LinearHead::by_classes is set, dweight is formed after all rows. The logits of some classes of all rows
// are then formed once more, in the memory of a chunk. RowPass::classes() turns them into their gradients,
// from the lse and the log-probability that it has of each row, and one GEMM gives the rows of dweight that
// belong to these classes. Kept rows have their gradients already.
#pragma once

#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/loss_head/loss_head.h"

namespace tigon {

// Says which rows are kept: the first `dlogits.rows` of the rows worked on.
struct LossHeadKept {
  enum class Holds : int8_t { nothing, logits, gradients };
  Matrix dlogits;  // empty if no row is kept
  Holds holds = Holds::nothing;
  bool overwrite = false;  // kept logits become their gradients in place
  bool padded = false;     // as in LossHeadChunk
};

// Describes rows of which some depend on each other: row = answer * tokens + token.
struct LossHeadGroups {
  int64_t answers = 0, tokens = 0;
  // If true, group g is the pair of answer g of the first half and answer g of the second half. Otherwise a
  // group is an answer.
  bool pairs = false;
  bool coupled = false;  // true if rows of a group depend on each other

  int64_t count() const { return pairs ? answers / 2 : answers; }
};

// Holds the arguments of a call: the linear layer, its labels, and what the loss wants of the engine.
struct LossHead {
  LinearHead head;
  LossHeadLabels labels;  // as loss_head_labels gives them
  // If false, all rows count, and only chunk_rows of `labels` is used.
  bool labelled = true;
  LossReduction reduction = {.kind = Reduction::none};
  Vector class_weight;  // enters the denominator of a mean
  // Holds the labels whose number a mean divides by; if it is empty, they are those of `labels`.
  Vector mean_target;
  Vector loss;          // f32 [rows], which the reduction adds up
  Vector token_weight;  // f32 [rows], factor of each row's gradient; 1 if empty
  Vector upstream;      // f32 [rows], factor of each row's gradient, instead of scale
  bool unit = false;    // true if the gradients belong to an upstream gradient of 1
  // Counts the rows of the caller's weight if `head` has only some of them; 0 if it has all.
  int64_t classes = 0;
  int64_t together = 1;     // this many adjacent rows share a chunk and a part
  bool f32_logits = false;  // logits are f32, a part at a time, for every dtype of hidden
  LossHeadKept kept;
  std::optional<LossHeadGroups> groups;
  // Holds a second head with the same labels. All its chunks come before the first one of `head`. If its
  // hidden is empty, there is no second head.
  LinearHead reference;
};

// Holds the state of a call while it runs: what a RowPass needs to know.
struct LossHeadRun {
  Context& ctx;
  const LossHead& a;
  LossHeadRows rows;
  std::vector<LossHeadSpan> spans;  // chunks; begin() or memory() clears them if no logits are needed
  int64_t limit = 0;                // most rows of a chunk; a group may raise it
  int64_t part = 0;                 // most rows of a part
  int64_t kept = 0;                 // number of kept rows, which come first in the list
  bool whole = true;                // true if no chunk cuts a group whose rows depend on each other
  bool factored = false;            // memory() sets it if gradient() will return factors
  bool by_classes = false;          // dweight is formed last, by classes; head.dweight is empty
  LossHeadResults results = {};
  // True if results have to be written even if the rows are not listed.
  bool writes = false;

  bool wants_gradients() const { return a.head.wants_gradients() || by_classes; }
  // True if all chunks go forward before any gradient is formed: gradients depend on rows of other chunks, or
  // no chunk forms any. If they are wanted, the chunks then go back, from the last one to the first.
  bool twice() const { return a.groups && !(whole && a.head.wants_gradients()); }
  // Returns the memory where a pass leaves a result of the rows worked on. At the end it reaches `to`, times
  // `factor`. `zeroed` says that the pass leaves 0 for rows that do not count.
  Vector result(const Vector& to, const Vector& factor = {}, bool zeroed = true);
  // Returns the factor of each row's gradient: upstream or scale, times token_weight.
  Vector factor() const;
};

// Holds the logits of classes [first, first + logits.cols), for rows [begin, begin + count) of the list.
struct LossHeadClasses {
  int64_t first = 0, begin = 0, count = 0;
  Matrix logits;
};
// Holds what is known of whole rows, by place in the list. The gradients of some of their classes need it.
struct LossHeadWhole {
  Vector lse, log_prob, entropy;
  Vector weight_sum;  // f32 [1], sum of class_weight, for label smoothing
};
// Runs a row pass that was made for all classes over some of them: it replaces their logits by their
// gradients.
void loss_head_class_gradient(const LossHeadRun& run, const LossHeadClasses& c, CrossEntropyRows pass,
                              const LossHeadWhole& whole);

// Defines a loss: what it makes of logits. The engine calls these hooks in the order above.
class RowPass {
 public:
  virtual ~RowPass() = default;
  // Returns the most rows of a part if `rows` rows are worked on.
  virtual int64_t part(Context&, int64_t rows) { return rows; }
  // Makes the last checks, which need the plan.
  virtual void begin(LossHeadRun&) {}
  // Takes the loss's own memory.
  virtual void memory(LossHeadRun& run) = 0;
  // Reads the reference's logits of a chunk.
  virtual void reference(const LossHeadRun&, const LossHeadPart&) {}
  // Reads the logits of some rows. If gradients are wanted, it writes the gradients of the logits to part.to.
  virtual void rows(const LossHeadRun& run, const LossHeadPart& part) = 0;
  // Is called after the rows of a chunk and before its GEMMs. Returns the factors by which the GEMMs multiply
  // each row's gradients; empty stands for 1. A pass that left no gradients in rows() makes them here. If no
  // row of the groups counts, the part is empty.
  virtual Vector gradient(const LossHeadRun&, const LossHeadSpan&, const LossHeadPart&) { return {}; }
  // Replaces the logits of some classes by their gradients. Is called only if LossHeadRun::by_classes is set.
  virtual void classes(const LossHeadRun&, const LossHeadClasses&) {}
  // Is called when all chunks have gone forward (LossHeadRun::twice), or if there is no chunk.
  virtual void turn(const LossHeadRun&) {}
  // Is called at the end, after the results have been written and before the total is computed.
  virtual void finish(const LossHeadRun&) {}
};

// Runs a call: the loop over chunks with the hooks of `pass`.
void loss_head_run(Context& ctx, const LossHead& a, RowPass& pass);

// Makes a list of rows in which the answers of a pair are side by side: chosen, then rejected. With `compact`
// (on the CPU) it holds only rows that count.
struct LossHeadPairs {
  Vector target;  // i64 [2 * pairs * tokens]
  int64_t ignore_index = -100, pairs = 0, tokens = 0;
  bool compact = false;
  Vector index, labels, position;  // out, as in LossHeadRows
};
namespace cpu {
void loss_head_pairs(Context& ctx, const LossHeadPairs& a);
}  // namespace cpu
namespace cuda {
void loss_head_pairs(Context& ctx, const LossHeadPairs& a);
}  // namespace cuda

}  // namespace tigon
