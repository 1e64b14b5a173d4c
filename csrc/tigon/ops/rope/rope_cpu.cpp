#include <algorithm>
#include <cmath>

#include "tigon/ops/rope/rope_cpu.h"

#define TIGON_KERNELS "tigon/ops/rope/rope_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

const void* element_at(const RopeTable& x, int64_t offset) {
  return static_cast<const char*>(x.data) + offset * int64_t(size_of(x.dtype));
}

constexpr int64_t kElementsPerTask = 16384;
// A row is rotated this many pairs at a time.
constexpr int64_t kPairs = 1024;
constexpr int64_t kTurnsPerTask = 4096;  // 64 KB of stack

}  // namespace

const RopeKernels& rope_kernels() { return TIGON_SELECT(rope_kernel_table); }

void find_turns(const RopeKernels& kernels, const Rope& a, bool backward, int64_t b, int64_t t, int64_t first,
                int64_t n, const Turns& out) {
  const void *cos[3], *sin[3];
  for (int64_t axis = 0; axis < 3; ++axis) {
    bool used = axis == 0 || a.form.sections.given();
    int64_t row = a.positions.data != nullptr && used ? a.positions.position(axis, b, t) : t;
    cos[axis] = used ? element_at(a.cos, a.cos.offset(axis, b, row)) : nullptr;
    sin[axis] = used ? element_at(a.sin, a.sin.offset(axis, b, row)) : nullptr;
  }
  kernels.turns[int(a.cos.dtype)](cos, sin, a.form, a.cos.col_stride, a.rotated() / 2, first, n, backward,
                                  out);
}

void rope(Context& ctx, const Rope& a, bool backward) {
  const RopeKernels& kernels = rope_kernels();
  auto rotate = kernels.rotate[int(a.q.dtype)][int(a.q_out.dtype)];
  auto copy = kernels.copy[int(a.q.dtype)][int(a.q_out.dtype)];
  RopePairs from = backward ? a.form.out : a.form.in, to = backward ? a.form.in : a.form.out;
  int64_t tokens = a.q.tokens, cols = a.q.cols, start = a.start(a.q), half = a.rotated() / 2,
          end = start + 2 * half, pairs = std::clamp<int64_t>(half, 1, kPairs);
  int64_t group = std::clamp<int64_t>(kElementsPerTask / ((a.q.heads + a.k.heads) * cols), 1,
                                      std::min(tokens, kTurnsPerTask / pairs));
  int64_t groups = (tokens + group - 1) / group;
  parallel(ctx, a.q.batch * groups, [&](int64_t task) {
    alignas(64) float buffer[4 * kTurnsPerTask];
    int64_t b = task / groups, first = task % groups * group, last = std::min(tokens, first + group);
    auto turns_of = [&](int64_t t) { return Turns(buffer + 4 * (t - first) * pairs, pairs); };
    auto walk = [&](const RopeHeads& x, const RopeHeads& y, auto&& row) {
      bool heads_inside = x.head_stride < x.token_stride;  // follows the order of memory
      int64_t outer = heads_inside ? last - first : x.heads, inner = heads_inside ? x.heads : last - first;
      for (int64_t i = 0; i < outer; ++i)
        for (int64_t j = 0; j < inner; ++j) {
          int64_t h = heads_inside ? j : i, t = first + (heads_inside ? i : j);
          row(t, element_of(x, b, h, t), element_of(y, b, h, t));
        }
    };
    auto both = [&](auto&& row) { walk(a.q, a.q_out, row), walk(a.k, a.k_out, row); };
    for (int64_t i = 0; i < half; i += pairs) {
      int64_t n = std::min(pairs, half - i);
      for (int64_t t = first; t < last; ++t) find_turns(kernels, a, backward, b, t, i, n, turns_of(t));
      both(
          [&](int64_t t, const void* x, void* y) { rotate(x, turns_of(t), y, start, i, n, half, from, to); });
    }
    if (2 * half < cols)
      both([&](int64_t, const void* x, void* y) {
        copy(x, y, 0, start);
        copy(x, y, end, cols);
      });
  });
}

}  // namespace tigon::cpu
