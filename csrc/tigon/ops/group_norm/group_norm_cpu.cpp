#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/norm_scalars.h"
#include "tigon/base/op.h"
#include "tigon/ops/group_norm/group_norm.h"

namespace tigon::cpu {
namespace {

// Locates a group of a sample: its channels, and where they begin in the sample and in memory.
struct GroupCoord {
  int64_t sample, first, channels, places;
  template <class Args>
  GroupCoord(const Args& a, int64_t i)
      : sample(i / a.groups),
        first(i % a.groups * (a.channels / a.groups)),
        channels(a.channels / a.groups),
        places(a.x.cols / a.channels) {}
  template <class X>
  X* of(const Matrix& m) const {
    return m.data ? m.row<X>(sample) + first * places : nullptr;
  }
};

// The kernels take group i of all samples.
struct GroupNormKernels {
  void (*forward)(const GroupNormFwd& a, int64_t i);
  void (*backward)(const GroupNormBwd& a, int64_t i, float* dweight, float* dbias);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/group_norm/group_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

// Each task is a group of a sample.
void group_norm_fwd(Context& ctx, const GroupNormFwd& a) {
  auto forward = TIGON_SELECT(group_norm_table)[a.x.dtype].forward;
  parallel(ctx, a.x.rows * a.groups, [&](int64_t i) { forward(a, i); });
}

void group_norm_bwd(Context& ctx, const GroupNormBwd& a) {
  auto backward = TIGON_SELECT(group_norm_table)[a.x.dtype].backward;
  const int64_t samples = a.x.rows;
  float* dweight = a.dweight ? ctx.scratch_of<float>(samples * a.channels) : nullptr;
  float* dbias = a.dbias ? ctx.scratch_of<float>(samples * a.channels) : nullptr;
  parallel(ctx, samples * a.groups, [&](int64_t i) { backward(a, i, dweight, dbias); });
  if (a.dweight) sum_partials(ctx, dweight, samples, a.channels, a.dweight);
  if (a.dbias) sum_partials(ctx, dbias, samples, a.channels, a.dbias);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(group_norm, GroupNorm)
}
