// The CPU backend has the parts around the GEMMs, which move few bytes compared with those.
#include <algorithm>
#include <cmath>

#include "tigon/base/column_sum.h"
#include "tigon/base/dispatch.h"
#include "tigon/base/elementwise.h"
#include "tigon/base/gemm_cpu.h"
#include "tigon/base/simd/lanes.h"
#include "tigon/ops/lora_linear/lora_linear.h"

namespace tigon::cpu {
namespace {

#include "tigon/ops/lora_linear/lora_linear_math.inc"

constexpr const char* kOp = "lora_linear";

template <class T>
void scale_row(float factor, const T* x, T* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = from_float<T>(factor * to_float(x[i]));
}

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

void dora_factors(Context& ctx, const DoraFactors& a, const DoraGemms& gemms) {
  const int64_t rank = a.b.cols;
  const float* magnitudes = in_f32(ctx, a.magnitude);
  float* wide = ctx.scratch_of<float>(a.weight.rows * rank);
  dispatch_float("dora_factors", "weight", a.weight.dtype, [&](auto weight) {
    using W = typename decltype(weight)::type;
    parallel(ctx, a.weight.rows, [&](int64_t r) {
      constexpr int kLanes = 16;
      float lanes[kLanes] = {};
      const W* w = a.weight.row<W>(r);
      const int64_t cols = a.weight.cols, whole = cols / kLanes * kLanes;
      for (int64_t c = 0; c < whole; c += kLanes)
        for (int i = 0; i < kLanes; ++i) lanes[i] += to_float(w[c + i]) * to_float(w[c + i]);
      double square = 0.0;
      for (int64_t c = whole; c < cols; ++c) square += double(to_float(w[c])) * to_float(w[c]);
      for (float lane : lanes) square += lane;
      float* b = wide + r * rank;
      widen(element_at(a.b, r, 0), a.b.dtype, b, rank);
      const float* cross = gemms.cross.row<float>(r);
      for (int64_t i = 0; i < rank; ++i) {
        const float* gram = gemms.gram.row<float>(i);
        double own = 0.0;
        for (int64_t k = 0; k < rank; ++k) own += double(gram[k]) * b[k];
        square += a.scale * b[i] * (2.0 * cross[i] + a.scale * own);
      }
      const DoraFactor f = dora_factor(magnitudes[r], square);
      a.factors.as<float>()[r] = f.factor, a.inverses.as<float>()[r] = f.inverse;
      if (a.y.data != nullptr) scale_row(f.factor, w, a.y.row<W>(r), cols);
    });
  });
}

void scale_rows(Context& ctx, const ScaleRows& a) {
  dispatch_float("scale_rows", "x", a.x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_block(ctx, a.x.rows, a.x.cols, false, [&](int64_t r, int64_t c, int64_t n) {
      scale_row(a.factors.as<float>()[r], a.x.row<T>(r) + c, a.y.row<T>(r) + c, n);
    });
  });
}

}  // namespace tigon::cpu
