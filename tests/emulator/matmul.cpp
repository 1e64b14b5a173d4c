// The matrix products of base/cuda/matmul in the emulator: every layout, with tails and a second source, exact; symmetric ones in
// batches.
#include <cstdlib>
#include <vector>

#include "tigon/base/cuda/matmul/epilogue_symmetric.cuh"
#include "tigon/base/cuda/matmul/launch.cuh"
#include "tigon/base/make_context.h"

using namespace tigon;
using namespace tigon::cuda;
using matmul::Major;

namespace {

// `rows` of `cols` small integers, whose sums are exact, and what must not be read or written between them.
struct Values {
  int64_t rows, cols, stride;
  std::vector<uint16_t> memory;
  uint16_t* data;
  Values(int64_t rows, int64_t cols, int64_t pad)
      : rows(rows), cols(cols), stride(cols + pad), memory(size_t(rows * stride + 8), 0xffff) {
    data = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  }
  uint16_t& at(int64_t r, int64_t c) { return data[r * stride + c]; }
};

// `k` has the K of each source.
template <Major kMajorA, Major kMajorB, class... Ks>
bool is_exact(int64_t m, int64_t n, Ks... k) {
  using T = __nv_bfloat16;
  constexpr bool trans_a = kMajorA == Major::MN, trans_b = kMajorB == Major::K;
  std::array<Gemm, sizeof...(k)> sources;
  std::vector<Values> kept;
  kept.reserve(2 * sizeof...(k));
  std::vector<float> sums(size_t(m * n), 0.0f);
  for (int source = 0; const int64_t depth : {int64_t(k)...}) {
    Values& a = kept.emplace_back(trans_a ? depth : m, trans_a ? m : depth, 8);
    Values& b = kept.emplace_back(trans_b ? n : depth, trans_b ? depth : n, 16);
    for (Values* x : {&a, &b})
      for (int64_t r = 0; r < x->rows; ++r)
        for (int64_t c = 0; c < x->cols; ++c) x->at(r, c) = narrow_bf16(float(rand() % 5 - 2));
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < n; ++c)
        for (int64_t i = 0; i < depth; ++i)
          sums[size_t(r * n + c)] +=
              widen_bf16(trans_a ? a.at(i, r) : a.at(r, i)) * widen_bf16(trans_b ? b.at(c, i) : b.at(i, c));
    sources[source++] = {
        .m = m, .n = n, .k = depth, .a = a.data, .lda = a.stride, .b = b.data, .ldb = b.stride};
  }
  Values d(m, n, 8);
  matmul::Matmul<T, kMajorA, kMajorB, matmul::StoreEpilogue<T>, sizeof...(k)>::run(
      "matmul", *make_cuda_context(), sources,
      {matmul::make_tensor_map("matmul", d.data, matmul::kTensorMapType<T>, n, m, d.stride, 64)});
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < d.stride; ++c) {
      const float sum = c < n ? sums[size_t(r * n + c)] : 0.0f;
      if (d.at(r, c) == (c < n ? narrow_bf16(sum) : 0xffff)) continue;
      printf("matmul: %ld x %ld, %zu sources, A %d B %d: (%ld, %ld) is %g, not %g\n", long(m), long(n),
             sizeof...(k), int(kMajorA), int(kMajorB), long(r), long(c), widen_bf16(d.at(r, c)), sum);
      return false;
    }
  return true;
}

template <class... Ks>
bool are_exact(int64_t m, int64_t n, Ks... k) {
  return is_exact<Major::K, Major::K>(m, n, k...) && is_exact<Major::K, Major::MN>(m, n, k...) &&
         is_exact<Major::MN, Major::K>(m, n, k...) && is_exact<Major::MN, Major::MN>(m, n, k...);
}

// 2 X X^T - C + 3 I of three matrices, or 2 X^T X.
template <Major kMajor>
bool is_symmetric(int64_t n, int64_t k, bool add) {
  using T = __half;
  constexpr int64_t kCount = 3;
  constexpr bool trans = kMajor == Major::MN;
  const int64_t rows = trans ? k : n, cols = trans ? n : k;
  Values x(kCount * rows, cols, 0), c(kCount * n, n, 0), d(kCount * n, n, 0);
  for (Values* v : {&x, &c})
    for (int64_t r = 0; r < v->rows; ++r)
      for (int64_t j = 0; j < v->cols; ++j) v->at(r, j) = narrow_f16(float(rand() % 5 - 2));
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t j = 0; j < r % n; ++j) c.at(r, j) = c.at(r / n * n + j, r % n);
  const Gemm g = {.m = n, .n = n, .k = k, .a = x.data, .lda = cols, .b = x.data, .ldb = cols};
  using Product = matmul::Matmul<T, kMajor, kMajor, matmul::SymmetricEpilogue<T>>;
  Product::run(
      "matmul", *make_cuda_context(), {g},
      {.d = matmul::make_tensor_map("matmul", d.data, matmul::kTensorMapType<T>, n, n, n, 64, kCount),
       .c = add ? reinterpret_cast<const T*>(c.data) : nullptr,
       .alpha = 2,
       .beta = -1,
       .gamma = 3,
       .size = int(n)},
      kCount, true);
  for (int64_t r = 0; r < d.rows; ++r)
    for (int64_t j = 0; j < n; ++j) {
      const int64_t b = r / n;
      float sum = (add ? -widen_f16(c.at(r, j)) : 0) + (j == r % n ? 3 : 0);
      for (int64_t i = 0; i < k; ++i)
        sum += 2 * widen_f16(trans ? x.at(b * k + i, r % n) : x.at(r, i)) *
               widen_f16(trans ? x.at(b * k + i, j) : x.at(b * n + j, i));
      if (d.at(r, j) == narrow_f16(sum)) continue;
      printf("matmul: symmetric %ld x %ld, X %d: (%ld, %ld) is %g, not %g\n", long(n), long(k), int(kMajor),
             long(r), long(j), widen_f16(d.at(r, j)), sum);
      return false;
    }
  return d.memory.back() == 0xffff;
}
bool are_symmetric(int64_t n, int64_t k) {
  return is_symmetric<Major::K>(n, k, true) && is_symmetric<Major::MN>(n, k, false);
}

}  // namespace

// One tile; tails of each size; more tiles and steps than stages; second sources of less and more than a step.
int main() {
  const bool products = are_exact(256, 256, 64) && are_exact(328, 520, 200) && are_exact(8, 776, 392) &&
                        are_exact(328, 520, 200, 8) && are_exact(264, 264, 128, 72);
  return products && are_symmetric(8, 72) && are_symmetric(328, 200) && are_symmetric(776, 64) ? 0 : 1;
}
