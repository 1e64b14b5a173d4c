// Defines PyTorch's operators of single steps of a head. tigon.parallel uses them, since its processes
// exchange data between GEMMs, and so do losses that are functions of Python.
#include "tigon/ops/loss_head/fields.h"

namespace tigon {
namespace {

// Runs the GEMMs of a caller's chunk: either its logits, or the gradients of its dlogits, which are only
// read.
template <bool backward>
struct ChunkGemms {
  LinearHead head = {.op = "linear_cross_entropy"};
  Matrix logits;
  LossHeadPass pass;
  bool padded = false;  // as LossHeadChunk::padded, of dlogits

  void fields(Fields& f) {
    f.padded_rows(backward ? "dlogits" : "logits", logits, !backward);
    f.rows("hidden", head.hidden), f.input("weight", head.weight);
    if (backward) {
      f.updated("dhidden", head.dhidden), f.updated("dweight", head.dweight), f.updated("dbias", head.dbias);
      f.optional("factor", pass.factor), f.option("first", pass.first),
          f.option("add_dweight", head.add_dweight), f.option("padded", padded);
    }
    f.optional("lora_a", head.lora_a), f.optional("lora_b", head.lora_b),
        f.option("lora_scale", head.lora_scale);
    if (backward) f.updated("dlora_a", head.dlora_a), f.updated("dlora_b", head.dlora_b);
  }
  static void run(Context& ctx, const ChunkGemms& p) {
    loss_head_check(p.head);
    loss_head_check_chunks(p.head, p.pass.first ? 1 : 2);
    LossHeadRows all = {.count = p.head.hidden.rows};
    LossHeadWorkspace workspace = loss_head_workspace(
        ctx, p.head, all, {.chunk = all.count, .logits = false, .factored = bool(p.pass.factor)});
    LossHeadChunk c = loss_head_chunk(p.head, all, workspace, 0, all.count);
    c.logits = p.logits, c.padded = p.padded;
    backward ? loss_head_gradients(ctx, p.head, c, p.pass) : loss_head_logits(ctx, p.head, c);
  }
};
using Logits = ChunkGemms<false>;
using Gradients = ChunkGemms<true>;
TIGON_CALL(Logits, "loss_head_logits", none)
TIGON_CALL(Gradients, "loss_head_gradients", none)

// Copies the rows of x to `columns` columns: zeros are appended, or the rest is cut off.
struct Columns {
  LossHeadMove call;
  int64_t columns = 0;

  void fields(Fields& f) {
    f.rows("x", call.from), f.option("columns", columns);
    f.result("y", call.to, call.from, call.from.rows, std::max<int64_t>(columns, 0));
  }
};
void columns(Context& ctx, const Columns& a) {
  TIGON_CHECK("linear_cross_entropy", a.columns >= 1, "columns must be >= 1, got ", a.columns);
  loss_head_move(ctx, a.call);
}
TIGON_OPERATOR(columns, Columns, "linear_cross_entropy_columns", forward)

// Lists the rows whose label counts, in order.
struct List {
  LossHeadCompact call;
  int64_t count = 0;

  void fields(Fields& f) {
    f.input("target", call.target), f.option("ignore_index", call.ignore_index);
    f.option("count", count);
    f.result("index", call.index, count, DType::i64), f.result("labels", call.labels, count, DType::i64);
    f.number("fault", call.fault);
  }
};
void list(Context& ctx, const List& a) {
  LossHeadCompact call = a.call;
  call.position = loss_head_vector(ctx, call.target.size, DType::i64);
  loss_head_compact(ctx, call);
}
TIGON_OPERATOR(list, List, "linear_loss_rows", none)

}  // namespace
}  // namespace tigon
