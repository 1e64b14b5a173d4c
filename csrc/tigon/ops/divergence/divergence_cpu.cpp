#include <algorithm>
#include <cmath>
#include <cstring>

#include "tigon/base/check.h"
#include "tigon/base/elementwise.h"
#include "tigon/ops/divergence/distillation.h"

namespace tigon::cpu {
namespace {

struct DistillationResult {
  float loss, soft, hard, entropy;
};
struct DistillationTable {
  // The index is the kind. dstudent is nullptr if not wanted.
  void (*at[kDivergenceKinds])(const DistillationRows& a, const void* student, const void* teacher,
                               void* dstudent, int64_t label, float scale, DistillationResult* out);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/divergence/divergence_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void distillation_rows(Context& ctx, const DistillationRows& a) {
  constexpr int64_t kElementsPerTask = 16384;
  int64_t rows = a.student.rows, cols = a.student.cols;
  const int64_t* labels = a.labels.as<int64_t>();
  auto ignored = [&](int64_t r) { return labels != nullptr && labels[r] == a.ignore_index; };
  for (int64_t r = 0; a.has_hard() && r < rows; ++r)
    TIGON_CHECK("distillation", ignored(r) || (labels[r] >= 0 && labels[r] < cols), "labels must be in [0, ",
                cols, ") or ", a.ignore_index, " (ignored), got ", labels[r], " in row ", r);
  auto run = TIGON_SELECT(distillation_table).at[int(a.kind)];
  int64_t group = std::max<int64_t>(1, kElementsPerTask / cols);
  parallel(ctx, (rows + group - 1) / group, [&](int64_t task) {
    for (int64_t r = task * group, end = std::min(rows, r + group); r < end; ++r) {
      DistillationResult out = {};
      char* dstudent = element_at(a.dstudent, r, 0);
      if (!ignored(r))
        run(a, element_at(a.student, r, 0), element_at(a.teacher, r, 0), dstudent,
            a.has_hard() ? labels[r] : -1, a.scale ? a.scale.as<float>()[a.scale.size == 1 ? 0 : r] : 1.0f,
            &out);
      else if (dstudent != nullptr)
        std::memset(dstudent, 0, size_t(cols) * size_of(a.dstudent.dtype));
      a.loss.as<float>()[r] = out.loss;
      if (a.soft) a.soft.as<float>()[r] = out.soft;
      if (a.hard) a.hard.as<float>()[r] = out.hard;
      if (a.entropy) a.entropy.as<float>()[r] = out.entropy;
    }
  });
}

// Takes the rows of the simpler contract, whose student has any dtype.
void divergence_rows(Context& ctx, const DivergenceRows& a) {
  const DistillationSide side = {.temperature = a.temperature};
  DistillationRows rows = {.student = a.student,
                           .teacher = a.teacher,
                           .student_side = side,
                           .teacher_side = side,
                           .labels = a.labels,
                           .scale = a.scale,
                           .dstudent = a.dstudent,
                           .loss = a.loss,
                           .kind = a.kind,
                           .ignore_index = a.ignore_index,
                           .beta = a.beta,
                           .factor = a.factor,
                           .log_probs = a.log_probs};
  rows.dstudent.dtype = a.student.dtype;
  cpu::distillation_rows(ctx, rows);
}

}  // namespace tigon::cpu
