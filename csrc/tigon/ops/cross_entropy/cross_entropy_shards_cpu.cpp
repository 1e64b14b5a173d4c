#include <algorithm>
#include <cmath>
#include <limits>

#include "tigon/ops/cross_entropy/cross_entropy_shards.h"

namespace tigon::cpu {
namespace {

#define TIGON_ROW inline
#include "tigon/ops/cross_entropy/cross_entropy_shards.inc"
#undef TIGON_ROW

}  // namespace

void cross_entropy_combine(Context& ctx, const CrossEntropyCombine& a) {
  constexpr int64_t kRowsPerTask = 1024;
  const ShardPointers p = shard_pointers(a);
  const int64_t rows = a.target.size;
  parallel(ctx, (rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t r = task * kRowsPerTask, end = std::min(rows, r + kRowsPerTask); r < end; ++r)
      combine_row(p, r);
  });
}

void cross_entropy_empty_part(Context&, const CrossEntropyEmptyPart& a) {
  for (int64_t r = 0; r < a.part.rows; ++r)
    std::fill_n(a.part.row<float>(r), a.part.cols, -std::numeric_limits<float>::infinity());
}

}  // namespace tigon::cpu
