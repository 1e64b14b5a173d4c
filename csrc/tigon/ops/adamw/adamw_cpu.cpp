#include <algorithm>

#include "tigon/ops/adamw/adamw_codes.h"
#include "tigon/ops/adamw/adamw_constants.h"

namespace tigon::cpu {
namespace {

using namespace adamw_detail;

struct AdamwTable {
  // Updates elements [begin, end) of a tensor.
  using Span = void (*)(const Adamw& a, const AdamwTensor& t, const Constants& c, float factor, int64_t begin,
                        int64_t end);
  Span at[kAdamwRoundings], coded[kAdamwRoundings];  // the index is the rounding
};
constexpr CodeMaps kCodeMaps = code_maps();
static_assert(kChunk % kCodedBlock == 0);

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/adamw/adamw_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

// Each task is one chunk of one tensor.
void adamw(Context& ctx, const Adamw& a) {
  if (a.found_inf && *a.found_inf.as<float>() != 0.0f) return;
  const auto n = int64_t(a.tensors.size());
  Constants* constants = ctx.scratch_of<Constants>(n);
  // ends[i] counts the chunks of the tensors up to i.
  int64_t* ends = ctx.scratch_of<int64_t>(n);
  int64_t chunks = 0;
  for (int64_t i = 0; i < n; ++i) {
    const AdamwTensor& t = a.tensors[size_t(i)];
    const AdamwGroup& group = a.groups[size_t(t.group)];
    int64_t done = t.steps;
    if (t.step) {
      done = int64_t(*t.step.as<float>());
      *t.step.as<float>() += 1.0f;
    }
    const AdamwTensor& before = a.tensors[size_t(i > 0 ? i - 1 : 0)];
    if (i > 0 && before.group == t.group && constants[i - 1].step == uint32_t(done + 1))
      constants[i] = constants[i - 1];
    else
      constants[i] = constants_of(
          group, group.lr_on_device != nullptr ? double(*group.lr_on_device) : group.lr, uint32_t(done + 1));
    ends[i] = chunks += (t.param.size + kChunk - 1) / kChunk;
  }
  const float *clip = a.clip.as<float>(), *grad_scale = a.grad_scale.as<float>();
  const AdamwTable& table = TIGON_SELECT(adamw_table);
  parallel(ctx, chunks, [&](int64_t task) {
    const int64_t i = std::upper_bound(ends, ends + n, task) - ends;
    const AdamwTensor& t = a.tensors[size_t(i)];
    const int64_t begin = (task - (i > 0 ? ends[i - 1] : 0)) * kChunk;
    const auto span = (t.exp_avg.dtype == DType::u8 ? table.coded : table.at)[int(a.rounding)];
    span(a, t, constants[i], factor_of(constants[i].sign, clip, grad_scale), begin,
         std::min(begin + kChunk, t.param.size));
  });
}

}  // namespace tigon::cpu
