#include "tigon/base/gemm_cpu.h"

#include <algorithm>
#include <vector>

#include "tigon/base/dispatch.h"

namespace tigon::cpu {
inline constexpr int64_t kStripRows = 12, kStripCols = 16;
}
#define TIGON_KERNELS "tigon/base/gemm_cpu.inc"
#include "tigon/base/simd/foreach_isa.h"

namespace tigon::cpu {
namespace {

// One tile takes 192 KiB of C, 192 KiB of A and 256 KiB of B, all fp32, in strips of rows of A and of columns
// of B.
constexpr int64_t kRows = 16 * kStripRows, kCols = 16 * kStripCols, kDepth = 256;
constexpr int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Packs strips[i / width][k][i % width] = m(i, k) as fp32, with 0 past `count`. m(i, k) lies at i * step_i +
// k * step_k.
template <int64_t kWidth, class T>
void pack(const T* m, int64_t step_i, int64_t step_k, int64_t count, int64_t depth, float* strips) {
  for (int64_t first = 0; first < count; first += kWidth, strips += kWidth * depth) {
    const T* from = m + first * step_i;
    int64_t here = std::min(kWidth, count - first);
    if (here < kWidth) std::fill_n(strips, kWidth * depth, 0.0f);
    if (step_i == 1) {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t i = 0; i < here; ++i) strips[k * kWidth + i] = to_float(from[k * step_k + i]);
    } else {
      for (int64_t i = 0; i < here; ++i)
        for (int64_t k = 0; k < depth; ++k) strips[k * kWidth + i] = to_float(from[i * step_i + k * step_k]);
    }
  }
}

template <class T, class C>
void tile_gemm(const Gemm& g, int64_t i0, int64_t rows, int64_t j0, int64_t cols) {
  int64_t strip_rows = up(rows, kStripRows), stride = up(cols, kStripCols);
  int64_t most = std::min(kDepth, g.k);
  std::vector<float> acc(size_t(strip_rows * stride), 0.0f), a(size_t(strip_rows * most)),
      b(size_t(stride * most));
  auto strip = TIGON_SELECT(kGemmStrip);
  for (int64_t k0 = 0; k0 < g.k; k0 += kDepth) {
    int64_t depth = std::min(kDepth, g.k - k0);
    int64_t a_i = g.trans_a ? 1 : g.lda, a_k = g.trans_a ? g.lda : 1;
    int64_t b_j = g.trans_b ? g.ldb : 1, b_k = g.trans_b ? 1 : g.ldb;
    pack<kStripRows>(static_cast<const T*>(g.a) + i0 * a_i + k0 * a_k, a_i, a_k, rows, depth, a.data());
    pack<kStripCols>(static_cast<const T*>(g.b) + j0 * b_j + k0 * b_k, b_j, b_k, cols, depth, b.data());
    for (int64_t j = 0; j < stride; j += kStripCols)
      for (int64_t i = 0; i < strip_rows; i += kStripRows)
        strip(&a[size_t(i * depth)], &b[size_t(j * depth)], depth, &acc[size_t(i * stride + j)], stride);
  }
  for (int64_t r = 0; r < rows; ++r) {
    C* out = static_cast<C*>(g.c) + (i0 + r) * g.ldc + j0;
    for (int64_t c = 0; c < cols; ++c) {
      float v = g.alpha * acc[size_t(r * stride + c)];
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
        tile_gemm<T, C>(g, i0, std::min(kRows, g.m - i0), j0, std::min(kCols, g.n - j0));
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
