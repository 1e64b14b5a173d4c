// CPU backend: the parts around the products, which are few bytes beside theirs.
#include <algorithm>

#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/lora_linear/lora_linear.h"

namespace tigon::cpu {
namespace {

#include "tigon/ops/lora_linear/lora_linear_math.inc"

constexpr const char* kOp = "lora_linear";

}  // namespace

void lora_copy(Context& ctx, std::span<const LoraCopy> list) {
  for (const LoraCopy& copy : list)
    dispatch_float(kOp, "adapter", copy.from.dtype, [&](auto from) {
      using F = typename decltype(from)::type;
      dispatch_float(kOp, "copy", copy.to.dtype, [&](auto to) {
        using T = typename decltype(to)::type;
        for_each_block(ctx, copy.to.rows, copy.to.cols, false, [&](int64_t r, int64_t c, int64_t n) {
          const int64_t there = r < copy.from.rows ? std::clamp<int64_t>(copy.from.cols - c, 0, n) : 0;
          const F* in = copy.from.row<F>(r) + c;
          T* out = copy.to.row<T>(r) + c;
          for (int64_t i = 0; i < there; ++i) out[i] = from_float<T>(to_float(in[i]));
          std::fill(out + there, out + n, from_float<T>(0.0f));
        });
      });
    });
}

void lora_dropout(Context& ctx, const LoraDropout& a) {
  Dropper dropper = make_dropper(a.p, a.stream);
  dropper.seed = uint64_t(*a.seed.as<int64_t>());
  dispatch_float(kOp, "x", a.from.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_block(ctx, a.from.rows, a.from.cols, false, [&](int64_t r, int64_t c, int64_t n) {
      const T* in = a.from.row<T>(r);
      T* out = a.to.row<T>(r);
      for (int64_t first = c; first < c + n; first += 4) {
        const DropFactors f = dropper.factors(r, first / 4);
        for (int64_t i = first; i < std::min(first + 4, c + n); ++i) {
          const float y = to_float(in[i]) * f.of[i - first];
          out[i] = from_float<T>(a.add ? to_float(out[i]) + y : y);
        }
      }
    });
  });
}

void lora_bias(Context& ctx, const Vector& bias, const Matrix& y) {
  const size_t bytes = size_of(y.dtype);
  for_each_block(ctx, y.rows, y.cols, false, [&](int64_t r, int64_t c, int64_t n) {
    std::copy_n(element_at(bias, c), size_t(n) * bytes, element_at(y, r, c));
  });
}

}  // namespace tigon::cpu
