// The one loop over chunks that the losses of a linear head share. loss_head_run divides the rows, holds the
// memory, makes the logits, forms the gradients and writes the results; a loss is a RowPass, which sees the
// logits of some rows at a time.
// What differs among the losses:
//   loss          chunks                      logits                     second logits        products take
//   labels        any rows that count; kept   hidden's dtype, or f32     none                 dlogits
//                 rows come first             a part at a time
//   their rows'   kept rows as long as their  made, kept, or none:       none                 dlogits, and a
//   gradients     memory, then as above       dlogits were kept                               factor if kept
//   divergence    as labels; no longer than   f32, a part at a time      the teacher's, of a  dlogits
//                 a part without gradients                               part
//   drafter       the same, of whole rows of  of a chunk                 the teacher's, of a  dlogits
//                 the teacher                                            part
//   token losses  whole groups if they fit,   of a chunk; if a group     a reference's, all   a factor that
//                 pairs side by side          fits none, forth and back  chunks before        formulas find
//   contrastive   any rows, all of them       of a chunk                 a guide's, a chunk   dlogits
// Rows, chunks, kept rows, groups and the reference are the engine's: LossHead declares them. A second head
// is the loss's own: it makes those logits in rows(), for the rows that it is given. That is enough for
// divergences and drafters, whose parts are no longer than the memory of the teacher's logits.
// Order   check, list of rows, plan, begin(), scale, clear, memory(), workspace, reference; of each chunk
//         logits, rows(), gradient(), products; turn(); results, finish(), total. All refusals come before
//         the first write, in begin() at the latest.
// By classes (LinearHead::by_classes) dweight waits until the rows are done. Then the logits of some classes
// of all rows are formed once more, in the memory of a chunk; the pass makes their gradients from the lse and
// log-probability that it has of each row, and one product gives those rows of dweight. Kept rows have
// their gradients already.
#pragma once

#include "tigon/ops/cross_entropy/cross_entropy.h"
#include "tigon/ops/loss_head/loss_head.h"

namespace tigon {

// Rows whose logits have memory of the caller's: the first `dlogits.rows` of those worked on.
struct LossHeadKept {
  enum class Holds : int8_t { nothing, logits, gradients };
  Matrix dlogits;  // empty: none
  Holds holds = Holds::nothing;
  bool overwrite = false;  // kept logits become their gradients in place
};

// Rows of which some depend on each other: row = answer * tokens + token.
struct LossHeadGroups {
  int64_t answers = 0, tokens = 0;
  bool pairs = false;    // a group is answer g of the first half and answer g of the second; else an answer
  bool coupled = false;  // rows of a group depend on each other

  int64_t count() const { return pairs ? answers / 2 : answers; }
};

struct LossHead {
  LinearHead head;
  LossHeadLabels labels;  // as loss_head_labels gives them
  bool labelled = true;   // false: all rows count, of `labels` chunk_rows is looked at
  LossReduction reduction = {.kind = Reduction::none};
  Vector class_weight;      // of a mean's denominator
  Vector mean_target;       // labels whose number a mean divides by; empty: those of `labels`
  Vector loss;              // f32 [rows], whose total the reduction wants
  Vector token_weight;      // factor of a row's gradient; empty: 1
  Vector upstream;          // f32 [rows], factor of a row's gradient instead of scale
  bool unit = false;        // the gradients are those of an upstream of 1
  int64_t classes = 0;      // rows of the caller's weight, where `head` has some of them; 0: it has all
  int64_t together = 1;     // rows of the list that share a chunk and a part
  bool f32_logits = false;  // logits in f32 memory of a part, whatever hidden's dtype
  LossHeadKept kept;
  std::optional<LossHeadGroups> groups;
  // A second head of the same labels, all of whose chunks come first; hidden empty: none.
  LinearHead reference;
};

// A call on its way: what the rows of a loss need to know.
struct LossHeadRun {
  Context& ctx;
  const LossHead& a;
  LossHeadRows rows;
  std::vector<LossHeadSpan> spans;  // chunks; a loss that needs no logits clears them in memory()
  int64_t limit = 0;                // most rows of a chunk; of groups, where they fit
  int64_t part = 0;                 // most rows at a time
  int64_t kept = 0;                 // rows whose logits have memory of the caller's
  bool whole = true;                // no chunk cuts a group whose rows depend on each other
  bool factored = false;            // gradient() will give factors; set by memory()
  bool by_classes = false;          // dweight comes last, by classes; head.dweight is empty
  LossHeadResults results = {};
  bool writes = false;  // results have to be written where the rows are not listed too

  // Rows go forth in all chunks and back in all: gradients depend on rows of other chunks, or are not wanted.
  bool wants_gradients() const { return a.head.wants_gradients() || by_classes; }
  bool twice() const { return a.groups && !(whole && a.head.wants_gradients()); }
  // Where a pass leaves a result of the rows worked on, which reaches `to` at the end, times factor.
  // `zeroed`: it leaves 0 for rows that do not count.
  Vector result(const Vector& to, const Vector& factor = {}, bool zeroed = true);
  // The factor of each row's gradient: upstream or scale, times token_weight.
  Vector factor() const;
};

// Classes [first, first + logits.cols) of `count` rows of the list.
struct LossHeadClasses {
  int64_t first = 0, begin = 0, count = 0;
  Matrix logits;
};
// What is known of whole rows, for gradients of some of their classes: by place.
struct LossHeadWhole {
  Vector lse, log_prob, entropy;
  Vector weight_sum;  // f32 [1], of class_weight with label smoothing
};
// A row pass over all classes, as one over some: its logits become their gradients.
void loss_head_gradient(const LossHeadRun& run, const LossHeadClasses& c, CrossEntropyRows pass,
                        const LossHeadWhole& whole);

// What a loss makes of logits.
class RowPass {
 public:
  virtual ~RowPass() = default;
  // Most rows at a time, of so many that are worked on.
  virtual int64_t part(Context&, int64_t rows) { return rows; }
  // The last checks, which need the plan.
  virtual void begin(LossHeadRun&) {}
  // Takes the loss's own memory.
  virtual void memory(LossHeadRun& run) = 0;
  // The reference's logits of a chunk.
  virtual void reference(const LossHeadRun&, const LossHeadPart&) {}
  // The logits of some rows; where gradients are wanted, theirs belong in part.to.
  virtual void rows(const LossHeadRun& run, const LossHeadPart& part) = 0;
  // After the rows of a chunk, before its products: what each row's gradients are multiplied by; empty: 1. A
  // pass that left no gradients in rows() makes them here. Of groups without a row `chunk` has none.
  virtual Vector gradient(const LossHeadRun&, const LossHeadSpan&, const LossHeadPart&) { return {}; }
  // The gradients of some classes' logits, in their place; only with LossHeadRun::by_classes.
  virtual void classes(const LossHeadRun&, const LossHeadClasses&) {}
  // All rows have gone forth (LossHeadRun::twice), or there is none.
  virtual void turn(const LossHeadRun&) {}
  virtual void finish(const LossHeadRun&) {}
};

void loss_head_run(Context& ctx, const LossHead& a, RowPass& pass);

// A list of rows with the answers of a pair side by side: chosen, then rejected. `compact`: only rows that
// count (on the CPU).
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
