#include "tigon/base/column_sum.h"

#include <algorithm>

#include "tigon/base/dispatch.h"
#include "tigon/base/gemm_cpu.h"

namespace tigon::cpu {

float number_at(const Vector& v, int64_t i) {
  return dispatch_float("parameter", "element", v.dtype,
                        [&](auto t) { return to_float(v.as<typename decltype(t)::type>()[i]); });
}

const float* in_f32(Context& ctx, const Vector& v) {
  if (!v || v.dtype == DType::f32) return v.as<float>();
  float* wide = ctx.scratch_of<float>(v.size);
  widen(v.data, v.dtype, wide, v.size);
  return wide;
}

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
