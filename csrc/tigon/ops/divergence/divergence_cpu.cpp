#include <algorithm>
#include <cmath>
#include <cstring>

#include "tigon/base/elementwise.h"
#include "tigon/ops/divergence/divergence.h"

namespace tigon::cpu {
namespace {

struct DivergenceKernels {
  void (*at[3])(const DivergenceRows& a, const void* student, const void* teacher, void* dstudent,
                float scale,
                float* loss);  // [dtype]
};
struct DivergenceTable {
  DivergenceKernels at[kDivergenceKinds];
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/divergence/divergence_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void divergence_rows(Context& ctx, const DivergenceRows& a) {
  constexpr int64_t kElementsPerTask = 16384;
  auto run = TIGON_SELECT(divergence_table).at[int(a.kind)].at[int(a.student.dtype)];
  int64_t rows = a.student.rows, cols = a.student.cols, group = std::max<int64_t>(1, kElementsPerTask / cols);
  parallel(ctx, (rows + group - 1) / group, [&](int64_t task) {
    for (int64_t r = task * group, end = std::min(rows, r + group); r < end; ++r) {
      char* out = element_at(a.dstudent, r, 0);
      float* loss = a.loss.as<float>() + r;
      if (a.labels && a.labels.as<int64_t>()[r] == a.ignore_index) {
        *loss = 0.0f;
        if (out != nullptr) std::memset(out, 0, size_t(cols) * size_of(a.dstudent.dtype));
        continue;
      }
      float scale = a.scale ? a.scale.as<float>()[a.scale.size == 1 ? 0 : r] : 1.0f;
      run(a, element_at(a.student, r, 0), element_at(a.teacher, r, 0), out, scale, loss);
    }
  });
}

}  // namespace tigon::cpu
