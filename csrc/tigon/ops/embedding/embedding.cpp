#include "tigon/ops/embedding/embedding.h"

#include "tigon/base/require.h"

namespace tigon {
namespace {

void check(const char* op, const Vector& ids, const char* table, const Matrix& weight, const char* result,
           const Matrix& y) {
  require_float(op, table, weight.dtype);
  TIGON_CHECK(op, ids.dtype == DType::i64 || ids.dtype == DType::i32, "ids must be int64 or int32, got ",
              name_of(ids.dtype));
  require_matrix(op, result, y, ids.size, weight.cols, weight.dtype);
  constexpr int64_t kMost = (int64_t(1) << 31) - 1;
  TIGON_CHECK(op, ids.size < kMost, "ids must have fewer than 2^31 elements, got ", ids.size);
  TIGON_CHECK(op, weight.rows < kMost, table, " must have fewer than 2^31 rows, got ", weight.rows);
}

}  // namespace

void embedding_fwd(Context& ctx, const EmbeddingFwd& a) {
  const char* op = "embedding";
  check(op, a.ids, "weight", a.weight, "y", a.y);
  if (a.ids.size == 0 || a.weight.cols == 0) return;
  TIGON_RUN(op, ctx, embedding_fwd, a);
}

void embedding_bwd(Context& ctx, const EmbeddingBwd& a) {
  const char* op = "embedding_bwd";
  check(op, a.ids, "dweight", a.dweight, "dy", a.dy);
  TIGON_CHECK(op, a.dweight.rows <= 1 || a.dweight.stride == a.dweight.cols, "dweight must be dense (stride ",
              a.dweight.cols, "), got stride ", a.dweight.stride);
  if (a.dweight.rows == 0 || a.dweight.cols == 0) return;
  TIGON_RUN(op, ctx, embedding_bwd, a);
}

}  // namespace tigon
