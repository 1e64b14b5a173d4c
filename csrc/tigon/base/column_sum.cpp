#include "tigon/base/column_sum.h"

#include <algorithm>

#include "tigon/base/dispatch.h"

namespace tigon::cpu {

void sum_partials(Context& ctx, const float* rows, int64_t partials, int64_t cols, const Vector& out) {
  constexpr int64_t kBlock = 1024;
  dispatch_float("column_sum", "result", out.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    parallel(ctx, (cols + kBlock - 1) / kBlock, [&](int64_t block) {
      int64_t first = block * kBlock, n = std::min(kBlock, cols - first);
      float sums[kBlock] = {};
      for (int64_t p = 0; p < partials; ++p)
        for (int64_t i = 0; i < n; ++i) sums[i] += rows[p * cols + first + i];
      for (int64_t i = 0; i < n; ++i) out.as<T>()[first + i] = from_float<T>(sums[i]);
    });
  });
}

}  // namespace tigon::cpu
