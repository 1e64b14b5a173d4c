#include "tigon/base/column_sum.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/norm_scalars.h"
#include "tigon/base/op.h"
#include "tigon/ops/group_norm/group_norm.h"

namespace tigon::cpu {
namespace {

struct GroupForward {
  const void *x, *weight, *bias;
  void* y;
  float *mean, *rstd;
  int64_t channels, places;
  float eps;
};
struct GroupBackward {
  const void *dy, *x, *weight;
  void* dx;
  float *dweight, *dbias, mean, rstd;
  int64_t channels, places;
};
struct GroupNormKernels {
  void (*forward)(const GroupForward&);
  void (*backward)(const GroupBackward&);
};
struct GroupNormTable {
  GroupNormKernels at[3][2];
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/group_norm/group_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

const GroupNormKernels& kernels_for(DType x, const Vector& weight) {
  return TIGON_SELECT(group_norm_table).at[int(x)][weight && weight.dtype == DType::f32];
}

}  // namespace

// A task is a group of a sample.
void group_norm_fwd(Context& ctx, const GroupNormFwd& a) {
  const GroupNormKernels& k = kernels_for(a.x.dtype, a.weight ? a.weight : a.bias);
  int64_t channels = a.channels / a.groups, places = a.x.cols / a.channels;
  parallel(ctx, a.x.rows * a.groups, [&](int64_t i) {
    int64_t sample = i / a.groups, channel = i % a.groups * channels;
    k.forward({.x = element_at(a.x, sample, channel * places),
               .weight = element_at(a.weight, channel),
               .bias = element_at(a.bias, channel),
               .y = element_at(a.y, sample, channel * places),
               .mean = a.mean ? a.mean.as<float>() + i : nullptr,
               .rstd = a.rstd ? a.rstd.as<float>() + i : nullptr,
               .channels = channels,
               .places = places,
               .eps = a.eps});
  });
}

void group_norm_bwd(Context& ctx, const GroupNormBwd& a) {
  const GroupNormKernels& k = kernels_for(a.x.dtype, a.weight);
  int64_t channels = a.channels / a.groups, places = a.x.cols / a.channels, samples = a.x.rows;
  float* dweight = a.dweight ? ctx.scratch_of<float>(samples * a.channels) : nullptr;
  float* dbias = a.dbias ? ctx.scratch_of<float>(samples * a.channels) : nullptr;
  parallel(ctx, samples * a.groups, [&](int64_t i) {
    int64_t sample = i / a.groups, channel = i % a.groups * channels, part = sample * a.channels + channel;
    k.backward({.dy = element_at(a.dy, sample, channel * places),
                .x = element_at(a.x, sample, channel * places),
                .weight = element_at(a.weight, channel),
                .dx = element_at(a.dx, sample, channel * places),
                .dweight = dweight ? dweight + part : nullptr,
                .dbias = dbias ? dbias + part : nullptr,
                .mean = a.mean.as<float>()[i],
                .rstd = a.rstd.as<float>()[i],
                .channels = channels,
                .places = places});
  });
  if (a.dweight) sum_partials(ctx, dweight, samples, a.channels, a.dweight);
  if (a.dbias) sum_partials(ctx, dbias, samples, a.channels, a.dbias);
}

}  // namespace tigon::cpu

namespace tigon {
TIGON_OP(group_norm, GroupNorm)
}
