#include <algorithm>

#include "tigon/base/column_sum.h"
#include "tigon/ops/rms_norm/rms_norm.h"

namespace tigon::cpu {
namespace {

struct RmsNormKernels {
  void (*forward)(const void* x, const void* weight, void* y, float* rstd, int64_t cols, float eps,
                  float offset, bool round_h);
  void (*backward)(const void* dy, const void* x, const void* weight, float rstd, void* dx, float* dweight,
                   int64_t cols, float offset, bool round_h);
};
struct RmsNormTable {
  RmsNormKernels at[3][2][2];  // [x dtype][weight is f32][y is f32]
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/rms_norm/rms_norm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

const RmsNormKernels& kernels_for(DType x, const Vector& weight, DType y) {
  return TIGON_SELECT(rms_norm_table).at[int(x)][weight && weight.dtype == DType::f32][y == DType::f32];
}

constexpr int64_t kRowsPerTask = 16;
constexpr int64_t kMaxPartials = 64;  // dweight partials: fixed by shape, so results do not depend on threads

char* row_at(const Matrix& m, int64_t r) {
  return static_cast<char*>(m.data) + r * m.stride * int64_t(size_of(m.dtype));
}

}  // namespace

void rms_norm_fwd(Context& ctx, const RmsNormFwd& a) {
  const RmsNormKernels& k = kernels_for(a.x.dtype, a.weight, a.y.dtype);
  parallel(ctx, (a.x.rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t r = task * kRowsPerTask, end = std::min(a.x.rows, r + kRowsPerTask); r < end; ++r)
      k.forward(row_at(a.x, r), a.weight.data, row_at(a.y, r), a.rstd.as<float>() + r, a.x.cols, a.eps,
                a.offset, a.rounding == Rounding::llama);
  });
}

void rms_norm_bwd(Context& ctx, const RmsNormBwd& a) {
  const RmsNormKernels& k = kernels_for(a.x.dtype, a.weight, a.dy.dtype);
  int64_t rows = a.x.rows, cols = a.x.cols;
  int64_t chunk = std::max(kRowsPerTask, (rows + kMaxPartials - 1) / kMaxPartials);
  int64_t chunks = (rows + chunk - 1) / chunk;
  float* partials = a.dweight ? ctx.scratch_of<float>(chunks * cols) : nullptr;
  bool any_dx = a.dx.data != nullptr;
  parallel(ctx, chunks, [&](int64_t c) {
    float* dw = partials ? partials + c * cols : nullptr;
    if (dw) std::fill(dw, dw + cols, 0.0f);
    for (int64_t r = c * chunk, end = std::min(rows, r + chunk); r < end; ++r)
      k.backward(row_at(a.dy, r), row_at(a.x, r), a.weight.data, a.rstd.as<float>()[r],
                 any_dx ? row_at(a.dx, r) : nullptr, dw, cols, a.offset, a.rounding == Rounding::llama);
  });
  if (a.dweight) sum_partials(ctx, partials, chunks, cols, a.dweight);
}

}  // namespace tigon::cpu
