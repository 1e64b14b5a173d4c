#include "tigon/ops/grad_norm/scale.h"

#include "tigon/base/elementwise.h"
#include "tigon/base/op.h"

namespace tigon::cpu {
namespace {

struct ScaleTable {
  void (*at[3])(void* p, int64_t n, float factor);  // indexed by dtype
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/grad_norm/scale_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void scale(Context& ctx, const Scale& a) {
  constexpr int64_t kChunk = 16384;
  const float factor = *a.factor.as<float>();
  if (factor == 1.0f) return;
  const ScaleTable& table = TIGON_SELECT(scale_table);
  const VectorChunks chunks(ctx, a.tensors, kChunk);
  parallel(ctx, chunks.count(), [&](int64_t task) {
    const Vector x = chunks[task];
    table.at[int(x.dtype)](x.data, x.size, factor);
  });
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_DEFINE_ENTRY(scale, Scale, "scale_", "scale", none)
}
