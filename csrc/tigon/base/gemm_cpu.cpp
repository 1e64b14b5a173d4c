#include "tigon/base/gemm_cpu.h"

#include <algorithm>
#include <vector>

#include "tigon/base/dispatch.h"

namespace tigon::cpu {
namespace {

constexpr int64_t kRows = 64, kCols = 256,
                  kDepth = 256;  // one tile: 64 KiB of C, 64 KiB of A, 256 KiB of B, all fp32

// tile[r][c] = op(M)[r0 + r][c0 + c] as fp32
template <class T>
void pack(const T* m, int64_t ld, bool transposed, int64_t r0, int64_t rows, int64_t c0, int64_t cols,
          float* tile) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      tile[r * cols + c] = to_float(transposed ? m[(c0 + c) * ld + r0 + r] : m[(r0 + r) * ld + c0 + c]);
}

template <class T, class C>
void tile_product(const Gemm& g, int64_t i0, int64_t rows, int64_t j0, int64_t cols) {
  std::vector<float> acc(size_t(rows * cols), 0.0f), a(size_t(rows * kDepth)), b(size_t(kDepth * cols));
  for (int64_t k0 = 0; k0 < g.k; k0 += kDepth) {
    int64_t depth = std::min(kDepth, g.k - k0);
    pack(static_cast<const T*>(g.a), g.lda, g.trans_a, i0, rows, k0, depth, a.data());
    pack(static_cast<const T*>(g.b), g.ldb, g.trans_b, k0, depth, j0, cols, b.data());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < depth; ++k) {
        float x = a[size_t(r * depth + k)];
        const float* row = &b[size_t(k * cols)];
        float* out = &acc[size_t(r * cols)];
        for (int64_t c = 0; c < cols; ++c) out[c] += x * row[c];
      }
  }
  for (int64_t r = 0; r < rows; ++r) {
    C* out = static_cast<C*>(g.c) + (i0 + r) * g.ldc + j0;
    for (int64_t c = 0; c < cols; ++c) {
      float v = g.alpha * acc[size_t(r * cols + c)];
      out[c] = from_float<C>(g.beta == 0.0f ? v : v + to_float(out[c]));
    }
  }
}

}  // namespace

void builtin_gemm(Context& ctx, const Gemm& g) {
  int64_t tiles_m = (g.m + kRows - 1) / kRows, tiles_n = (g.n + kCols - 1) / kCols;
  dispatch_float("gemm", "operands", g.ab_dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch_float("gemm", "result", g.c_dtype, [&](auto c) {
      using C = typename decltype(c)::type;
      parallel(ctx, tiles_m * tiles_n, [&](int64_t tile) {
        int64_t i0 = tile / tiles_n * kRows, j0 = tile % tiles_n * kCols;
        tile_product<T, C>(g, i0, std::min(kRows, g.m - i0), j0, std::min(kCols, g.n - j0));
      });
    });
  });
}

void widen(const void* src, DType dtype, float* dst, int64_t n) {
  dispatch_float("widen", "source", dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t i = 0; i < n; ++i) dst[i] = to_float(static_cast<const T*>(src)[i]);
  });
}

}  // namespace tigon::cpu
