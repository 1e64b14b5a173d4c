#include <algorithm>
#include <cmath>
#include <cstring>

#include "tigon/base/dispatch.h"
#include "tigon/ops/loss_head/engine.h"

namespace tigon::cpu {
namespace {

using FinishRun = void(const void* in, DType in_dtype, float factor, void* out, DType out_dtype, int64_t n);

}  // namespace
}  // namespace tigon::cpu

#define TIGON_KERNELS "tigon/ops/loss_head/loss_head_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {
#include "tigon/ops/loss_head/loss_head_math.inc"

template <class Fn>
void for_each(int64_t n, const Fn& fn) {
  for (int64_t i = 0; i < n; ++i) fn(i);
}
}  // namespace

void loss_head_finish(Context& ctx, const LossHeadFinish& a) {
  constexpr int64_t kBlock = int64_t(1) << 15;
  float factor = *a.dloss.as<float>() * (a.scale ? *a.scale.as<float>() : 1.0f);
  FinishRun* run = TIGON_SELECT(finish_run);
  int64_t n = a.in.rows * a.in.cols, in_size = int64_t(size_of(a.in.dtype)),
          out_size = int64_t(size_of(a.out.dtype));
  parallel(ctx, (n + kBlock - 1) / kBlock, [&](int64_t block) {
    int64_t first = block * kBlock;
    run(static_cast<const char*>(a.in.data) + first * in_size, a.in.dtype, factor,
        static_cast<char*>(a.out.data) + first * out_size, a.out.dtype, std::min(kBlock, n - first));
  });
}

void loss_head_ones(Context&, Vector out) {
  dispatch_float("linear_head", "ones", out.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    std::fill_n(out.as<T>(), out.size, from_float<T>(1.0f));
  });
}

void loss_head_zero(Context&, const Matrix& out) {
  for (int64_t r = 0; r < out.rows; ++r)
    std::memset(static_cast<char*>(out.data) + r * out.stride * int64_t(size_of(out.dtype)), 0,
                size_t(out.cols) * size_of(out.dtype));
}

void loss_head_compact(Context&, const LossHeadCompact& a) {
  const int64_t* target = a.target.as<int64_t>();
  int64_t *index = a.index.as<int64_t>(), *labels = a.labels.as<int64_t>(),
          *position = a.position.as<int64_t>();
  int64_t count = 0, wanted = a.index.size;
  for (int64_t r = 0; r < a.target.size; ++r) {
    bool counts = target[r] != a.ignore_index;
    position[r] = counts ? count : -1;
    if (counts && count < wanted) index[count] = r, labels[count] = target[r];
    count += counts;
  }
  *a.fault.as<float>() = count == wanted ? 0.0f : NAN;
  if (count == wanted) return;
  std::fill_n(labels, wanted, loss_head_wrong_label(a.ignore_index));
  for (int64_t i = count; i < wanted; ++i) index[i] = 0;
}

void loss_head_shift(Context&, const LossHeadShifted& a) { for_each(a.out.size, ShiftedLabel{a}); }
void loss_head_factors(Context&, const LossHeadFactors& a) { for_each(a.out.size, RowFactor{a}); }
void loss_head_results(Context&, const LossHeadResults& a) { for_each(a.target.size, RowResults{a}); }

void loss_head_pairs(Context&, const LossHeadPairs& a) {
  const int64_t* target = a.target.as<int64_t>();
  int64_t *index = a.index.as<int64_t>(), *labels = a.labels.as<int64_t>(),
          *position = a.position.as<int64_t>();
  int64_t place = 0;
  for (int64_t pair = 0; pair < a.pairs; ++pair)
    for (int64_t answer = pair; answer < 2 * a.pairs; answer += a.pairs)
      for (int64_t row = answer * a.tokens; row < (answer + 1) * a.tokens; ++row) {
        bool taken = !a.compact || target[row] != a.ignore_index;
        position[row] = taken ? place : -1;
        if (taken) index[place] = row, labels[place++] = target[row];
      }
}

static void move_scaled(Context& ctx, const LossHeadMove& a) {
  const int64_t* index = a.index.as<int64_t>();
  dispatch_float("linear_head", "rows", a.from.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    parallel(ctx, a.factor.size, [&](int64_t i) {
      int64_t r = index ? index[i] : i;
      const T* from = a.from.row<T>(a.scatter ? i : r);
      T* to = a.to.row<T>(a.scatter ? r : i);
      float factor = a.factor.as<float>()[i];
      for (int64_t c = 0; c < a.from.cols; ++c) to[c] = from_float<T>(to_float(from[c]) * factor);
    });
  });
}

void loss_head_move(Context& ctx, const LossHeadMove& a) {
  constexpr int64_t kRows = 64;
  if (a.factor) return move_scaled(ctx, a);
  const int64_t n = a.rows(), *index = a.index.as<int64_t>();
  const size_t size = size_of(a.from.dtype), kept = size * size_t(std::min(a.from.cols, a.to.cols));
  parallel(ctx, (n + kRows - 1) / kRows, [&](int64_t task) {
    for (int64_t i = task * kRows, end = std::min(n, i + kRows); i < end; ++i) {
      const int64_t r = index ? index[i] : i, from = a.scatter ? i : r, to = a.scatter ? r : i;
      char* out = static_cast<char*>(a.to.data) + size_t(to * a.to.stride) * size;
      std::memcpy(out, static_cast<const char*>(a.from.data) + size_t(from * a.from.stride) * size, kept);
      std::memset(out + kept, 0, size * size_t(a.to.cols) - kept);
    }
  });
}

}  // namespace tigon::cpu
