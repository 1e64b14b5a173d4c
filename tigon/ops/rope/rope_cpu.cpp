#include <algorithm>

#include "tigon/ops/rope/rope.h"

namespace tigon::cpu {
namespace {

struct RopeRows {
  void (*at[3][2][3])(const void* x, const void* cos, const void* sin, void* y, int64_t half, int64_t cols,
                      bool backward);
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/rope/rope_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

char* row_at(const RopeHeads& x, int64_t b, int64_t h, int64_t t) {
  return static_cast<char*>(x.data) +
         (b * x.batch_stride + h * x.head_stride + t * x.token_stride) * int64_t(size_of(x.dtype));
}
const char* row_at(const RopeTable& x, int64_t b, int64_t t) {
  return static_cast<const char*>(x.data) +
         ((x.batch == 1 ? 0 : b) * x.batch_stride + t * x.token_stride) * int64_t(size_of(x.dtype));
}

constexpr int64_t kElementsPerTask = 16384;

}  // namespace

void rope(Context& ctx, const Rope& a, bool backward) {
  auto rotate = TIGON_SELECT(rope_table).at[int(a.q.dtype)][a.cos.dtype == DType::f32][int(a.q_out.dtype)];
  int64_t tokens = a.q.tokens, cols = a.q.cols;
  int64_t group = std::clamp<int64_t>(kElementsPerTask / ((a.q.heads + a.k.heads) * cols), 1, tokens);
  int64_t groups = (tokens + group - 1) / group;
  auto walk = [&](const RopeHeads& x, const RopeHeads& y, int64_t b, int64_t first, int64_t end) {
    auto row = [&](int64_t h, int64_t t) {
      rotate(row_at(x, b, h, t), row_at(a.cos, b, t), row_at(a.sin, b, t), row_at(y, b, h, t), a.cos.cols / 2,
             cols, backward);
    };
    if (x.head_stride < x.token_stride) {  // in the order of memory
      for (int64_t t = first; t < end; ++t)
        for (int64_t h = 0; h < x.heads; ++h) row(h, t);
    } else {
      for (int64_t h = 0; h < x.heads; ++h)
        for (int64_t t = first; t < end; ++t) row(h, t);
    }
  };
  parallel(ctx, a.q.batch * groups, [&](int64_t task) {
    int64_t b = task / groups, first = task % groups * group, end = std::min(tokens, first + group);
    walk(a.q, a.q_out, b, first, end);
    walk(a.k, a.k_out, b, first, end);
  });
}

}  // namespace tigon::cpu
