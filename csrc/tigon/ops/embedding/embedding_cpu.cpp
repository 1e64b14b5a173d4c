#include <algorithm>
#include <cstring>

#include "tigon/base/check.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/ops/embedding/embedding.h"

namespace tigon::cpu {
namespace {

struct EmbeddingKernels {
  void (*gather)(const void* weight, void* y, int64_t cols, float scale);
  void (*add)(const void* dy, float* sum, int64_t cols, bool first);
  void (*store)(const float* sum, void* dweight, int64_t cols, float scale);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/embedding/embedding_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kElementsPerTask = 16384;
constexpr int64_t kColumns = 1024,
                  // A task adds this many rows to one sum before that joins its token's.
    kPart = 64;

int64_t id_at(const Vector& ids, int64_t i) {
  return ids.dtype == DType::i64 ? ids.as<int64_t>()[i] : int64_t(ids.as<int32_t>()[i]);
}

void check_ids(const char* op, const Vector& ids, int64_t vocabulary) {
  for (int64_t i = 0; i < ids.size; ++i) {
    int64_t id = id_at(ids, i);
    TIGON_CHECK(op, id >= 0 && id < vocabulary, "ids must be in [0, ", vocabulary, "), got ", id);
  }
}

}  // namespace

void embedding_fwd(Context& ctx, const EmbeddingFwd& a) {
  check_ids("embedding", a.ids, a.weight.rows);
  auto gather = TIGON_SELECT(embedding_table)[a.weight.dtype].gather;
  int64_t tokens = a.ids.size, cols = a.weight.cols, group = std::max<int64_t>(1, kElementsPerTask / cols);
  parallel(ctx, (tokens + group - 1) / group, [&](int64_t task) {
    for (int64_t i = task * group, end = std::min(tokens, i + group); i < end; ++i)
      gather(element_at(a.weight, id_at(a.ids, i), 0), element_at(a.y, i, 0), cols, a.scale);
  });
}

// Positions are sorted by id (a count, a prefix sum, a scatter). Then each task takes some ids and some
// columns.
void embedding_bwd(Context& ctx, const EmbeddingBwd& a) {
  check_ids("embedding_bwd", a.ids, a.dweight.rows);
  const EmbeddingKernels& k = TIGON_SELECT(embedding_table)[a.dweight.dtype];
  int64_t tokens = a.ids.size, rows = a.dweight.rows, cols = a.dweight.cols;
  // begin[v + 1] is where the positions of id v begin while they are scattered; each moves on to the next
  // begin.
  int32_t* begin = ctx.scratch_of<int32_t>(rows + 2);
  int32_t* order = ctx.scratch_of<int32_t>(tokens);
  std::fill(begin, begin + rows + 2, 0);
  for (int64_t i = 0; i < tokens; ++i) ++begin[id_at(a.ids, i) + 2];
  for (int64_t v = 2; v < rows + 2; ++v) begin[v] += begin[v - 1];
  for (int64_t i = 0; i < tokens; ++i) order[begin[id_at(a.ids, i) + 1]++] = int32_t(i);

  int64_t blocks = (cols + kColumns - 1) / kColumns, width = std::min(cols, kColumns);
  int64_t group = std::max<int64_t>(1, kElementsPerTask / width);
  parallel(ctx, (rows + group - 1) / group * blocks, [&](int64_t task) {
    float sum[kColumns], part[kColumns];
    int64_t first = task / blocks * group, col = task % blocks * width, n = std::min(width, cols - col);
    for (int64_t v = first, last = std::min(rows, first + group); v < last; ++v) {
      int64_t from = begin[v], to = v == a.padding_idx ? from : begin[v + 1];
      char* out = element_at(a.dweight, v, col);
      if (from == to) {
        if (a.add) continue;
        std::memset(out, 0, size_t(n) * size_of(a.dweight.dtype));
        continue;
      }
      for (int64_t i = from; i < to; i += kPart) {
        float* into = i == from ? sum : part;
        for (int64_t j = i, end = std::min(to, i + kPart); j < end; ++j)
          k.add(element_at(a.dy, order[j], col), into, n, j == i);
        if (into == part) TIGON_SELECT(embedding_table)[DType::f32].add(part, sum, n, false);
      }
      if (a.add) k.add(out, sum, n, false);
      k.store(sum, out, n, a.scale);
    }
  });
}

}  // namespace tigon::cpu

namespace tigon {

TIGON_OP(embedding, Embedding)

namespace {

// PyTorch's operator of a gradient that is added.
struct Added : EmbeddingBwd {
  void fields(Fields& f) {
    f.rows("dy", dy, 0);
    f.input("ids", ids, ids.size, ids.dtype);
    f.updated("dweight", dweight, Role::rows);
    require_embedding(f, ids, "dweight", dweight.rows);
    f.require(dweight.dtype == dy.dtype && dweight.cols == dy.cols && dweight.stride == dweight.cols,
              "dweight must be dense, of dy's dtype and columns");
    f.option("padding_idx", padding_idx);
    add = true;
  }
};
void add_rows(Context& ctx, const Added& a) {
  if (a.ids.size > 0 && a.dy.cols > 0) TIGON_RUN("embedding_add_", ctx, embedding_bwd, a);
}
TIGON_OPERATOR(add_rows, Added, "embedding_add_", none)

}  // namespace

}  // namespace tigon
