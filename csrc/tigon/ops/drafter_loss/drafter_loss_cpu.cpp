#include <algorithm>

#include "tigon/base/elementwise.h"
#include "tigon/ops/drafter_loss/drafter_loss.h"

namespace tigon::cpu {
namespace {

struct DrafterKernels {
  void (*teacher)(const DrafterTeacher& a, int64_t r);
  void (*row)(const DrafterRows& a, int64_t r);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/drafter_loss/drafter_loss_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void drafter_teacher(Context& ctx, const DrafterTeacher& a) {
  auto run = TIGON_SELECT(drafter_table)[a.logits.dtype].teacher;
  for_each_row(ctx, a.logits.rows, [&](int64_t r) { run(a, r); });
}

void drafter_rows(Context& ctx, const DrafterRows& a) {
  auto run = TIGON_SELECT(drafter_table)[a.draft.dtype].row;
  for_each_row(ctx, a.draft.rows, [&](int64_t r) { run(a, r); });
}

}  // namespace tigon::cpu
