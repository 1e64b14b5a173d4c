#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"
#include "tigon/ops/grad_norm/grad_norm.h"
#include "tigon/ops/grad_norm/grad_norm_math.inc"

namespace tigon::cpu {
namespace {

struct SquaresTable {
  double (*at[3])(const void* p, int64_t n);  // indexed by dtype
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/grad_norm/grad_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void grad_norm(Context& ctx, const GradNorm& a) {
  const VectorChunks chunks(ctx, a.grads, grad_norm_detail::kNormChunk);
  double* partials = ctx.scratch_of<double>(chunks.count());
  const SquaresTable& squares = TIGON_SELECT(squares_table);
  parallel(ctx, chunks.count(), [&](int64_t task) {
    const Vector g = chunks[task];
    partials[task] = squares.at[int(g.dtype)](g.data, g.size);
  });
  double sum = 0.0;
  for (int64_t i = 0; i < chunks.count(); ++i) sum += partials[i];
  grad_norm_detail::finish_norm(sum, a.grad_scale.as<float>(), a.max_norm, a.total.as<double>(),
                                a.norm.as<float>(), a.factor.as<float>());
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_DEFINE_ENTRY(grad_norm, GradNorm, "grad_norm", "grad_norm", none)
}
