#include <algorithm>

#include "tigon/base/dispatch.h"
#include "tigon/ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tigon::cpu {
namespace {

struct FinishTable {
  void (*at[3][3])(const void* in, float factor, void* out, int64_t n);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/linear_cross_entropy/linear_cross_entropy_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {

void linear_cross_entropy_finish(Context& ctx, const LinearCrossEntropyFinish& a) {
  constexpr int64_t kBlock = int64_t(1) << 15;
  float factor = *a.dloss.as<float>() * (a.scale ? *a.scale.as<float>() : 1.0f);
  auto run = TIGON_SELECT(finish_table).at[int(a.in.dtype)][int(a.out.dtype)];
  int64_t n = a.in.rows * a.in.cols, in_size = int64_t(size_of(a.in.dtype)), out_size = int64_t(size_of(a.out.dtype));
  parallel(ctx, (n + kBlock - 1) / kBlock, [&](int64_t block) {
    int64_t first = block * kBlock;
    run(static_cast<const char*>(a.in.data) + first * in_size, factor, static_cast<char*>(a.out.data) + first * out_size,
        std::min(kBlock, n - first));
  });
}

void linear_cross_entropy_ones(Context&, Vector out) {
  dispatch_float("linear_cross_entropy", "ones", out.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    std::fill_n(out.as<T>(), out.size, from_float<T>(1.0f));
  });
}

}  // namespace tigon::cpu
