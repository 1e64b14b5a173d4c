#include <algorithm>

#include "tigon/base/elementwise.h"
#include "tigon/ops/adamw/grad_norm_finish.h"

namespace tigon::cpu {
namespace {

struct SquaresTable {
  double (*at[3])(const void* p, int64_t n);  // [dtype]
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/adamw/grad_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void grad_norm(Context& ctx, const GradNorm& a) {
  using adamw_detail::kNormChunk;
  const auto n = int64_t(a.grads.size());
  int64_t* ends = ctx.scratch_of<int64_t>(n);  // of each gradient's chunks
  int64_t chunks = 0;
  for (int64_t i = 0; i < n; ++i)
    ends[i] = chunks += (a.grads[size_t(i)].size + kNormChunk - 1) / kNormChunk;
  double* partials = ctx.scratch_of<double>(chunks);
  const SquaresTable& squares = TIGON_SELECT(squares_table);
  parallel(ctx, chunks, [&](int64_t task) {
    const int64_t i = std::upper_bound(ends, ends + n, task) - ends;
    const Vector& g = a.grads[size_t(i)];
    const int64_t begin = (task - (i > 0 ? ends[i - 1] : 0)) * kNormChunk;
    partials[task] = squares.at[int(g.dtype)](element_at(g, begin), std::min(kNormChunk, g.size - begin));
  });
  double sum = 0.0;
  for (int64_t i = 0; i < chunks; ++i) sum += partials[i];
  adamw_detail::finish_norm(sum, a.grad_scale.as<float>(), a.max_norm, a.total.as<double>(),
                            a.norm.as<float>(), a.factor.as<float>());
}

}  // namespace tigon::cpu
