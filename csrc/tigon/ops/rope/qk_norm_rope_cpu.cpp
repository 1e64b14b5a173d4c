#include <algorithm>

#include "tigon/base/column_sum.h"
#include "tigon/ops/rope/qk_norm_rope.h"
#include "tigon/ops/rope/rope_cpu.h"

namespace tigon::cpu {
namespace {

struct QkNormKernels {
  // Computes n of one row, as fp32 numbers that round_n has rounded to x's dtype.
  void (*normalise)(const void* x, const void* weight, float* n, int64_t cols, float eps, float offset,
                    bool round_h, bool round_n);
  // Computes dx of one row from the gradient of n, and adds g * h to dweight.
  void (*backward)(const float* g, const void* x, const void* weight, void* dx, float* dweight, int64_t cols,
                   float eps, float offset, bool round_h);
};
struct QkNormTable {
  QkNormKernels at[3][2];  // indexed by x's dtype and by whether the weight is f32
};

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/rope/qk_norm_rope_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kMostColumns = 1024;
constexpr int64_t kElementsPerTask = 16384;

struct Call {
  const Rope& rope;
  const QkNorm& norm;
  bool backward;
  int64_t tokens, batch, cols, start, half;
  bool round_h, round_n;

  Call(const Rope& rope, const QkNorm& norm, const RopeHeads& x, bool backward)
      : rope(rope),
        norm(norm),
        backward(backward),
        tokens(x.tokens),
        batch(x.batch),
        cols(x.cols),
        start(rope.start(x)),
        half(rope.rotated() / 2),
        round_h(norm.rounding == Rounding::llama),
        round_n(norm.result(x.dtype) == x.dtype) {}

  const QkNormKernels& kernels(DType x) const {
    const Vector& w = norm.any_weight();
    return TIGON_SELECT(qk_norm_table).at[int(x)][w && w.dtype == DType::f32];
  }

  // Calls fn(b, t, turns) for tokens [first, last) of all batches, in order.
  template <class Fn>
  void each_token(int64_t first, int64_t last, Fn&& fn) const {
    alignas(64) float buffer[2 * kMostColumns];
    const RopeKernels& kernels = rope_kernels();
    Turns turns(buffer, std::max<int64_t>(half, 1));
    for (int64_t i = first; i < last; ++i) {
      int64_t b = i / tokens, t = i % tokens;
      find_turns(kernels, rope, backward, b, t, 0, half, turns);
      fn(b, t, turns);
    }
  }
  // Sets y to the rotation of a row x.
  template <class Rotate, class Copy>
  void rotate_row(Rotate rotate, Copy copy, const void* x, const Turns& turns, void* y) const {
    rotate(x, turns, y, start, 0, half, half, rope.form.in, rope.form.in);
    copy(x, y, 0, start);
    copy(x, y, start + 2 * half, cols);
  }
};

}  // namespace

void qk_norm_rope_fwd(Context& ctx, const QkNormRopeFwd& a) {
  const RopeHeads& x = a.rope.q.empty() ? a.rope.k : a.rope.q;
  const RopeHeads& y = a.rope.q.empty() ? a.rope.k_out : a.rope.q_out;
  Call call(a.rope, a.norm, x, false);
  const QkNormKernels& kernels = call.kernels(x.dtype);
  auto rotate = rope_kernels().rotate[int(DType::f32)][int(y.dtype)];
  auto copy = rope_kernels().copy[int(DType::f32)][int(y.dtype)];
  int64_t all = call.batch * call.tokens, heads = a.rope.q.heads + a.rope.k.heads;
  int64_t group = std::clamp<int64_t>(kElementsPerTask / (heads * call.cols), 1, all);
  parallel(ctx, (all + group - 1) / group, [&](int64_t task) {
    alignas(64) float n[kMostColumns];
    auto part = [&](const RopeHeads& in, const RopeHeads& out, const Vector& w, int64_t b, int64_t t,
                    const Turns& turns) {
      for (int64_t h = 0; h < (in.empty() ? 0 : in.heads); ++h) {
        kernels.normalise(element_of(in, b, h, t), w.data, n, call.cols, a.norm.eps, a.norm.offset,
                          call.round_h, call.round_n);
        call.rotate_row(rotate, copy, n, turns, element_of(out, b, h, t));
      }
    };
    call.each_token(task * group, std::min(all, (task + 1) * group),
                    [&](int64_t b, int64_t t, const Turns& turns) {
                      part(a.rope.q, a.rope.q_out, a.norm.q_weight, b, t, turns);
                      part(a.rope.k, a.rope.k_out, a.norm.k_weight, b, t, turns);
                    });
  });
}

void qk_norm_rope_bwd(Context& ctx, const QkNormRopeBwd& a) {
  const RopeHeads& x = a.q.empty() ? a.k : a.q;
  const RopeHeads& dy = a.q.empty() ? a.rope.k : a.rope.q;
  Call call(a.rope, a.norm, x, true);
  int64_t all = call.batch * call.tokens, cols = a.dweight.data ? a.dweight.cols : call.cols;
  const RowChunks chunks(all, 1);
  float* partials = a.dweight.data ? ctx.scratch_of<float>(chunks.count * 2 * cols) : nullptr;
  auto rotate = rope_kernels().rotate[int(dy.dtype)][int(DType::f32)];
  auto copy = rope_kernels().copy[int(dy.dtype)][int(DType::f32)];
  parallel(ctx, chunks.count, [&](int64_t c) {
    alignas(64) float g[kMostColumns];
    const QkNormKernels& kernels = call.kernels(x.dtype);
    float* dw = partials ? partials + c * 2 * cols : nullptr;
    if (dw) std::fill(dw, dw + 2 * cols, 0.0f);
    auto part = [&](const RopeHeads& in, const RopeHeads& upstream, const RopeHeads& out, const Vector& w,
                    float* sums, int64_t b, int64_t t, const Turns& turns) {
      for (int64_t h = 0; h < (in.empty() ? 0 : in.heads); ++h) {
        call.rotate_row(rotate, copy, element_of(upstream, b, h, t), turns, g);
        kernels.backward(g, element_of(in, b, h, t), w.data, element_of(out, b, h, t), w ? sums : nullptr,
                         cols, a.norm.eps, a.norm.offset, call.round_h);
      }
    };
    call.each_token(chunks.begin(c), chunks.end(c), [&](int64_t b, int64_t t, const Turns& turns) {
      part(a.q, a.rope.q, a.rope.q_out, a.norm.q_weight, dw, b, t, turns);
      part(a.k, a.rope.k, a.rope.k_out, a.norm.k_weight, dw ? dw + cols : nullptr, b, t, turns);
    });
  });
  if (partials)
    sum_partials(ctx, partials, chunks.count, 2 * cols,
                 {.data = a.dweight.data, .dtype = a.dweight.dtype, .size = 2 * cols});
}

}  // namespace tigon::cpu
